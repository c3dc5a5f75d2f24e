"""The batches of a run, in an order that depends only on the seed and the epoch."""

import itertools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from hsvit_jax import artifacts, augment, tasks
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.data.dataset import stream_batches
from hsvit_jax.train.run_spec import Run
from hsvit_jax.train.step import AUGMENT, MIX, ORDER, Batch, augment_settings, run_key

_DRAWN = 24  # images in the picture of a batch


def source(run: Run, first: int) -> Iterator[Batch]:
    """Yields the batches from step number `first` on, split over the mesh's `data` axis.

    The devices gather them if they hold the training split; else the host reads them.
    """
    return (resident if run.dataset.resident else streamed)(run, first)


def make_epoch_order(examples: int, seed: int, repeats: int = 1) -> Callable[[int], np.ndarray]:
    """Compiles `order(epoch)`, a permutation of the examples, int32 (N,).

    `repeats` repeats each example of the permutation's beginning. A repeat's number is its index
    plus N per earlier one, so that its augmentation differs.
    """
    key = run_key(seed, ORDER)

    @jax.jit
    def order(epoch: jax.Array) -> jax.Array:
        drawn_N = jax.random.permutation(jax.random.fold_in(key, epoch), examples)
        place_N, turn_N = jnp.divmod(jnp.arange(examples), repeats)
        return (drawn_N[place_N] + examples * turn_N).astype(jnp.int32)

    return lambda epoch: np.asarray(order(jnp.int32(epoch)))


def make_balanced_order(labels_N: np.ndarray, seed: int) -> Callable[[int], np.ndarray]:
    """Compiles `order(epoch)`: N draws, equally many of each class, int32 (N,).

    A class's examples are drawn in turn, in an order of the epoch. A draw is the example's index
    plus N per earlier draw, so that its augmentation differs.
    """
    key, examples = run_key(seed, ORDER), len(labels_N)
    _, class_N, counts_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    starts_K, most = np.cumsum(counts_K) - counts_K, (2**31 - 1) // examples

    @jax.jit
    def order(epoch: jax.Array) -> jax.Array:
        members_key, draws_key = jax.random.split(jax.random.fold_in(key, epoch))
        members_N = jax.random.permutation(members_key, examples)
        members_N = members_N[jnp.argsort(jnp.asarray(class_N)[members_N], stable=True)]
        turn_N, of_N = jnp.divmod(jax.random.permutation(draws_key, examples), len(counts_K))
        count_N = jnp.asarray(counts_K)[of_N]
        drawn_N = members_N[jnp.asarray(starts_K)[of_N] + turn_N % count_N]
        return (drawn_N + examples * (turn_N // count_N % most)).astype(jnp.int32)

    return lambda epoch: np.asarray(order(jnp.int32(epoch)))


def example_ids(run: Run, first: int) -> Iterator[np.ndarray]:
    """Yields the draws of each batch from step number `first` on, int32 (B,), without end."""
    size, seed, split = run.config.train.batch, run.config.seed, run.dataset.train
    repeats = run.config.data.repeats
    if run.config.data.balance == "sample":
        order_of = make_balanced_order(split.labels, seed)
    else:
        order_of = make_epoch_order(len(split), seed, repeats)
    epoch, start = divmod(run.position(first), run.steps_per_epoch)
    while True:
        order = order_of(epoch)
        for number in range(start, run.steps_per_epoch):
            ids_B = order[number * size : (number + 1) * size]
            # Repeats of an image lie apart in a batch, as MixUp and CutMix mix neighbours.
            yield np.concatenate([ids_B[turn::repeats] for turn in range(repeats)])
        epoch, start = epoch + 1, 0


def make_gather(run: Run) -> Callable[..., Batch]:
    """Jits `gather(images (N, H, W, C), labels (N,), ids (B,))` → the batch of these draws."""
    data = run.config.data
    repeats = data.balance == "sample" or data.repeats > 1

    def gather(images: jax.Array, labels: jax.Array, ids_B: jax.Array) -> Batch:
        rows_B = ids_B % len(labels) if repeats else ids_B
        return images[rows_B], labels[rows_B], ids_B

    return jax.jit(gather, out_shardings=mesh_lib.batch_sharding(run.mesh))


def resident(run: Run, first: int) -> Iterator[Batch]:
    """Yields batches of a training split that every device holds whole."""
    split, gather = run.dataset.train, make_gather(run)
    arrays = split.images, tasks.of(run.config).encode(split.labels)
    images, labels = (mesh_lib.put_replicated(run.mesh, x) for x in arrays)
    for ids_B in example_ids(run, first):
        yield gather(images, labels, mesh_lib.put_batch(run.mesh, ids_B))


def streamed(run: Run, first: int) -> Iterator[Batch]:
    """Yields the same batches; this process reads and decodes only its own rows."""
    size = run.config.train.batch
    rows = mesh_lib.local_rows(run.mesh, size)
    split, encode = run.dataset.train, tasks.of(run.config).encode
    draws = itertools.islice(example_ids(run, first), run.total_steps - first)
    ids, again = itertools.tee(ids_B[rows] for ids_B in draws)
    read = stream_batches(split, (ids_B % len(split) for ids_B in ids))
    for (images, labels, _), ids_B in zip(read, again, strict=True):
        batch = images, encode(labels), ids_B
        yield tuple(mesh_lib.put_rows(run.mesh, x, size) for x in batch)


def augmented(
    config: ml_collections.ConfigDict, number: int, *batch: np.ndarray, late: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Augments a batch of images, labels and ids with the draws of step and epoch `number`.

    Returns:
        uint8 images and their targets (B, K).
    """
    settings = augment_settings(config)
    augment_key, mix_key = (run_key(config.seed, use) for use in (AUGMENT, MIX))
    keys = augment_key, number, jax.random.fold_in(mix_key, number)
    made = jax.jit(augment.train_batch, static_argnums=0)
    x_BHWC, targets_BK = map(np.asarray, made(settings, *keys, *batch, late))
    pixels = np.round(255 * (x_BHWC * np.asarray(settings.std) + np.asarray(settings.mean)))
    return np.clip(pixels, 0, 255).astype(np.uint8), targets_BK


def draw_first(run: Run, path: Path) -> None:
    """Draws images of the first batch as the network sees them, augmented, with targets."""
    config, split = run.config, run.dataset.train
    ids_B = next(example_ids(run, 0))
    rows_B = ids_B % len(split)
    batch = split.gather(rows_B), split.labels[rows_B], ids_B
    late = not round(config.augment.mix_until * run.total_steps)
    images, targets_BK = augmented(config, 0, *batch, late=late)
    rows = -(-min(len(images), _DRAWN) // 6)
    figure = artifacts.figure(8.4, 1.7 * rows)
    drawn = zip(images[:_DRAWN], targets_BK, strict=False)
    for place, (image_HWC, target_K) in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, 6, place, xticks=[], yticks=[])
        axes.imshow(image_HWC.squeeze(), cmap="gray", vmin=0, vmax=255)
        text = tasks.of(config).text(target_K, run.dataset.info.class_names)
        text = textwrap.fill(text, 24, max_lines=3)
        axes.set_title(text, fontsize=6, parse_math=False)
    artifacts.save_figure(figure, path)
