"""Loss and accuracy by step as a picture, which no run depends on."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts, tasks
from hsvit_jax.train.metrics.log import read_metrics, series


@contextlib.contextmanager
def forgiven(picture: str) -> Iterator[None]:
    """Context in which an error, of any kind, is a warning: no picture costs a run anything."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"no {picture} ({type(error).__name__}: {error})", stacklevel=1)


def draw_curves(workdir: Path, title: str, figure: str = "accuracy") -> Path | None:
    """Draws loss and accuracy, or another figure, by step from `metrics.jsonl` as `curves.png`.

    Args:
        title: plain text; a `$` is only a dollar sign.

    Returns:
        the figure's path; None without any line or, with a warning, where it cannot be drawn.
    """
    path = workdir / "curves.png"
    with forgiven(f"curves: {path} cannot be drawn"):
        if lines := read_metrics(workdir / "metrics.jsonl"):
            artifacts.save_figure(_curves(lines, title, figure), path)
            return path
    return None


def _curves(lines: Sequence[Mapping[str, Any]], title: str, name: str) -> Any:
    figure = artifacts.figure(10, 4)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for axes, key, form in ((loss_axes, "loss", ".4f"), (accuracy_axes, name, tasks.form(name))):
        for split, points in series(lines, key).items():
            style: dict[str, Any] = {"linewidth": 1.4}
            if len(points) == 1:  # an end-of-run test figure is a point, not a curve
                style = {"marker": "*", "markersize": 11, "linestyle": "none"}
                style |= {"color": "black"} if split == "test" else {}
            if points:
                label = f"{split}: {points[-1][1]:{form}}"
                axes.plot(*zip(*points, strict=True), label=label, **style)
    figure.suptitle(title, parse_math=False)
    loss_axes.set(xlabel="step", ylabel="loss (nats)")
    limits = {"ylim": (0, 1.02)} if tasks.form(name) == ".2%" else {}
    accuracy_axes.set(xlabel="step", ylabel=name, **limits)
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        if axes.lines:
            for text in axes.legend(title="last value").texts:
                text.set_parse_math(False)
    return figure
