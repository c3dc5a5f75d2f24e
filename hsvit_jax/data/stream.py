"""Batches of a split in a given order, read ahead by threads (grain)."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from hsvit_jax.data.dataset import Split

_END = object()


def stream_batches(
    split: Split, index_batches: Iterator[np.ndarray], *, threads: int = 16, prefetch: int = 4
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (images uint8 (n, H, W, C), labels int32 (n,), indices int64 (n,)) per index batch.

    The order is that of ``index_batches``, whatever the number of threads; batches may differ in
    size, and the iterator may be endless. It is drawn from up to ``prefetch`` batches ahead.

    Args:
      split: the split to read.
      index_batches: integer arrays (n,), n ≥ 1, of indices into the split.
      threads: how many images are read at once, at least 1.
      prefetch: how many batches to read ahead, at least 1.

    Raises:
      BadImage: a file can no longer be read; it is named.
      ValueError: an empty batch, or fewer than one thread or prefetched batch.
      IndexError: an index outside the split.
    """
    if threads < 1 or prefetch < 1:
        raise ValueError(f"threads and prefetch must be at least 1, got {threads} and {prefetch}")
    return _stream(split, iter(index_batches), threads, prefetch)


def _stream(
    split: Split, index_batches: Iterator[np.ndarray], threads: int, prefetch: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    import grain

    records = _Records(split, index_batches)
    records.extend(0)
    if not records.sizes:
        return
    # grain counts its buffer in single images.
    options = grain.ReadOptions(threads, prefetch * records.sizes[0])
    images = iter(grain.MapDataset.source(records).to_iter_dataset(options))
    try:
        while (first := next(images)) is not _END:
            size = records.sizes.popleft()
            batch = [first, *(next(images) for _ in range(size - 1))]
            pixels, labels, indices = zip(*batch, strict=True)
            yield np.stack(pixels), np.array(labels, np.int32), np.array(indices, np.int64)
    finally:
        images.close()


class _Records:
    """Single examples by their place in the stream; each place is read once, in any order."""

    def __init__(self, split: Split, index_batches: Iterator[np.ndarray]):
        self.sizes: deque[int] = deque()
        self._split = split
        self._batches = index_batches
        self._lock = threading.Lock()
        self._waiting: dict[int, int] = {}
        self._drawn = 0
        self._ended = False

    def __len__(self) -> int:
        return sys.maxsize  # the end is only known when it is reached

    def extend(self, place: int) -> None:
        """Draws index batches until ``place`` is among them or there are no more."""
        while self._drawn <= place and not self._ended:
            batch = next(self._batches, None)
            if batch is None:
                self._ended = True
                return
            batch = np.asarray(batch)
            if batch.ndim != 1 or not len(batch) or batch.dtype.kind not in "iu":
                raise ValueError(
                    f"an index batch must hold one or more integers (n,), got {batch.dtype} "
                    f"{batch.shape}"
                )
            if batch.min() < 0 or batch.max() >= len(self._split):
                raise IndexError(
                    f"indices {batch.min()}..{batch.max()} do not fit a split of {len(self._split)}"
                )
            self._waiting.update(enumerate(batch.tolist(), self._drawn))
            self._drawn += len(batch)
            self.sizes.append(len(batch))

    def __getitem__(self, place: int) -> Any:
        with self._lock:
            self.extend(place)
            index = self._waiting.pop(place, None)
        if index is None:
            return _END
        split = self._split
        image = split.images[index] if split.images is not None else split.reader.read(index)
        return image, split.labels[index], index
