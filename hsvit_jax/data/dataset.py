"""Data sets: their description, their three splits, and their fingerprint."""

import dataclasses
import hashlib
import json
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np

from hsvit_jax.text import few, one_line

TRAIN, VAL, TEST, UNSPLIT = 0, 1, 2, 3
TEST_FRACTION = 0.1
_LEAST_HELD_OUT = 4  # examples of a class that comes in one piece
_MIRROR_CHANGES = ("mnist", "svhn", "usps", "digits", "omniglot", "quickdraw", "letters")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DataInfo:
    """The description of a data set.

    Attributes:
      image_size: (H, W) in pixels.
      channels: 1 or 3.
      class_names: label ``i`` is ``class_names[i]``.
      mean, std: per channel, of pixel values scaled to [0, 1].
      flip: whether a mirrored image keeps its label.
      fit: how images of another shape are fitted to it: 'crop', 'pad' or 'stretch'.
    """

    name: str
    image_size: tuple[int, int]
    channels: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    fit: str = "crop"

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""
        return len(self.class_names)

    def with_shape(self, image_size: tuple[int, int], channels: int) -> "DataInfo":
        """Copies the description for another size or channel count; mean and std follow."""
        mean, std = self.mean, self.std
        if channels != self.channels:
            if channels == 1:
                mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
            else:
                mean, std = mean[:1] * channels, std[:1] * channels
        return dataclasses.replace(
            self, image_size=image_size, channels=channels, mean=mean, std=std
        )


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of a split, in memory or read as needed.

    Attributes:
      labels: int32 (N,).
      images: uint8 (N, H, W, C), or None for a streamed split.
      read: reads image ``i`` of a streamed split, uint8 (H, W, C); safe to call from threads.
      names: of the images' files, str (N,), or None for images that are in none.
    """

    labels: np.ndarray = field(repr=False)
    images: np.ndarray | None = field(repr=False)
    read: Callable[[int], np.ndarray] | None = field(default=None, repr=False)
    names: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads images in the order of ``indices``, one or more: uint8 (n, H, W, C).

        Raises:
          BadImage: a streamed file can no longer be read.
        """
        if self.images is not None:
            return self.images[np.asarray(indices)]
        with ThreadPoolExecutor(16) as pool:
            return np.stack(list(pool.map(self.read, indices)))

    def take(self, index_N: np.ndarray) -> "Split":
        """Returns the examples with these indices, int (N,), as a split of their own."""
        names = None if self.names is None else self.names[index_N]
        if self.images is not None:
            return Split(self.labels[index_N], self.images[index_N], names=names)
        return Split(self.labels[index_N], None, lambda i: self.read(int(index_N[i])), names)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three disjoint splits; `val` is held out of the training examples.

    Attributes:
      fingerprint: SHA-256 over the content, the split rule, the image size, the channels and the
        class names: equal for equal data, wherever it lies.
      val_fraction: the share of the training examples that was asked for as `val`.
      fraction: the share of the training and validation examples that `subset` left.
      on_bad_image: what was done about unusable images, see `data.load`.
    """

    info: DataInfo
    train: Split
    val: Split
    test: Split
    fingerprint: str
    val_fraction: float = 0.1
    fraction: float = 1.0
    on_bad_image: str = "error"

    @property
    def resident(self) -> bool:
        """Whether the images are arrays in memory; streamed ones are read as needed."""
        return self.train.images is not None

    def subset(self, fraction: float) -> "Dataset":
        """Returns a share of each class's training and validation examples; the test split stays.

        A smaller subset lies within every larger one, and each class keeps an example at least.

        Args:
          fraction: of the examples of each class, above 0 and at most 1.

        Raises:
          ValueError: another fraction, or a subset already, whose share would be another one's.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction}: set a number above 0 and at most 1")
        if fraction == 1:
            return self
        if self.fraction < 1:
            raise ValueError(
                f"subset({fraction:g}) of a subset of {self.fraction:g}: take it of the whole set"
            )
        kept = {name: _first(getattr(self, name), fraction) for name in ("train", "val")}
        name = fingerprint(self.info, self.fingerprint, f"{fraction} of train and val")
        return dataclasses.replace(self, **kept, fingerprint=name, fraction=float(fraction))


