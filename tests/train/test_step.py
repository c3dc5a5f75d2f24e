"""The compiled step: one program, no copies, the same result in every form and on every mesh."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.small_runs import CLASSES, PLAIN, small_config, small_dataset

from hsvit_jax import train
from hsvit_jax.checkpoint import Checkpoints
from hsvit_jax.train import batches, optim, step
from hsvit_jax.weights.stored import averaged

DATASET = small_dataset()
BATCH = 16
LOOP = "stablehlo.while"
UNEVEN = np.repeat(np.arange(2, dtype=np.int32), [60, 10])


class Trainer:
    """A prepared run with its jitted step, a fresh state and its first batches."""

    def __init__(self, **settings):
        settings = {"augment__mixup": 0.8, "augment__cutmix": 1.0, **settings}
        run = train.prepare(small_config(**settings), dataset=DATASET)
        # Not Adam, which divides by a gradient's size, which may be rounding alone.
        tx = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.05))
        shape = jax.eval_shape(lambda: step.init_state(run.model, tx, run.config))
        run = dataclasses.replace(run, tx=tx, state_shape=shape)
        self.run, self.fresh, self.step = run, step.first_state(run), step.jit_step(run)
        self.batches = list(itertools.islice(batches.source(run, 0), 6))

    def state(self):
        """A fresh state that may be donated."""
        return jax.tree.map(jnp.copy, self.fresh)

    def take(self, steps):
        """The state after some steps, and the metrics of each."""
        state, rows = self.state(), []
        for batch in self.batches[:steps]:
            state, values = self.step(state, batch)
            rows.append(jax.device_get(values))
        return state, rows


@functools.cache
def on_mesh(group, data):
    return Trainer(mesh__group=group, mesh__data=data, train__log_every=3)


def one_device():
    return on_mesh(1, 1)


def assert_same_bits(got, expected):
    got, expected = jax.device_get(got), jax.device_get(expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
def test_resident_and_streamed_batches_are_the_same_and_compile_once(shape):
    """From any step on, over the end of an epoch of 4."""
    trainer = on_mesh(*shape)
    streamed = dataclasses.replace(trainer.run, dataset=small_dataset(streamed=True))
    for number, batch in enumerate(batches.source(streamed, 2), 2):
        assert_same_bits(batch, trainer.batches[number])
    assert number == 5
    trainer.step(trainer.state(), batch)
    programs = trainer.step._cache_size()  # other tests may have given it other states
    trainer.step(trainer.state(), trainer.batches[number])
    assert trainer.step._cache_size() == programs


def test_the_state_is_donated_and_no_copy_of_it_is_made():
    trainer = one_device()
    state = trainer.state()
    memory = trainer.step.lower(state, trainer.batches[0]).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state))
    trainer.step(state, trainer.batches[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_working_memory_does_not_hold_the_data_set():
    count, images = 100_000, DATASET.train.images
    shapes = (
        jax.ShapeDtypeStruct((count, *images.shape[1:]), jnp.uint8),
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )
    memory = batches.make_gather(one_device().run).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.01 * count * images[0].nbytes


@pytest.mark.parametrize("shape", [(2, 4), pytest.param((8, 1), marks=pytest.mark.slow)])
def test_a_run_does_not_depend_on_the_mesh(shape):
    """Augmentation, mixing and dropout included: the same losses, statistics and averages."""
    losses = assert_same_run(on_mesh(*shape).take(3), one_device().take(3))
    assert len(set(losses)) == 3


def test_accelerators_take_the_same_steps(monkeypatch):
    """With their formulas of convolutions and attention, which run here too; for GPUs and TPUs the
    program is lowered only. The loops over slices of `ops.conv` are a CPU's."""
    one = one_device()
    expected, loops = one.take(3), one.step.lower(one.fresh, one.batches[0]).as_text().count(LOOP)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    trainer = Trainer(mesh__group=2, mesh__data=4, train__log_every=3)
    assert_same_run(trainer.take(3), expected)
    traced = trainer.step.trace(trainer.fresh, trainer.batches[0])
    for platform in ("cuda", "tpu"):
        assert traced.lower(lowering_platforms=(platform,)).as_text().count(LOOP) < loops


