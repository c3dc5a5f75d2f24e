"""How fast a data set's image files become batches of a streamed run, by the trainer's stream."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from hsvit_jax import train
from hsvit_jax.data import stream


class Speed(NamedTuple):
    """Images per second of wall time, batch by batch, and per second of one core's time.

    The latter counts what this process computed and not what it waited for, so other work on the
    machine hardly changes it.
    """

    images_per_second: list[float]
    images_per_cpu_second: float
    image_size: tuple[int, int]


def measure(config: ml_collections.ConfigDict, *, steps: int, warmup: int) -> Speed:
    """Reads `warmup` batches of the configuration's training split, then times `steps` more.

    Every image is read from disk, decoded and fitted to data.image_size for the batch it is in,
    however small the data set; nothing is augmented, which is the device's work. Raises ValueError
    for a data set that cannot be read, or that has no files to read.
    """
    if config.data.name == "digits":
        raise ValueError(
            "digits are a part of the package: there are no files to decode; name a folder of "
            "images, as in --config=configs/backbone.py:folder=PATH"
        )
    dataset = train.load_data(config, resident=False)
    batch = config.train.batch
    batches = stream.stream_batches(dataset.train, _indices(len(dataset.train), batch))
    try:
        for _ in itertools.islice(batches, warmup):
            pass
        worked = time.process_time()
        rates = [batch / seconds for seconds in _seconds(batches, steps)]
        worked = time.process_time() - worked
    finally:
        batches.close()
    return Speed(rates, steps * batch / worked, tuple(dataset.info.image_size))


def _indices(examples: int, batch: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(examples, size=batch)


def _seconds(batches: Iterator[Any], steps: int) -> Iterator[float]:
    for _ in range(steps):
        started = time.perf_counter()
        next(batches)
        yield time.perf_counter() - started
