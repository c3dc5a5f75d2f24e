"""The contents of a report, computed: predictions, calibration, hard images, augmentation.

N images, G groups, K classes; R rows and columns of a heat map.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
from scipy import special

from hsvit_jax import augment, data
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import Classifier
from hsvit_jax.commands.report import measures
from hsvit_jax.train import evaluate, step

# So that a report costs seconds: what is evaluated and shown at most.
_MOST_IMAGES, _MOST_SHOWN = 10_000, 12
_ROWS = 7  # of a heat map
_AUGMENTED = 4, 5  # images, variants of each


@dataclasses.dataclass(frozen=True)
class Example:
    """One image with its prediction.

    Attributes:
      label: its true class.
      heat_RR: how far the prediction's probability falls when that part of the image is covered.
      votes: groups by the class that each would name alone; empty for a network without groups.
    """

    image_HWC: np.ndarray
    label: int
    probabilities_K: np.ndarray
    heat_RR: np.ndarray
    votes: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that is computed for a report.

    Attributes:
      confusion_KK: rows: the true class, columns: the predicted one.
      as_trained, fitted: calibration without and with the temperature that fits validation.
      wrong, unsure: the most wrong and the least sure images.
      augmented: for some training images the image and variants of it, each with its target (K,);
        empty where the recipe changes no image.
    """

    confusion_KK: np.ndarray
    as_trained: measures.Calibration
    fitted: measures.Calibration
    wrong: list[Example]
    unsure: list[Example]
    augmented: list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]


def find(classifier: Classifier, dataset: data.Dataset, split: str) -> Findings:
    """Evaluates at most 10,000 images of a split, evenly chosen, and explains the hardest.

    Args:
      split: 'train', 'val' or 'test'.

    Raises:
      ValueError: logits are not finite.
    """
    config = classifier.config
    part = _thinned(getattr(dataset, split))
    batch = config_lib.eval_batch(config)
    logits_NK, labels_N = _logits(classifier, part, batch), part.labels
    predicted_N = logits_NK.argmax(1)
    fitted_on = logits_NK, labels_N
    if split != "val" and len(dataset.val):
        held_out = _thinned(dataset.val)
        fitted_on = _logits(classifier, held_out, batch), held_out.labels
    temperature = measures.fit_temperature(*fitted_on)
    p_NK = special.softmax(logits_NK, axis=1)
    chosen = measures.hardest(p_NK, labels_N, _MOST_SHOWN)
    shown = np.concatenate(chosen)
    images = part.gather(shown) if len(shown) else part.gather([0])[:0]
    heats = _occlusion(classifier, images, p_NK[shown], batch)
    votes = _votes(classifier, images)
    examples = [
        Example(*of_one)
        for of_one in zip(images, labels_N[shown], p_NK[shown], heats, votes, strict=True)
    ]
    return Findings(
        measures.confusion(labels_N, predicted_N, len(classifier.class_names)),
        measures.calibration(logits_NK, labels_N),
        measures.calibration(logits_NK, labels_N, temperature),
        examples[: len(chosen[0])],
        examples[len(chosen[0]) :],
        _augmented(config, dataset.train),
    )


def _thinned(part: data.Split) -> data.Split:
    if len(part) <= _MOST_IMAGES:
        return part
    return part.take(np.linspace(0, len(part) - 1, _MOST_IMAGES).astype(np.int64))


def _logits(classifier: Classifier, part: data.Split, batch: int) -> np.ndarray:
    batches = evaluate.padded_batches(part, batch, 1)
    found = [classifier.logits(images, batch)[valid] for images, _, valid in batches]
    logits_NK = np.concatenate(found).astype(np.float64)
    if wrong := int((~np.isfinite(logits_NK)).any(1).sum()):  # argmax calls them the first class
        raise ValueError(
            f"the logits of {wrong:,} of {len(part):,} images are not finite, and nothing can be "
            "measured: report an earlier step of the run by --which=STEP"
        )
    return logits_NK


def _occlusion(
    classifier: Classifier, images_NHWC: np.ndarray, p_NK: np.ndarray, batch: int
) -> np.ndarray:
    """The fall of the predicted class's probability for each covered part, (N, R, R): by two cells
    of the data's mean colour. Source: Zeiler and Fergus, arXiv 1311.2901, section 4.2."""
    height, width = images_NHWC.shape[1:3]
    colour = np.round(255 * np.asarray(classifier.config.data.mean)).astype(np.uint8)

    def cells(length: int) -> list[slice]:
        starts = (np.arange(_ROWS) - 0.5) * length / _ROWS
        return [slice(max(0, round(s)), round(s + 2 * length / _ROWS) or 1) for s in starts]

    places = [(rows, columns) for rows in cells(height) for columns in cells(width)]
    falls = []
    for image_HWC, p_K in zip(images_NHWC, p_NK, strict=True):  # in turn: they may be large
        covered = np.repeat(image_HWC[None], len(places), 0)
        for one, place in zip(covered, places, strict=True):
            one[place] = colour
        logits = classifier.logits(covered, batch).astype(np.float64)
        p_PK = special.softmax(logits, axis=1)
        falls.append(p_K.max() - p_PK[:, p_K.argmax()])
    return np.reshape(falls, (-1, _ROWS, _ROWS))


def _votes(classifier: Classifier, images_NHWC: np.ndarray) -> Sequence[dict[int, int]]:
    """For each image the number of groups by the class they name alone."""
    model, settings = classifier.model, classifier.config.data
    if not (model.group_axis_limit and model.config.groups and len(images_NHWC)):
        return [{}] * len(images_NHWC)

    def choices(params: dict, stats: dict, images: jax.Array) -> jax.Array:
        x_NHWC = augment.normalise(images, tuple(settings.mean), tuple(settings.std))
        return model.views(params, stats, x_NHWC)["votes"][0].argmax(-1)

    given = classifier.params, classifier.stats, images_NHWC
    choices_GN = jax.device_get(jax.jit(choices)(*given))
    choices_NG = choices_GN[classifier.voters_G > 0].T
    return [dict(collections.Counter(row.tolist()).most_common()) for row in choices_NG]


def _augmented(
    config: ml_collections.ConfigDict, part: data.Split
) -> list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]]:
    """Some training images, and each in a few batches of the recipe."""
    settings = step.augment_settings(config)
    if config.init.cache or not settings.active():
        return []
    chosen = np.unique(np.linspace(0, len(part) - 1, _AUGMENTED[0]).astype(np.int32))
    images, labels = part.gather(chosen), part.labels[chosen].astype(np.int32)
    uses = step.AUGMENT, step.MIX
    made = jax.jit(augment.train_batch, static_argnums=0)
    variants = []
    for number in range(_AUGMENTED[1]):  # MixUp draws once for a batch
        keys = (jax.random.fold_in(step.run_key(config.seed, use), number) for use in uses)
        x_BHWC, targets_BK = map(np.asarray, made(settings, *keys, images, labels, chosen))
        variants.append((augment.pixels(x_BHWC, settings), targets_BK))
    return [
        (image, [(pixels[n], targets[n]) for pixels, targets in variants])
        for n, image in enumerate(images)
    ]
