"""Writes what a benchmark has measured as a CSV and a figure."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts


def write(
    rows: Sequence[Any], folder: Path, name: str, draw: Callable[[Any], None], inches: tuple
) -> tuple[Path, Path]:
    """Writes a table as CSV and a figure as PNG.

    Args:
      rows: dataclass instances of one kind, at least one; a column for each field.
      folder: of both files, made if it is not there.
      name: of both files, without suffix.
      draw: fills a Matplotlib figure, whose first panel gets the legend.

    Returns:
      the paths of the CSV and the PNG.
    """
    table, plot = folder / f"{name}.csv", folder / f"{name}.png"
    head = [field.name for field in dataclasses.fields(rows[0])]
    artifacts.save_csv(table, [head, *map(dataclasses.astuple, rows)])
    drawn = artifacts.figure(*inches, dpi=110)
    draw(drawn)
    drawn.axes[0].legend()
    artifacts.save_figure(drawn, plot)
    return table, plot


def double_log(axes: Any, guide: tuple[Sequence[float], Sequence[float]], label: str) -> None:
    """Sets both axes to powers of two and draws a grey line to compare slopes with."""
    axes.plot(*guide, color="lightgrey", linewidth=5, zorder=0, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
