"""The batches of a run, in an order that depends on the seed and the epoch alone."""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import mesh as mesh_lib
from hsvit_jax.data import stream
from hsvit_jax.train.run_spec import Run
from hsvit_jax.train.step import ORDER, Batch, run_key


def source(run: Run, first: int) -> Iterator[Batch]:
    """Yields the batches from step number `first` on, split over the mesh's `data` axis.

    They are gathered on the devices where the training split fits there, else read on the host.
    """
    return (resident if run.dataset.resident else streamed)(run, first)


def make_epoch_order(examples: int, seed: int) -> Callable[[int], np.ndarray]:
    """Compiles `order(epoch)`, a permutation of the examples, int32 (N,)."""
    key = run_key(seed, ORDER)

    @jax.jit
    def order(epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), examples).astype(jnp.int32)

    return lambda epoch: np.asarray(order(jnp.int32(epoch)))


def example_ids(run: Run, first: int) -> Iterator[np.ndarray]:
    """Yields the examples of each batch from step number `first` on, int32 (B,), without end."""
    size, order_of = (
        run.config.train.batch,
        make_epoch_order(len(run.dataset.train), run.config.seed),
    )
    epoch, start = divmod(first, run.steps_per_epoch)
    while True:
        order = order_of(epoch)
        for number in range(start, run.steps_per_epoch):
            yield order[number * size : (number + 1) * size]
        epoch, start = epoch + 1, 0


def make_gather(run: Run) -> Callable[..., Batch]:
    """Jits `gather(images (N, H, W, C), labels (N,), ids (B,))`, which returns the batch of these
    examples of a training split that lies whole on every device."""

    def gather(images: jax.Array, labels: jax.Array, ids_B: jax.Array) -> Batch:
        return images[ids_B], labels[ids_B], ids_B

    return jax.jit(gather, out_shardings=mesh_lib.batch_sharding(run.mesh))


def resident(run: Run, first: int) -> Iterator[Batch]:
    """Yields batches of a training split that is put on every device, whole."""
    split, gather = run.dataset.train, make_gather(run)
    images, labels = (mesh_lib.put_replicated(run.mesh, x) for x in (split.images, split.labels))
    for ids_B in example_ids(run, first):
        yield gather(images, labels, mesh_lib.put_batch(run.mesh, ids_B))


def streamed(run: Run, first: int) -> Iterator[Batch]:
    """Yields the same batches, of which this process reads and decodes only its own rows."""
    size = run.config.train.batch
    rows = mesh_lib.local_rows(run.mesh, size)
    ids = itertools.islice(example_ids(run, first), run.total_steps - first)
    for arrays in stream.stream_batches(run.dataset.train, (ids_B[rows] for ids_B in ids)):
        yield tuple(mesh_lib.put_rows(run.mesh, x, size) for x in arrays)
