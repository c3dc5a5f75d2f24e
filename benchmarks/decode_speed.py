"""Measures how fast a data set's image files become batches of a streamed run.

python benchmarks/decode_speed.py backbone:folder=PATH,paper train.batch=128
"""

import argparse
import itertools
import json
import time
from typing import Any

import ml_collections
import numpy as np

from hsvit_jax import config as config_lib
from hsvit_jax import train
from hsvit_jax.benchmark import jobs, machine
from hsvit_jax.data import catalog
from hsvit_jax.data.dataset import stream_batches


def measure(
    config: ml_collections.ConfigDict, *, steps: int = 10, warmup: int = 2
) -> dict[str, Any]:
    """Reads `warmup` batches of the training split, then times `steps` more.

    Every image is read from disk, decoded and fitted to data.image_size for the batch it is in,
    however small the data set; nothing is augmented, which is the device's work.

    Args:
        config: as a config file returns it; its train.batch is the batch.

    Returns:
        the fields of the JSON line. `images_per_cpu_second` counts the time that this process
        computed, not what it waited for, so other work on the machine hardly changes it.

    Raises:
        ValueError: the data set cannot be read, or has no files to decode.
    """
    name = config.data.name
    named = catalog.REGISTRY.get(name)
    if named and not named.list_images and name != "imagenet":
        raise ValueError(
            f"{name} is published as arrays of pixels: there are no files to decode; pass a "
            "folder of images, such as --config=configs/backbone.py:folder=PATH"
        )
    dataset = train.load_data(config, resident=False)
    batch = config.train.batch
    rng, examples = np.random.default_rng(0), len(dataset.train)
    ids = (rng.integers(examples, size=batch) for _ in itertools.count())
    batches = stream_batches(dataset.train, ids)
    try:
        for _ in range(warmup):
            next(batches)
        started = time.process_time()
        rates = [batch / seconds for seconds in jobs.timed(lambda: next(batches), steps)]
        cpu_seconds = time.process_time() - started
    finally:
        batches.close()
    return {
        "work": "decode",
        "batch": batch,
        **jobs.summary("images_per_second", rates),
        "images_per_cpu_second": steps * batch / cpu_seconds,
        "steps": steps,
        "peak_memory_bytes": machine.peak_memory(),
        "image_size": list(dataset.info.image_size),
        "data": name,
        **machine.description(),
    }


def main() -> None:
    """Prints the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a configuration, as --config takes it")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    config = config_lib.get_config(given.spec, *given.settings)
    print(json.dumps(measure(config, steps=given.steps)))


if __name__ == "__main__":
    main()
