"""Arrays, and anything that gives (image, label), as a data set in memory."""

import dataclasses
import functools
import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hsvit_jax.data.dataset import (
    UNSPLIT,
    DataInfo,
    Dataset,
    Source,
    Split,
    count_copies,
    split,
    warn_of_copies,
)
from hsvit_jax.data.images import GREY_MODES, BadImage, check_shape, fit_image, upright
from hsvit_jax.text import few

_LEAST_STD = 1e-3  # of a channel that is the same everywhere
#: A name as a folder's is read, so that one name spelled on two systems is one class.
_normal = functools.partial(unicodedata.normalize, "NFC")
_MOST_CLASSES = 65536  # as data.num_classes; larger labels are no numbers of classes


def from_arrays(
    images: Sequence[Any] | np.ndarray,
    labels: Sequence[Any] | np.ndarray,
    class_names: Sequence[str] | None = None,
    **options: Any,
) -> Dataset:
    """Makes a data set of images and as many labels; `from_examples` has the rest.

    Raises:
      ValueError: another number of labels than of images, or as `from_examples`.
    """
    if len(images) != len(labels):
        raise ValueError(
            f"{len(images):,} images and {len(labels):,} labels: give one label for each image"
        )
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
) -> Dataset:
    """Makes a data set of (image, label) pairs: an iterable, or what has a length and an index.

    An image is what `images.fit_image` takes. A tenth of every class is held out for the test, and
    `val_fraction` for validation, always the same ones. Mean and standard deviation are those of
    the training images.

    Args:
      examples: pairs; they are read once and kept in memory.
      class_names: label i is class_names[i], or one of the names; by default the labels, sorted, or
        of whole numbers all from 0 to the largest.
      name: the run's data set is called 'given=<name>'.
      image_size: (H, W); by default that of the first image, 128×128 where it is a file.
      channels: 1 or 3; by default those of the first image, 3 where it is a file.
      fit: 'crop', 'pad' or 'stretch', of images of another shape.
      val_fraction: between 0 and 0.8.
      flip: whether a mirrored image keeps its label.
      test_only: every example is in the test split, as for `Classifier.evaluate`.

    Raises:
      ValueError: no example, labels that are no classes, or an image that cannot be used.
    """
    images, labels = [], []
    for i, pair in enumerate(_each(examples)):
        if isinstance(pair, dict) or getattr(pair, "__len__", lambda: 0)() != 2:
            raise ValueError(f"example {i} is no pair (image, label), but {pair!r:.80}")
        image, label = pair
        try:
            if not images:
                size, depth = _shape(image)
                size = size if image_size is None else image_size
                channels = depth if channels is None else channels
                check_shape(size, channels, fit)
                size, channels = tuple(map(int, size)), int(channels)  # NumPy's numbers too
            images.append(fit_image(image, size, channels, fit))
        except BadImage as error:
            raise BadImage(f"example {i}: {error}") from error
        labels.append(label)
    if not images:
        raise ValueError("no examples: give pairs of an image and its label")
    names, numbers = _numbered(labels, class_names, 1 if test_only else 2)
    pixels = np.stack(images)
    if not test_only:
        digests = [hashlib.sha256(image).digest() for image in pixels]
        warn_of_copies(len(digests), *count_copies(digests, "example {} of example {}".format))
    content = hashlib.sha256(numbers.tobytes())
    content.update(np.ascontiguousarray(pixels))
    parts = np.full(len(numbers), UNSPLIT, np.int8)
    info = DataInfo(f"given={name}", size, channels, names, (), (), flip)
    source = Source(Split(numbers, pixels), parts, names, content.hexdigest())
    dataset = split(source, info, fit, val_fraction, test_only)
    train = (dataset.test if test_only else dataset.train).images
    mean = train.mean((0, 1, 2)) / 255
    # `std` would hold all pixels in double precision, eight times the memory of the images.
    squares = np.einsum("nhwc,nhwc->c", train, train, dtype=np.float64) * (channels / train.size)
    std = np.sqrt(np.maximum(squares / 255**2 - mean**2, _LEAST_STD**2))
    info = dataclasses.replace(dataset.info, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return dataclasses.replace(dataset, info=info)


def _each(examples: Any) -> Iterator[tuple[Any, Any]]:
    """The examples; of what has a length and an index these, as its index need not end."""
    if hasattr(examples, "columns") or isinstance(examples, dict):
        raise ValueError(
            "examples must be pairs (image, label), not a table: give its columns to "
            "hsvit_jax.from_arrays, as in from_arrays(table['image'], table['label'])"
        )
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        return (examples[i] for i in range(len(examples)))
    return iter(examples)


def _shape(image: Any) -> tuple[tuple[int, int], int]:
    if hasattr(image, "mode") and not hasattr(image, "shape"):  # Pillow's, no memory map
        image = upright(image)
        return (image.height, image.width), 1 if image.mode in GREY_MODES else 3
    try:
        shape = np.shape(image)
    except ValueError:  # rows of several lengths, which are refused when they are read
        shape = ()
    if len(shape) < 2:
        return (128, 128), 3
    return tuple(shape[:2]), 1 if shape[2:] in ((), (1,)) else 3


def _numbered(
    labels: Sequence[Any], class_names: Sequence[str] | None, least: int
) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes' names, and the label of each example as their number, int32 (N,)."""
    values = np.asarray(labels)
    ordered = class_names is None or hasattr(class_names, "__getitem__")
    if not ordered or isinstance(class_names, str | Mapping):
        raise ValueError(
            "class_names must be a list in the order of the labels (of a dict of their numbers "
            f"sorted(index, key=index.get)); got {class_names!r:.80}"
        )
    if values.ndim != 1 or values.dtype.kind not in "iuUb":
        raise ValueError(
            f"labels must be whole numbers or names, one for each image; got {values.dtype} "
            f"{values.shape}"
        )
    if class_names is not None:
        class_names = [_normal(name) if isinstance(name, str) else name for name in class_names]
    if values.dtype.kind == "U":
        # NumPy makes texts of them: a missing label of a table would be a class "nan".
        strange = [label for label in labels if not isinstance(label, str)]
        if strange:
            raise ValueError(f"labels must be all names or all numbers; got {strange[0]!r} too")
        labels = [*map(_normal, values.tolist())]
        names = tuple(sorted({*labels}) if class_names is None else class_names)
        unknown = sorted({*labels} - {*names})
        if unknown:
            raise ValueError(f"labels that class_names lacks: {few(unknown)}")
        number = {name: i for i, name in enumerate(names)}
        numbers = np.array([number[label] for label in labels], np.int32)
    else:
        low, high = int(values.min()), int(values.max())
        if class_names is None and high >= _MOST_CLASSES:
            raise ValueError(
                f"labels run from {low} to {high}, and there can be {_MOST_CLASSES:,} classes, "
                "counted from 0"
            )
        names = tuple(map(str, range(high + 1)) if class_names is None else class_names)
        if low < 0 or high >= len(names):
            raise ValueError(
                f"labels run from {low} to {high}, but there are {len(names)} classes: they count "
                "from 0"
            )
        numbers = values.astype(np.int32)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names must be texts, in the order of the labels; got {few(names)}")
    if len(set(names)) < max(least, len(names)):
        raise ValueError(f"classes need two or more different names; got {few(names)}")
    return names, numbers