def _first(split: Split, fraction: float) -> Split:
    """A share of each class, in an order that does not depend on the share."""
    kept = [
        members[: _share(len(members), fraction, 1, len(members))]
        for members in _classes(split.labels, np.arange(len(split)))
    ]
    return split.take(np.sort(np.concatenate(kept))) if kept else split


@dataclass(frozen=True)
class Source:
    """The usable examples of a data set before it is split.

    Attributes:
      parts: int8 (N,), the split that each example is meant for: see `assign_splits`.
      class_names: label ``i`` is ``class_names[i]``.
      content: SHA-256 of everything that was read.
    """

    examples: Split
    parts: np.ndarray
    class_names: tuple[str, ...]
    content: str


def split(
    source: Source, info: DataInfo, fit: str, val_fraction: float, test_only: bool
) -> Dataset:
    """Splits the examples by `assign_splits`, with warnings of classes, or puts all into test.

    Raises:
      ValueError: classes of one name, fewer than two without `test_only`, or as `assign_splits`.
    """
    names = source.class_names
    if len({*names}) < max(len(names), 1 if test_only else 2):
        raise ValueError(f"{info.name} needs two or more different classes; it has {few(names)}")
    info = dataclasses.replace(info, class_names=names, fit=fit)
    if test_only:
        every = np.arange(len(source.examples))
        parts = every[:0], every[:0], every
    else:
        parts = assign_splits(source.examples.labels, source.parts, val_fraction)
        _warn_of_classes(info, [source.examples.labels[indices] for indices in parts])
    splits = [source.examples.take(indices) for indices in parts]
    rule = split_rule(source.parts, val_fraction) + (f", fit {fit}" if fit != "crop" else "")
    name = fingerprint(info, source.content, rule)
    return Dataset(info, *splits, fingerprint=name, val_fraction=val_fraction)


def _warn_of_classes(info: DataInfo, labels: Sequence[np.ndarray]) -> None:
    names, lost, told = info.class_names, set(), []
    counts = [np.bincount(part, minlength=len(names)) for part in labels]
    for what, n in zip(("training", "validation", "test"), counts, strict=True):
        if n.any() and (missing := np.flatnonzero(n == 0).tolist()):
            told.append(f"no {what} image of {few([names[k] for k in missing])}")
            lost |= {*missing}
    if told:
        each = few([f"{names[k]} {'/'.join(str(n[k]) for n in counts)}" for k in sorted(lost)])
        warnings.warn(
            f"{info.name} has {', '.join(told)} (images for training/validation/test: {each})",
            stacklevel=4,
        )
    alike: dict[str | Decimal, list[str]] = {}
    for name in names:
        alike.setdefault(_plain(name), []).append(name)
    if again := ["/".join(same) for same in alike.values() if len(same) > 1]:
        warnings.warn(
            f"{info.name} has class names that differ only in case, blanks or form: {few(again)}",
            stacklevel=4,
        )


def _plain(name: str) -> str | Decimal:
    """A class name without what people write differently, and a number as its value."""
    letters = unicodedata.normalize("NFKC", name).casefold()
    text = "".join(c for c in letters if not c.isspace() and unicodedata.category(c) != "Cf")
    try:
        return Decimal(text).normalize()
    except ArithmeticError:
        return text


def default_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of sets that state none: ImageNet's, or 0.5 and 0.25 for grey."""
    return ((0.5,), (0.25,)) if channels == 1 else (IMAGENET_MEAN, IMAGENET_STD)


def keeps_label_mirrored(name: str) -> bool:
    """Whether a public set's images keep their labels when mirrored; a digit or letter does not."""
    return "fashion" in name.lower() or not any(word in name.lower() for word in _MIRROR_CHANGES)


def fingerprint(info: DataInfo, content: str, rule: str) -> str:
    """SHA-256 hex over the content's own digest, the split rule, shape and class names."""
    body = [content, rule, list(info.image_size), info.channels, list(info.class_names)]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def count_copies(digests: Sequence[bytes], pair: Callable[[int, int], str]) -> tuple[int, str]:
    """How many of these digests, '' of what cannot be read, were there before, and a text on the
    first of them: `pair` of its index and of that of its original."""
    first: dict[bytes, int] = {}
    copies = [i for i, key in enumerate(digests) if key and first.setdefault(key, i) != i]
    return len(copies), "".join(pair(i, first[digests[i]]) for i in copies[:1])


