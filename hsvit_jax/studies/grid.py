"""Accuracies over one or two axes, as a table, a CSV file and a plot."""

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts
from hsvit_jax.text import printable


@dataclasses.dataclass(frozen=True)
class Measured:
    """A network trained with every seed: its top-1 accuracies on the test split."""

    accuracies: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; 0 for a single one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Point(Measured):
    """A trained network and its place on the axes.

    Attributes:
      x, line: values of the axes, as printed.
      flops: of one image forward, 2·MAC.
      training_images: of the training split.
      steps: of one run, the mean over seeds.
      batch: of one run.
      examples: of the test split.
    """

    x: str
    line: str
    parameters: int
    flops: int
    training_images: int
    steps: int
    batch: int
    examples: int


@dataclasses.dataclass(frozen=True)
class Labels:
    """Words of a plot: its title, the axis across, and the axis whose values are the lines."""

    title: str
    x: str
    line: str


def text(row: Any) -> str:
    """Formats the mean over seeds, its standard deviation, and the interval of few images."""
    spread = f" ± {100 * row.deviation:.2f}" if len(row.accuracies) > 1 else ""
    return artifacts.accuracy_text(row.accuracy, row.examples, spread)


def table(points: Sequence[Point], labels: Labels) -> str:
    """Formats accuracies as Markdown, a row for each line and a column for each x."""
    columns, lines = (
        list(dict.fromkeys(getattr(p, axis) for p in points)) for axis in ("x", "line")
    )
    cells = {(p.line, p.x): text(p) for p in points}
    rows = [[line, *(cells.get((line, x), "–") for x in columns)] for line in lines]
    return artifacts.markdown([[f"{labels.line} \\ {labels.x}", *columns], *rows])


def write(
    points: Sequence[Point], labels: Labels, folder: Path, name: str, command: str
) -> list[Any]:
    """Writes the table as Markdown, all points as CSV and the plot as PNG.

    Args:
      points: of the table, in its order.
      folder: of the three files.
      name: of the three files, without suffix.
      command: that made them.

    Returns:
      the table and the three paths.
    """
    first, seeds = points[0], len(points[0].accuracies)
    compute = [p.steps * p.batch * p.flops for p in points]
    notes = (
        f"{labels.title}. Top-1 accuracy on {first.examples:,} test images, {seeds} "
        f"seed{'s, ± one standard deviation over them' if seeds > 1 else ''}. Steps × batch × "
        f"FLOPs of a run: {min(compute):.3g} to {max(compute):.3g}."
    )
    drawn = table(points, labels)
    page = f"{drawn}\n\n{notes}\n\n    {command}\n"
    return [drawn, *save(points, folder, name, page, _figure(points, labels))]


def save(
    rows: Sequence[Measured], folder: Path, name: str, text: str, figure: Any
) -> tuple[Path, Path, Path]:
    """Writes a text as NAME.md, the rows' fields as NAME.csv and a figure as NAME.png."""
    text_path, table, plot = (folder / f"{name}.{kind}" for kind in ("md", "csv", "png"))
    artifacts.write_file(text_path, text)
    _, *fields = (field.name for field in dataclasses.fields(rows[0]))
    cells = [[*fields, "accuracy", "deviation", "accuracies"]]
    for row in rows:
        values, every = [getattr(row, field) for field in fields], map(str, row.accuracies)
        cells.append([*values, row.accuracy, row.deviation, " ".join(every)])
    artifacts.save_csv(table, cells)
    artifacts.save_figure(figure, plot)
    return text_path, table, plot


def _figure(points: Sequence[Point], labels: Labels) -> Any:
    """Draws a line for each value of the second axis."""
    figure = artifacts.figure(7.5, 4.8)
    panel = figure.add_subplot()
    columns = list(dict.fromkeys(p.x for p in points))
    try:
        place = {x: float(x) for x in columns}
        if not all(map(math.isfinite, place.values())):
            raise ValueError("a name, such as inf")
        spread = max(place.values()) >= 8 * min(place.values()) > 0
        panel.set_xscale("log" if spread else "linear")
        panel.set_xticks(list(place.values()), columns, minor=False)
        panel.set_xticks([], minor=True)
    except ValueError:  # names
        place = {x: float(i) for i, x in enumerate(columns)}
        shown = list(map(printable, columns))
        panel.set_xticks(range(len(columns)), shown, rotation=20, parse_math=False)
    drawn: dict[str, Any] = {}
    for marker, line in zip(
        "os^DvP*Xh<>d" * 9, dict.fromkeys(p.line for p in points), strict=False
    ):
        own = sorted((p for p in points if p.line == line), key=lambda p: place[p.x])
        drawn[line] = panel.errorbar(
            [place[p.x] for p in own],
            [100 * p.accuracy for p in own],
            yerr=[[100 * side for side in sides] for sides in zip(*map(_sides, own), strict=True)],
            marker=marker,
            capsize=3,
        )
    panel.set_xlabel(labels.x, parse_math=False)
    panel.set_ylabel("test accuracy (%), 95 % intervals")
    title = textwrap.fill(labels.title, 32)  # a long legend narrows it
    panel.set_title(title, fontsize=10, parse_math=False)
    panel.grid(alpha=0.3)
    artifacts.legend(figure, drawn, labels.line)
    return figure


def _sides(point: Point) -> tuple[float, float]:
    """How far the interval of 95 % reaches below and above the accuracy: Student's of the mean over
    seeds or, where it reaches further, Wilson's of the test images; within 0 and 1."""
    from scipy import special

    low, high = artifacts.wilson(point.accuracy * point.examples, point.examples)
    seeds, spread = len(point.accuracies), 0.0
    if seeds > 1:
        spread = float(special.stdtrit(seeds - 1, 0.975)) * point.deviation / seeds**0.5
    below, above = max(spread, point.accuracy - low), max(spread, high - point.accuracy)
    return min(below, point.accuracy), min(above, 1 - point.accuracy)
