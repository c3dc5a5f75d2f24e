"""Rows of measurements: a table for a README, a CSV file, and a plot with logarithmic axes."""

import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: its head and, as words, its cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(
    rows: Sequence[Any], folder: Path, name: str, draw: Callable[[Any], None], inches: tuple
) -> tuple[Path, Path]:
    """`name`.csv and `name`.png in `folder`, which is made.

    rows: dataclass instances of one kind, at least one; a column for each field. draw: fills a
    Matplotlib figure of the size given, whose first panel gets the legend.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    table, plot = folder / f"{name}.csv", folder / f"{name}.png"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    figure = Figure(figsize=inches, dpi=110, layout="constrained")
    draw(figure)
    figure.axes[0].legend()
    figure.savefig(plot)
    return table, plot


def double_log(axes: Any, guide: tuple[Sequence[float], Sequence[float]], label: str) -> None:
    """Both axes in powers of two, plain numbers on them, and a grey line to compare slopes with."""
    axes.plot(*guide, color="lightgrey", linewidth=5, zorder=0, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
