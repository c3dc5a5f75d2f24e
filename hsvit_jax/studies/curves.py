"""hsvit curves: validation accuracy and training loss of several runs in one plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax import artifacts, cli
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


def run(request: cli.Request) -> None:
    """Draws the curves of the runs that the words name."""
    if not request.words:
        raise cli.Misuse("no run is named")
    out = cli.ending(request.flags.out)
    of_run = out.parent.resolve() in [Path(word).resolve() for word in request.words]
    if out.name == "curves.png" and (of_run or (out.parent / "metrics.jsonl").exists()):
        raise cli.Misuse(f"--out={out} is a run's own plot: choose another name")
    runs = {}
    for word in request.words:
        folder = Path(word)
        lines = metrics.read_metrics(folder / "metrics.jsonl")
        if not lines and (folder / "metrics.jsonl").is_file():
            cli.note(f"{folder} is left out: the run has written no metrics yet")
            continue
        if not lines:
            raise ValueError(f"{folder} holds no metrics.jsonl of a run: name a run's folder")
        name = folder.resolve().name  # of '.', too
        runs[name if name not in runs else str(folder.resolve())] = lines
    for name, lines in runs.items():
        if not any(line.get("split") == "val" for line in lines):  # as with train.select_on=test
            cli.note(f"{name} was never evaluated on the validation split: its loss alone is drawn")
    if not runs:
        raise ValueError("none of the runs has written metrics yet: there is nothing to draw")
    draw(runs, out)
    print(out)
