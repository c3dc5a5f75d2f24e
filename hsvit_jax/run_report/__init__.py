"""A run as one self-contained HTML file, which training also writes at its end."""

import dataclasses
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from hsvit_jax import artifacts, classifier, data, storage, tasks, train
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import Classifier, other_data
from hsvit_jax.run_report import findings, measures, page
from hsvit_jax.runtime import coordination
from hsvit_jax.text import few, note
from hsvit_jax.train import evaluate, metrics

_LONGEST_REPORT = 6 * 3600.0  # seconds


def fit(
    config: ml_collections.ConfigDict, workdir: str | Path, *, report: bool = True, **options: Any
) -> train.Result:
    """Trains as `hsvit_jax.train.train` does, and writes the run's report.

    Args:
      config, workdir, options: those of `train.train`, which also raises.
      report: whether to write it.

    Returns:
      the finished run.
    """
    started, result = time.monotonic(), train.train(config, workdir, **options)
    if report and coordination.is_lead():
        path = write_after_training(result.workdir, options.get("dataset"))
        result = dataclasses.replace(result, report=path, seconds=time.monotonic() - started)
    if report:  # jax ends a job five minutes after the first of its processes
        coordination.wait_for_lead("report", _LONGEST_REPORT)
    return result


def write_after_training(folder: Path, dataset: data.Dataset | None = None) -> Path | None:
    """Writes the report of a run that has just ended; notes a failure and returns None."""
    try:
        trained = classifier.load(folder, devices=jax.local_devices())
        return write(trained, folder, folder / "report.html", dataset=dataset)
    except Exception as error:  # whatever it is, the run is done and saved
        note(f"no report ({type(error).__name__}: {error})")
    except KeyboardInterrupt:
        note(f"no report (Ctrl-C): the run is done and saved; hsvit report {folder} writes it")
    return None


def write(
    trained: Classifier,
    folder: Path,
    path: Path,
    *,
    split: str = "val",
    dataset: data.Dataset | None = None,
) -> Path:
    """Writes a report on a trained network and, beside it, a CSV file of its wrong predictions.

    Args:
      folder: of its run, for the curves and the environment.
      path: of the HTML file.
      split: to evaluate; 'val' becomes 'test' for data without validation images.
      dataset: replaces the data set that the configuration names.

    Returns:
      `path`.

    Raises:
      ValueError: the data has no such split or other classes.
    """
    config, names = trained.config, trained.class_names
    dataset = train.load_data(config) if dataset is None else dataset
    split = "test" if split == "val" and not len(dataset.val) else split
    if not len(getattr(dataset, split)):
        raise ValueError(f"{config.data.name} has no {split} split here")
    if dataset.info.class_names != names[: dataset.info.num_classes]:
        raise ValueError(
            f"{config.data.name} has other classes ({few(dataset.info.class_names)}) "
            f"than the network ({few(names)}): pass the data it was trained on"
        )
    if trained.fingerprint not in (None, dataset.fingerprint):
        note(other_data.CHANGED.format(config.data.name))
    note("writing the report ...")
    task, splits = tasks.of(config), ("train", "val", "test")
    classes = config.data.task == "classify"
    found = (findings.find if classes else findings.score)(trained, dataset, split)
    table = path.with_name(f"{path.stem}-wrong.csv")
    lines = metrics.read_metrics(folder / "metrics.jsonl")
    html = page.render(
        found,
        names,
        path.parent,
        lines,
        trained.image_size,
        task,
        title=folder.resolve().name,
        table_name=table.name,
        split=split,
        facts=_facts(trained, found, split, lines),
        totals={name: len(getattr(dataset, name)) for name in splits},
        counts={
            name: data.class_counts(getattr(dataset, name).labels, len(names))
            for name in splits
            if task.unit == "probability"  # numbers are not counted
        },
        settings=config_lib.describe(config, lambda key: True),
        environment=_environment(trained, folder),
    )
    artifacts.write_file(path, html)
    if classes:
        rows = ((name, names[true], names[taken], p) for name, true, taken, p in found.mistakes)
        artifacts.save_csv(table, [("file", "class", "predicted", "probability"), *rows])
    else:
        rows = ((name, names[k], true, answer) for name, k, true, answer in found.mistakes)
        artifacts.save_csv(table, [("file", "label", "true", task.unit), *rows])
    if classes and folder.is_dir() and (split == "test" or len(dataset.val)):
        fitted = {"step": trained.step, "temperature": found.fitted.temperature}
        artifacts.write_file(folder / measures.CALIBRATION, json.dumps(fitted) + "\n")
    storage.publish(folder)
    return path


def _facts(
    trained: Classifier,
    found: findings.Findings | findings.Scored,
    split: str,
    lines: list[dict[str, Any]],
) -> dict[str, str]:
    """Returns the figures at the head of the page by their labels."""

    def accuracy(value: float, examples: int, name: str) -> dict[str, str]:
        ends = "–".join(f"{end:.1%}" for end in artifacts.interval(value, examples))
        of = f"{name} accuracy on {examples:,} images"
        return {f"{of}; 95 % interval {ends}" if ends else of: f"{value:.2%}"}

    task = tasks.of(trained.config)
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(trained.params))
    of_network = {
        f"parameters of {config_lib.title(trained.config.model)}": f"{parameters:,}",
        "step of the checkpoint": f"{trained.step:,}",
    }
    test = metrics.measured(lines, trained.step, task.reported).get("test")
    if isinstance(found, findings.Scored):
        of_splits = {f"{split}, {len(found.true_NK):,} images": found.figures}
        of_splits |= {"final test": test} if test and split != "test" else {}
        return {
            f"{tasks.name_of(name)} on {where}": format(figures[name], tasks.form(name))
            for where, figures in of_splits.items()
            for name in task.reported
        } | of_network
    total = int(found.confusion_KK.sum())
    facts = accuracy(np.trace(found.confusion_KK) / total, total, split)
    if test and split != "test":
        facts |= accuracy(test["accuracy"], test["examples"], "final test")
    facts |= {
        "macro F1, the mean over classes": f"{evaluate.macro_f1(found.confusion_KK):.3f}",
        "expected calibration error": f"{found.as_trained.ece:.1%}",
    }
    return facts | of_network


def _environment(trained: Classifier, folder: Path) -> dict[str, str]:
    """Returns facts of the run by their names, its recorded environment first."""
    file, recorded = folder / "environment.json", {}
    if file.is_file():
        try:
            about = dict(json.loads(file.read_bytes()))
            recorded = {str(name): str(value) for name, value in about.items()}
        except (TypeError, ValueError, RecursionError) as error:
            note(f"{file} is damaged and left out of the report: {error}")
    return recorded | {
        "data": trained.config.data.name,
        "fingerprint of the data": str(trained.fingerprint),
        "report written": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
    }
