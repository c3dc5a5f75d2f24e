"""Tables and plots of studies: systems with their costs, and accuracies over two axes.

The comparison follows figure 2 of the HSViT paper and figure 4 of the ViX paper.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hsvit_jax import artifacts
from hsvit_jax.models import costs
from hsvit_jax.studies import engine
from hsvit_jax.studies.engine import Row
from hsvit_jax.text import printable

#: Columns of the CSV files.
COMPARISON = "name spec epochs parameters megabytes flops batch forward_bytes training_bytes "
COMPARISON += "images_per_second examples top5 accuracy deviation accuracies"
GRID = "x line parameters flops training_images steps batch examples accuracy deviation accuracies"


def ranked(rows: Sequence[Row], batch: int) -> list[Row]:
    """Returns the rows with the memory of `batch` images, best accuracy first."""
    found = []
    for row in rows:
        forward = costs.forward_bytes(row["model"], batch)
        training = costs.training_bytes(row["model"], batch)
        memory = {"forward_bytes": forward, "training_bytes": training}
        found.append({**row, "batch": batch, **memory})
    return sorted(found, key=lambda row: -row["accuracy"])


SHOWN = {
    "system": lambda row: row["name"],
    "parameters": lambda row: f"{row['parameters']:,}",
    "parameters (MB)": lambda row: f"{row['megabytes']:.2f}",
    "FLOPs": lambda row: f"{row['flops'] / 1e9:.3f} G",
    "memory forward": lambda row: artifacts.byte_text(row["forward_bytes"]),
    "memory training": lambda row: artifacts.byte_text(row["training_bytes"]),
    "images/s": lambda row: f"{row['images_per_second']:,.0f}",
    "top-1": engine.accuracy_text,
    "top-5": lambda row: "–" if row["top5"] is None else f"{row['top5']:.2%}",
}


def comparison(rows: Sequence[Row]) -> str:
    """Formats the rows as Markdown."""
    return artifacts.markdown(artifacts.table(SHOWN, rows)) + "\n"


def write_comparison(rows: Sequence[Row], out: Path, command: str) -> list[Path]:
    """Writes comparison.md, comparison.csv and comparison.png in `out`; returns their paths."""
    batch, epochs = rows[0]["batch"], [row["epochs"] for row in rows]
    ends = dict.fromkeys(f"{number:.3g}" for number in (min(epochs), max(epochs)))
    notes = (
        f"{' to '.join(ends)} epochs, {engine.seeds_text(rows)}. Accuracy: test split. MB: float32 "
        "parameters. FLOPs: one image forward, 2·MAC. Memory: peak of the compiled program with "
        f"activations, batch {batch}, {jax.default_backend()}, {jax.device_count()} device(s). "
        f"images/s: median of the training log.\n\n    {command}\n"
    )
    across = {
        "parameters": "parameters",
        "flops": "FLOPs of one image forward",
        "training_bytes": f"bytes of a training program, batch {batch}",
    }
    plot = figure(rows, across, lambda row: f"{row['name']}: {row['accuracy']:.2%}")
    return engine.save(rows, COMPARISON, out, "comparison", f"{comparison(rows)}\n{notes}", plot)


def _grid(rows: Sequence[Row], x: str, line: str) -> str:
    """Formats accuracies as Markdown, a row for each line and a column for each x."""
    columns, lines = (list(dict.fromkeys(row[axis] for row in rows)) for axis in ("x", "line"))
    cells = {(row["line"], row["x"]): engine.accuracy_text(row) for row in rows}
    body = [[name, *(cells.get((name, column), "–") for column in columns)] for name in lines]
    return artifacts.markdown([[f"{line} \\ {x}", *columns], *body])


def write_grid(
    rows: Sequence[Row], title: str, axes: tuple[str, str], folder: Path, name: str, command: str
) -> list[Any]:
    """Writes the table as Markdown, all rows as CSV and the plot as PNG.

    Args:
      axes: names of the axis across and of the axis whose values are the lines.
      folder, name: place of the three files, and their name without suffix.
      command: the command line that made them.

    Returns:
      the table and the three paths.
    """
    compute = [row["steps"] * row["batch"] * row["flops"] for row in rows]
    notes = (
        f"{title}. Top-1 accuracy on {rows[0]['examples']:,} test images, "
        f"{engine.seeds_text(rows)}. Steps × batch × FLOPs of a run: {min(compute):.3g} to "
        f"{max(compute):.3g}."
    )
    drawn = _grid(rows, *axes)
    page = f"{drawn}\n\n{notes}\n\n    {command}\n"
    plot = figure(rows, {"x": axes[0]}, lambda row: row["line"], title, axes[1])
    return [drawn, *engine.save(rows, GRID, folder, name, page, plot)]


def figure(
    rows: Sequence[Row],
    panels: Mapping[str, str],
    series: Callable[[Row], str],
    title: str = "",
    legend: str = "",
    *,
    points: bool = False,
) -> Any:
    """Draws accuracies with their intervals.

    Args:
      panels: columns to draw, each with the label of its axis.
      series: returns the name of a row's line.
      legend: title of the legend.
      points: whether to draw neither lines nor intervals.
    """
    from matplotlib import colormaps

    figure, colours = artifacts.figure(5 + 2.6 * len(panels), 4.7), colormaps["tab20"].colors
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    drawn: dict[str, Any] = {}
    for panel, (column, label) in zip(axes, panels.items(), strict=True):
        place = _places(panel, list(dict.fromkeys(row[column] for row in rows)))
        for i, name in enumerate(dict.fromkeys(map(series, rows))):
            own = [row for row in rows if series(row) == name]
            own.sort(key=lambda row: place[row[column]])
            drawn[name] = panel.errorbar(
                [place[row[column]] for row in own],
                [100 * row["accuracy"] for row in own],
                yerr=None if points else list(zip(*map(interval, own), strict=True)),
                linestyle="none" if points else "-",
                marker="os^Dv"[(i + i // len(colours)) % 5],  # distinct in grey, too
                color=colours[i % len(colours)],
                capsize=3,
            )
        panel.set_xlabel(label, parse_math=False)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy (%), 95 % intervals")
    axes[0].set_title(textwrap.fill(title, 32), fontsize=10, parse_math=False)
    artifacts.legend(figure, drawn, legend)
    return figure


def _places(panel: Any, values: list[Any]) -> dict[Any, float]:
    """Sets the axis across; returns the place of each value. Names keep their order."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    try:
        place = {value: float(value) for value in values}
    except ValueError:
        place = {}
    if not place or not all(map(math.isfinite, place.values())):  # names, such as inf
        shown = list(map(printable, values))
        panel.set_xticks(range(len(values)), shown, rotation=20, parse_math=False)
        return {value: float(i) for i, value in enumerate(values)}
    wide = max(place.values()) >= 8 * min(place.values()) > 0
    panel.set_xscale("log" if wide else "linear")
    if isinstance(values[0], str):
        panel.set_xticks(list(place.values()), values)
        panel.set_xticks([], minor=True)
    else:
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)) if wide else MaxNLocator(4))
        if max(place.values()) >= 1:  # else 5 m would be a learning rate
            panel.xaxis.set_major_formatter(EngFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
    return place


def interval(row: Row) -> tuple[float, float]:
    """Returns how far the 95 % interval reaches below and above the accuracy, in percent.

    It is the wider of Student's over seeds and Wilson's over images.
    """
    from scipy import special

    accuracy, examples = row["accuracy"], row["examples"]
    low, high = artifacts.wilson(accuracy * examples, examples)
    seeds, spread = len(row["accuracies"]), 0.0
    if seeds > 1:
        spread = float(special.stdtrit(seeds - 1, 0.975)) * row["deviation"] / seeds**0.5
    below, above = max(spread, accuracy - low), max(spread, high - accuracy)
    return 100 * min(below, accuracy), 100 * min(above, 1 - accuracy)
