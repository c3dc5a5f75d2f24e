"""Defines data sets: their description, three splits, batches, and fingerprint."""

import dataclasses
import functools
import hashlib
import json
import unicodedata
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from hsvit_jax.text import few, one_line

TRAIN, VAL, TEST, UNSPLIT = 0, 1, 2, 3
TEST_FRACTION = 0.1
_LEAST_HELD_OUT = 4  # examples a class, of a set that comes in one piece
_MIRROR_CHANGES = ("mnist", "svhn", "usps", "digits", "omniglot", "quickdraw", "letters")
_MOST_CLASSES = 65536  # data.num_classes has the same limit
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Names in one form, so that one name from two systems is one class.
nfc = functools.partial(unicodedata.normalize, "NFC")


@dataclass(frozen=True)
class DataInfo:
    """Describes a data set.

    Attributes:
      image_size: (H, W) in pixels.
      channels: 1 or 3.
      class_names: label ``i`` is ``class_names[i]``.
      mean, std: one value a channel, for pixels scaled to [0, 1].
      flip: whether a mirrored image keeps its label.
      fit: how images of another shape are fitted: 'crop', 'pad' or 'stretch'.
      task: 'classify', 'multilabel' or 'regress', as data.task; names are of labels or columns.
      target_mean, target_std: of each column's training numbers, to regress; else empty.
    """

    name: str
    image_size: tuple[int, int]
    channels: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    fit: str = "crop"
    task: str = "classify"
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    @property
    def num_classes(self) -> int:
        """Returns the number of classes, K."""
        return len(self.class_names)

    def with_shape(self, image_size: tuple[int, int], channels: int) -> "DataInfo":
        """Copies the description for another size or channel count; mean and std follow."""
        changes = {"image_size": image_size, "channels": channels}
        for name in ("mean", "std") if channels != self.channels else ():
            values = getattr(self, name)
            mean = sum(values) / len(values) if channels == 1 else values[0]
            changes[name] = (mean,) * channels
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Split:
    """Holds the examples of a split, in memory or read as needed.

    Attributes:
      labels: int32 (N,); float64 (N, K) of several labels (0 or 1) or numbers an image.
      images: uint8 (N, H, W, C), or None for a streamed split.
      read: reads image ``i`` of a streamed split, uint8 (H, W, C); safe to call from threads.
      names: the images' file names, str (N,), or None for images without a file.
    """

    labels: np.ndarray = field(repr=False)
    images: np.ndarray | None = field(repr=False)
    read: Callable[[int], np.ndarray] | None = field(default=None, repr=False)
    names: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads images in the order of ``indices``: uint8 (n, H, W, C)."""
        if self.images is not None:
            return self.images[np.asarray(indices)]
        with ThreadPoolExecutor(16) as pool:
            return np.stack(list(pool.map(self.read, indices)))

    def take(self, index_N: np.ndarray) -> "Split":
        """Returns the split of the examples with these indices, int (N,)."""
        names = None if self.names is None else self.names[index_N]
        if self.images is not None:
            return Split(self.labels[index_N], self.images[index_N], names=names)
        return Split(self.labels[index_N], None, lambda i: self.read(int(index_N[i])), names)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Holds three disjoint splits; `val` is held out of the training examples.

    Attributes:
      fingerprint: SHA-256 over content, split rule, image size, channels and class names.
      val_fraction: the share of the training examples requested as `val`.
      fraction: the share of the training and validation examples that `subset` kept.
      on_bad_image: 'error' or 'skip', as given to `data.load`.
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
        """Returns whether the images are arrays in memory; streamed ones are read as needed."""
        return self.train.images is not None

    def subset(self, fraction: float) -> "Dataset":
        """Returns a share of each class's training and validation examples; the test split stays.

        A smaller subset lies within every larger one. Each class keeps at least one example.

        Raises:
          ValueError: the fraction is not above 0 and at most 1, or this set is a subset already.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction}: set a number above 0 and at most 1")
        if fraction == 1:
            return self
        if self.fraction < 1:
            raise ValueError(
                f"subset({fraction:g}) of a subset of {self.fraction:g}: take it of the whole set"
            )
        kept = {}
        for name in ("train", "val"):
            split = getattr(self, name)
            chosen = [np.arange(0)]
            for members in _classes(split.labels, np.arange(len(split))):
                chosen.append(members[: _share(len(members), fraction, 1, len(members))])
            kept[name] = split.take(np.sort(np.concatenate(chosen)))
        name = fingerprint(self.info, self.fingerprint, f"{fraction} of train and val")
        info = _with_statistics(self.info, kept["train"])
        more = {"info": info, "fingerprint": name, "fraction": float(fraction)}
        return dataclasses.replace(self, **kept, **more)


