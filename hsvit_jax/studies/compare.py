"""Several systems on the same data: a table of accuracies and costs with a plot.

In the manner of figure 2 of the HSViT paper and figure 4 of the ViX paper. With fractions: nested
shares of the images at equal compute.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hsvit_jax import artifacts
from hsvit_jax.models import costs
from hsvit_jax.studies import engine, grid

COLUMNS = "name spec epochs parameters megabytes flops batch forward_bytes training_bytes "
COLUMNS += "images_per_second examples top5"

Row = Mapping[str, Any]


def compare(trained: Sequence[engine.Trained], batch: int) -> list[Row]:
    """Returns a row for each system, best accuracy first; memory is of `batch` images."""
    rows = []
    for one in trained:
        forward = costs.forward_bytes(one.run.model, batch)
        training = costs.training_bytes(one.run.model, batch)
        memory = {"forward_bytes": forward, "training_bytes": training}
        rows.append(engine.row(one, batch=batch, **memory))
    return sorted(rows, key=lambda row: -row["accuracy"])


def learning_curves(
    systems: Sequence[engine.System],
    out: Path,
    fractions: Sequence[float],
    settings: Sequence[str] = (),
    seeds: Sequence[int | str] = (0,),
) -> list[Row]:
    """Trains the systems on shares of the training images, at equal compute for each share.

    Args:
      systems: the length of the first one's training decides the compute.
      fractions: of the training images of each class, above 0 and at most 1.
      out, settings, seeds: of `engine.train_all`.

    Returns:
      a row for each system and share: its x are the training images of a class.
    """
    rows = []
    for fraction in fractions:
        given = [*settings, f"data.fraction={fraction:g}"]
        for one in engine.train_all(systems, out, given, seeds, "compute"):
            row = engine.row(one)
            of_a_class = row["training_images"] / one.run.dataset.info.num_classes
            rows.append({**row, "x": f"{of_a_class:g}", "line": row["name"]})
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
    seeds, batch = len(rows[0]["accuracies"]), rows[0]["batch"]
    epochs = sorted(row["epochs"] for row in rows)
    least_most = dict.fromkeys(f"{number:.3g}" for number in (epochs[0], epochs[-1]))
    notes = (
        f"{' to '.join(least_most)} epochs, {seeds} seed{'s' if seeds > 1 else ''}"
        f"{', ± one standard deviation over them' if seeds > 1 else ''}. Accuracy: test split. "
        "MB: of the parameters in float32. FLOPs: one image forward, 2·MAC. Memory: peak of the "
        f"compiled program, activations included, batch {batch}, {jax.default_backend()}, "
        f"{jax.device_count()} device(s). images/s: median of the training log.\n\n    {command}\n"
    )
    page = f"{table(rows)}\n{notes}"
    across = {
        "parameters": "parameters",
        "flops": "FLOPs of one image forward",
        "training_bytes": f"bytes of a training program, batch {batch}",
    }
    plot = grid.figure(rows, across, lambda row: f"{row['name']}: {row['accuracy']:.2%}")
    return engine.save(rows, COLUMNS, out, "comparison", page, plot)
