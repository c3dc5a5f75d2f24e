"""CPU process set-up: environment and malloc settings that must precede `import jax`."""

import ctypes
import os
import re
import resource
import signal
import sys
from pathlib import Path

# mallopt's parameter numbers, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8

# Whether programs get huge pages never, always, or where they ask for them.
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


# Bytes that jax, its threads and the libraries beside it map at the least, of two cores.
_LEAST_ADDRESSES = 9 << 28


def check_address_space() -> None:
    """Ends (1), after a line on stderr, under a limit that libraries would abort at."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESSES:
        print(
            f"the limit of this process's address space (ulimit -v) is {limit >> 20:,} MiB, and "
            f"jax maps {_LEAST_ADDRESSES >> 20:,} and more, most of them unused: raise it, or "
            "bound the memory by a control group instead",
            file=sys.stderr,
        )
        raise SystemExit(1)


def prepare() -> None:
    """Sets up threads and malloc for the CPU back end, before jax is imported.

    With several CPU devices in one process, collectives wait for each other in a thread pool of
    NPROC threads, which must be at least twice the devices. And glibc is set to keep freed memory:
    XLA allocates its buffers anew every step, and giving the pages back each time costs more than
    some of the layers computed in them.

    Raises:
        SystemExit: code 2, after a line on stderr, for a JAX_NUM_CPU_DEVICES that is no number.
    """
    forced = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    named = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if not named.isdecimal():  # jax's import would end in a traceback
        print(
            f"JAX_NUM_CPU_DEVICES={named!r} is no whole number: unset it, or give one",
            file=sys.stderr,
        )
        raise SystemExit(2)
    devices = int(forced[1]) if forced else int(named)
    if devices > 1:
        os.environ.setdefault("NPROC", str(2 * devices))
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):  # another C library: nothing to tune
            return
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_ARENA_MAX, 1)  # another arena maps and unmaps each block above 64 MB
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)


def use_huge_pages() -> None:
    """Restarts this program with glibc asking for huge pages, where the kernel has them.

    For `hsvit` and `python -m hsvit_jax...` on Linux, before anything heavy is imported: glibc
    reads its tunables only at the start of a process. XLA's buffers are hundreds of megabytes and
    new in every step; in pages of 4 KiB a sixth of a step's time goes to the kernel handing them
    out. The process keeps its number. HSVIT_HUGE_PAGES=0 prevents the restart, as does a
    GLIBC_TUNABLES that sets glibc.malloc.hugetlb.
    """
    tunables, hugetlb = os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb"
    arguments = sys.orig_argv[1:]
    try:
        on_request = "[madvise]" in Path(_HUGE_PAGES).read_text("ascii")
    except OSError:  # not Linux, or a kernel without them
        return
    module = arguments[1].partition(".")[0] if arguments[:1] == ["-m"] else ""
    is_ours = module == "hsvit_jax" or Path(*arguments[:1]).name == "hsvit"
    if not is_ours or os.environ.get("HSVIT_HUGE_PAGES") == "0":
        return
    if not on_request or hugetlb in tunables or not sys.executable:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{hugetlb}=1")))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `signals.prepare_process`
    try:
        os.execv(sys.executable, [sys.executable, *arguments])
    finally:  # reached only where it could not be started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
