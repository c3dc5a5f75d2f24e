"""Computes what a report shows: predictions, calibration, hard images, augmentation.

N images, G groups, K classes; R rows and columns of a heat map.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np
import scipy

from hsvit_jax import config as config_lib
from hsvit_jax import data, tasks
from hsvit_jax.augment import transforms
from hsvit_jax.classifier import Classifier
from hsvit_jax.run_report import measures
from hsvit_jax.train import batches, evaluate, step

# A report costs seconds: these bound what it evaluates and shows.
_MOST_IMAGES, _MOST_SHOWN, _SECONDS = 10_000, 12, 15.0
_ROWS = 7  # of a heat map
_AUGMENTED = 4, 5  # images, variants of each


@dataclasses.dataclass(frozen=True)
class Example:
    """One image with its prediction.

    Attributes:
      name: of its file, or its place in the split.
      label: its true class.
      heat_RR: fall of the prediction's probability by covered part; None after `_SECONDS`.
      votes: number of groups by the class that each names alone; empty without groups.
    """

    name: str
    image_HWC: np.ndarray
    label: int
    probabilities_K: np.ndarray
    heat_RR: np.ndarray | None
    votes: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Findings:
    """The results that a report shows.

    Attributes:
      confusion_KK: rows: the true class, columns: the predicted one.
      as_trained, fitted: calibration without and with the temperature that fits validation.
      wrong, unsure: the most wrong and the least sure images.
      mistakes: name, class, predicted class and its probability, the most wrong first.
      augmented: rows of a training image (target None) and its variants with targets (K,);
        empty for a recipe that changes no image.
    """

    confusion_KK: np.ndarray
    as_trained: measures.Calibration
    fitted: measures.Calibration
    wrong: list[Example]
    unsure: list[Example]
    mistakes: list[tuple[str, int, int, float]]
    augmented: list[list[tuple[np.ndarray, np.ndarray | None]]]


class Card(NamedTuple):
    """One image with its answer and the truth, as texts; `places` are the wrong outputs."""

    name: str
    image_HWC: np.ndarray
    answer: str
    truth: str
    places: list[int]


@dataclasses.dataclass(frozen=True)
class Scored:
    """The results that a report shows for several labels or numbers an image.

    Attributes:
      figures, by_output: those of the task's `measure`.
      worst: the images with the largest errors.
      mistakes: name, output, truth and answer of wrong labels or of all numbers, the worst first.
      true_NK, answers_NK: of all images.
      augmented: as in `Findings`.
    """

    figures: dict[str, float]
    by_output: dict[str, np.ndarray]
    worst: list[Card]
    mistakes: list[tuple[str, int, float, float]]
    true_NK: np.ndarray
    answers_NK: np.ndarray
    augmented: list[list[tuple[np.ndarray, np.ndarray | None]]]


def _prepared(
    classifier: Classifier, dataset: data.Dataset, split: str
) -> tuple[data.Split, int, np.ndarray]:
    """Returns at most 10,000 named images of a split, a batch size, and their outputs."""
    part = getattr(dataset, split)
    if part.names is None:
        places = np.array([f"{split} image {i}" for i in range(len(part))], object)
        part = dataclasses.replace(part, names=places)
    part = _thinned(part)
    # All that follows has one batch size, hence one program of `Classifier.logits`.
    batch = min(config_lib.eval_batch(classifier.config), 1 << (len(part) - 1).bit_length())
    return part, batch, _logits(classifier, part, batch)


def score(classifier: Classifier, dataset: data.Dataset, split: str) -> Scored:
    """Evaluates at most 10,000 images of a split for another task than classification.

    Raises:
      ValueError: outputs are not finite.
    """
    part, _, outputs_NK = _prepared(classifier, dataset, split)
    task, names = tasks.of(classifier.config), classifier.class_names
    answers_NK, error_NK = task.answer(outputs_NK), task.error(outputs_NK, part.labels)
    wrong_NK = np.ones(error_NK.shape, bool)
    if task.unit == "probability":
        wrong_NK = task.over(answers_NK) != (part.labels > 0.5)
    order = np.argsort(-error_NK, axis=None, kind="stable")
    pairs = np.stack(np.unravel_index(order, error_NK.shape), 1)[wrong_NK.flat[order]].tolist()
    shown = np.argsort(-(error_NK * wrong_NK).max(1), kind="stable")[:_MOST_SHOWN]
    worst = []
    for i in shown[wrong_NK[shown].any(1)]:
        texts = task.said(answers_NK[i], names), task.text(part.labels[i], names)
        image_HWC, places = part.gather([i])[0], np.flatnonzero(wrong_NK[i]).tolist()
        worst.append(Card(part.names[i], image_HWC, *texts, places))
    values = part.labels, answers_NK
    mistakes = [(part.names[i], k, *(float(x[i, k]) for x in values)) for i, k in pairs]
    measured = task.measure(outputs_NK, part.labels)
    return Scored(*measured, worst, mistakes, *values, _augmented(classifier.config, dataset.train))


def find(classifier: Classifier, dataset: data.Dataset, split: str) -> Findings:
    """Evaluates at most 10,000 images of a split, evenly chosen, and explains the hardest.

    Args:
      split: 'train', 'val' or 'test'.

    Raises:
      ValueError: logits are not finite.
    """
    config = classifier.config
    part, batch, logits_NK = _prepared(classifier, dataset, split)
    labels_N = part.labels
    predicted_N = logits_NK.argmax(1)
    fitted_on = logits_NK, labels_N
    if split != "val" and len(dataset.val):
        held_out = _thinned(dataset.val)
        fitted_on = _logits(classifier, held_out, batch), held_out.labels
    temperature = measures.fit_temperature(*fitted_on)
    p_NK = scipy.special.softmax(logits_NK, axis=1)
    wrong, _ = measures.hardest(p_NK, labels_N, len(part))
    mistakes = [
        (part.names[i], int(labels_N[i]), int(predicted_N[i]), float(p_NK[i].max())) for i in wrong
    ]
    chosen = measures.hardest(p_NK, labels_N, _MOST_SHOWN)
    shown = np.concatenate(chosen)
    images = part.gather(shown) if len(shown) else part.gather([0])[:0]
    heats = _occlusion(classifier, images, p_NK[shown], batch)
    columns = images, labels_N[shown], p_NK[shown], heats, _votes(classifier, images)
    examples = [Example(*row) for row in zip(part.names[shown], *columns, strict=True)]
    confusion_KK = np.zeros((len(classifier.class_names),) * 2, np.int64)
    np.add.at(confusion_KK, (labels_N, predicted_N), 1)
    return Findings(
        confusion_KK,
        measures.calibration(logits_NK, labels_N),
        measures.calibration(logits_NK, labels_N, temperature),
        examples[: len(chosen[0])],
        examples[len(chosen[0]) :],
        mistakes,
        _augmented(config, dataset.train),
    )


def _thinned(part: data.Split) -> data.Split:
    if len(part) <= _MOST_IMAGES:
        return part
    return part.take(np.linspace(0, len(part) - 1, _MOST_IMAGES).astype(np.int64))


def _bar(steps: Iterable, **options: Any) -> Iterable:
    """Returns the same steps, with a bar on a terminal."""
    from tqdm import auto

    return auto.tqdm(steps, leave=False, disable=None, **options)


def _logits(classifier: Classifier, part: data.Split, batch: int) -> np.ndarray:
    padded = evaluate.padded_batches(part, batch, 1)
    seen = _bar(padded, desc="report: evaluating", total=-(-len(part) // batch))
    found = [classifier.logits(images, batch)[valid] for images, _, valid in seen]
    logits_NK = np.concatenate(found).astype(np.float64)
    if wrong := int((~np.isfinite(logits_NK)).any(1).sum()):  # argmax calls them the first class
        raise ValueError(
            f"the logits of {wrong:,} of {len(part):,} images are not finite: report an earlier "
            "step with --which=STEP"
        )
    return logits_NK


def _occlusion(
    classifier: Classifier, images_NHWC: np.ndarray, p_NK: np.ndarray, batch: int
) -> list[np.ndarray | None]:
    """Returns the fall of the predicted class's probability by covered part (R, R).

    A patch two cells wide has the data's mean color. The last images have None if another batch
    would exceed `_SECONDS`. Source: Zeiler and Fergus, arXiv 1311.2901, section 4.2.
    """
    height, width = images_NHWC.shape[1:3]
    color = np.round(255 * np.asarray(classifier.config.data.mean)).astype(np.uint8)

    def cells(length: int) -> list[slice]:
        starts = (np.arange(_ROWS) - 0.5) * length / _ROWS
        return [slice(max(0, round(s)), round(s + 2 * length / _ROWS) or 1) for s in starts]

    places = [(rows, columns) for rows in cells(height) for columns in cells(width)]
    falls, begun, at_once = [], time.monotonic(), max(1, batch // len(places))
    for first in _bar(range(0, len(images_NHWC), at_once), desc="report: heat maps"):
        spent = time.monotonic() - begun
        if first and spent * (1 + at_once / first) > _SECONDS:
            break
        covered = np.repeat(images_NHWC[first : first + at_once], len(places), 0)
        for one, place in zip(covered, itertools.cycle(places), strict=False):
            one[place] = color
        logits = classifier.logits(covered, batch).astype(np.float64)
        p_NPK = scipy.special.softmax(logits, axis=1).reshape(-1, len(places), p_NK.shape[1])
        for p_K, p_PK in zip(p_NK[first:], p_NPK, strict=False):
            falls.append((p_K.max() - p_PK[:, p_K.argmax()]).reshape(_ROWS, _ROWS))
    return falls + [None] * (len(images_NHWC) - len(falls))


def _votes(classifier: Classifier, images_NHWC: np.ndarray) -> Sequence[dict[int, int]]:
    """Returns, for each image, the number of groups by the class that each names alone."""
    if not classifier.model.voters:
        return [{}] * len(images_NHWC)
    voted_G = classifier.voters_G > 0
    views = classifier.explain(images_NHWC)
    classes = (view.votes_GK[voted_G].argmax(-1).tolist() for view in views)
    return [dict(collections.Counter(of_one).most_common()) for of_one in classes]


def _augmented(
    config: ml_collections.ConfigDict, part: data.Split
) -> list[list[tuple[np.ndarray, np.ndarray | None]]]:
    """Returns some training images, and each in a few batches of the recipe."""
    settings = step.augment_settings(config)
    names = {text.partition(":")[0] for text in settings.transforms}
    if config.init.cache or not settings.active() or names - transforms.TRANSFORMS.keys():
        return []
    chosen = np.unique(np.linspace(0, len(part) - 1, _AUGMENTED[0]).astype(np.int32))
    images, labels = part.gather(chosen), part.labels[chosen]
    labels = labels.astype(np.int32 if labels.ndim == 1 else np.float32)
    numbers = range(_AUGMENTED[1])  # MixUp draws once for a batch
    variants = [batches.augmented(config, n, images, labels, chosen) for n in numbers]
    return [
        [(image, None), *((pixels[n], targets[n]) for pixels, targets in variants)]
        for n, image in enumerate(images)
    ]