@dataclass(frozen=True)
class Source:
    """Holds the usable examples of a data set before it is split.

    Attributes:
      parts: int8 (N,), the split of each example, or UNSPLIT.
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
    """Splits the examples by `assign_splits`, or puts all into test; warns of odd classes."""
    names = source.class_names
    least = 1 if test_only or info.task != "classify" else 2
    if len({*names}) < max(len(names), least):
        raise ValueError(f"{info.name} needs two or more different classes; it has {few(names)}")
    info = dataclasses.replace(info, class_names=names, fit=fit)
    if test_only:
        every = np.arange(len(source.examples))
        parts = every[:0], every[:0], every
    else:
        parts = assign_splits(source.examples.labels, source.parts, val_fraction)
        _warn_of_classes(info, [source.examples.labels[indices] for indices in parts])
    splits = [source.examples.take(indices) for indices in parts]
    info = _with_statistics(info, splits[0])
    rule = split_rule(source.parts, val_fraction) + (f", fit {fit}" if fit != "crop" else "")
    rule += f", {info.task}" if info.task != "classify" else ""
    name = fingerprint(info, source.content, rule)
    return Dataset(info, *splits, fingerprint=name, val_fraction=val_fraction)


def _warn_of_classes(info: DataInfo, labels: Sequence[np.ndarray]) -> None:
    names, lost, lacks = info.class_names, set(), []
    counts = [class_counts(part, len(names)) for part in labels if info.task != "regress"]
    for what, n in zip(("training", "validation", "test"), counts, strict=False):
        if n.any() and (missing := np.flatnonzero(n == 0).tolist()):
            lacks.append(f"no {what} image of {few([names[k] for k in missing])}")
            lost |= {*missing}
    if lacks:
        each = few([f"{names[k]} {'/'.join(str(n[k]) for n in counts)}" for k in sorted(lost)])
        warnings.warn(
            f"{info.name} has {', '.join(lacks)} (images for training/validation/test: {each})",
            stacklevel=4,
        )
    similar: dict[str | Decimal, list[str]] = {}
    for name in names:
        similar.setdefault(_plain(name), []).append(name)
    if again := ["/".join(same) for same in similar.values() if len(same) > 1]:
        warnings.warn(
            f"{info.name} has class names that differ only in case, blanks or form: {few(again)}",
            stacklevel=4,
        )


def _plain(name: str) -> str | Decimal:
    """Returns a class name without case, blanks and Unicode form, or its value as a number."""
    letters = unicodedata.normalize("NFKC", name).casefold()
    text = "".join(c for c in letters if not c.isspace() and unicodedata.category(c) != "Cf")
    try:
        return Decimal(text).normalize()
    except ArithmeticError:
        return text


def class_counts(labels: np.ndarray, classes: int) -> np.ndarray:
    """Counts the examples of each class or label, int (K,)."""
    if labels.ndim == 1:
        return np.bincount(labels, minlength=classes)
    return np.count_nonzero(labels, axis=0)


def _with_statistics(info: DataInfo, train: Split) -> DataInfo:
    """Adds mean and deviation of the training numbers, which standardise them."""
    if info.task != "regress" or not len(train):
        return info
    mean_K, std_K = train.labels.mean(0), train.labels.std(0)
    if constant := [n for n, s in zip(info.class_names, std_K, strict=True) if not s > 0]:
        raise ValueError(
            f"{info.name} has one value only in the training images' columns {few(constant)}: "
            "remove them"
        )
    statistics = {"target_mean": tuple(mean_K.tolist()), "target_std": tuple(std_K.tolist())}
    return dataclasses.replace(info, **statistics)


def default_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and std of sets that state none: ImageNet's, or 0.5 and 0.25 for grey."""
    return ((0.5,), (0.25,)) if channels == 1 else (IMAGENET_MEAN, IMAGENET_STD)


