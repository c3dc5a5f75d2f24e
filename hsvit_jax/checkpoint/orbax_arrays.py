"""A step's arrays as Orbax stores them; the only module that imports Orbax, when it is needed."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import math
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import SingleDeviceSharding

from hsvit_jax.checkpoint import checksum
from hsvit_jax.checkpoint import directory as disk
from hsvit_jax.checkpoint.record import (
    CheckpointError,
    Damage,
    Record,
    TreePath,
    brief,
    check_fits,
    dotted,
    nest,
)

# Bytes of arrays that any step may hold, and how many times its files' size beyond that: the
# compressed zeros of a fresh optimizer's moments lie beside parameters that do not compress.
_PLAUSIBLE, _DENSEST = 1 << 31, 100

_by_itself = contextvars.ContextVar("by_itself", default=False)


def barrier(processes: set[int] | None) -> Callable[..., None]:
    """Orbax's barrier of these processes, or all.

    A thread whose part of a save failed passes by: the other processes wait at an earlier barrier,
    and would for 20 minutes before the error is raised.
    """
    wait = orbax().multihost.get_barrier_sync_fn(processes=processes)
    caller = threading.get_ident()  # which may be handling an error of another kind

    def unless_failed(*, key: str, timeout_ms: int) -> None:
        if sys.exc_info()[1] is None or threading.get_ident() == caller:
            wait(key=key, timeout_ms=timeout_ms)

    return unless_failed


def read(
    directory: Path, record: Record, wanted: dict[TreePath, Any] | None
) -> dict[TreePath, Any]:
    """Reads the leaves of a step and checks their checksums.

    Args:
      wanted: leaves by path whose shardings the result takes; None for NumPy arrays.

    Raises:
      Damage: they do not agree, raised on all processes; or the record describes far more than
          the step's files can hold.
      CheckpointError: `wanted` is another tree, or there is too little memory.
    """
    total = sum(
        math.prod(shape) * np.dtype(kind).itemsize for kind, shape, _ in record.leaves.values()
    )
    path = directory / "state"

    def load() -> dict[TreePath, Any]:
        if total > max(_PLAUSIBLE, _DENSEST * disk.size(path)):
            raise Damage(
                f"its record describes {total:,} bytes of arrays, far more than {path} holds"
            )
        like = wanted or {
            name: np.empty(shape, kind) for name, (kind, shape, _) in record.leaves.items()
        }
        check_fits(directory, record, like)
        return _load(path, like)

    try:
        leaves = agree(load)
    except MemoryError as error:
        raise CheckpointError(
            f"{directory} holds {total:,} bytes of arrays, more than there is memory for"
        ) from error

    def check_sums() -> None:
        sums = checksum.of(list(leaves.values()))
        for (name, leaf), digits in zip(leaves.items(), sums, strict=True):
            if (str(leaf.dtype), leaf.shape, digits) != record.leaves[name]:
                raise Damage(f"{path}: the data of {dotted(name)} do not agree with its checksum")

    agree(check_sums)
    return leaves


def _load(path: Path, wanted: dict[TreePath, Any]) -> dict[TreePath, Any]:
    """Reads with Orbax's handler, which has no barrier that a failing process would leave."""
    ocp = orbax()
    from etils import epath

    stored = as_stored(wanted)
    args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if isinstance(leaf, np.ndarray)
        else ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=_sharding(leaf), global_shape=leaf.shape
        )
        for name, leaf in stored.items()
    }
    handler = ocp.PyTreeCheckpointHandler()
    try:
        if any(isinstance(leaf, np.ndarray) for leaf in stored.values()):
            # Orbax reads these as they are stored, whatever their size; the others it checks. It
            # reads whole chunks, which may be larger than their array.
            metadata = traverse_util.flatten_dict(handler.metadata(epath.Path(path)).tree)
            for name, leaf in stored.items():
                shape, chunk = metadata[name].shape, metadata[name].storage.chunk_shape
                if tuple(shape) != leaf.shape or any(map(operator.gt, chunk, shape)):
                    raise Damage(f"{dotted(name)} has another shape than its record says")
        restore = ocp.args.PyTreeRestore(item=nest(stored), restore_args=nest(args))
        arrays = traverse_util.flatten_dict(handler.restore(epath.Path(path), args=restore))
        arrays = {name: arrays[name] for name in stored}
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # of this machine, not of the files
    except Exception as error:  # damaged bytes can make any of the parsers below raise anything
        raise Damage(f"{path}: {brief(error)}") from error
    finally:
        handler.close()
    return {
        name: arrays[_words(name)] if _words(name) in arrays else _empty(leaf)
        for name, leaf in wanted.items()
    }


def _words(path: TreePath) -> tuple[str, ...]:
    return tuple(map(str, path))


def as_stored(leaves: dict[TreePath, Any]) -> dict[TreePath, Any]:
    """Leaves as Orbax stores them: under string keys, without arrays of size 0."""
    return {_words(path): leaf for path, leaf in leaves.items() if math.prod(leaf.shape)}


def _empty(leaf: Any) -> jax.Array | np.ndarray:
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype, device=_sharding(leaf))


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context in which this process reads and writes for itself: no other is there to agree."""
    token = _by_itself.set(True)
    try:
        yield
    finally:
        _by_itself.reset(token)


def others() -> bool:
    """Whether there are other processes to agree with."""
    return jax.process_count() > 1 and not _by_itself.get()


def gathered(leaves: dict[TreePath, Any]) -> dict[TreePath, Any]:
    """Returns whole leaves as NumPy arrays on process 0, nothing on the others."""
    from jax.experimental import multihost_utils

    whole = {}
    for path, leaf in leaves.items():  # one at a time: a device may not have room for all
        if isinstance(leaf, jax.Array):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        if jax.process_index() == 0:
            whole[path] = leaf
    return whole


def from_lead(steps: list[int]) -> list[int]:
    """Process 0's steps on every process, as a file system may show each another directory."""
    if not others():
        return steps
    from jax.experimental import multihost_utils

    text = json.dumps(steps).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.frombuffer(text.ljust(size)[:size], np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def agree(attempt: Callable[[], Any]) -> Any:
    """Returns `attempt()`; Damage on one process is raised on all, so that none waits alone."""
    result, damage = None, None
    try:
        result = attempt()
    except Damage as error:
        damage = error
    if others():
        from jax.experimental import multihost_utils

        if not multihost_utils.process_allgather(np.array(damage is None)).all():
            damage = damage or Damage("another process could not read it")
    if damage is not None:
        raise damage
    return result


@functools.cache
def orbax() -> Any:
    """Imports and silences Orbax: it logs the errors that it raises, a full disk from five threads
    with their tracebacks, and asyncio those of the tasks whose errors Orbax does not collect."""
    import orbax.checkpoint

    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    whole = logging.Formatter().format  # with the traceback
    logging.getLogger("asyncio").addFilter(
        lambda record: not re.search("orbax|tensorstore", whole(record))
    )
    show = sys.unraisablehook

    def unless_late_read(report: Any) -> None:
        """Drops the complaints of reads under way when Orbax closes its event loop, as it does
        when one array cannot be read."""
        if str(report.exc_value) != "Event loop is closed":
            show(report)

    sys.unraisablehook = unless_late_read
    return orbax.checkpoint
