"""Several systems on the same data: a table of accuracies and costs with a plot.

The table follows figure 2 of the HSViT paper and figure 4 of the ViX paper.
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from hsvit_jax import artifacts
from hsvit_jax.models import costs
from hsvit_jax.studies import engine, grid
from hsvit_jax.studies.engine import Row

COLUMNS = "name spec epochs parameters megabytes flops batch forward_bytes training_bytes "
COLUMNS += "images_per_second examples top5"


def ranked(rows: Sequence[Row], batch: int) -> list[Row]:
    """Returns the rows with the memory of `batch` images, best accuracy first."""
    found = []
    for row in rows:
        forward = costs.forward_bytes(row["model"], batch)
        training = costs.training_bytes(row["model"], batch)
        memory = {"forward_bytes": forward, "training_bytes": training}
        found.append({**row, "batch": batch, **memory})
    return sorted(found, key=lambda row: -row["accuracy"])


def learning_curves(
    systems: Sequence[engine.System],
    out: Path,
    fractions: Sequence[float],
    settings: Sequence[str] = (),
    seeds: Sequence[int | str] = (0,),
) -> list[Row]:
    """Trains the systems on shares of the training images, at equal compute for each share.

    Args:
      fractions: shares of each class's training images, above 0 and at most 1.
      systems, out, settings, seeds: as in `engine.train_all`.

    Returns:
      a row for each system and share; its x is the number of training images per class.
    """
    rows = []
    for fraction in fractions:
        given = [*settings, f"data.fraction={fraction:g}"]
        for row in engine.train_all(systems, out, given, seeds, "compute"):
            per_class = row["training_images"] / row["classes"]
            rows.append({**row, "x": f"{per_class:g}", "line": row["name"]})
    return rows


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


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as Markdown."""
    return artifacts.markdown(artifacts.table(SHOWN, rows)) + "\n"


def write(rows: Sequence[Row], out: Path, command: str) -> list[Path]:
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
    plot = grid.figure(rows, across, lambda row: f"{row['name']}: {row['accuracy']:.2%}")
    return engine.save(rows, COLUMNS, out, "comparison", f"{table(rows)}\n{notes}", plot)
