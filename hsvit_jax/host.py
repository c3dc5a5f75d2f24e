"""What a process must be told before jax is imported, and what glibc may keep."""

import ctypes
import hashlib
import os
import platform
import re
import stat
import sys
from pathlib import Path

# mallopt's parameter numbers, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


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


def _processor() -> str:
    """Short, and different where machine code may not be exchanged."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _is_private(folder: Path) -> bool:
    """Makes the folder if it is not there; false if it is not this user's alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return mine and stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
