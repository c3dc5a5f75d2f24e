"""Batches of a split in a given order, read ahead by threads."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hsvit_jax.data.dataset import Split


def stream_batches(
    split: Split, index_batches: Iterator[np.ndarray], *, threads: int = 16, prefetch: int = 4
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Streams the batches of a split, reading images ahead.

    The order is that of ``index_batches``, whatever the number of threads; batches may differ in
    size, and the iterator may be endless.

    Args:
      index_batches: integer arrays (n,), n ≥ 1, of indices into the split.
      threads: how many images are read at once.
      prefetch: how many batches to read ahead.

    Yields:
      Images uint8 (n, H, W, C), labels int32 (n,) and indices (n,) of each index batch.

    Raises:
      BadImage: a file can no longer be read; it is named.
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
            yield pixels, split.labels[indices].astype(np.int32), indices
    finally:  # where the stream is closed early, nothing goes on in the background
        pool.shutdown(cancel_futures=True)