def warn_of_copies(total: int, copies: int, first: str) -> None:
    """Warns of what `count_copies` has found among `total` images of one's own, if anything."""
    if copies:
        warnings.warn(
            f"{copies:,} of {total:,} images are copies of others, {one_line(first)} first: a "
            "copy of a test image may be trained on, and one in another class has two labels; "
            "remove them",
            stacklevel=4,
        )


def used_as(given: Collection[int]) -> dict[int, int]:
    """The part that each of the parts a set comes in is used as.

    Training examples alone are to be split; validation examples are the test where there is none.
    """
    if set(given) == {TRAIN}:
        return {TRAIN: UNSPLIT}
    return {part: TEST if part == VAL and TEST not in given else part for part in given}


def split_rule(parts: np.ndarray, val_fraction: float) -> str:
    """Names the rule that `assign_splits` follows for these parts, for the fingerprint."""
    if np.any(parts == UNSPLIT):
        return f"stratified test={TEST_FRACTION} val={val_fraction}"
    if np.any(parts == VAL):
        return "given train, val and test"
    return f"given train and test, stratified val={val_fraction} of train"


def assign_splits(
    labels: np.ndarray, parts: np.ndarray, val_fraction: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assigns every example to a split, by its place in the data set alone.

    Examples marked UNSPLIT give ``TEST_FRACTION`` of every class to test and ``val_fraction`` to
    validation. Where a test part is given, validation is ``val_fraction`` of every class of the
    train part, unless a VAL part is given too: then that is used whole. A class gives at least
    one example to each held-out split while one is left for training, and of UNSPLIT examples at
    least four or, where that is less, a fifth of them.

    Args:
      labels: int (N,).
      parts: int (N,), of TRAIN, VAL, TEST, UNSPLIT.
      val_fraction: between 0 and 0.8.

    Returns:
      Ascending indices of the train, validation and test examples, int (n,) each.
    """
    if not 0 <= val_fraction <= 0.8:
        raise ValueError(f"val_fraction={val_fraction}: set a number from 0 to 0.8")
    train = np.flatnonzero((parts == TRAIN) | (parts == UNSPLIT))
    val, test = np.flatnonzero(parts == VAL), np.flatnonzero(parts == TEST)
    whole = bool(np.any(parts == UNSPLIT))
    test_fraction = TEST_FRACTION if whole else 0.0
    val_fraction = 0.0 if len(val) else val_fraction
    held_test, held_val = [], []
    for members in _classes(labels, train):
        least = max(1, min(_LEAST_HELD_OUT, len(members) // 5)) if whole else 1
        n_test = _share(len(members), test_fraction, least, len(members) - 1)
        n_val = _share(len(members), val_fraction, least, len(members) - 1 - n_test)
        held_test.append(members[:n_test])
        held_val.append(members[n_test : n_test + n_val])
    if held_test:
        test = np.concatenate([test, *held_test])
        val = np.concatenate([val, *held_val])
    train = np.setdiff1d(train, np.concatenate([test, val]), assume_unique=True)
    if not len(train) or not len(test):
        raise ValueError(
            f"{len(labels)} examples leave {len(train)} for training and {len(test)} for test; "
            "both need at least one: add images, two or more in every class"
        )
    return train, np.sort(val), np.sort(test)


def _classes(labels: np.ndarray, indices: np.ndarray) -> Iterator[np.ndarray]:
    """The indices of each class, in an order that is fixed for good."""
    labels = labels[indices]
    order = np.lexsort((_scramble(indices), labels))  # one sort for all: there may be 22,000
    starts = np.flatnonzero(np.diff(labels[order])) + 1
    yield from np.split(indices[order], starts) if len(order) else ()


def _share(count: int, fraction: float, least: int, most: int) -> int:
    """Rounds half up: at least `least` of a fraction above 0, never more than `most`."""
    if fraction == 0:
        return 0
    return max(0, min(most, max(least, int(count * fraction + 0.5))))


def _scramble(indices: np.ndarray) -> np.ndarray:
    """SplitMix64 of each index: an order that no NumPy release can change (NEP 19 lets it)."""
    x = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
