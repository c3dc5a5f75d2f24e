"""hsvit eval: accuracy on a split of the data, on other data, or with attention groups lost."""

import shlex
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from hsvit_jax import artifacts, cli, data, train
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import Classifier, lost_groups
from hsvit_jax.commands.predict import load_classifier
from hsvit_jax.run_report import CHANGED, load_own, measures
from hsvit_jax.runtime import coordination
from hsvit_jax.train import evaluate, metrics


def run(request: cli.Request) -> int:
    """Prints one line of JSON, and the confusion matrix on standard error."""
    curve = request.flags.curve
    if curve is not None:
        path = cli.ending(curve, word="--curve")
    classifier = load_classifier(request)
    config, split, part = _images(request, classifier)
    if curve is not None:
        table, (kind, _, source) = path.with_suffix(".csv"), config.data.name.partition("=")
        if kind == "csv" and table.resolve() == Path(source).expanduser().resolve():
            raise ValueError(
                f"--curve={curve} would write {table} over the data's table: choose another name"
            )
        for file in (path, table):  # before the work, as it may fail
            artifacts.prepare_for(file)
        _write_curve(classifier, config, part, split, path)
        return 0
    evaluator = evaluate.make_evaluator(
        classifier.model,
        classifier.mesh,
        config,
        classifier.aggregate,
        votes_G=_votes(request.flags.drop_groups, classifier),
    )
    batch = config_lib.eval_batch(config)
    result = evaluator(classifier.params, classifier.stats, part, batch)
    if coordination.is_lead():
        print(metrics.to_line(classifier.step, {"split": split, **result.figures}))
    coordination.print_once(confusion_table(result.confusion_KK, classifier.class_names))
    return 0


def _images(
    request: cli.Request, classifier: Classifier
) -> tuple[ml_collections.ConfigDict, str, data.Split]:
    """Loads the images to evaluate, with notes: the configuration, the split's name and itself."""
    config, split, own = classifier.config, request.flags.split, True
    if request.config is not None:
        config = config.copy_and_resolve_references().unlock()
        own, given = config.data.name == request.config.data.name, request.config.by_hand
        config.data.name = request.config.data.name
        for key in ("dir", "on_bad_image"):
            if not own or f"data.{key}" in given:
                config.data[key] = request.config.data[key]
        own = own or classifier.trained_on(config)
        if not own:  # the share was of the run's own
            config.data.fraction = 1.0
        if not own or "data.val_fraction" in given:
            config.data.val_fraction = request.config.data.val_fraction
        for key in ("batch", "tta"):
            if f"eval.{key}" in given:
                config.eval[key] = request.config.eval[key]
    name = config.data.name
    if split is None:  # of a folder beside a named run, which is other data than the run's, all
        other_data = request.config is not None and name.startswith(("folder=", "csv="))
        split = "all" if request.run and other_data else "test"
    whole = {"test_only": split == "all"}
    if request.config is None:
        how = f"{request.program} eval {shlex.quote(request.run)} --config=c2a2:"
        how += f"{name.partition('=')[0]}=NEW --split=test"
        dataset = load_own(config, how, **whole)
    else:
        dataset = train.load_data(config, **whole)
    coordination.check_same("data set", dataset.fingerprint)
    same_name = name == classifier.config.data.name
    if same_name and classifier.fingerprint not in (None, dataset.fingerprint):
        coordination.print_once(CHANGED.format(name))
    elif split == "all" and own:
        coordination.print_once(
            "note: these are the images of the training; --split=test evaluates those that the "
            "network has not seen"
        )
    part = dataset.test if split == "all" else getattr(dataset, split)
    part = classifier.relabelled(part, dataset.info)
    if not len(part):
        raise ValueError(f"{name} has no {split} split here")
    images = sum(map(len, (dataset.train, dataset.val, dataset.test)))
    hint = "" if request.flags.split or split == "all" else " (--split=all takes all of them)"
    coordination.print_once(f"{name}, split {split}: {len(part):,} of {images:,} images{hint}")
    return config, split, part


def _write_curve(
    classifier: Classifier,
    config: ml_collections.ConfigDict,
    part: data.Split,
    split: str,
    path: Path,
) -> None:
    """Writes accuracy against the number of lost groups: a PNG, a CSV and lines of JSON."""
    points, step = lost_groups.curve(classifier, part, config), classifier.step
    if not coordination.is_lead():
        return
    name = f"{config.model.variant}, {config.data.name}, {split} split"
    table, plot = lost_groups.write(points, path, f"{name}, step {step:,}")
    for point in points:
        ends = artifacts.interval(point.mean, len(part))
        line = {"split": split, **vars(point)} | ({"interval": list(ends)} if ends else {})
        print(metrics.to_line(step, line))
    coordination.print_once(f"{plot} and {table}")


def _votes(lost: list[str] | None, network: Classifier) -> np.ndarray | None:
    """A weight for each attention group, 0 for the lost ones; None where none is lost."""
    if lost is None:
        return None
    groups = network.model.group_axis_limit and network.model.config.groups
    if not groups:
        raise ValueError(
            f"--drop_groups={','.join(lost)}: this network has no attention groups that could be "
            "lost; leave it out"
        )
    places = {str(g): g for g in range(groups)}
    numbers = {places.get(word.strip(), -1) for word in lost}
    voters = set(np.flatnonzero(network.voters_G).tolist())
    if not numbers or not numbers <= set(range(groups)) or not voters - numbers:
        others = "" if len(voters) == groups else f", of which {len(voters)} vote"
        raise ValueError(
            f"--drop_groups={','.join(lost)}: this network has {groups} attention groups, numbered "
            f"from 0 to {groups - 1}{others}; name some of them, not all"
        )
    return np.array([float(g not in numbers) for g in range(groups)], np.float32)


def confusion_table(confusion_KK: Any, names: tuple[str, ...], most: int = 10) -> str:
    """Formats the confusion matrix, or for many classes the `most` frequent confusions."""
    if len(names) <= 20:
        width = max(max(len(n) for n in names), len(str(confusion_KK.max())), 4)
        head = " " * width + " " + " ".join(f"{n[:width]:>{width}}" for n in names)
        rows = [
            f"{n:>{width}} " + " ".join(f"{c:>{width}}" for c in row)
            for n, row in zip(names, confusion_KK, strict=True)
        ]
        return "\n".join(["rows: true class, columns: predicted", head, *rows])
    confusions = measures.frequent_confusions(confusion_KK, most)
    lines = [f"{n:>6} × {names[i]} taken for {names[j]}" for n, i, j in confusions]
    return "\n".join(["most frequent confusions:", *lines])
