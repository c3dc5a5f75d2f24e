"""Several systems on the same data by the same loop: `hsvit compare SPEC SPEC ...`.

A table of accuracies and costs with a plot, in the manner of figure 2 of the HSViT paper and figure
4 of the ViX paper; with --fractions, nested shares of the images at equal compute.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from hsvit_jax import artifacts, cli
from hsvit_jax.models import costs
from hsvit_jax.studies import grid
from hsvit_jax.studies.systems import System, point, refuse_left_out, seeds_of, train_all


@dataclasses.dataclass(frozen=True)
class Row(grid.Measured):
    """One system: the size of its network, the cost of its programs, its accuracy.

    Attributes:
      epochs: that were trained, the mean over seeds: train.patience may have ended a run.
      megabytes: of the parameters in float32, in units of 10^6 bytes.
      flops: of one image forward, 2·MAC.
      forward_bytes, training_bytes: peaks of the compiled programs at `batch` images.
      images_per_second: median of the training log of all seeds.
      examples: of the test split.
      top5: mean over seeds; None for fewer than six classes.
    """

    name: str
    spec: str
    epochs: float
    parameters: int
    megabytes: float
    flops: int
    batch: int
    forward_bytes: int
    training_bytes: int
    images_per_second: float
    examples: int
    top5: float | None


def compare(
    systems: Sequence[System],
    out: Path,
    *,
    settings: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    batch: int = 64,
) -> list[Row]:
    """Trains the systems that are not trained yet, after all checks, and evaluates them.

    Args:
      systems: of equal data and equal length of training.
      settings, seeds: as of `train_all`.
      batch: images of the programs whose memory is stated.

    Returns:
      a row for each system whose training did not diverge, best accuracy first.

    Raises:
      ValueError: as `train_all`.
    """
    rows = []
    for one in train_all(systems, out, settings=settings, seeds=seeds):
        model, tests = one.run.model, [result.test for result in one.results]
        parameters = costs.parameters(model)
        rows.append(
            Row(
                name=one.name,
                spec=" ".join([one.system.spec, *one.system.settings]),
                epochs=one.steps / one.run.steps_per_epoch,
                parameters=parameters,
                megabytes=4 * parameters / 1e6,
                flops=costs.flops(model),
                batch=batch,
                forward_bytes=costs.forward_bytes(model, batch),
                training_bytes=costs.training_bytes(model, batch),
                images_per_second=one.images_per_second,
                examples=tests[0].examples,
                top5=statistics.fmean(test.top5 for test in tests)
                if len(tests[0].confusion_KK) > 5
                else None,
                accuracies=one.accuracies,
            )
        )
    return sorted(rows, key=lambda row: -row.accuracy)


COLUMNS = {
    "system": lambda row: row.name,
    "parameters": lambda row: f"{row.parameters:,}",
    "parameters (MB)": lambda row: f"{row.megabytes:.2f}",
    "FLOPs": lambda row: f"{row.flops / 1e9:.3f} G",
    "memory forward": lambda row: artifacts.byte_text(row.forward_bytes),
    "memory training": lambda row: artifacts.byte_text(row.training_bytes),
    "images/s": lambda row: f"{row.images_per_second:,.0f}",
    "top-1": grid.text,
    "top-5": lambda row: "–" if row.top5 is None else f"{row.top5:.2%}",
}


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as Markdown."""
    return artifacts.markdown(artifacts.table(COLUMNS, rows)) + "\n"


def write(rows: Sequence[Row], out: Path, command: str) -> tuple[Path, Path, Path]:
    """Writes comparison.md, comparison.csv and comparison.png in `out`; returns their paths."""
    seeds, batch = len(rows[0].accuracies), rows[0].batch
    epochs = sorted(row.epochs for row in rows)
    least_most = dict.fromkeys(f"{number:.3g}" for number in (epochs[0], epochs[-1]))
    notes = (
        f"{' to '.join(least_most)} epochs, {seeds} seed{'s' if seeds > 1 else ''}"
        f"{', ± one standard deviation over them' if seeds > 1 else ''}. Accuracy: test split. "
        "MB: of the parameters in float32. FLOPs: one image forward, 2·MAC. Memory: peak of the "
        f"compiled program, activations included, batch {batch}, {jax.default_backend()}, "
        f"{jax.device_count()} device(s). images/s: median of the training log.\n\n    {command}\n"
    )
    return grid.save(rows, out, "comparison", f"{table(rows)}\n{notes}", _figure(rows))


