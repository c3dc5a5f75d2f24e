"""Measures predictions: precision, recall and F1 by class, confusions, calibration.

N images, K classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from hsvit_jax import artifacts

#: The file of a run with the temperature that fits its validation images.
CALIBRATION = "calibration.json"
_BINS = 15  # of confidence


class Measure(NamedTuple):
    """A fraction and its 95 % interval."""

    value: float
    low: float
    high: float


class ClassMeasures(NamedTuple):
    """Measures of one class; None where nothing was counted."""

    images: int
    precision: Measure | None
    recall: Measure | None
    f1: Measure | None


class Bin(NamedTuple):
    """The images whose confidence lies in one of equal intervals."""

    images: int
    confidence: float
    accuracy: float


class Calibration(NamedTuple):
    """Calibration of logits that are divided by a temperature.

    Attributes:
      ece: expected calibration error, the mean over images of their bin's |accuracy − confidence|.
      loss: mean cross-entropy in nats.
    """

    temperature: float
    ece: float
    loss: float
    bins: tuple[Bin, ...]


def by_class(confusion_KK: np.ndarray) -> list[ClassMeasures]:
    """Returns precision, recall and F1 of each class with Wilson intervals.

    F1 is 2J/(1 + J), where J = right / (right + wrongly named + missed) is a proportion.
    """

    def proportion(right: int, total: int) -> Measure | None:
        return Measure(right / total, *artifacts.wilson(right, total)) if total else None

    out = []
    sums = (np.diag(confusion_KK), confusion_KK.sum(0), confusion_KK.sum(1))
    for right, named, there in zip(*map(np.ndarray.tolist, sums), strict=True):
        j = proportion(right, named + there - right)
        f1 = j and Measure(*(2 * end / (1 + end) for end in j))
        out.append(ClassMeasures(there, proportion(right, named), proportion(right, there), f1))
    return out


def calibration(
    logits_NK: np.ndarray, labels_N: np.ndarray, temperature: float = 1.0
) -> Calibration:
    """Measures calibration in bins of equal width. Source: Guo et al., arXiv 1706.04599."""
    log_p_NK = scipy.special.log_softmax(logits_NK / temperature, axis=1)
    confidence_N = np.exp(log_p_NK.max(1))
    right_N = log_p_NK.argmax(1) == labels_N
    place_N = np.minimum((confidence_N * _BINS).astype(int), _BINS - 1)
    bins = []
    for b in range(_BINS):
        inside = place_N == b
        count = int(inside.sum())
        means = (float(x[inside].mean()) if count else 0.0 for x in (confidence_N, right_N))
        bins.append(Bin(count, *means))
    ece = sum(b.images * abs(b.accuracy - b.confidence) for b in bins) / len(labels_N)
    loss = -float(np.take_along_axis(log_p_NK, labels_N[:, None], 1).mean())
    return Calibration(temperature, ece, loss, tuple(bins))


def fit_temperature(logits_NK: np.ndarray, labels_N: np.ndarray) -> float:
    """Fits the temperature, from 1/20 to 20, with the lowest cross-entropy."""

    def loss(log_inverse: float) -> float:
        log_p_NK = scipy.special.log_softmax(logits_NK * np.exp(log_inverse), axis=1)
        return -np.take_along_axis(log_p_NK, labels_N[:, None], 1).mean()

    most = np.log(20.0)
    found = scipy.optimize.minimize_scalar(loss, bounds=(-most, most), method="bounded")
    return float(np.exp(-found.x))


def frequent_confusions(confusion_KK: np.ndarray, most: int) -> list[tuple[int, int, int]]:
    """Returns the most frequent (images, true class, predicted class) of wrong predictions."""
    pairs_N2 = np.argwhere(confusion_KK)  # few of the cells of many classes
    pairs_N2 = pairs_N2[pairs_N2[:, 0] != pairs_N2[:, 1]]
    counts_N = confusion_KK[tuple(pairs_N2.T)]
    order = np.argsort(-counts_N, kind="stable")[:most]
    return [(int(counts_N[i]), *pairs_N2[i].tolist()) for i in order]


def confusion_table(confusion_KK: np.ndarray, names: Sequence[str], most: int = 10) -> str:
    """Formats the confusion matrix, or for many classes the `most` frequent confusions."""
    if len(names) <= 20:
        counts = [(name, *map(str, row)) for name, row in zip(names, confusion_KK, strict=True)]
        table = artifacts.aligned([("", *names), *counts])
        return "\n".join(["rows: true class, columns: predicted", *table])
    confusions = frequent_confusions(confusion_KK, most)
    lines = [f"{n:>6} × {names[i]} taken for {names[j]}" for n, i, j in confusions]
    return "\n".join(["most frequent confusions:", *lines])


def hardest(probabilities_NK: np.ndarray, labels_N: np.ndarray, most: int) -> Sequence[np.ndarray]:
    """Returns the indices of the `most` most wrong images and of the least sure others.

    An image is wrong by the excess of the prediction's probability over the true class's. It is
    unsure if its two highest probabilities differ by less than a half.
    """
    top_N2 = np.sort(probabilities_NK, 1)[:, :-3:-1]
    true_N = np.take_along_axis(probabilities_NK, labels_N[:, None], 1)[:, 0]
    excess_N = top_N2[:, 0] - true_N
    wrong = np.argsort(-excess_N, kind="stable")[:most]
    wrong = wrong[probabilities_NK[wrong].argmax(1) != labels_N[wrong]]
    lead_N = top_N2[:, 0] - top_N2[:, 1:].sum(1)
    order = np.argsort(lead_N, kind="stable")
    return wrong, order[(lead_N[order] < 0.5) & ~np.isin(order, wrong)][:most]
