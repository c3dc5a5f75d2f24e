"""Validation accuracy and training loss of several runs in one plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts
from hsvit_jax.runtime import coordination
from hsvit_jax.train import metrics

Lines = Sequence[Mapping[str, Any]]


def draw(runs: Mapping[str, Lines], path: Path) -> None:
    """Draws the curves of runs by step; a single point is a dot.

    Args:
      runs: the lines of each run's metrics.jsonl, by the run's name.
      path: an image file.

    Raises:
      ValueError: `path` is no regular file.
    """
    figure = artifacts.figure(12, 4.6)
    accuracy_axes, loss_axes = figure.subplots(1, 2)
    drawn: dict[str, Any] = {}
    for i, (name, lines) in enumerate(runs.items()):
        # In both panels, whichever of them the run is in.
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}
        for axes, split, key in ((accuracy_axes, "val", "accuracy"), (loss_axes, None, "loss")):
            points = [
                (line["step"], line[key])
                for line in lines
                if line.get("split") == split and isinstance(line.get(key), float)
            ]
            if points:
                style["marker"] = "o" if len(points) == 1 else ""
                drawn[name] = axes.plot(*zip(*points, strict=True), linewidth=1.4, **style)[0]
    accuracy_axes.set(xlabel="step", ylabel="validation accuracy")
    loss_axes.set(xlabel="step", ylabel="training loss (nats), augmented")
    for axes in (accuracy_axes, loss_axes):
        axes.grid(alpha=0.3)
    artifacts.legend(figure, drawn)
    artifacts.save_figure(figure, path)


def read(folders: Sequence[Path]) -> dict[str, Lines]:
    """Reads the metrics of runs, by the runs' names; notes those that have little to draw.

    Raises:
      ValueError: a folder is no run's, or none of the runs has written metrics yet.
    """
    runs = {}
    for folder in folders:
        file = folder / "metrics.jsonl"
        lines = metrics.read_metrics(file)
        if not file.is_file():
            raise ValueError(f"{folder} holds no metrics.jsonl of a run: name a run's folder")
        if not lines:
            coordination.print_once(f"{folder} is left out: the run has written no metrics yet")
            continue
        name = folder.resolve().name  # of '.', too
        name = name if name not in runs else str(folder.resolve())
        runs[name] = lines
        if not any(line.get("split") == "val" for line in lines):  # as with train.select_on=test
            coordination.print_once(
                f"{name} was never evaluated on the validation split: its loss alone is drawn"
            )
    if not runs:
        raise ValueError("none of the runs has written metrics yet: there is nothing to draw")
    return runs
