"""Accuracies over one or two axes, as a table, a CSV file and a plot."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts
from hsvit_jax.studies import engine
from hsvit_jax.text import printable

COLUMNS = "x line parameters flops training_images steps batch examples"

Rows = Sequence[Mapping[str, Any]]


def table(rows: Rows, x: str, line: str) -> str:
    """Formats accuracies as Markdown, a row for each line and a column for each x."""
    columns, lines = (list(dict.fromkeys(row[axis] for row in rows)) for axis in ("x", "line"))
    cells = {(row["line"], row["x"]): engine.accuracy_text(row) for row in rows}
    body = [[name, *(cells.get((name, column), "–") for column in columns)] for name in lines]
    return artifacts.markdown([[f"{line} \\ {x}", *columns], *body])


def write(
    rows: Rows, title: str, axes: tuple[str, str], folder: Path, name: str, command: str
) -> list[Any]:
    """Writes the table as Markdown, all rows as CSV and the plot as PNG.

    Args:
      rows: of the table, in its order.
      axes: words for the axis across, and for the axis whose values are the lines.
      folder: of the three files.
      name: of the three files, without suffix.
      command: that made them.

    Returns:
      the table and the three paths.
    """
    seeds = len(rows[0]["accuracies"])
    compute = [row["steps"] * row["batch"] * row["flops"] for row in rows]
    notes = (
        f"{title}. Top-1 accuracy on {rows[0]['examples']:,} test images, {seeds} "
        f"seed{'s, ± one standard deviation over them' if seeds > 1 else ''}. Steps × batch × "
        f"FLOPs of a run: {min(compute):.3g} to {max(compute):.3g}."
    )
    drawn = table(rows, *axes)
    page = f"{drawn}\n\n{notes}\n\n    {command}\n"
    return [drawn, *engine.save(rows, COLUMNS, folder, name, page, figure(rows, title, *axes))]


def figure(rows: Rows, title: str, x: str, line: str) -> Any:
    """Draws a line for each value of the second axis."""
    figure = artifacts.figure(7.5, 4.8)
    panel = figure.add_subplot()
    columns = list(dict.fromkeys(row["x"] for row in rows))
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
    for i, name in enumerate(dict.fromkeys(row["line"] for row in rows)):
        own = sorted((r for r in rows if r["line"] == name), key=lambda row: place[row["x"]])
        drawn[name] = panel.errorbar(
            [place[row["x"]] for row in own],
            [100 * row["accuracy"] for row in own],
            yerr=list(zip(*map(interval, own), strict=True)),
            marker="os^DvP*Xh<>d"[i % 12],
            capsize=3,
        )
    panel.set_xlabel(x, parse_math=False)
    panel.set_ylabel("test accuracy (%), 95 % intervals")
    panel.set_title(textwrap.fill(title, 32), fontsize=10, parse_math=False)  # a legend narrows it
    panel.grid(alpha=0.3)
    artifacts.legend(figure, drawn, line)
    return figure


def interval(row: Mapping[str, Any]) -> tuple[float, float]:
    """How far the interval of 95 % reaches below and above the accuracy, in percent: Student's of
    the mean over seeds or, where it reaches further, Wilson's of the test images."""
    from scipy import special

    accuracy, examples = row["accuracy"], row["examples"]
    low, high = artifacts.wilson(accuracy * examples, examples)
    seeds, spread = len(row["accuracies"]), 0.0
    if seeds > 1:
        spread = float(special.stdtrit(seeds - 1, 0.975)) * row["deviation"] / seeds**0.5
    below, above = max(spread, accuracy - low), max(spread, high - accuracy)
    return 100 * min(below, accuracy), 100 * min(above, 1 - accuracy)