def assert_same_run(got, expected):
    """Losses and averaged weights of two runs agree but for rounding; returns the losses."""
    (state, rows), (other, others) = got, expected
    losses = [float(row["loss"]) for row in others]
    np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=1e-5)
    averages = (jax.tree.leaves(jax.device_get(averaged(s))) for s in (state, other))
    for a, b in zip(*averages, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(b).max(), 0.1))
    return losses


def test_accumulated_gradients_are_those_of_the_batch():
    """Of pairs of equal examples, in two parts: what one of each pair gives, in less memory."""
    settings = {"augment__mixup": 0.0, "augment__cutmix": 0.0, "train__ema_decay": 0.0}
    plain = Trainer(train__batch=8, **settings)
    parts = Trainer(train__accumulate=2, **settings)
    state, values = plain.step(plain.state(), plain.batches[0])
    pairs = tuple(jnp.repeat(x, 2, 0) for x in plain.batches[0])
    got, summed = parts.step(parts.state(), pairs)
    for name in ("loss", "accuracy", "grad_norm"):
        np.testing.assert_allclose(summed[name], values[name], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(s["params"]) for s in (got, state)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    whole = one_device()
    temporary = [
        t.step.lower(t.state(), whole.batches[0]).compile().memory_analysis().temp_size_in_bytes
        for t in (parts, whole)
    ]
    assert temporary[0] < 0.75 * temporary[1]


def test_late_batches_are_not_mixed():
    """From step 3 of 6 on: the losses of a run with CutMix before, of one without after."""
    until = Trainer(augment__mixup=0.0, augment__mix_probability=1.0, augment__mix_until=0.5)
    plain = Trainer(augment__mixup=0.0, augment__cutmix=0.0)
    assert until.run.total_steps == 6
    for number in (2, 3):
        mixed, unmixed = (
            float(t.step(t.state() | {"step": jnp.int32(number)}, t.batches[0])[1]["loss"])
            for t in (until, plain)
        )
        assert (mixed == pytest.approx(unmixed, rel=1e-6)) == (number == 3)


def test_double_precision_elsewhere_changes_no_state():
    """Before and after a step its arrays have the dtypes that a checkpoint is restored into."""
    run = train.prepare(small_config(train__accumulate=2), dataset=DATASET)
    batch = next(batches.source(run, 0))
    with jax.enable_x64(True):
        first = jax.eval_shape(lambda: step.init_state(run.model, run.tx, run.config))
        after, _ = jax.eval_shape(step.make_train_step(run), first, batch)
    for state in (first, after):
        found, wanted = jax.tree.leaves(state), jax.tree.leaves(run.state_shape)
        assert [x.dtype for x in found] == [x.dtype for x in wanted]


# --- Steps that must not be taken ----------------------------------------------------------------

COUNTERS = ("step", "bad", "skipped", "meter")


def without_counters(state):
    return {k: v for k, v in state.items() if k not in COUNTERS}


def replaced(leaf, value):
    """Where the leaf was: another place would be compiled for anew."""
    return jax.device_put(np.asarray(value, leaf.dtype), leaf.sharding)


def test_a_bad_step_changes_only_the_counters():
    """A parameter of one group that is not finite, and so are loss and gradient; then an update
    that overflows, of a gradient that is finite."""
    trainer = one_device()
    state, _ = trainer.take(1)
    kernel = np.array(state["params"]["groups"]["blocks"]["0"]["out_kernel"])
    meter = jax.tree.map(np.array, state["meter"])

    def put(state, value, moment):
        group = state["params"]["groups"]["blocks"]["0"]
        kernel[7, 0, 0] = value
        group["out_kernel"] = replaced(group["out_kernel"], kernel.copy())
        moments = optax.tree.get(state["opt"], "trace")
        bias = moments["head"]["linear"]["bias"]
        moments["head"]["linear"]["bias"] = replaced(bias, np.full(CLASSES, moment))
        return state | {"opt": optax.tree.set(state["opt"], trace=moments)}

    cases = ((np.nan, 0.0), (np.inf, 0.0), (-np.inf, 0.0), (0.0, 3e38))
    for number, (value, moment) in enumerate(cases, 1):
        before = jax.device_get(state := put(state, value, moment))
        state, values = trainer.step(state, trainer.batches[number])
        assert np.isfinite(values["grad_norm"]) == (value == 0)
        assert_same_bits(without_counters(state), without_counters(before))
        counters = int(state["step"]), int(state["bad"]), int(state["skipped"])
        assert counters == (number + 1, number, number)
        assert (int(values["bad"]), int(values["skipped"])) == (number, number)
        if number == 1:
            assert_same_bits(state["meter"], meter)  # the mean is of the steps that were taken
            assert float(values["loss"]) == pytest.approx(float(meter["loss"]))
    # A good step follows: counted, and no longer in a row.
    _, values = trainer.step(put(state, 0.0, 0.0), trainer.batches[5])
    assert (int(values["bad"]), int(values["skipped"])) == (0, 4)


# --- What a step keeps ---------------------------------------------------------------------------


def test_moving_average():
    """ema ← r·ema + (1 − r)·new, with r = min(decay, (1 + n)/(10 + n)), of params and stats."""
    trainer = one_device()
    decay = trainer.run.config.train.ema_decay
    expected = jax.device_get({k: trainer.fresh[k] for k in ("params", "stats")})
    state = trainer.state()
    for number in range(4):
        state, _ = trainer.step(state, trainer.batches[number])
        rate = min(decay, (1 + number) / (10 + number))
        now = jax.device_get({k: state[k] for k in ("params", "stats")})
        expected = jax.tree.map(lambda a, b, r=rate: r * a + (1 - r) * b, expected, now)
    got = jax.device_get(state["ema"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(np.testing.assert_array_equal, averaged(state)[0], state["ema"]["params"])


def test_metrics_are_means_since_the_last_log_line():
    """log_every=3: the sums start anew at steps 0 and 3."""
    trainer = one_device()
    state, means, losses = trainer.state(), [], []
    for number in range(5):
        alone = jax.tree.map(jnp.copy, state)
        alone["meter"] = jax.tree.map(jnp.zeros_like, alone["meter"])
        batch = trainer.batches[number]
        losses.append(float(trainer.step(alone, batch)[1]["loss"]))
        state, values = trainer.step(state, batch)
        means.append(float(values["loss"]))
    since = [slice(0, 1), slice(0, 2), slice(0, 3), slice(3, 4), slice(3, 5)]
    np.testing.assert_allclose(means, [np.mean(losses[s]) for s in since], rtol=1e-5)
    assert len(set(losses)) == 5


def test_keys_are_of_one_kind_whatever_is_jaxs_default():
    key = jax.random.key_data(step.run_key(3, step.AUGMENT))
    with jax.default_prng_impl("rbg"):
        same = jax.random.key_data(step.run_key(3, step.AUGMENT))
    np.testing.assert_array_equal(same, key)


def test_epoch_orders_are_permutations_that_differ():
    order_of = batches.make_epoch_order(70, 0)
    orders = [np.arange(70), *map(order_of, range(3)), batches.make_epoch_order(70, 1)(0)]
    for order in orders[1:]:
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), orders[0])
    assert len({order.tobytes() for order in np.array(orders, np.int32)}) == 5
    np.testing.assert_array_equal(orders[2], batches.make_epoch_order(70, 0)(1))


def test_repeated_augmentation():
    """A third of the images three times each, apart in a batch, each time with another number."""
    config = small_config(data__repeats=3, **PLAIN | {"train__steps": 5})
    run = train.prepare(config, dataset=DATASET, devices=jax.devices()[:1])
    seen = [next(batches.source(run, number)) for number in range(2)]
    ids = np.concatenate([ids for _, _, ids in seen])
    assert len(np.unique(ids)) == 70 and set(np.bincount(ids % 70)) == {0, 1, 3}
    assert (ids % 70 != np.roll(ids % 70, 1)).all()
    np.testing.assert_array_equal(
        np.concatenate([x for x, _, _ in seen]), DATASET.train.images[ids % 70]
    )
    plain = batches.make_epoch_order(70, 0)(0)
    np.testing.assert_array_equal(np.sort(ids[ids < 70]), np.sort(plain[:24]))
    with pytest.raises(ValueError, match="both choose an epoch"):
        train.prepare(small_config(data__repeats=3, data__balance="sample"), dataset=DATASET)


def test_balanced_draws():
    """Of classes of 60, 9 and 1; every draw of an example in an epoch has a number of its own."""
    labels = np.repeat([0, 2, 5], [60, 9, 1])
    order_of = batches.make_balanced_order(labels, 0)
    first, second = order_of(0), order_of(1)
    for order in (first, second):
        assert order.dtype == np.int32 and len(np.unique(order)) == 70
        drawn = np.bincount(labels[order % 70])
        assert sorted(drawn[[0, 2, 5]]) == [23, 23, 24]
        assert np.bincount(order % 70, minlength=70)[:60].max() == 1
    assert (first != second).any()
    np.testing.assert_array_equal(second, batches.make_balanced_order(labels, 0)(1))


@pytest.mark.parametrize("streamed", [False, True])
def test_balanced_batches(streamed):
    """Resident and streamed, from any step on: images of the draws, with the draws' own numbers."""
    split = small_dataset(streamed=streamed).train
    dataset = dataclasses.replace(DATASET, train=dataclasses.replace(split, labels=UNEVEN))
    config = small_config(data__balance="sample", **PLAIN | {"train__steps": 5})
    run = train.prepare(config, dataset=dataset, devices=jax.devices()[:1])
    order = np.concatenate([batches.make_balanced_order(UNEVEN, 0)(n) for n in range(3)])
    for number, (images, labels, ids) in zip(range(3, 5), batches.source(run, 3), strict=False):
        np.testing.assert_array_equal(ids, order[35 * number : 35 * number + 35])
        np.testing.assert_array_equal(images, DATASET.train.images[np.asarray(ids) % 70])
        np.testing.assert_array_equal(labels, UNEVEN[np.asarray(ids) % 70])
    weights = step.class_weights(run)
    np.testing.assert_allclose(weights[:2], [70 / (2 * 60), 70 / (2 * 10)])


def test_a_class_s_weight_multiplies_its_loss(monkeypatch):
    """Smoothing and all: neither a rare class nor one without images draws examples to it."""

    def apply(params, stats, images, **how):  # of equal logits: log K for each example
        return jnp.zeros((len(images), CLASSES)), stats

    monkeypatch.setattr(step.mesh_lib, "spread", lambda *_: apply)
    dataset = dataclasses.replace(DATASET, train=dataclasses.replace(DATASET.train, labels=UNEVEN))
    config = small_config(
        data__balance="weights", augment__label_smoothing=0.5, train__ema_decay=0.0, **PLAIN
    )
    run = train.prepare(config, dataset=dataset, devices=jax.devices()[:1])
    tx = optax.identity()
    run = dataclasses.replace(run, tx=tx)
    (images, labels, ids), weights = next(batches.source(run, 0)), step.class_weights(run)
    state = step.init_state(run.model, tx, run.config, ({"head": {"bias": jnp.zeros(3)}}, {}))
    loss = step.make_train_step(run)(state, (images, labels, ids))[1]["loss"]
    np.testing.assert_allclose(loss, np.log(CLASSES) * weights[labels].mean(), rtol=1e-5)
    (row,) = step.weighed(jax.nn.one_hot([0], CLASSES), weights, 0.5)
    assert row.argmax() == 0 and (row[1:] == row[1]).all()


@pytest.mark.parametrize("name", optim.DIRECTIONS)
def test_plain_state_goes_there_and_back(name, tmp_path):
    """Of every optimizer, as a checkpoint holds it: dicts of arrays."""
    run = one_device().run
    settings = run.config.optim.copy_and_resolve_references().unlock()
    settings.name = name
    tx = optim.build(settings, run.schedule, run.model)
    shapes = jax.eval_shape(lambda: step.init_state(run.model, tx, run.config))
    plain = step.to_plain(shapes)
    kinds = {type(x) for x in jax.tree.leaves(plain, is_leaf=lambda x: not isinstance(x, dict))}
    assert kinds == {jax.ShapeDtypeStruct}
    leaves, structure = jax.tree.flatten(shapes)
    numbered = structure.unflatten(range(len(leaves)))
    again = step.from_plain(step.to_plain(numbered), shapes)
    assert jax.tree.structure(again) == structure
    assert jax.tree.leaves(again) == list(range(len(leaves)))
    template = step.state_template(dataclasses.replace(run, tx=tx, state_shape=shapes))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), template) == jax.tree.map(
        lambda x: (x.shape, x.dtype), plain
    )
    if name == "muon":  # half of its leaves are masked: empty dicts
        filled = [np.full(x.shape, n, x.dtype) for n, x in enumerate(leaves)]
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(0, step.to_plain(structure.unflatten(filled)), {})
            _, restored, _ = checkpoints.restore(template)
        restored, again = jax.tree.flatten(step.from_plain(restored, shapes))
        assert again == structure
        jax.tree.map(np.testing.assert_array_equal, restored, filled)
