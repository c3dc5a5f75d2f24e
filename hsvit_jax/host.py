"""What a process must be told before jax is imported, and what glibc may keep."""

import ctypes
import os
import re
import sys

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
