"""The batches of a run, in an order that depends on the seed and the epoch alone."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import mesh as mesh_lib
from hsvit_jax.data import stream
from hsvit_jax.train.run_spec import Run
from hsvit_jax.train.step import ORDER, Batch, run_key


def make_epoch_order(examples: int, seed: int) -> Callable[[int], np.ndarray]:
    """A compiled epoch → the order of that epoch's examples, int32 (N,)."""
    key = run_key(seed, ORDER)

    @jax.jit
    def order(epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), examples).astype(jnp.int32)

    return lambda epoch: np.asarray(order(jnp.int32(epoch)))


def source(run: Run, first: int) -> Iterator[Batch]:
    """The batches from step number `first` on, split over `data`.

    They are gathered on the devices where the training split lies there, else read on the host.
    """
    return (resident if run.dataset.resident else streamed)(run, first)


def make_gather(run: Run) -> Callable[..., Batch]:
    """A jitted (images (N, H, W, C), labels (N,), order (N,), place) → the batch of the examples
    order[place : place + B], of a training split that lies whole on every device."""
    over_data = mesh_lib.batch_sharding(run.mesh)

    def gather(images: jax.Array, labels: jax.Array, order: jax.Array, place: jax.Array) -> Batch:
        ids_B = jax.lax.dynamic_slice(order, (place,), (run.config.train.batch,))
        ids_B = jax.lax.with_sharding_constraint(ids_B, over_data)
        return images[ids_B], labels[ids_B], ids_B

    return jax.jit(gather, out_shardings=over_data)


def resident(run: Run, first: int) -> Iterator[Batch]:
    """Batches of a training split that is put on every device, whole."""
    split, size = run.dataset.train, run.config.train.batch
    gather, order_of = make_gather(run), make_epoch_order(len(split), run.config.seed)
    images, labels = (mesh_lib.put_replicated(run.mesh, x) for x in (split.images, split.labels))
    epoch, place = divmod(first, run.steps_per_epoch)
    while True:
        order = mesh_lib.put_replicated(run.mesh, order_of(epoch))
        for number in range(place, run.steps_per_epoch):
            yield gather(images, labels, order, number * size)
        epoch, place = epoch + 1, 0


def streamed(run: Run, first: int) -> Iterator[Batch]:
    """The same batches of images that this process reads and decodes as they are needed, its rows
    of each alone."""
    size = run.config.train.batch
    order_of = make_epoch_order(len(run.dataset.train), run.config.seed)
    rows = mesh_lib.local_rows(run.mesh, size)

    def indices() -> Iterator[np.ndarray]:
        epoch, order = -1, np.empty(0, np.int32)
        for number in range(first, run.total_steps):
            now, place = divmod(number, run.steps_per_epoch)
            if now != epoch:
                epoch, order = now, order_of(now)
            yield order[place * size : (place + 1) * size][rows]

    for arrays in stream.stream_batches(run.dataset.train, indices()):
        yield tuple(mesh_lib.put_rows(run.mesh, x, size) for x in arrays)
