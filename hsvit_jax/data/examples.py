"""Makes data sets of arrays, and of any source of (image, label) pairs, in memory."""

import dataclasses
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hsvit_jax.data.dataset import (
    UNSPLIT,
    DataInfo,
    Dataset,
    Source,
    Split,
    describe_copies,
    number_labels,
    split,
    target_rows,
)
from hsvit_jax.data.images import GREY_MODES, BadImage, check_shape, fit_image, upright

_LEAST_STD = 1e-3  # for a channel of one value


def from_arrays(
    images: Sequence[Any] | np.ndarray,
    labels: Sequence[Any] | np.ndarray,
    class_names: Sequence[str] | None = None,
    **options: Any,
) -> Dataset:
    """Makes a data set of images and as many labels; `from_examples` has the rest."""
    return from_examples(zip(images, labels, strict=True), class_names, **options)


def from_examples(
    examples: Iterable[tuple[Any, Any]],
    class_names: Sequence[str] | None = None,
    *,
    name: str = "examples",
    image_size: tuple[int, int] | None = None,
    channels: int | None = None,
    fit: str = "crop",
    val_fraction: float = 0.1,
    flip: bool = True,
    test_only: bool = False,
    task: str = "classify",
) -> Dataset:
    """Makes a data set of (image, label) pairs.

    A tenth of every class is held out for test, and `val_fraction` for validation, always the same
    examples. Mean and standard deviation are those of the training images.

    Args:
      examples: an iterable of pairs, or a sequence with a length; all are kept in memory. An image
        is whatever `fit_image` accepts.
      class_names: label i is class_names[i], or one of the names. Defaults to the labels, sorted;
        for whole numbers to all from 0 to the largest.
      name: the run's data set is called 'given=<name>'.
      image_size: (H, W); defaults to that of the first image, for a file to 128×128.
      channels: 1 or 3; defaults to those of the first image, for a file to 3.
      fit: how images of another shape are fitted: 'crop', 'pad' or 'stretch'.
      val_fraction: between 0 and 0.8.
      flip: whether a mirrored image keeps its label.
      test_only: puts every example into the test split, as `Classifier.evaluate` needs.
      task: 'multilabel' for labels that are rows of 0 and 1, 'regress' for numbers or rows of them;
        class_names are then the names of the labels or columns.

    Raises:
      ValueError: no example, labels that are no classes, or an image that cannot be used.
    """
    if hasattr(examples, "__len__") and hasattr(
        examples, "__getitem__"
    ):  # its iterator may not end
        examples = map(examples.__getitem__, range(len(examples)))
    images, labels = [], []
    for i, (image, label) in enumerate(examples):
        try:
            if not images:
                size, depth = _shape(image)
                size = size if image_size is None else image_size
                channels = depth if channels is None else channels
                size, channels = check_shape(size, channels, fit)
            images.append(fit_image(image, size, channels, fit))
        except BadImage as error:
            raise BadImage(f"example {i}: {error}") from error
        labels.append(label)
    if not images:
        raise ValueError("no examples: pass pairs of an image and its label")
    if task == "classify":
        names, numbers = number_labels(labels, class_names)
    else:
        names, numbers = target_rows(labels, class_names, task)
    pixels = np.stack(images)
    if not test_only:
        digests = [hashlib.sha256(image).digest() for image in pixels]
        if copies := describe_copies(digests, [f"example {i}" for i in range(len(digests))]):
            warnings.warn(copies, stacklevel=2)
    content = hashlib.sha256(numbers.tobytes())
    content.update(np.ascontiguousarray(pixels))
    parts = np.full(len(numbers), UNSPLIT, np.int8)
    info = DataInfo(f"given={name}", size, channels, names, (), (), flip, task=task)
    source = Source(Split(numbers, pixels), parts, names, content.hexdigest())
    dataset = split(source, info, fit, val_fraction, test_only)
    train = (dataset.test if test_only else dataset.train).images
    mean = train.mean((0, 1, 2)) / 255
    # `np.std` would hold all pixels in double precision, eight times the images' memory.
    squares = np.einsum("nhwc,nhwc->c", train, train, dtype=np.float64) * (channels / train.size)
    std = np.sqrt(np.maximum(squares / 255**2 - mean**2, _LEAST_STD**2))
    info = dataclasses.replace(dataset.info, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return dataclasses.replace(dataset, info=info)


def _shape(image: Any) -> tuple[tuple[int, int], int]:
    if hasattr(image, "mode") and not hasattr(image, "shape"):  # Pillow; memory maps have a shape
        image = upright(image)
        return (image.height, image.width), 1 if image.mode in GREY_MODES else 3
    try:
        shape = np.shape(image)
    except ValueError:  # rows of several lengths, refused when they are read
        shape = ()
    if len(shape) < 2:
        return (128, 128), 3
    return tuple(shape[:2]), 1 if shape[2:] in ((), (1,)) else 3
