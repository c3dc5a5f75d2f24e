"""Streams give exactly the asked-for order, whatever the threads, and say which file failed."""

import itertools
import random
import threading
import time

import numpy as np
import pytest

from hsvit_jax.data import BadImage, Split
from hsvit_jax.data.dataset import stream_batches

N = 29


class Reader:
    """Images that hold their own index, read after an unpredictable wait."""

    def __init__(self, bad: int = -1):
        self.bad, self.reads = bad, 0
        self.lock = threading.Lock()

    def __call__(self, index: int) -> np.ndarray:
        with self.lock:
            self.reads += 1
        time.sleep(random.random() * 0.002)
        if index == self.bad:
            raise BadImage("photos/cat_7.jpg: the file is empty")
        return np.full((3, 5, 2), index, np.uint8)


def split(bad: int = -1) -> Split:
    return Split(np.arange(N, dtype=np.int32) % 7, None, Reader(bad))


def test_order_is_that_of_the_index_batches():
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, N, size) for size in (8, 8, 8, 3, 1, 11)]
    pixels = np.broadcast_to(np.arange(N, dtype=np.uint8)[:, None, None, None], (N, 3, 5, 2))
    resident = Split(split().labels, pixels)
    assert list(stream_batches(split(), iter([]))) == []
    for threads, prefetch, source in itertools.product((1, 16), (1, 4), (split(), resident)):
        got = list(stream_batches(source, iter(batches), threads=threads, prefetch=prefetch))
        for (images, labels, indices), expected in zip(got, batches, strict=True):
            np.testing.assert_array_equal(indices, expected)
            np.testing.assert_array_equal(labels, expected % 7)
            np.testing.assert_array_equal(images[:, 2, 4, 1], expected)
            assert images.shape == (len(expected), 3, 5, 2)
            assert (images.dtype, labels.dtype, indices.dtype) == (np.uint8, np.int32, np.int64)


def test_endless_iterators_are_read_ahead_only_so_far():
    source = split()
    drawn = itertools.count()
    endless = (np.full(4, next(drawn) % N) for _ in itertools.repeat(0))
    stream = stream_batches(source, endless, threads=4, prefetch=2)
    for step in range(20):
        assert next(stream)[2].tolist() == [step % N] * 4
    stream.close()
    time.sleep(0.05)
    reads = source.read.reads
    assert next(drawn) < 20 + 2 + 4
    time.sleep(0.05)
    assert source.read.reads == reads  # nothing goes on in the background


def test_errors_name_the_file():
    stream = stream_batches(split(bad=7), iter([np.arange(6), np.arange(6, 12)]))
    assert next(stream)[2].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(BadImage, match=r"photos/cat_7\.jpg"):
        next(stream)
