"""Progress of a run: a live bar on a terminal and in a notebook, plain lines elsewhere."""

import datetime
import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from hsvit_jax import tasks
from hsvit_jax.text import printable


class Progress:
    """A live bar on a terminal and in a notebook; plain lines elsewhere.

    Args:
        start: the step it resumes from.
        offset: of the run, which its epochs are counted by.
        best: the highest validation accuracy so far, where there is one, or other `figure`.
        enabled: False shows nothing.
    """

    _EVERY = 10.0  # seconds between two plain lines

    def __init__(
        self,
        total: int,
        start: int,
        steps_per_epoch: int,
        *,
        offset: int = 0,
        best: float | None = None,
        figure: str = "accuracy",
        enabled: bool = True,
    ) -> None:
        self.best, self._offset, self._form = best, offset, tasks.form(figure)
        self._total, self._steps_per_epoch = total, steps_per_epoch
        self._enabled = enabled
        self._bar, self._printed = None, -math.inf
        self._figures: list[str] = []  # behind the bar, the most important first
        if not enabled:
            return
        from tqdm import auto, std

        size: dict[str, Any] = {"dynamic_ncols": True}
        form = "{desc} {bar} {n_fmt}/{total_fmt}{postfix}"
        if sys.stderr.isatty():  # tqdm shows nothing on a terminal that does not know its rows
            size = {"ncols": shutil.get_terminal_size().columns - 1, "nrows": 24}
            form = form.replace("bar", "bar:6")  # a notebook's is a widget
        if sys.stderr.isatty() or auto.notebook_tqdm is not std.tqdm:
            bar = auto.tqdm(total=total, initial=start, file=sys.stderr, bar_format=form, **size)
            self._bar = None if bar.disable else bar  # by TQDM_DISABLE=1: plain lines

    def phase(self, text: str, *, compiling: bool) -> None:
        """Reports the work between steps; as a line only if it must be compiled."""
        if self._bar is not None:
            self._draw(f"compiling {text}" if compiling else text)
            self._bar.refresh()
        elif compiling:
            self.say(f"compiling {text} ...")

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._bar is not None:
            self._draw(self._epoch(step))
            self._bar.update(step - self._bar.n)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows loss, the task's figure, learning_rate, images_per_second, seconds_left of a step.

        The speed and the time left do not count compiling, evaluating and saving.
        """
        if not self._enabled:
            return
        left = datetime.timedelta(seconds=round(values["seconds_left"]))
        figures = [f"loss {values['loss']:.4f}"]
        figures += [tasks.shown(name, values[name]) for name in tasks.STEP_FIGURES & values.keys()]
        figures += [] if self.best is None else [f"best {self.best:{self._form}}"]
        figures += [f"{values['images_per_second']:,.0f} images/s"]
        figures += [f"rate {values['learning_rate']:.1e}"]
        if self._bar is not None:
            self._figures = [f"{left} left", *figures]
            self.advance(step)
        elif time.monotonic() - self._printed >= self._EVERY or step == self._total:
            self._printed = time.monotonic()
            text = "  ".join([*figures, f"{left} left"])
            self.say(f"step {step:,}/{self._total:,}  {self._epoch(step)}  {text}")

    def _draw(self, what: str) -> None:
        """Puts `what` before the bar, and behind it as many figures as the terminal shows."""
        around = len(what) + 2 * len(str(self._total)) + 11  # with the bar and the counts
        texts = ["  ".join(self._figures[:n]) for n in range(1, len(self._figures) + 1)]
        fit = [text for text in texts if around + len(text) <= (self._bar.ncols or math.inf)]
        self._bar.desc, self._bar.postfix = what, max(fit, key=len, default="")

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        text = printable(text)
        if self._bar is not None:
            self._bar.write(text, file=self._bar.fp)
        elif self._enabled:
            print(text, file=sys.stderr, flush=True)

    def _epoch(self, step: int) -> str:
        """The epoch of a step, of how many; the last may be a part of one."""
        places = (max(n, 1) + self._offset for n in (step, self._total))
        epoch, epochs = (-(-place // self._steps_per_epoch) for place in places)
        return f"epoch {epoch}/{epochs}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
