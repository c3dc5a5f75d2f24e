"""Splits are disjoint, complete, stratified and fixed; streams keep the order that they get."""

import itertools
import random
import threading
import time

import numpy as np
import pytest
from support.small_runs import small_dataset

from hsvit_jax.data import BadImage, Split
from hsvit_jax.data.dataset import TEST, TRAIN, UNSPLIT, VAL, assign_splits, stream_batches


def parts(*counts_and_codes):
    return np.concatenate([np.full(n, code, np.int8) for n, code in counts_and_codes])


GIVEN = (
    parts((211, UNSPLIT)),
    parts((150, TRAIN), (61, TEST)),
    parts((150, TRAIN), (30, VAL), (31, TEST)),
)


def test_disjoint_and_complete():
    labels = np.arange(211) * 7 % 5
    for given, val_fraction in itertools.product(GIVEN, (0, 0.1, 0.37, 0.8)):
        train, val, test = assign_splits(labels, given, val_fraction)
        together = np.concatenate([train, val, test])
        np.testing.assert_array_equal(np.sort(together), np.arange(211))
        for split in (train, val, test):
            assert (np.diff(split) > 0).all()
        if VAL in given:
            np.testing.assert_array_equal(val, np.flatnonzero(given == VAL))
        else:
            wanted = np.bincount(labels[(given == TRAIN) | (given == UNSPLIT)]) * val_fraction
            np.testing.assert_allclose(np.bincount(labels[val], minlength=5), wanted, atol=0.51)
        if UNSPLIT in given:
            np.testing.assert_allclose(np.bincount(labels[test]), 4, atol=0.51)


def test_the_choice_is_fixed_for_good():
    _, val, test = assign_splits(np.zeros(40, int), parts((40, UNSPLIT)), 0.1)
    assert (val.tolist(), test.tolist()) == ([2, 11, 14, 24], [16, 19, 29, 30])


def test_small_classes_give_four_or_a_fifth():
    for count, held in ((20, 4), (40, 4), (12, 2)):
        labels, given = np.repeat([0, 1], count), parts((2 * count, UNSPLIT))
        splits = assign_splits(labels, given, 0.1)
        assert [np.bincount(labels[ids]).tolist() for ids in splits[1:]] == [[held] * 2] * 2

    labels = np.array([0, 1, 1, 2, 2, 2])  # an example stays for training
    splits = assign_splits(labels, parts((6, UNSPLIT)), 0.1)
    assert [labels[ids].tolist() for ids in splits] == [[0, 1, 2], [2], [1, 2]]


def test_without_training_or_test_examples():
    with pytest.raises(ValueError, match="2 examples leave 2 for training and 0 for test"):
        assign_splits(np.array([0, 1]), parts((2, UNSPLIT)), 0.1)
    with pytest.raises(ValueError, match="leave 0 for training"):
        assign_splits(np.array([0, 1]), parts((2, TEST)), 0.1)


@pytest.mark.parametrize("streamed", [False, True])
def test_smaller_shares_lie_within_larger_ones(streamed):
    whole = small_dataset((350, 70, 23), streamed=streamed)
    assert whole.subset(1.0) is whole
    seen, prints = None, {whole.fingerprint}
    for fraction in (0.5, 0.1, 0.02):
        part = whole.subset(fraction)
        images = {x.tobytes() for x in part.train.gather(range(len(part.train)))}
        assert len(images) == len(part.train) and (seen is None or images < seen)
        wanted = max(round(50 * fraction), 1)
        assert np.bincount(part.train.labels).tolist() == [wanted] * 7
        assert np.bincount(part.val.labels).tolist() == [max(round(10 * fraction), 1)] * 7
        assert part.test is whole.test and part.resident is not streamed
        seen = images
        prints.add(part.fingerprint)
    assert len(prints) == 4
    with pytest.raises(ValueError, match=r"of a subset of 0\.02: take it of the whole set"):
        part.subset(0.5)


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
