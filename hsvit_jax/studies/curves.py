"""Validation accuracy and training loss of several runs in one plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts
from hsvit_jax.text import note
from hsvit_jax.train import metrics

Lines = Sequence[Mapping[str, Any]]

_SPLITS = "val", "train, augmented"  # names of `metrics.series`


def draw(runs: Mapping[str, Lines], path: Path) -> None:
    """Draws validation accuracy and training loss by step; a single point is a dot.

    Args:
      runs: the lines of each run's metrics.jsonl, by the run's name.
      path: an image file.
    """
    figure = artifacts.figure(12, 4.6)
    panels = figure.subplots(1, 2)
    drawn: dict[str, Any] = {}
    for i, (name, lines) in enumerate(runs.items()):
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}
        for axes, key, split in zip(panels, ("accuracy", "loss"), _SPLITS, strict=True):
            if points := metrics.series(lines, key).get(split):
                style["marker"] = "o" if len(points) == 1 else ""
                drawn[name] = axes.plot(*zip(*points, strict=True), linewidth=1.4, **style)[0]
    words = ("validation accuracy", "training loss (nats), augmented")
    for axes, label in zip(panels, words, strict=True):
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    artifacts.legend(figure, drawn)
    artifacts.save_figure(figure, path)


def read(folders: Sequence[Path]) -> dict[str, Lines]:
    """Reads the metrics of runs, by the runs' names; notes runs that have little to draw.

    Raises:
      ValueError: a folder holds no run, or no run has written metrics yet.
    """
    runs: dict[str, Lines] = {}
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"{folder} holds no metrics.jsonl: name the folder of a run")
        lines = metrics.read_metrics(folder / "metrics.jsonl")
        if not lines:
            note(f"{folder} is skipped: the run has written no metrics yet")
            continue
        place = folder.resolve()
        name = str(place) if place.name in runs else place.name
        runs[name] = lines
        if not any(line.get("split") == "val" for line in lines):
            note(f"{name} was never evaluated on the validation split: only its loss is drawn")
    if not runs:
        raise ValueError("none of the runs has written metrics yet: there is nothing to draw")
    return runs
