"""Measures how a training step's time grows with its sizes.

    python benchmarks/step_growth.py c2a2 --batch=64 --series=depth,batch --out=growth

The configuration's step, and the same with one setting changed at a time, compiled side by side in
one process and stepped in turn, so that a slow spell of the machine hits all of them. A step that
grows no faster than its FLOPs stays below the diagonal of the plot.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tables

from hsvit_jax import artifacts
from hsvit_jax import config as config_lib
from hsvit_jax.benchmark import jobs
from hsvit_jax.models import costs

#: Series → (key, value) of each change, for an HSViT with two blocks of convolutions.
SERIES = {
    "batch": [("train.batch", f"{n}") for n in (16, 32, 128, 256)],
    "groups": [("model.groups", f"{n}") for n in (4, 8, 32)],
    "depth": [("model.depth", f"{n}") for n in (1, 4, 8)],
    "kernels": [("model.conv_channels", pair) for pair in ("(32, 64)", "(96, 192)", "(128, 256)")],
    "image": [("data.image_size", pair) for pair in ("(16, 16)", "(48, 48)", "(64, 64)")],
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Costs of one step and its changed setting.

    series: a key of `SERIES`, or 'as it is'; seconds: of a step, the median; flops: of a step's
    forward and backward pass; workspace: bytes of the compiled program besides its arguments.
    seconds_ratio and flops_ratio: to the unchanged step; the former is the median of the rounds'.
    """

    series: str
    value: str
    batch: int
    seconds: float
    flops: float
    workspace: int
    seconds_ratio: float
    flops_ratio: float


#: The printed table: heads and how to format a `Row` below them.
COLUMNS = {
    "changed": lambda row: row.series,
    "to": lambda row: row.value,
    "step, ms": lambda row: f"{1e3 * row.seconds:,.0f}",
    "GFLOP a step": lambda row: f"{row.flops / 1e9:.1f}",
    "GFLOP/s": lambda row: f"{row.flops / row.seconds / 1e9:.0f}",
    "time": lambda row: f"{row.seconds_ratio:.2f}×",
    "FLOPs": lambda row: f"{row.flops_ratio:.2f}×",
    "workspace, MiB": lambda row: f"{row.workspace / 2**20:,.0f}",
}


def measure(
    spec: str, batch: int, *, rounds: int, settings: Sequence[str] = (), series: Sequence[str] = ()
) -> list[Row]:
    """Times training steps, unchanged and with one setting changed at a time.

    Args:
        rounds: steps of each, in turn, after one that is not counted.
        settings: KEY=VALUE overrides of the configuration.
        series: keys of `SERIES`, all when left out.

    Returns:
        a row for each step, the unchanged one first.
    """
    changes = [("as it is", ("train.batch", str(batch)))]
    changes += [(name, change) for name in series or SERIES for change in SERIES[name]]
    # Build every run first, so that unsuitable sizes fail before any work.
    runs = []
    for name, (key, value) in changes:
        try:
            config = config_lib.get_config(
                spec, *settings, f"train.batch={batch}", f"{key}={value}"
            )
            runs.append(jobs.prepare(config, False, jax.devices()[:1]))
        except ValueError as error:
            raise ValueError(
                f"series {name!r}, {key}={value}: {error}; pass other --series"
            ) from error
    flops = [costs.training_flops(run.model) * run.config.train.batch for run in runs]
    timed = []
    for run, (name, (key, value)) in zip(runs, changes, strict=True):
        timed.append(jobs.train_job(run, augmented=False))
        print(f"compiled: {name}, {key}={value}", file=sys.stderr)
    turns = [[jobs.timed(job.take, 1)[0] for job in timed] for _ in range(rounds + 1)][1:]
    return [
        Row(
            series=name,
            value=value,
            batch=timed[i].images,
            seconds=statistics.median(turn[i] for turn in turns),
            flops=flops[i],
            workspace=timed[i].compiled.memory_analysis().temp_size_in_bytes,
            seconds_ratio=statistics.median(turn[i] / turn[0] for turn in turns),
            flops_ratio=flops[i] / flops[0],
        )
        for i, (name, (_, value)) in enumerate(changes)
    ]


def write(rows: Sequence[Row], folder: Path) -> tuple[Path, Path]:
    """Writes `growth.csv` and `growth.png` into `folder`, and creates it."""
    return tables.write(rows, folder, "growth", lambda figure: _draw(rows, figure), (11, 5))


def _draw(rows: Sequence[Row], figure: Any) -> None:
    """Draws time, and workspace, against FLOPs, all as multiples of the unchanged step's."""
    base = rows[0]
    panels = {
        "time": lambda r: r.seconds_ratio,
        "workspace": lambda r: r.workspace / base.workspace,
    }
    for axes, (label, ratio) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name in dict.fromkeys(row.series for row in rows[1:]):
            series = [base, *(row for row in rows if row.series == name)]
            points = sorted((row.flops_ratio, ratio(row)) for row in series)
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
        ends = [min(r.flops_ratio for r in rows), max(r.flops_ratio for r in rows)]
        tables.double_log(axes, (ends, ends), "as FLOPs")
        axes.set(xlabel="FLOPs of a step, times", ylabel=f"{label} of a step, times")


def main() -> None:
    """Prints the table, and writes it with its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a configuration, as --config takes it")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--batch", type=int, default=64, help="images of the unchanged step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--series", default=",".join(SERIES))
    parser.add_argument("--out", default="growth")
    given = parser.parse_args()
    how = {"rounds": given.rounds, "settings": given.settings, "series": given.series.split(",")}
    rows = measure(given.spec, given.batch, **how)
    print(artifacts.markdown(artifacts.table(COLUMNS, rows)))
    print(*write(rows, Path(given.out)), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
