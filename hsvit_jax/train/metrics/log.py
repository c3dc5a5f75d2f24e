"""The metrics of a run as JSON lines, from process 0, which hands them to loggers too."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

from hsvit_jax import artifacts
from hsvit_jax.train.metrics import loggers


class MetricLog:
    """Appends metrics to `metrics.jsonl` in a run's folder, and hands them to its loggers.

    Args:
        start_step: the step a run resumes from. Lines of later steps, which a killed run wrote
            after its last checkpoint, are dropped; a line that is there is not written again, but
            for an evaluation with other figures.
        enabled: False writes nothing, for all processes but the first.
        names: of `train.loggers`.
        config: of the run, for the loggers.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        start_step: int = 0,
        enabled: bool = True,
        names: Sequence[str] = ("tensorboard",),
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._file: IO[bytes] | None = None
        self._loggers: list[loggers.Background] = []
        self._unwritten, self._waits = b"", False
        if not enabled:
            return
        path = workdir / "metrics.jsonl"
        anew = _drop_after(path, start_step)
        self._logged = {(line["step"], line.get("split")): line for line in read_metrics(path)}
        self._file = artifacts.append_to(path)
        about = workdir, start_step, anew, config
        self._loggers = [loggers.Background(name, *about) for name in dict.fromkeys(names)]

    def check(self) -> None:
        """Raises ValueError once the file is another one, or gone, and this one's lines with it."""
        path = Path(self._file.name) if self._file else None
        if path and not (path.exists() and os.path.samefile(path, self._file.fileno())):
            raise ValueError(
                f"{path.parent} was removed or moved while the run was in it, or its {path.name}: "
                "start again, and leave the work folder where it is"
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line, {'step': step, **values}; floats that are not finite become null."""
        if self._file is None:
            return
        self.check()
        key, text = (step, values.get("split")), to_line(step, values)
        line = json.loads(text)
        if key in self._logged and (key[1] is None or line == self._logged[key]):
            return
        self._logged[key] = line
        self._append(text.encode() + b"\n")
        prefix = line.get("split", "train")
        scalars = {f"{prefix}/{k}": v for k, v in line.items() if isinstance(v, float)}
        self._each_logger(lambda logger: logger.put((int(step), scalars)))

    def evaluations(self, split: str, figure: str) -> dict[int, float]:
        """Reads a figure of a split's evaluations by step, oldest first, without those whose loss
        is not finite; none on processes that write no metrics."""
        lines = read_metrics(Path(self._file.name)) if self._file else []
        of_split = {line["step"]: line for line in lines if line.get("split") == split}
        return {
            step: line[figure]
            for step, line in of_split.items()
            if isinstance(line.get("loss"), float) and isinstance(line.get(figure), float)
        }

    def _append(self, line: bytes) -> None:
        """Appends to the file; bytes that a full disk refuses are written before the next line."""
        self._unwritten += line
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._waits:
                _warn(f"{self._file.name} waits for space on its disk ({error.strerror})")
            self._waits = True

    def _each_logger(self, use: Callable[[loggers.Background], None]) -> None:
        """Uses every logger, and drops one that fails after one warning with the whole error."""
        for logger in list(self._loggers):
            try:
                use(logger)
            except Exception as error:  # a library's own, of any kind
                self._loggers.remove(logger)
                why = " ".join(f"{type(error).__name__}: {error}".split())
                _warn(f"no more figures for {logger.name}: {why}; metrics.jsonl has all")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._append(b"")
            self._file.close()
        self._each_logger(loggers.Background.close)


def _warn(text: str) -> None:
    warnings.warn(f"{text}; training goes on", stacklevel=2)


def to_line(step: int, values: Mapping[str, Any]) -> str:
    """Formats {'step': step, **values} as JSON; floats that are not finite become null."""
    return json.dumps({"step": int(step), **{k: _json_value(v) for k, v in values.items()}})


def _json_value(value: Any) -> Any:
    """A plain Python number; null for NaN and infinity, which JSON has not."""
    if isinstance(value, str | bool | int | list):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def best_before_patience_ended(found: Mapping[int, float], patience: int) -> str:
    """The step of the best evaluation of `found`, by their steps, the first of equals, where
    `patience` or more came after it; '' else, and for no patience."""
    best = max(found, key=found.__getitem__, default=0)
    return str(best) if patience and sum(step > best for step in found) >= patience else ""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a `metrics.jsonl`, without damaged ones; none where it is missing.

    Of several evaluations of a split at one step, which `MetricLog` may write, the last counts.
    """
    lines = _sorted_out(path)[0]
    return list({(line["step"], line.get("split")): line for line in lines}.values())


def measured(
    lines: Sequence[Mapping[str, Any]], step: int, names: Sequence[str] = ("accuracy",)
) -> dict[str, dict[str, Any]]:
    """Selects accuracy, loss and examples of 'val' and 'test' at a step, but from damaged lines.

    Other tasks have other figures, by `names`.
    """
    found = {}
    for line in lines:
        split, loss, images = (line.get(key) for key in ("split", "loss", "examples"))
        figures = {name: line.get(name) for name in names}
        right = all(isinstance(x, float) and math.isfinite(x) for x in figures.values())
        right &= right and 0 <= figures.get("accuracy", 0.0) <= 1
        if right and type(images) is int and images > 0 and line["step"] == step:
            loss = loss if isinstance(loss, float) else None
            found[split] = {**figures, "loss": loss, "examples": images}
    return {split: found[split] for split in ("val", "test") if split in found}


def series(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[tuple[int, float]]]:
    """Returns a figure by step for each split; nothing where a line has no number."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        points = found.setdefault(line.get("split", "train, augmented"), [])
        if isinstance(line.get(key), float):
            points.append((line["step"], line[key]))
    return found


def _sorted_out(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The good lines of a `metrics.jsonl`, and the damaged ones; a last line without its end, which
    was cut short and is written again by the resumed run, is neither."""
    lines, damaged = [], b""
    raws = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for raw in (raw for raw in raws if raw.endswith(b"\n") and raw.strip()):
        try:
            line = json.loads(raw, parse_float=_figure, parse_constant=_figure)
            step, split = line["step"], line.get("split", "")
            if type(step) is not int or not 0 <= step < 2**53 or not isinstance(split, str):
                raise ValueError
            lines.append(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += raw
    return lines, damaged


def _figure(text: str) -> float | None:
    """A figure of a line; None, as NaN is written, for one that float32 has not."""
    return value if abs(value := float(text)) < 2.0**128 else None


def _drop_after(path: Path, step: int) -> bool:
    """Keeps the lines up to `step`, in one atomic replacement, and damaged ones in a file beside:
    they cost a figure, not the run. Returns whether the lines were another training's."""
    if not path.exists():
        return False
    lines, damaged = _sorted_out(path)
    if damaged:
        beside = path.with_suffix(".damaged")
        with artifacts.append_to(beside) as file:
            file.write(damaged)
        warnings.warn(f"damaged lines of {path} were moved to {beside}", stacklevel=2)
    # It had checkpoints, if it was evaluated, or came to its second epoch.
    anew = not step and any(x["step"] and ("split" in x or x.get("epoch")) for x in lines)
    if anew:
        beside = path.with_suffix(".before")
        with artifacts.append_to(beside) as file:
            file.write(path.read_bytes())
        warnings.warn(
            f"the run begins anew, as it has no checkpoint; its lines so far are kept in {beside}",
            stacklevel=2,
        )
    kept = [line for line in lines if line["step"] <= step]
    artifacts.write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
    return anew
