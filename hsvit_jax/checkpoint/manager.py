"""The checkpoint manager: keeps the latest and the best steps, and checks them when it reads them.

One step is one directory, renamed into place when it is complete:

    checkpoints/1200/state/          the arrays (OCDBT and zarr, written by every process)
    checkpoints/1200/meta/metadata   JSON: format, SHA-256 of the rest, step, metric, the caller's
                                     metadata, and each leaf's dtype, shape and 64-bit checksum
    checkpoints/1200.damaged         a step that failed its check, moved out of the way

Orbax itself restores a file with a flipped bit without an error; `Checkpoints` returns nothing
before its checksums agree.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from hsvit_jax.checkpoint import checksum
from hsvit_jax.checkpoint import directory as disk
from hsvit_jax.checkpoint import orbax_arrays as arrays
from hsvit_jax.checkpoint.record import (
    CheckpointError,
    Damage,
    Record,
    brief,
    flatten,
    nest,
    read_record,
    seal,
    unseal,
)
from hsvit_jax.text import few

Which = Literal["latest", "best"] | int


class CheckpointWarning(UserWarning):
    """A warning of something in a checkpoint directory that was passed over."""


class _Keep:
    """Orbax's preservation policy: the newest and the best of the steps with valid metadata."""

    def __init__(self, latest: int, best: int) -> None:
        self.latest, self.best = latest, best
        self.metrics: dict[int, float | None] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Keeps damaged steps too, which have no metric: they take no other step's place."""
        keep = {*sorted(self.metrics)[-self.latest :], *_ranked(self.metrics)[: self.best]}
        return [c.step in keep or c.step not in self.metrics for c in checkpoints]


