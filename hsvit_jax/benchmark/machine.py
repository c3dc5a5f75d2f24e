"""The machine that a benchmark runs on: peak FLOP/s, memory, versions."""

import functools
import importlib.metadata
import os
import platform
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp

from hsvit_jax.benchmark import jobs
from hsvit_jax.ops import conv_direct

# Side of the square product and batch of the convolution that measure the peak, by back end.
_PEAK_SIZES = {"cpu": (2048, 32)}
_PEAK_SIZES_ACCELERATOR = (8192, 512)

#: The unit of `ru_maxrss`, in bytes.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def measure_peak(dtype: str) -> dict:
    """Measures the peak FLOP/s of one device: the best of 5 square products or 3×3 convolutions."""
    side, batch = _PEAK_SIZES.get(jax.default_backend(), _PEAK_SIZES_ACCELERATOR)
    square = jnp.ones((side, side), dtype)
    maps, kernel = jnp.ones((batch, 32, 32, 128), dtype), jnp.ones((3, 3, 128, 128), dtype)
    best = {}
    for name, function, args, flops in (
        ("matmul", jnp.matmul, (square, square), 2 * side**3),
        ("convolution", conv_direct.conv2d_xla, (maps, kernel), 2 * maps.size * kernel.size // 128),
    ):
        take = functools.partial(jax.jit(function), *args)
        jax.block_until_ready(take())
        best[f"{name}_flops_per_second"] = flops / min(jobs.timed(take, 5))
    return {"flops_per_second": max(best.values()), **best, "dtype": dtype}


def program_record(compiled: Any) -> dict:
    """Returns XLA's costs of the timed program, per device; it counts a loop's body once."""
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return {
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def peak_memory() -> int:
    """Returns the peak bytes of memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def device_memory(devices: Any) -> int | None:
    """Returns the peak bytes held on any of the accelerators; None for CPUs."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return None if None in peaks else max(peaks)


def description() -> dict:
    """Describes devices, cores, load and versions, for the JSON line."""
    version = importlib.metadata.version
    return {
        "devices": [d.device_kind for d in jax.devices()],
        "backend": jax.default_backend(),
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": {
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
        },
    }
