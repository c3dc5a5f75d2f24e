"""What a process must be told before jax is imported, and what glibc may keep."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

# mallopt's parameter numbers, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

# prctl's requests about a process's huge pages, from linux/prctl.h.
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42

# Whether programs get huge pages never, always, or where they ask for them.
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


def prepare() -> None:
    """Makes the CPU back end fit for work; called by the command line before jax is imported.

    With several CPU devices in one process, collectives wait for each other in a thread pool of
    NPROC threads, which must be at least twice the devices. And glibc is told to keep freed memory:
    XLA allocates its buffers anew every step, and giving the pages back each time costs more than
    some of the layers computed in them.
    """
    found = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    devices = int(found[1]) if found else int(os.environ.get("JAX_NUM_CPU_DEVICES", "1"))
    if devices > 1:
        os.environ.setdefault("NPROC", str(2 * devices))
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):  # another C library: nothing to tune
            return
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)


def use_huge_pages() -> None:
    """Starts this program once more, with glibc asking for huge pages, where it can have them.

    For `python -m hsvit_jax...` on Linux, before anything heavy is imported: glibc reads its
    tunables only at the start of a process. XLA's buffers are hundreds of megabytes and new in
    every step; in pages of 4 KiB a sixth of a step's time goes to the kernel handing them out. The
    process keeps its number. GLIBC_TUNABLES with a glibc.malloc.hugetlb of its own is left as is.
    """
    tunables, ours = os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb"
    arguments = getattr(sys, "orig_argv", [])[1:]
    started = arguments[:1] == ["-m"] and arguments[1:2] == [f"{__package__}.{_program()}"]
    try:
        on_request = "[madvise]" in Path(_HUGE_PAGES).read_text("ascii")
    except OSError:  # not Linux, or a kernel without them
        return
    if not started or not on_request or ours in tunables or not sys.executable:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{ours}=1")))
    os.execv(sys.executable, [sys.executable, *arguments])


def _program() -> str:
    """The module that runs as the program, without its package."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return name.removeprefix(f"{__package__}.")


def release_memory() -> None:
    """Gives freed memory back to the system, as after compiling: XLA leaves hundreds of megabytes.

    Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Around the compilation of a large program: in little memory, which is given back.

    A compiler's blocks are small and many: in huge pages they take up more than they hold.
    """
    release_memory()
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    pages = prctl and prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0
    if pages:
        prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        if pages:
            prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)
        release_memory()


def remember_compilations() -> None:
    """Keeps compiled programs in a folder of the user's cache, so that the next start is faster.

    For the command line only, before jax is imported; JAX_COMPILATION_CACHE_DIR names another
    folder and JAX_ENABLE_COMPILATION_CACHE=false turns it off. The cache holds machine code, so a
    folder that others can write to, or own, is not used, and every kind of processor has its own,
    as a home folder may be shared by several.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache) / "hsvit_jax" / f"xla-{_processor()}"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and _is_private(folder):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # The many small ones too, which take a second together.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _processor() -> str:
    """Short, and different where machine code may not be exchanged."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _is_private(folder: str | Path) -> bool:
    """Makes the folder if it is not there; false if it is not this user's alone."""
    try:
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return mine and stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
