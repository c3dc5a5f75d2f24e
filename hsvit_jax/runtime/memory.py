"""Memory checks: refuses a network or step that needs more memory than the devices have."""

import contextlib
import math
import re
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import ml_collections
import numpy as np

#: The kernel's account of a host's memory.
_MEMINFO = Path("/proc/meminfo")
#: This process's control groups, and where their limits are.
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available() -> float:
    """Bytes that this process may use of a host, or of one accelerator; infinite where unknown."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return float((device.memory_stats() or {}).get("bytes_limit", math.inf))
    return min(_limits(), default=math.inf)


def _limits() -> Iterator[float]:
    """The host's memory, and the limits of this process's address space and control groups."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        yield address_space
    with contextlib.suppress(OSError):  # not Linux
        sizes = re.findall(r"^(?:MemTotal|SwapTotal): +(\d+)", _MEMINFO.read_text("ascii"), re.M)
        yield sum(1024 * int(size) for size in sizes)
        for line in _OWN_GROUPS.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            kind, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            if kind not in controllers.split(","):
                continue
            # In a container the path may be the host's, and the limit is found at the top.
            group = PurePosixPath(path)
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file; 'max' for no limit
                    yield int((_GROUPS / kind / folder.relative_to("/") / file).read_text("ascii"))


def check_network(config: ml_collections.ConfigDict, model: Any) -> None:
    """Raises ValueError for a network far beyond the memory of the job, before data is read.

    A device may hold only a shard of the arrays, so the memory of all devices is added up.
    """
    params, _ = model.init_shapes()
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(p)) for name, p in params.items()}
    trained = sum(size for name, size in sizes.items() if name not in model.frozen)
    copies = sum(sizes.values()) * (2 if config.train.ema_decay else 1) + 3 * trained
    places = jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()
    memory = places * available()
    _refuse(
        4 * copies,
        memory,
        f"training {config.model.variant} with its {sum(sizes.values()):,} parameters",
        "make the network smaller",
    )


def check_step(program: Any, config: ml_collections.ConfigDict, devices: int) -> None:
    """Raises ValueError for a compiled training step that needs more memory than its device has.

    Args:
      program: compiled for one device.
      config: names the batch and image size in the message.
      devices: those of this process that run it; CPUs share their memory.
    """
    memory = program.memory_analysis()
    if memory is None:  # a back end that does not say
        return
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    need = held + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    sharing = devices if jax.default_backend() == "cpu" else 1
    size = "×".join(map(str, config.data.image_size))
    _refuse(
        sharing * need,
        available(),
        f"a training step of {config.train.batch} images of {size} pixels",
        "lower train.batch or data.image_size, raise train.accumulate, make the network smaller "
        "or add devices",
    )


def _refuse(need: float, memory: float, what: str, fix: str) -> None:
    if need > memory:
        need, memory = np.array([need, memory]) / 2**30
        raise ValueError(
            f"{what} needs at least {need:,.4g} GiB of memory, and there are {memory:,.4g}: {fix}"
        )
