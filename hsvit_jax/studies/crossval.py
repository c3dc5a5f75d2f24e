"""Cross-validation: a run for each fold of the training images, tested on that fold."""

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_collections
import numpy as np

from hsvit_jax import artifacts, data, tasks, train
from hsvit_jax.train import init_from


def folds(dataset: data.Dataset, count: int, val_fraction: float, seed: int) -> Iterator:
    """Yields `count` data sets whose test splits are the stratified folds of `dataset`.

    Args:
      dataset: its training and validation examples are dealt out; its test split is not used.
      count: number of folds.
      val_fraction: validation share of each class outside the fold; above 0 at least one example.
      seed: seed of the order within a class.

    Raises:
      ValueError: a class has fewer examples than there are folds, or fewer than two outside one.
    """
    whole = _joined(dataset)
    members = [np.flatnonzero(whole.labels == k) for k in range(dataset.info.num_classes)]
    least = min(range(len(members)), key=lambda label: len(members[label]))
    if len(members[least]) < max(count, 4 if count == 2 else 3):
        raise ValueError(
            f"class {dataset.info.class_names[least]!r} has {len(members[least])} images outside "
            f"the test split, too few for {count} folds: add images or lower --folds"
        )
    keys = jax.random.split(jax.random.key(seed), len(members))
    members = [np.asarray(jax.random.permutation(*x)) for x in zip(keys, members, strict=True)]
    for fold in range(count):
        parts: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        for label, own in enumerate(members):
            held = (np.arange(len(own)) + label) % count == fold  # folds of about equal size
            rest = own[~held]
            number = min(max(round(val_fraction * len(rest)), 1), len(rest) - 1)
            number *= val_fraction > 0
            for name, part in zip(parts, (rest[number:], rest[:number], own[held]), strict=True):
                parts[name].append(part)
        rule = f"fold {fold} of {count}, seed {seed}, val={val_fraction}"
        yield dataclasses.replace(
            dataset,
            **{name: whole.take(np.sort(np.concatenate(x))) for name, x in parts.items()},
            fingerprint=data.dataset.fingerprint(dataset.info, dataset.fingerprint, rule),
            val_fraction=val_fraction,
        )


def _joined(dataset: data.Dataset) -> data.Split:
    """The training and validation splits as one."""
    train, val, first = dataset.train, dataset.val, len(dataset.train)
    labels = np.concatenate([train.labels, val.labels])
    if dataset.resident:
        return data.Split(labels, np.concatenate([train.images, val.images]))
    return data.Split(labels, None, lambda i: train.read(i) if i < first else val.read(i - first))


def train_folds(config: ml_collections.ConfigDict, count: int, out: Path) -> list[str]:
    """Trains a run for each fold that is not trained yet, in OUT/fold1 to OUT/foldN.

    Returns:
      a line for each fold, one for all, and the path of the table, which is written.
    """
    tasks.refuse_others(config, "crossval")
    config = init_from.with_weights(config)
    dataset = train.load_data(config)
    lines, rows = [], []
    for fold, part in enumerate(folds(dataset, count, config.data.val_fraction, config.seed), 1):
        test = train.train(config, out / f"fold{fold}", dataset=part, as_begun=True).test
        rows.append([fold, test.examples, test.accuracy, test.macro_f1, test.loss])
        accuracy = artifacts.accuracy_text(test.accuracy, test.examples)
        lines.append(f"fold {fold}: {accuracy}, macro F1 {test.macro_f1:.2%}")
    chosen = " (best on test)" * (config.train.select_on == "test")
    head = ["fold", "images", f"accuracy{chosen}", "macro_f1", "loss"]
    artifacts.save_csv(out / "crossval.csv", [head, *rows])
    _, images, accuracies, *_ = zip(*rows, strict=True)
    examples, spread = sum(images), f" ± {100 * statistics.stdev(accuracies):.2f} over folds"
    correct = sum(round(a * n) for a, n in zip(accuracies, images, strict=True))
    mean = artifacts.accuracy_text(correct / examples, examples, spread)
    lines.append(f"all{chosen}: {mean}, {examples:,} images, each tested once")
    return [*lines, f"  table  {out / 'crossval.csv'}"]
