"""Memory checks: refuses a network or batch that needs more memory than the devices have."""

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
#: More values than a network keeps for a pixel of an image, but for the largest.
_VALUES_PER_PIXEL = 1000
#: Programs need less than their shapes say where operations are fused, hardly by this factor.
_MARGIN = 2


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
    """Raises ValueError for a network, or a batch for it, far beyond the memory of the job.

    Estimated from shapes, before data is read. A device may hold only a shard of the arrays, so
    the memory of all devices is added up.
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
    # Else tracing is not worth its seconds.
    if 4 * math.prod(_images(config)) * _VALUES_PER_PIXEL > memory:
        _refuse(_saved_bytes(config, model) / _MARGIN, memory, *_step_text(config))


def _images(config: ml_collections.ConfigDict) -> tuple[int, ...]:
    """The shape of the images whose gradient a training step computes at a time."""
    part = config.train.batch // config.train.accumulate
    return part, *config.data.image_size, config.data.channels


def _saved_bytes(config: ml_collections.ConfigDict, model: Any) -> int:
    """Bytes that a training step keeps from the forward for the backward pass, by their shapes."""
    params, stats = model.init_shapes()

    def saved(params: dict, stats: dict, images: jax.Array, key: jax.Array) -> Any:
        def logits(params: dict) -> jax.Array:
            return model.apply(params, stats, images, train=True, dropout_key=key)[0]

        return jax.vjp(logits, params)[1]

    images = jax.ShapeDtypeStruct(_images(config), np.float32)
    kept = jax.eval_shape(saved, params, stats, images, jax.eval_shape(jax.random.key, 0))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def _step_text(config: ml_collections.ConfigDict) -> tuple[str, str]:
    """A training step as the subject of a sentence, and what makes it smaller."""
    size = "×".join(map(str, config.data.image_size))
    given = config.data.name.startswith("given=")
    key = "image_size= of hsvit_jax.from_examples" if given else "data.image_size"
    return (
        f"a training step of {config.train.batch} images of {size} pixels",
        f"lower train.batch or {key}, raise train.accumulate, make the network smaller or "
        "add devices",
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
    _refuse(sharing * need, available(), *_step_text(config))


def _refuse(need: float, memory: float, what: str, fix: str) -> None:
    if need > memory:
        need, memory = np.array([need, memory]) / 2**30
        raise ValueError(
            f"{what} needs at least {need:,.4g} GiB of memory, and there are {memory:,.4g}: {fix}"
        )
