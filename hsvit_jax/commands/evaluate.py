"""hsvit eval: accuracy on a split of the data, on other data, or with groups lost."""

import dataclasses
from pathlib import Path

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import MESH, Command, Request, define_path
from hsvit_jax.commands.trained import DATA, JOB, RUN, load_classifier

_EVALUATION = f"{DATA} data.val_fraction data.on_bad_image eval {MESH}"
_SPLIT = "Which images; default: all of a folder or csv in --config beside RUN, else test."

COMMAND = Command(
    "Evaluates a trained network on a split, on other data, or with groups lost.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 --split=test\n$ runs/pets --config=c2a2:folder=other_photos",
    (
        *RUN,
        JOB,
        (flags.DEFINE_enum, "split", None, ["all", "train", "val", "test"], _SPLIT),
        (flags.DEFINE_list, "drop_groups", None, "Numbers of lost attention groups."),
        (define_path, "curve", None, "A PNG of accuracy against groups lost."),
    ),
    config=_EVALUATION,
    exclusive=("curve drop_groups",),
)


def run(request: Request) -> None:
    """Prints one line of JSON, and the confusion matrix on standard error."""
    from hsvit_jax import artifacts
    from hsvit_jax.classifier import lost_groups, other_data
    from hsvit_jax.run_report import measures
    from hsvit_jax.runtime import coordination
    from hsvit_jax.train import metrics

    curve, lost = request.flags.curve, request.flags.drop_groups
    path = cli.ending(curve, word="--curve") if curve else None
    network = load_classifier(request)
    named = bool(request.run)
    config, split, part = other_data.load(network, request.config, request.flags.split, named=named)
    network, step = dataclasses.replace(network, config=config), network.step
    if path is None:
        result = lost_groups.evaluate(network, part, lost) if lost else network.evaluate(part)
        if coordination.is_lead():
            print(metrics.to_line(step, {"split": split, **result.figures}))
        table = measures.confusion_table(result.confusion_KK, network.class_names)
        coordination.print_once(table)
        return
    table, (kind, _, source) = path.with_suffix(".csv"), config.data.name.partition("=")
    if kind == "csv" and table.resolve() == Path(source).expanduser().resolve():
        raise ValueError(
            f"--curve={curve} would write {table} over the data's table: choose another name"
        )
    for file in (path, table):  # before the work, as it may fail
        artifacts.prepare_for(file)
    points = lost_groups.curve(network, part)
    if coordination.is_lead():
        name = config_lib.title(config.model)
        title = f"{name}, {config.data.name}, {split} split, step {step:,}"
        table, plot = lost_groups.write(points, path, title)
        for point in points:
            ends = artifacts.interval(point.mean, len(part))
            line = {"split": split, **vars(point)} | ({"interval": list(ends)} if ends else {})
            print(metrics.to_line(step, line))
        coordination.print_once(f"{plot} and {table}")
