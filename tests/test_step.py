"""The compiled step: one program, no copies, the same result in every form and on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import CLASSES, small_config, small_dataset

from hsvit_jax import augment, train
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train import batches, step

DATASET = small_dataset()
IMAGES, LABELS = DATASET.train.images, DATASET.train.labels
BATCH = 16


class Trainer:
    """A prepared run with its jitted step, and its batches from the devices or the host."""

    def __init__(self, *, dataset=DATASET, sgd=False, **settings):
        run = train.prepare(small_config(**settings), dataset=dataset)
        if sgd:  # Adam divides by the size of a gradient, which may be rounding alone
            tx = optax.sgd(0.05)
            shape = jax.eval_shape(lambda: step.init_state(run.model, tx, run.config))
            run = dataclasses.replace(run, tx=tx, state_shape=shape)
        self.run, self.fresh = run, step.first_state(run)
        self.step = step.jit_step(run)
        self.gather = batches.make_gather(run)
        self.images = mesh_lib.put_replicated(run.mesh, dataset.train.images)
        self.labels = mesh_lib.put_replicated(run.mesh, dataset.train.labels)
        self.order_of = batches.make_epoch_order(len(dataset.train), run.config.seed)

    def state(self):
        """A fresh state that may be donated."""
        return jax.tree.map(jnp.copy, self.fresh)

    def batch(self, number, streamed=False):
        """The batch of a step, gathered on the devices or put there from the host."""
        epoch, place = divmod(number, self.run.steps_per_epoch)
        ids = self.order_of(epoch)[place * BATCH : (place + 1) * BATCH]
        if not streamed:
            ids = mesh_lib.put_batch(self.run.mesh, ids)
            return self.gather(self.images, self.labels, ids)
        arrays = (IMAGES[ids], LABELS[ids], ids)
        return tuple(mesh_lib.put_batch(self.run.mesh, a) for a in arrays)

    def take(self, state, steps, streamed=False):
        """State and metrics of each step."""
        rows = []
        for number in range(steps):
            state, values = self.step(state, self.batch(number, streamed))
            rows.append(jax.device_get(values))
        return state, rows


@functools.cache
def one_device():
    return Trainer(train__log_every=3)


def assert_same_bits(got, expected):
    got, expected = jax.device_get(got), jax.device_get(expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def test_resident_and_streamed_give_the_same_bits_and_compile_once(bits_of_a_run):
    trainer = one_device()
    one, rows = trainer.take(trainer.state(), 5)
    other, streamed_rows = trainer.take(trainer.state(), 5, streamed=True)
    assert_same_bits(one, other)
    assert_same_bits(rows, streamed_rows)
    assert trainer.step._cache_size() == trainer.gather._cache_size() == 1


def test_the_state_is_donated_and_the_data_set_is_not_copied():
    trainer = one_device()
    state = trainer.state()
    memory = trainer.step.lower(state, trainer.batch(0)).compile().memory_analysis()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= state_bytes
    trainer.step(state, trainer.batch(0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not trainer.images.is_deleted()


def test_working_memory_does_not_hold_the_data_set():
    trainer = one_device()
    count = 100_000
    shapes = (
        jax.ShapeDtypeStruct((count, *IMAGES.shape[1:]), jnp.uint8),
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )
    memory = trainer.gather.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.01 * count * IMAGES[0].nbytes


@functools.cache
def sgd_losses(group, data):
    trainer = Trainer(sgd=True, mesh__group=group, mesh__data=data)
    state, rows = trainer.take(trainer.state(), 3)
    assert trainer.step._cache_size() == trainer.gather._cache_size() == 1
    return [float(row["loss"]) for row in rows], jax.device_get(step.averaged(state))


@pytest.mark.parametrize("shape", [(2, 4), pytest.param((8, 1), marks=pytest.mark.slow)])
def test_a_run_does_not_depend_on_the_mesh(shape):
    """Augmentation, mixing and dropout included: the same losses, statistics and averages."""
    expected, expected_average = sgd_losses(1, 1)
    losses, average = sgd_losses(*shape)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(average), jax.tree.leaves(expected_average), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(b).max(), 0.1))
    assert len(set(expected)) == 3


def test_augmented_batch_does_not_depend_on_the_mesh():
    settings = step.augment_settings(one_device().run.config)
    ids = one_device().order_of(0)[:BATCH]
    keys = (step.run_key(0, 2), step.run_key(0, 3))

    @jax.jit
    def make(images, labels, ids):
        return augment.train_batch(settings, *keys, images, labels, ids)

    made = []
    for data in (1, 8):
        mesh = mesh_lib.make(1, data, groups=8)
        arrays = (mesh_lib.put_batch(mesh, a) for a in (IMAGES[ids], LABELS[ids], ids))
        made.append(make(*arrays))
    assert_same_bits(*made)


# --- Steps that must not be taken ----------------------------------------------------------------

COUNTERS = ("step", "bad", "skipped", "meter")


def without_counters(state):
    return {k: v for k, v in state.items() if k not in COUNTERS}


def test_a_bad_step_changes_only_the_counters():
    """A NaN among the parameters: loss and gradient are not finite."""
    trainer = one_device()
    state, _ = trainer.take(trainer.state(), 1)
    state["params"]["head"]["linear"]["bias"] = (
        state["params"]["head"]["linear"]["bias"].at[0].set(jnp.nan)
    )
    before = jax.device_get(state)
    number = 1
    for bad in (1, 2):
        state, values = trainer.step(state, trainer.batch(number))
        number += 1
        assert_same_bits(without_counters(state), without_counters(before))
        assert (int(state["step"]), int(state["bad"]), int(state["skipped"])) == (number, bad, bad)
        assert (int(values["bad"]), int(values["skipped"])) == (bad, bad)
    assert_same_bits(state["meter"], before["meter"])  # the mean is of the steps that were taken
    assert float(values["loss"]) == pytest.approx(float(before["meter"]["loss"]))
    # A good step follows: counted, and no longer in a row.
    state["params"]["head"]["linear"]["bias"] = jnp.zeros(CLASSES)
    state, values = trainer.step(state, trainer.batch(number))
    assert (int(values["bad"]), int(values["skipped"])) == (0, 2)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_is_a_bad_step(value):
    """In a leaf of the groups, whose gradient another device may hold."""
    trainer = one_device()
    state = trainer.state()
    kernel = state["params"]["groups"]["blocks"]["0"]["out_kernel"]
    state["params"]["groups"]["blocks"]["0"]["out_kernel"] = kernel.at[7, 0, 0].set(value)
    before = jax.device_get(state)
    state, values = trainer.step(state, trainer.batch(0))
    assert_same_bits(without_counters(state), without_counters(before))
    assert int(values["bad"]) == 1


def test_an_update_that_overflows_is_a_bad_step():
    """Loss and gradient are finite, the parameters after it would not be."""
    trainer = one_device()
    state = trainer.state()
    moment = optax.tree.get(state["opt"], "mu")
    moment["head"]["linear"]["bias"] = jnp.full(CLASSES, 3e38)
    state["opt"] = optax.tree.set(state["opt"], mu=moment)
    before = jax.device_get(state)
    state, values = trainer.step(state, trainer.batch(0))
    assert np.isfinite(values["grad_norm"]) and int(values["bad"]) == 1
    assert_same_bits(without_counters(state), without_counters(before))


# --- What a step keeps ---------------------------------------------------------------------------


def test_moving_average():
    """ema ← r·ema + (1 − r)·new, with r = min(decay, (1 + n)/(10 + n)), of params and stats."""
    trainer = one_device()
    decay = trainer.run.config.train.ema_decay
    assert decay == 0.98
    expected = jax.device_get({k: trainer.fresh[k] for k in ("params", "stats")})
    state = trainer.state()
    for number in range(4):
        state, _ = trainer.step(state, trainer.batch(number))
        rate = min(decay, (1 + number) / (10 + number))
        now = jax.device_get({k: state[k] for k in ("params", "stats")})
        expected = jax.tree.map(lambda a, b, r=rate: r * a + (1 - r) * b, expected, now)
    got = jax.device_get(state["ema"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(np.testing.assert_array_equal, step.averaged(state)[0], state["ema"]["params"])


def test_metrics_are_means_since_the_last_log_line():
    """log_every=3: the sums start anew at steps 0 and 3."""
    trainer = one_device()
    state, means, losses = trainer.state(), [], []
    for number in range(5):
        alone = jax.tree.map(jnp.copy, state)
        alone["meter"] = jax.tree.map(jnp.zeros_like, alone["meter"])
        batch = trainer.batch(number)
        losses.append(float(trainer.step(alone, batch)[1]["loss"]))
        state, values = trainer.step(state, batch)
        means.append(float(values["loss"]))
    since = [slice(0, 1), slice(0, 2), slice(0, 3), slice(3, 4), slice(3, 5)]
    np.testing.assert_allclose(means, [np.mean(losses[s]) for s in since], rtol=1e-5)
    assert len(set(losses)) == 5


def test_epoch_orders_are_permutations_that_differ():
    order_of = batches.make_epoch_order(70, 0)
    orders = [order_of(epoch) for epoch in range(3)]
    for order in orders:
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(70))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])
    assert not np.array_equal(orders[0], np.arange(70))
    np.testing.assert_array_equal(orders[1], batches.make_epoch_order(70, 0)(1))
    assert not np.array_equal(orders[0], batches.make_epoch_order(70, 1)(0))


def test_plain_state_goes_there_and_back():
    trainer = one_device()
    plain = step.to_plain(trainer.fresh)
    kinds = {type(x) for x in jax.tree.leaves(plain, is_leaf=lambda x: not isinstance(x, dict))}
    assert all(issubclass(kind, jax.Array) for kind in kinds)
    assert_same_bits(step.from_plain(plain, trainer.fresh), trainer.fresh)
    template = step.state_template(trainer.run)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), template) == jax.tree.map(
        lambda x: (x.shape, x.dtype), plain
    )