def keeps_label_mirrored(name: str) -> bool:
    """Returns whether mirrored images of a public set keep their labels, as no digits do."""
    return "fashion" in name.lower() or not any(word in name.lower() for word in _MIRROR_CHANGES)


def fingerprint(info: DataInfo, content: str, rule: str) -> str:
    """Returns SHA-256 over the content's digest, split rule, image size, channels and classes."""
    body = [content, rule, list(info.image_size), info.channels, list(info.class_names)]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def number_labels(
    labels: Sequence[Any], class_names: Sequence[str] | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the class names, and each example's label as their number, int32 (N,)."""
    if isinstance(class_names, Set | Mapping):
        raise ValueError("class_names must be a list in the order of the labels")
    values = np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind not in "iuUb":
        raise ValueError(
            f"labels must be whole numbers or names; got {values.dtype} {values.shape}: pass "
            "task='multilabel' or task='regress' for several labels or numbers an image"
        )
    if class_names is None and values.dtype.kind == "U":
        class_names = sorted({*map(nfc, values.tolist())})
    elif class_names is None:
        high = int(values.max())
        if high >= _MOST_CLASSES:
            raise ValueError(f"label {high} is above {_MOST_CLASSES - 1:,}: number classes from 0")
        class_names = map(str, range(high + 1))
    names = tuple(map(nfc, class_names))
    if values.dtype.kind == "U":
        # NumPy converts them to text: a missing label of a table would be a class "nan".
        if strange := [label for label in labels if not isinstance(label, str)]:
            raise ValueError(f"labels must be all names or all numbers; got {strange[0]!r} too")
        number = {name: i for i, name in enumerate(names)}
        values = np.array([number.get(nfc(label), -1) for label in labels])
    wrong = (values < 0) | (values >= len(names))
    if wrong.any():
        first = labels[int(np.argmax(wrong))]
        raise ValueError(f"label {first!r} is none of the {len(names)} classes {few(names)}")
    return names, values.astype(np.int32)


def target_rows(
    rows: Sequence[Any] | np.ndarray, class_names: Sequence[str] | None, task: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names of labels or columns, and each example's row of them, float64 (N, K)."""
    wanted = "zeros and ones" if task == "multilabel" else "finite numbers"
    try:
        values = np.asarray(rows, np.float64)
    except (TypeError, ValueError):  # rows of several lengths, or texts
        values = np.zeros(0)
    if values.ndim == 1 and len(values) and task == "regress":
        values = values[:, None]
    names = tuple(map(nfc, class_names or map(str, range(values.shape[-1]))))
    fits = np.isin(values, (0, 1)) if task == "multilabel" else np.isfinite(values)
    if values.ndim != 2 or not fits.all() or not 0 < len({*names}) == len(names) == values.shape[1]:
        raise ValueError(
            f"task={task!r} needs as many {wanted} for each image, and a name for each; got "
            f"{values.shape} and the names {few(names)}"
        )
    return names, values


def describe_copies(digests: Sequence[bytes], names: Sequence[str]) -> str:
    """Counts digests already seen (b'' = unreadable) and names the first copy; '' if none."""
    first: dict[bytes, int] = {}
    copies = [i for i, key in enumerate(digests) if key and first.setdefault(key, i) != i]
    if not copies:
        return ""
    pair = f"{names[copies[0]]} of {names[first[digests[copies[0]]]]}"
    return (
        f"{len(copies):,} of {len(digests):,} images are copies of others, {one_line(pair)} first: "
        "a copy of a test image may be trained on, and one in another class has two labels; "
        "remove them"
    )


def used_as(given: Collection[int]) -> dict[int, int]:
    """Maps each part of a set to the split that it is used as.

    A training part alone is split. Without a test part the validation part is the test split.
    """
    if set(given) == {TRAIN}:
        return {TRAIN: UNSPLIT}
    return {part: TEST if part == VAL and TEST not in given else part for part in given}


def split_rule(parts: np.ndarray, val_fraction: float) -> str:
    """Names the rule by which `assign_splits` splits these parts, for the fingerprint."""
    if np.any(parts == UNSPLIT):
        return f"stratified test={TEST_FRACTION} val={val_fraction}"
    if np.any(parts == VAL):
        return "given train, val and test"
    return f"given train and test, stratified val={val_fraction} of train"


def assign_splits(
    labels: np.ndarray, parts: np.ndarray, val_fraction: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assigns every example to a split, by its index in the data set alone.

    UNSPLIT examples give ``TEST_FRACTION`` of every class to test and ``val_fraction`` to
    validation. With a test part, validation is ``val_fraction`` of each class of the train part,
    or the VAL part if there is one. A class gives at least one example to each held-out split
    while one is left for training; UNSPLIT ones give at least four, or a fifth if that is less.

    Args:
      labels: int (N,).
      parts: int (N,), of TRAIN, VAL, TEST, UNSPLIT.
      val_fraction: from 0 to 0.8.

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
    held_test, held_val = [test], [val]
    for members in _classes(labels, train):
        least = max(1, min(_LEAST_HELD_OUT, len(members) // 5)) if whole else 1
        n_test = _share(len(members), test_fraction, least, len(members) - 1)
        n_val = _share(len(members), val_fraction, least, len(members) - 1 - n_test)
        held_test.append(members[:n_test])
        held_val.append(members[n_test : n_test + n_val])
    test, val = np.concatenate(held_test), np.concatenate(held_val)
    train = np.setdiff1d(train, np.concatenate([test, val]), assume_unique=True)
    if not len(train) or not len(test):
        raise ValueError(
            f"{len(labels)} examples leave {len(train)} for training and {len(test)} for test; "
            "both need at least one: add images, two or more in every class"
        )
    return train, np.sort(val), np.sort(test)


def _classes(labels: np.ndarray, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the indices of each class, in an order that never changes."""
    labels = _strata(labels[indices])
    order = np.lexsort((_scramble(indices), labels))  # one sort, as there may be 22,000 classes
    starts = np.flatnonzero(np.diff(labels[order])) + 1
    yield from np.split(indices[order], starts) if len(order) else ()


def _strata(labels: np.ndarray) -> np.ndarray:
    """Returns what each example is split by, (N,): its class, its rarest label, or nothing."""
    if labels.ndim == 1:
        return labels
    if not np.isin(labels, (0, 1)).all():
        return np.zeros(len(labels))
    rarity_NK = np.where(labels > 0, labels.sum(0)[None], len(labels) + 1)
    return np.where(labels.any(1), rarity_NK.argmin(1), -1)


def _share(count: int, fraction: float, least: int, most: int) -> int:
    """Returns a share of `count`, rounded half up, between `least` and `most`; 0 of fraction 0."""
    if fraction == 0:
        return 0
    return max(0, min(most, max(least, int(count * fraction + 0.5))))


def _scramble(indices: np.ndarray) -> np.ndarray:
    """Hashes each index by SplitMix64; NumPy's generators may change their order (NEP 19)."""
    x = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_batches(
    split: Split, index_batches: Iterator[np.ndarray], *, threads: int = 16, prefetch: int = 4
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the batches of a split in the order of ``index_batches``, which may be endless.

    Args:
      index_batches: integer arrays (n,), n ≥ 1, of indices into the split.
      threads: how many images are read at once.
      prefetch: how many batches are read ahead.

    Yields:
      Images uint8 (n, H, W, C), labels (n,) or (n, K), and indices (n,) of each index batch.
    """
    read = split.images.__getitem__ if split.images is not None else split.read
    pool = ThreadPoolExecutor(threads)
    ahead: deque[tuple[np.ndarray, list[Future[np.ndarray]]]] = deque()

    def submit() -> None:
        if (indices := next(index_batches, None)) is not None:
            ahead.append((indices, [pool.submit(read, index) for index in indices.tolist()]))

    try:
        for _ in range(prefetch):
            submit()
        while ahead:
            indices, images = ahead.popleft()
            submit()
            pixels = np.stack([image.result() for image in images])
            yield pixels, split.labels[indices], indices
    finally:  # no read continues after the stream is closed
        pool.shutdown(cancel_futures=True)
