"""The commands that use a trained network: hsvit eval, predict, visualize, report."""

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import MESH, Command, Request, define_path, define_place
from hsvit_jax.text import printable

if TYPE_CHECKING:
    from hsvit_jax.classifier import Classifier

RUN = (
    (define_place, "checkpoint", None, "RUN: a run, its URL or checkpoint, a file, or zoo:NAME."),
    (define_place, "workdir", None, "RUN: the folder or URL of a run."),
    (flags.DEFINE_string, "which", "best", "Checkpoint: 'best', 'latest' or a step."),
)
_DISTRIBUTED = "auto, off, or COORDINATOR:PORT,PROCESSES,INDEX."
JOB = (flags.DEFINE_string, "distributed", "auto", _DISTRIBUTED)
DATA = "data.name data.dir"
_EVALUATION = f"{DATA} data.val_fraction data.on_bad_image eval {MESH}"
_SPLIT = "Which images; default: all of a folder or csv in --config beside RUN, else test."
_FILES_AT_ONCE = 256  # decoded images in memory


@Command(
    "Evaluates a trained network on a split, on other data, or with groups lost.",
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
def evaluate(request: Request) -> None:
    """Prints one line of JSON, and the confusion matrix on standard error."""
    from hsvit_jax.classifier import lost_groups, other_data
    from hsvit_jax.run_report import measures
    from hsvit_jax.runtime import coordination
    from hsvit_jax.train import evaluate as evaluation
    from hsvit_jax.train import metrics

    curve, lost = request.flags.curve, request.flags.drop_groups
    path = cli.ending(curve, word="--curve") if curve else None
    network = load_classifier(request)
    named = bool(request.run)
    config, split, part = other_data.load(network, request.config, request.flags.split, named=named)
    network = dataclasses.replace(network, config=config)
    if path is None:
        result = lost_groups.evaluate(network, part, lost) if lost else network.evaluate(part)
        if coordination.is_lead():
            print(metrics.to_line(network.step, {"split": split, **result.figures}))
        names = network.class_names
        if isinstance(result, evaluation.Scores):
            coordination.print_once(result.table(names))
        else:
            coordination.print_once(measures.confusion_table(result.confusion_KK, names))
    else:
        _draw_curve(network, part, split, path)


@Command(
    "Measures a network's embeddings by nearest neighbours and a linear classifier on them.",
    "$ runs/c2a2-cifar10-strong-seed0 --config=c2a2:folder=my_images",
    (*RUN, JOB, (flags.DEFINE_integer, "k", 20, "Number of nearest neighbours.", 1)),
    config=_EVALUATION,
)
def probe(request: Request) -> None:
    """Prints one line of JSON: the accuracies on the test images of the run's or other data."""
    from hsvit_jax import train
    from hsvit_jax.classifier import other_data, probe
    from hsvit_jax.runtime import coordination
    from hsvit_jax.train import metrics

    network, asked = load_classifier(request), request.config
    if asked is not None and any(key.startswith("data.") for key in asked.user):
        config, _ = other_data.configured(network, asked, asked.user)
        network = dataclasses.replace(network, config=config)
    dataset = train.load_data(network.config)
    coordination.check_same("data set", dataset.fingerprint)
    figures = probe.measure(network, dataset, request.flags.k)
    if coordination.is_lead():
        line = {"data": network.config.data.name, **figures}
        print(metrics.to_line(network.step, line))


def _draw_curve(network: "Classifier", part: Any, split: str, path: Path) -> None:
    """Draws accuracy against lost groups, and prints a line of JSON for each point."""
    from hsvit_jax import artifacts
    from hsvit_jax.classifier import lost_groups
    from hsvit_jax.runtime import coordination
    from hsvit_jax.train import metrics

    config, step = network.config, network.step
    table, (kind, _, source) = path.with_suffix(".csv"), config.data.name.partition("=")
    if kind == "csv" and table.resolve() == Path(source).expanduser().resolve():
        raise ValueError(
            f"--curve={path} would write {table} over the data's table: choose another name"
        )
    for file in (path, table):  # first, as it may fail
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


@Command(
    "Classifies image files and folders of them.",
    "$ runs/c2a2-digits-strong-seed0 cat.jpg photos/",
    (
        *RUN,
        JOB,
        (flags.DEFINE_integer, "top_k", None, "Classes per image; default: 5, or every label.", 1),
        (flags.DEFINE_enum, "format", "table", ["table", "csv", "json"], "The output."),
        (flags.DEFINE_bool, "calibrated", False, "Use the temperature of the run's report."),
    ),
    config=MESH,
    words="IMAGE ...",
)
def predict(request: Request) -> int:
    """Prints the top classes of each image; returns 1 if a file is no image."""
    from hsvit_jax.classifier import files
    from hsvit_jax.runtime import coordination

    paths, form = files.listed(request.words), request.flags.format
    network, rows, errors = load_classifier(request), [], []
    shows, head = coordination.is_lead(), True
    for first in range(0, len(paths), _FILES_AT_ONCE):
        some = paths[first : first + _FILES_AT_ONCE]
        found, unread = files.predict(network, some, request.flags.top_k)
        errors += unread
        if form != "csv":
            rows += found
        elif found and shows:  # at once, as a long run may end early
            print(files.render(found, form, head=head), flush=True)
            head = False
    if shows and (rows or form == "json" or (form == "csv" and head)):
        print(files.render(rows, form))
    for error in errors:
        coordination.print_once(error)
    return 1 if errors else 0


@Command(
    "Draws feature maps, votes and attention maps of images.",
    "$ runs/c2a2-digits-strong-seed0 cat.jpg --out=views",
    (*RUN, JOB, (define_path, "out", "views", "Folder of the PNGs.")),
    config=MESH,
    words="IMAGE ...",
)
def visualize(request: Request) -> int:
    """Writes PNGs and prints their names; returns 1 if a file is no image."""
    from hsvit_jax.classifier import figures, files
    from hsvit_jax.runtime import coordination
    from hsvit_jax.train.workdir import check_apart

    paths, out = files.listed(request.words), Path(request.flags.out)
    if taken := {path.resolve() for path in paths} & figures.names(paths, out.resolve()):
        raise ValueError(
            f"--out={out} could overwrite the image {min(taken)}: choose another folder"
        )
    network = load_classifier(request)
    check_apart(network.config.data.name, out, "--out")
    written, errors = figures.write(network, paths, out)
    if coordination.is_lead():
        for path in written:
            print(printable(str(path)))
    for error in errors:
        coordination.print_once(error)
    return 1 if errors else 0


@Command(
    "Writes a run's curves, figures by class, calibration and hardest images as one HTML file.",
    "$ runs/c2a2-digits-strong-seed0 --split=test",
    (
        *RUN,
        (flags.DEFINE_enum, "split", "val", ["train", "val", "test"], "Which images."),
        (define_path, "out", None, "Default: report.html of the run, or NAME-report.html."),
    ),
)
def report(request: Request) -> int:
    """Writes the report and prints its path."""
    from hsvit_jax import classifier, run_report, storage

    values, source = request.flags, request.source
    folder = storage.local(source)
    if folder.resolve().name == "checkpoints":
        folder = folder.parent if folder.name else folder / ".."
    name = Path(source.rpartition(":")[2]).stem  # a file, or a name of the zoo or hub
    own = folder / "report.html" if folder.is_dir() else f"{name}-report.html"
    path = Path(values.out or own)
    if path.suffix.lower() != ".html" or path.is_dir():
        raise ValueError(f"--out={path}: set the name of an HTML file, such as report.html")
    trained = classifier.load(source, values.which)
    written = run_report.write(trained, folder, path, split=values.split)
    print(printable(storage.shown(written)))
    return 0


def load_classifier(request: Request) -> "Classifier":
    """Loads the network of the run; it defaults to the configuration's folder."""
    from hsvit_jax import classifier, tasks
    from hsvit_jax.runtime import cluster, coordination

    values = request.flags
    job = cluster.find(values.distributed)
    if job is not None:
        cluster.start(job)
        given = "\n".join([request.name, *request.argv])
        own = r"^--?distributed[=\n].*$"  # it differs between processes
        coordination.check_same("command line", re.sub(own, "", given, flags=re.MULTILINE))
    mesh = (request.config or config_lib.get_config("c2a2", *request.settings)).mesh
    devices = {name: mesh[name] for name in ("group", "data", "aggregate")}
    network = classifier.load(request.source, values.which, **devices)
    if "calibrated" in values and values.calibrated:
        tasks.refuse_others(network.config, "--calibrated")
        temperature = _temperature(request.source, network.step)
        return dataclasses.replace(network, temperature=temperature)
    return network


def _temperature(source: str, step: int) -> float:
    """The temperature that a report fitted to a step of a run."""
    from hsvit_jax.run_report.measures import CALIBRATION
    from hsvit_jax.weights import sources

    try:
        found = json.loads((sources.run_folder(source) / CALIBRATION).read_bytes())
        if found["step"] == step and 0.01 < found["temperature"] < 100:
            return float(found["temperature"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ValueError(
        f"{source} has no calibration of step {step:,}: run hsvit report {source} first"
    )