def _figure(rows: Sequence[Row]) -> Any:
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = artifacts.figure(13, 4.6)
    costs = (
        ("parameters", "parameters"),
        ("flops", "FLOPs of one image forward"),
        ("training_bytes", f"bytes of a training program, batch {rows[0].batch}"),
    )
    panels = figure.subplots(1, len(costs), sharey=True)
    colours = colormaps["tab20"].colors
    markers = "os^Dv"
    drawn: dict[str, Any] = {}
    for panel, (field, label) in zip(panels, costs, strict=True):
        for i, row in enumerate(rows):
            drawn[f"{row.name}: {row.accuracy:.2%}"] = panel.errorbar(
                getattr(row, field),
                100 * row.accuracy,
                yerr=100 * row.deviation or None,
                marker=markers[(i + i // len(colours)) % len(markers)],  # told apart in grey, too
                color=colours[i % len(colours)],
                linestyle="none",
                capsize=3,
            )
        spread = [getattr(row, field) for row in rows]
        wide = max(spread) > 5 * min(spread)  # else a logarithmic axis may have no tick to show
        panel.set(xlabel=label, xscale="log" if wide else "linear")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)) if wide else MaxNLocator(4))
        panel.xaxis.set_major_formatter(EngFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="test accuracy (%)")
    artifacts.legend(figure, drawn)
    return figure


def learning_curves(
    systems: Sequence[System],
    out: Path,
    fractions: Sequence[float],
    *,
    settings: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
) -> list[grid.Point]:
    """Trains the systems on shares of the training images, at equal compute for each share.

    Args:
      systems: of equal data; the length of the first one's training decides the compute.
      fractions: of the training images of each class, above 0 and at most 1.
      settings, seeds: as of `train_all`.

    Returns:
      a point for each system and share whose training did not diverge: its x are the training
      images of a class.

    Raises:
      ValueError: a setting of data.fraction, or as `train_all`.
    """
    points = []
    named = [*settings, *(setting for system in systems for setting in system.settings)]
    if any(setting.startswith("data.fraction=") for setting in named):
        raise ValueError("--fractions names the shares of all systems: leave data.fraction out")
    for fraction in fractions:
        given = [*settings, f"data.fraction={fraction:g}"]
        for one in train_all(systems, out, settings=given, seeds=seeds, equal="compute"):
            classes = one.run.dataset.info.num_classes
            images = len(one.run.dataset.train) / classes
            points.append(point(one, f"{images:g}", one.system.name))
    return points


def run(request: cli.Request) -> None:
    """Trains and compares the systems that the words name; prints and writes the table."""
    values = request.flags
    if not request.words:
        raise cli.Misuse("no system is named")
    if request.spec:
        raise cli.Misuse(f"compare does not use --config: name {request.spec} as a word")
    out, seeds = Path(values.out), seeds_of(values.seeds)
    systems, settings = System.parse_all(request.words), request.settings
    if values.fractions is None:
        rows = compare(systems, out, settings=settings, seeds=seeds, batch=values.batch)
        print(table(rows), *write(rows, out, request.line), sep="\n")
        refuse_left_out(len(systems), len(rows))
        return
    fractions = sorted(set(values.fractions))
    if not 0 < fractions[0] <= fractions[-1] <= 1:
        raise cli.Misuse(f"--fractions are above 0, at most 1; got {fractions}")
    points = learning_curves(systems, out, fractions, settings=settings, seeds=seeds)
    labels = grid.Labels(
        title="Accuracy against training images, at equal compute for each number of images",
        x="training images of a class",
        line="system",
    )
    print(*grid.write(points, labels, out, "fractions", request.line), sep="\n")
    refuse_left_out(len(systems) * len(fractions), len(points))
