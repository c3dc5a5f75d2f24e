"""Steps of work to time, as the trainer and the evaluation make them."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from hsvit_jax import augment, data, train
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train import batches, evaluate, step
from hsvit_jax.train.prepare import with_teacher
from hsvit_jax.weights.stored import averaged


class Job(NamedTuple):
    """A repeatable step of some work."""

    take: Callable[[], Any]
    images: int  # per step
    compiled: Any = None  # the step's program, if it is one program
    compile_seconds: float | None = None


def prepare(config: ml_collections.ConfigDict, real_data: bool, devices: list | None) -> Any:
    """Prepares a training run, on random images of the data set's shape unless `real_data`.

    Raises:
        ValueError: the configuration cannot be trained, or its data do not fit in memory.
    """
    dataset = train.load_data(config, training=True) if real_data else _random_dataset(config)
    if not real_data:  # their number must not choose the recipe
        config = config.with_user({**config.user, "recipe": config.recipe})
    run = train.prepare(config, dataset=dataset, devices=devices)
    if not run.dataset.resident:
        raise ValueError(
            f"{run.config.data.name} does not fit in memory: remove --data to time random images"
        )
    return run


def _random_dataset(config: ml_collections.ConfigDict) -> Any:
    """Eight batches of random images, shaped like the configuration's data."""
    info = data.describe(config.data.name, config.data.dir or None, config.data.task)
    resolved = config_lib.resolve(config, info)
    shape = (8 * resolved.train.batch, *resolved.data.image_size, resolved.data.channels)
    rng = np.random.default_rng(0)
    split = data.Split(
        np.arange(shape[0], dtype=np.int32) % info.num_classes,
        rng.integers(256, size=shape, dtype=np.uint8),
    )
    info = dataclasses.replace(info.with_shape(shape[1:3], shape[3]), fit=config.data.fit)
    made = {key: config.data[key] for key in ("val_fraction", "fraction", "on_bad_image")}
    return data.Dataset(info, split, split, split, fingerprint="random", **made)


def compile(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Compiles a jitted function for these arguments; returns it and the seconds."""
    started = time.perf_counter()
    compiled = function.lower(*args).compile()
    return compiled, time.perf_counter() - started


def augmentation(run: Any, augmented: bool) -> augment.Augment:
    """Returns the run's augmentation, or only its normalisation unless `augmented`."""
    full = step.augment_settings(run.config)
    return full if augmented else augment.Augment(full.mean, full.std, full.num_classes)


def train_job(run: Any, augmented: bool) -> Job:
    """Builds the training step, with its gathering of a batch on the devices."""
    run = with_teacher(run)
    state, source = step.first_state(run), batches.resident(run, 0)
    train_step = step.jit_step(run, augmentation(run, augmented))
    compiled, seconds = compile(train_step, state, next(source), *run.lessons)

    def take() -> Any:
        nonlocal state
        state, values = compiled(state, next(source), *run.lessons)
        return state, values

    return Job(take, run.config.train.batch, compiled, seconds)


def input_job(run: Any, augmented: bool) -> Job:
    """Builds the batch of a training step, gathered on the devices and augmented."""
    settings, key = augmentation(run, augmented), step.run_key(run.config.seed, 0)

    @jax.jit
    def draw(batch: Any, key: Any) -> Any:
        mix_key = jax.random.fold_in(key, batch[2][0])
        return augment.train_batch(settings, key, batch[2][0], mix_key, *batch)

    source = batches.resident(run, 0)
    compiled, seconds = compile(draw, next(source), key)
    return Job(lambda: compiled(next(source), key), run.config.train.batch, compiled, seconds)


def infer_job(run: Any, _: bool) -> Job:
    """Builds the evaluation's forward pass on a batch that lies on the devices."""
    batch = run.config.train.batch
    forward = evaluate.make_forward(run.model, run.mesh, run.config, run.config.mesh.aggregate)
    params, stats = averaged(step.first_state(run))
    images = mesh_lib.put_batch(run.mesh, run.dataset.train.images[:batch])
    compiled, seconds = compile(forward, params, stats, images)
    return Job(lambda: compiled(params, stats, images), batch, compiled, seconds)


def eval_job(run: Any, _: bool) -> Job:
    """Builds an evaluation of the test split, from host arrays to counts."""
    config = run.config
    evaluator = evaluate.make_evaluator(run.model, run.mesh, config, config.mesh.aggregate)
    params, stats = averaged(step.first_state(run))
    split, batch = run.dataset.test, config_lib.eval_batch(config)
    return Job(lambda: evaluator(params, stats, split, batch).loss, len(split))


#: Kind of work → its `Job`, of a run and whether images are augmented.
JOBS = {"train": train_job, "infer": infer_job, "input": input_job, "eval": eval_job}


def timed(take: Callable[[], Any], steps: int) -> list[float]:
    """Takes steps, waiting for each; returns their wall-clock seconds."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        jax.block_until_ready(take())
        times.append(time.perf_counter() - started)
    return times


def summary(name: str, values: list[float], spread: str = "") -> dict[str, Any]:
    """Returns the median; minimum, quartiles and maximum as `spread` (default: NAME_spread)."""
    numbers = np.quantile(values, (0, 0.25, 0.75, 1)).tolist()
    ends = dict(zip(("min", "quartile1", "quartile3", "max"), numbers, strict=True))
    return {name: statistics.median(values), spread or f"{name}_spread": ends}