class Checkpoints:
    """The latest and best training states in a directory, checked when they are read.

    Every process of a job creates one and calls the same methods in the same order; the directory
    must be one they all see. Every method first waits for a save that is still under way, and
    raises its error. After a failed save the earlier steps are intact and saving can be tried
    again.

    Args:
      directory: of the steps; created if it is missing, unless `read_only`.
      keep_latest: how many of the newest steps to keep, at least 1.
      keep_best: how many of the steps with the highest metric to keep besides.
      read_only: never write, move or delete anything.

    Raises:
      CheckpointError: the directory cannot be written (tried at once), or is a URL.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        read_only: bool = False,
    ) -> None:
        self.directory = disk.local(directory).absolute()
        self._keep = _Keep(keep_latest, keep_best)
        self._read_only = read_only
        self._manager: Any = None
        if not read_only:
            disk.probe(self.directory)

    def save(
        self, step: int, state: dict, meta: dict, *, metric: float | None = None, wait: bool = False
    ) -> None:
        """Writes `state` as `step`; returns once it is copied from the devices, unless `wait`.

        Saving an existing step writes nothing: it is accepted when the state is the same bit for
        bit (a final save after a periodic one), and an error otherwise.

        Args:
          step: newer than every step in the directory.
          state: nested dict of jax or NumPy arrays, any sharding; keys are strings or integers.
          meta: anything `json` can write; it is read back as JSON has it (tuples as lists).
          metric: higher is better. None, NaN and infinities are never best. That of a step that is
            saved already is not recorded.
          wait: return only when the step is on disk.

        Raises:
          CheckpointError: read-only, a full disk, a newer or a different step in the way.
          ValueError: `state` has a leaf of another dtype than checkpoints hold.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened read-only; step {step} not saved")
        metric = None if metric is None or not math.isfinite(metric) else float(metric)
        leaves, empty = flatten(state)
        for path, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):  # it may change while it is being written
                leaves[path] = np.array(leaf)
        self.wait()
        sums = checksum.of(list(leaves.values()))
        document = seal(step, metric, leaves, sums, empty, meta)
        if self._is_saved(step, unseal(document, step)):
            return
        known = {at: record.metric for at, record in self._records().items()}
        if known and max(known) > step:
            raise CheckpointError(
                f"step {step} not saved: {self.directory} already holds step {max(known)}; resume "
                "from it, or save into another directory"
            )
        self._keep.metrics = known | {step: metric}
        with self._reporting(f"step {step} was not saved in {self.directory}"):
            orbax = arrays.orbax()
            disk.clear_cut_short(self.directory)
            self._manager = self._manager or self._open(orbax)
            arguments = orbax.args.Composite(
                state=orbax.args.StandardSave(nest(arrays.as_stored(leaves))),
                meta=orbax.args.JsonSave(document),
            )
            self._manager.save(step, args=arguments, force=True)
        if wait:
            self.wait()

    def restore(self, template: dict, which: Which = "latest") -> tuple[int, dict, dict] | None:
        """Reads the newest (or best, or named) undamaged step, checked against its checksums.

        A damaged step is passed over with a `CheckpointWarning` for the one before it (for
        'best', the next best; steps without a metric come last), and after a good one was read
        renamed to `<step>.damaged`, unless read-only. No other step replaces a numbered
        one.

        Args:
          template: nested dict of `jax.ShapeDtypeStruct` or jax arrays, whose shardings the
              result takes (without one: the first local device), or of NumPy arrays.
          which: 'latest', 'best' or a step.

        Returns:
          (step, state, meta), or None where there is no step at all.

        Raises:
          CheckpointError: there are steps, but none is good; no such step; or a healthy step
              has other keys, shapes or dtypes than `template`, all of them listed.
        """
        wanted, empty = flatten(template)
        first = self._first(which, lambda path, record: arrays.read(path, record, wanted))
        if first is None:
            return None
        step, record, leaves = first
        return step, nest(leaves, empty), record.meta

    def meta(self, which: Which = "latest") -> dict | None:
        """Reads the metadata of the step `restore` would try first, without its arrays.

        Returns None where there is no step at all; raises as `restore` does.
        """
        first = self._first(which, lambda path, record: {}, set_aside=False)
        return None if first is None else first[1].meta

    def steps(self) -> list[int]:
        """Lists the steps with valid metadata, oldest first; their arrays are not read."""
        return sorted(self._records())

    def best_step(self) -> int | None:
        """Finds the step with the highest metric, the later of equals; None where none has one."""
        ranked = _ranked({step: record.metric for step, record in self._records().items()})
        return next(iter(arrays.from_lead(ranked)), None)

    def wait(self) -> None:
        """Blocks until the save under way is on disk; raises CheckpointError if it failed."""
        if self._manager is not None:
            with self._reporting(f"the last save in {self.directory} failed"):
                self._manager.wait_until_finished()

    def check(self) -> None:
        """Raises CheckpointError if the last save has failed; waits for none under way."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def close(self) -> None:
        """Waits as `wait` does and ends Orbax's threads; the object can be used again."""
        manager, self._manager = self._manager, None
        if manager is not None:
            with self._reporting(f"the last save in {self.directory} failed"):
                manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and arrays.others():
            self._manager = None  # the others may never come to finish a save with this process
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the first error is the one to show

    @contextlib.contextmanager
    def _reporting(self, failure: str) -> Iterator[None]:
        """Turns Orbax's errors, of many types and without a directory, into CheckpointError."""
        try:
            yield
        except Exception as error:
            self._manager = None  # it keeps what else failed in that save for the next one
            if arrays.others() and "Gloo" in str(error):  # another process was lost
                raise jax.errors.JaxRuntimeError(f"{failure}: {brief(error)}") from error
            disk.clear_cut_short(self.directory)
            kept = "Earlier steps are untouched" if self.steps() else "No step was saved before"
            raise CheckpointError(
                f"{failure}: {brief(error)}. {kept}; free some space or check the disk, then save "
                "again."
            ) from error

    def _open(self, orbax: Any) -> Any:
        """Opens Orbax's manager, which learns neither metrics nor the number of steps to keep: a
        NaN or a damaged file there would cost it the best step, or the start."""
        saving = None if jax.process_count() == 1 or arrays.others() else {0}
        return orbax.CheckpointManager(
            self.directory,
            options=orbax.CheckpointManagerOptions(
                create=False,
                save_root_metadata=False,
                lightweight_initialize=True,
                preservation_policy=self._keep,
                async_options=orbax.options.AsyncOptions(barrier_sync_fn=arrays.barrier(saving)),
                multiprocessing_options=orbax.options.MultiprocessingOptions(
                    active_processes=saving, barrier_sync_key_prefix="alone" if saving else None
                ),
            ),
        )

    def _numbered(self) -> list[int]:
        return sorted(int(p.name) for p in disk.entries(self.directory) if disk.is_step(p))

    def _records(self) -> dict[int, Record]:
        self.wait()
        records = {}
        for step in self._numbered():
            with contextlib.suppress(Damage):
                records[step] = read_record(self.directory, step)
        return records

    def _is_saved(self, step: int, record: Record) -> bool:
        """Whether `step` is on disk with this very state; a damaged one is moved away."""
        if step not in arrays.from_lead(self._numbered()):
            return False
        try:
            saved = arrays.agree(functools.partial(read_record, self.directory, step))
        except Damage as damage:
            _warn(f"step {step} in {self.directory} is damaged ({damage}), saved anew")
            self._set_aside([step])
            return False
        if saved.leaves != record.leaves:
            raise CheckpointError(
                f"step {step} not saved: {self.directory} already holds another state under this "
                "number; resume from it, or save into another directory"
            )
        return True

    def _first(
        self, which: Which, read: Callable[[Path, Record], dict], set_aside: bool = True
    ) -> tuple[int, Record, dict] | None:
        """Reads the first undamaged step in the order of `which`.

        Warns of those passed over; moves them away after a good one was read, if `set_aside`. A
        reader of a run that saves meanwhile, and removes older steps, looks anew.
        """
        self.wait()
        numbered = arrays.from_lead(self._numbered())
        order = arrays.from_lead(self._order(which, numbered))
        failures: dict[int, str] = {}
        for step in order:
            try:
                record = arrays.agree(functools.partial(read_record, self.directory, step))
                result = read(self.directory / str(step), record)
            except Damage as damage:
                if self._read_only and arrays.from_lead(self._numbered()) != numbered:
                    return self._first(which, read, set_aside)
                failures[step] = str(damage).rstrip(".")
                _warn(f"step {step} in {self.directory} is damaged, passed over: {damage}")
                continue
            if set_aside and not self._read_only:
                self._set_aside(list(failures))
            return step, record, result
        if not order:
            return None
        raise CheckpointError(
            f"no good checkpoint in {self.directory}, "
            + few((f"step {step}: {why}" for step, why in failures.items()), "; ")
            + ("" if self._read_only else ". Move these steps away to start afresh.")
        )

    def _order(self, which: Which, numbered: list[int]) -> list[int]:
        ranked = _ranked({step: record.metric for step, record in self._records().items()})
        newest = numbered[::-1]
        if which == "latest":
            return newest
        if which == "best":
            return ranked + [step for step in newest if step not in ranked]
        if which not in numbered:
            raise CheckpointError(f"no step {which!r} in {self.directory}, only {few(numbered)}")
        return [which]

    def _set_aside(self, steps: list[int]) -> None:
        """Renames damaged steps: nothing is lost, and their numbers are free for saving again."""
        for step in steps if jax.process_index() == 0 else []:
            target, count = self.directory / f"{step}.damaged", 1
            while target.exists():
                target, count = self.directory / f"{step}.damaged-{count + 1}", count + 1
            (self.directory / str(step)).rename(target)
        if steps:
            arrays.agree(lambda: None)  # a barrier: nobody lists the directory before
            if self._manager is not None:
                self._manager.reload()


def load_tree(path: str | Path, which: Which = "latest") -> tuple[int, dict, dict]:
    """Reads a complete, checked step without a template, every leaf as a NumPy array.

    Args:
      path: a directory of checkpoints, or a work directory that has `checkpoints/`.
      which: as in `Checkpoints.restore`.

    Returns:
      (step, state, meta).

    Raises:
      CheckpointError: there is no such directory, no checkpoint in it, or none that is good.
    """
    path = disk.local(path).absolute()
    inner = path / "checkpoints"
    checkpoints = Checkpoints(inner if inner.is_dir() else path, read_only=True)
    first = checkpoints._first(which, lambda path, record: arrays.read(path, record, None))
    if first is None:
        raise CheckpointError(
            f"{path} {'holds no checkpoint' if path.exists() else 'does not exist'}: name the work "
            "folder of a run that has saved one, an exported .safetensors file or zoo:NAME"
        )
    step, record, leaves = first
    return step, nest(leaves, record.empty), record.meta


def _ranked(metrics: dict[int, float | None]) -> list[int]:
    """Steps that have a metric, the best first, the later of equals first."""
    ranked = sorted((metric, step) for step, metric in metrics.items() if metric is not None)
    return [step for _, step in reversed(ranked)]


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=2)
