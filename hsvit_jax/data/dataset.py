"""What a data set is once loaded: its description, its three splits, and its fingerprint."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class DataInfo:
    """Name, default size, channels, class names and normalisation of a data set.

    Label ``i`` is ``class_names[i]``. ``mean`` and ``std`` are per channel, in units where a
    pixel runs from 0 to 1. ``flip`` says whether a mirrored image keeps its label.
    """

    name: str
    image_size: tuple[int, int]
    channels: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""
        return len(self.class_names)

    def with_shape(self, image_size: tuple[int, int], channels: int) -> "DataInfo":
        """The same description for another size or channel count; mean and std follow."""
        mean, std = self.mean, self.std
        if channels != self.channels:
            if channels == 1:
                mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
            else:
                mean, std = mean[:1] * channels, std[:1] * channels
        return dataclasses.replace(
            self, image_size=image_size, channels=channels, mean=mean, std=std
        )


class ImageReader(Protocol):
    """Reads one decoded image of a streamed split; safe to call from several threads."""

    def read(self, index: int) -> np.ndarray:
        """Image ``index`` as uint8 (H, W, C)."""
        ...


@dataclass(frozen=True)
class Split:
    """Labels int32 (N,), and images uint8 (N, H, W, C) or a reader of them."""

    labels: np.ndarray
    images: np.ndarray | None
    reader: ImageReader | None

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The images at ``indices`` (n,), in that order, as uint8 (n, H, W, C).

        Raises:
          IndexError: an index is negative or not smaller than the number of examples.
          BadImage: a streamed file can no longer be read.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.ndim != 1:
            raise ValueError(f"indices must be one-dimensional, got shape {indices.shape}")
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(
                f"indices {indices.min()}..{indices.max()} do not fit a split of {len(self)}"
            )
        if self.images is not None:
            return self.images[indices]
        if not len(indices):
            raise ValueError("cannot gather zero images from a streamed split")
        with ThreadPoolExecutor(min(16, len(indices))) as pool:
            return np.stack(list(pool.map(self.reader.read, indices.tolist())))


@dataclass(frozen=True)
class Dataset:
    """Three disjoint splits and the identity of what is in them.

    ``val`` is held out of the training examples; ``test`` is for evaluation only.
    ``fingerprint`` is a SHA-256 over the content, the split rule, the image size, the channels
    and the class names: equal for equal data, wherever it lies.
    """

    info: DataInfo
    train: Split
    val: Split
    test: Split
    fingerprint: str

    @property
    def resident(self) -> bool:
        """True when the images are arrays in memory, False when they are read as needed."""
        return self.train.images is not None


def fingerprint(info: DataInfo, content: str, rule: str) -> str:
    """SHA-256 hex over the content's own digest, the split rule, shape and class names."""
    body = [content, rule, list(info.image_size), info.channels, list(info.class_names)]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
