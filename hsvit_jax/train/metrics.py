"""Metrics of a run, from process 0: JSON lines, TensorBoard events, progress, curves."""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import queue
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

from hsvit_jax import report

_MOST_EVENTS = 10_000  # lines of metrics that may wait for TensorBoard's file
_PATIENCE = 5.0  # seconds in which it takes what is left at the end


class MetricLog:
    """Appends metrics to `metrics.jsonl` and TensorBoard events in a run's folder.

    `start_step`: the step a run goes on from; lines of later steps, left by a run that was killed
    before it could save them, are dropped, and a line that is there already is not written again,
    so that every step is told once.
    """

    def __init__(self, workdir: Path, *, start_step: int = 0, enabled: bool = True) -> None:
        self._file: IO[bytes] | None = None
        self._events: _Events | None = None
        self._unwritten, self._warned = b"", False
        self._told: set[tuple[int, str | None]] = set()
        if not enabled:
            return
        path = workdir / "metrics.jsonl"
        _drop_after(path, start_step)
        self._told.update((line["step"], line.get("split")) for line in read_metrics(path))
        self._file = report.append_to(path)
        self._events = _Events(workdir / "tensorboard", start_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: {'step': step, **values}; floats that are not finite become null."""
        told = (step, values.get("split"))
        if self._file is None or told in self._told:
            return
        self._told.add(told)
        self._append(to_line(step, values).encode() + b"\n")
        clean = {k: _json_value(v) for k, v in values.items()}
        prefix = clean.get("split", "train")
        scalars = {f"{prefix}/{k}": v for k, v in clean.items() if isinstance(v, float)}
        self._tell_events(lambda events: events.put(int(step), scalars))

    def _append(self, line: bytes) -> None:
        """Appends to the file; bytes that a full disk refuses are written before the next line."""
        self._unwritten += line
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self._warn(f"{self._file.name} waits for space on its disk ({error.strerror})")

    def _tell_events(self, what: Callable[[_Events], None]) -> None:
        """TensorBoard's events end for good at their first error."""
        try:
            if self._events is not None:
                what(self._events)
        except Exception as error:
            self._events = None
            self._warn(f"no more events for TensorBoard ({error}); metrics.jsonl has every figure")

    def _warn(self, text: str) -> None:
        """Once: a full disk troubles both files."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"{text}; training goes on", stacklevel=2)

    def close(self) -> None:
        """Closes both files."""
        if self._file is not None:
            self._append(b"")
            self._file.close()
            self._tell_events(_Events.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Events(threading.Thread):
    """TensorBoard's events, written by a thread of their own.

    tensorboardX's writer would block its caller for ever once its thread has died, of a full disk
    or a clock that was set back.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        super().__init__(name="tensorboard", daemon=True)
        self._folder, self._first_step = folder, first_step
        self._queue: queue.Queue = queue.Queue(_MOST_EVENTS)
        self._error: Exception | None = None
        self.start()

    def put(self, step: int, scalars: dict[str, float] | None) -> None:
        """Hands the figures of a step to the thread without waiting for it; None ends it.

        Raises what ended the thread, or TimeoutError when `_MOST_EVENTS` steps wait for it.
        """
        if self._error is not None:
            raise self._error
        try:
            self._queue.put_nowait((time.time(), step, scalars))
        except queue.Full:
            raise TimeoutError(f"{self._folder} is too slow") from None

    def close(self) -> None:
        """Writes what is left, in at most `_PATIENCE`; raises as `put` does."""
        self.put(0, None)
        self.join(_PATIENCE)
        if self.is_alive() or self._error is not None:
            raise self._error or TimeoutError(f"{self._folder} is too slow")

    def run(self) -> None:
        """Writes until it is told to end, or cannot."""
        try:
            self._folder.mkdir(exist_ok=True)
            host, now = socket.gethostname(), time.time()
            name = f"events.out.tfevents.{now:.0f}.{host}.{os.getpid()}.{time.monotonic_ns()}"
            with (self._folder / name).open("xb", buffering=0) as file:
                _write_event(file, now, 0, {}, file_version="brain.Event:2")
                # TensorBoard hides what a run that was killed had written from this step on.
                _write_event(file, now, self._first_step, {}, session_log={"status": 1})
                while (entry := self._queue.get())[2] is not None:
                    _write_event(file, *entry)
        except Exception as error:
            self._error = error


def _write_event(
    file: IO[bytes], seconds: float, step: int, scalars: dict[str, float], **more: Any
) -> None:
    """One record: the data's length and the data, each with its checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
    event = Event(wall_time=seconds, step=step, summary={"value": values}, **more)
    data = event.SerializeToString()
    parts = struct.pack("<Q", len(data)), data
    record = b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)
    if file.write(record) < len(record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def to_line(step: int, values: Mapping[str, Any]) -> str:
    """{'step': step, **values} as one line of JSON; floats that are not finite become null."""
    return json.dumps({"step": int(step), **{k: _json_value(v) for k, v in values.items()}})


def _json_value(value: Any) -> Any:
    """Plain Python numbers; JSON has no NaN."""
    if isinstance(value, str | bool | int | list):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without those that are none of ours."""
    return _sorted_out(path)[0]


def _sorted_out(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The lines of a `metrics.jsonl`, and those that are damaged; a last one cut short is neither.

    A line whose writing was cut short has no end; what it said is said again by the resumed run.
    """
    lines, damaged = [], b""
    raws = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for raw in (raw for raw in raws if raw.endswith(b"\n") and raw.strip()):
        try:
            line = json.loads(raw)
            step, split = line["step"], line.get("split", "")
            if type(step) is not int or not 0 <= step < 2**53 or not isinstance(split, str):
                raise ValueError
            lines.append(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += raw
    return lines, damaged


def _drop_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step`, in one atomic replacement, and damaged ones in a file beside.

    They cost a figure, not the run.
    """
    if not path.exists():
        return
    lines, damaged = _sorted_out(path)
    if damaged:
        beside = path.with_suffix(".damaged")
        with report.append_to(beside) as file:
            file.write(damaged)
        warnings.warn(f"damaged lines of {path} were moved to {beside}", stacklevel=2)
    kept = [line for line in lines if line["step"] <= step]
    report.write_file(path, "".join(json.dumps(line) + "\n" for line in kept))


class Progress:
    """A live bar with loss, accuracy, images/s and ETA; plain lines when not a terminal."""

    def __init__(
        self, total: int, start: int, *, enabled: bool = True, every: float = 10.0
    ) -> None:
        self._total, self._enabled, self._every = total, enabled, every
        self._bar = None
        self._said = -math.inf
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),  # leaves one line at 80 columns
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("train", total=total, completed=start, figures="")

    def update(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Shows the figures of `step`: loss, accuracy, images_per_second, seconds_left."""
        if not self._enabled:
            return
        text = (
            f"loss {values['loss']:.4f}  accuracy {values['accuracy']:.2%}  "
            f"{values['images_per_second']:,.0f} images/s"
        )
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, description=f"epoch {epoch + 1}", figures=text
            )
        elif time.monotonic() - self._said >= self._every or step == self._total:
            self._said = time.monotonic()
            left = datetime.timedelta(seconds=round(values["seconds_left"]))
            print(
                f"step {step:,}/{self._total:,}  epoch {epoch + 1}  {text}  {left} left",
                file=sys.stderr,
                flush=True,
            )

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the bar down and leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def draw_curves(workdir: Path, title: str) -> Path | None:
    """Loss and accuracy by step from `metrics.jsonl`, as `curves.png`.

    None without any line, or with a warning on a full disk: the run is done by then.

    A `$` in the title is only a dollar sign.
    """
    lines = read_metrics(workdir / "metrics.jsonl")
    if not lines:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    series: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        series.setdefault(line.get("split", "train, augmented"), []).append(line)
    for name, rows in series.items():
        single = len(rows) == 1  # an end-of-run test figure is a point, not a curve
        style = {"marker": "*", "markersize": 11, "linestyle": "none", "color": "black"}
        for axes, key, form in ((loss_axes, "loss", ".4f"), (accuracy_axes, "accuracy", ".2%")):
            points = [(r["step"], r[key]) for r in rows if isinstance(r.get(key), float)]
            if points:
                label = f"{name}: {points[-1][1]:{form}}"
                axes.plot(
                    *zip(*points, strict=True),
                    label=label,
                    **(style if single else {"linewidth": 1.4}),
                )
    figure.suptitle(title, parse_math=False)
    loss_axes.set(xlabel="step", ylabel="loss (nats)")
    accuracy_axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(title="last value")
    path = workdir / "curves.png"
    try:
        report.save_figure(figure, path)
    except OSError as error:
        warnings.warn(f"no curves: {path} cannot be written ({error.strerror})", stacklevel=2)
        return None
    return path
