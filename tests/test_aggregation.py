"""Compressed sums over the mesh: bytes of the compiled program, errors, gradients, residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import small_config, small_dataset

from hsvit_jax import checkpoint, optim, step, train
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.planner import hlo

PARTS, WIDTH, BATCH, EXAMPLES = 8, 7, 12, 17


class Votes:
    """A network that only aggregates: each group's token is its own weights times the image."""

    groups = PARTS
    part_names = ("groups", "head")
    frozen = frozenset()

    def spread_axis(self, path):
        return 0 if path[0] == "groups" else None

    def apply(self, params, stats, images_BD, *, share, **_):
        cls_GBD = params["groups"]["weight"][:, None] * images_BD[None]
        return share.total(cls_GBD) * params["head"]["weight"][None], stats


def values():
    """(params, images): no two devices' sums are alike."""
    rng = np.random.default_rng(4)
    parts = rng.normal(size=(PARTS, WIDTH)) * np.arange(1, PARTS + 1)[:, None]
    params = {
        "groups": {"weight": parts.astype(np.float32)},
        "head": {"weight": np.ones(WIDTH, np.float32)},
    }
    return params, rng.normal(size=(BATCH, WIDTH)).astype(np.float32)


def exact():
    params, images = values()
    return params["groups"]["weight"].sum(0) * images


def placed(group, data):
    """A mesh with `values` where they belong."""
    mesh = mesh_lib.make(
        group, data, groups=PARTS, batch=BATCH, devices=jax.devices()[: group * data]
    )
    params, images = values()
    params = jax.device_put(params, mesh_lib.state_shardings(mesh, params, Votes()))
    return mesh, params, mesh_lib.put_batch(mesh, images)


def transfers(compiled, group):
    return hlo.count(compiled.as_text(), group)[1]


# --- Aggregation ---------------------------------------------------------------------------------


@functools.cache
def forward(aggregate, group, data):
    """The sum on a mesh, and its program's transfers."""
    mesh, params, images = placed(group, data)
    apply = mesh_lib.spread(Votes(), mesh, aggregate)
    compiled = jax.jit(lambda p, x: apply(p, {}, x)[0]).lower(params, images).compile()
    return np.asarray(compiled(params, images)), transfers(compiled, group)


@pytest.mark.parametrize("group, data", [(2, 2), (4, 2), (8, 1)])
@pytest.mark.parametrize("aggregate, row", [("bf16", 2 * WIDTH), ("int8", WIDTH + 4)])
def test_bytes_and_error_of_a_compressed_sum(aggregate, row, group, data):
    """Over a ring an all-to-all and an all-gather move what an all-reduce of their bytes would.

    6 examples on each of 2 data devices are filled up to 8 rows for 4 group devices, 12 to 16.
    """
    total, sent = forward(aggregate, group, data)
    rows = -(-BATCH // data // group) * group
    assert sent == {("group", "all-to-all"): rows * row, ("group", "all-gather"): rows * row}
    params, images = values()
    per_device = params["groups"]["weight"].reshape(group, -1, WIDTH).sum(1)
    votes = np.abs(per_device[:, None] * images)
    if aggregate == "bf16":
        bound = (votes.sum(0) + np.abs(exact())) / 256
    else:
        largest = votes.max(2, keepdims=True).sum(0), np.abs(exact()).max(1, keepdims=True)
        bound = sum(largest) / 254
    error = np.abs(total - exact())
    assert (error <= 1.02 * bound + 1e-6).all()
    assert error.max() > 1e-4


@pytest.mark.parametrize("aggregate", ["bf16", "int8"])
def test_one_group_device_sends_and_loses_nothing(aggregate):
    total, sent = forward(aggregate, 1, 2)
    assert sent == {}
    np.testing.assert_array_equal(total, forward("psum", 1, 2)[0])


@pytest.mark.parametrize("aggregate", ["bf16", "int8"])
def test_the_gradient_passes_straight_through(aggregate):
    """As an all-reduce's, to the bit; and nothing is sent for it over `group`."""
    gradients = []
    for kind in ("psum", aggregate):
        mesh, params, images = placed(4, 2)
        apply = mesh_lib.spread(Votes(), mesh, kind)
        loss = jax.grad(
            lambda p, x, apply=apply: (apply(p, {}, x)[0] * jnp.arange(1.0, 8)[None]).sum()
        )
        compiled = jax.jit(loss).lower(params, images).compile()
        gradients.append(np.asarray(compiled(params, images)["groups"]["weight"]))
    np.testing.assert_array_equal(*gradients)
    assert np.abs(gradients[0]).min() > 0
    assert {kind for axis, kind in transfers(compiled, 4) if axis == "group"} == {
        "all-to-all",
        "all-gather",
    }


# --- Residuals -----------------------------------------------------------------------------------


@functools.cache
def exchange(group, data):
    """A jitted (params, images, ids, feedback, good) → (sum, feedback) of int8 on a mesh."""
    mesh, params, images = placed(group, data)
    apply = mesh_lib.spread(Votes(), mesh, "int8")

    @jax.jit
    def run(params, images, ids, feedback, good):
        total, _, lost = apply(params, {}, images, example_ids_B=ids, feedback_SND=feedback)
        return total, mesh_lib.keep_feedback(mesh, feedback, ids, lost, good)

    def take(ids, feedback, good=True):
        where = mesh_lib.state_shardings(mesh, {mesh_lib.FEEDBACK: feedback})
        feedback = jax.device_put(feedback, where[mesh_lib.FEEDBACK])
        out = run(params, images, mesh_lib.put_batch(mesh, ids), feedback, jnp.bool_(good))
        return jax.tree.map(np.asarray, out)

    return take


def fresh():
    return np.zeros((PARTS, EXAMPLES, WIDTH), np.float32)


IDS = np.array([16, 3, 0, 11, 5, 9, 2, 14, 7, 1, 12, 8], np.int32)


def test_messages_and_residuals_add_up_to_the_truth_on_a_mesh_that_changes():
    """4 group devices, then 8, then 2: nothing of what was owed to an example is forgotten."""
    feedback, told = fresh(), np.zeros((BATCH, WIDTH))
    for taken, shape in enumerate([(4, 2), (4, 2), (8, 1), (2, 2), (4, 2)], start=1):
        total, feedback = exchange(*shape)(IDS, feedback)
        told += total
        owed = feedback.sum(0)[IDS]
        np.testing.assert_allclose(told + owed, taken * exact(), atol=2e-5 * np.abs(exact()).max())
        empty = feedback.reshape(shape[0], PARTS // shape[0], EXAMPLES, WIDTH)[:, 1:]
        assert not empty.any()
        assert not np.delete(feedback, IDS, 1).any()


def test_the_average_message_is_unbiased_with_residuals_and_is_not_without():
    feedback, told, steps = fresh(), 0, 24
    for _ in range(steps):
        total, feedback = exchange(4, 2)(IDS, feedback)
        told = told + total / steps
    without = np.abs(forward("int8", 4, 2)[0] - exact()).max()
    assert np.abs(told - exact()).max() < without / 8


def test_a_step_that_is_not_good_changes_no_residual():
    before = np.array(exchange(4, 2)(IDS, fresh())[1])
    before[1] = 0.125  # as a run on 8 devices would leave it
    _, after = exchange(4, 2)(IDS, before, good=False)
    np.testing.assert_array_equal(after, before)
    _, after = exchange(4, 2)(IDS, before)
    assert (after[:, IDS] != before[:, IDS]).any()


# --- In training ---------------------------------------------------------------------------------


@functools.cache
def trained():
    """A prepared int8 run on 4 × 2, its compiled step and a state after one step."""
    plain = {"augment__crop_padding": 0, "augment__mixup": 0.0, "augment__cutmix": 0.0}
    config = small_config(mesh__group=4, mesh__data=2, mesh__aggregate="int8", **plain)
    run = train.prepare(config, dataset=small_dataset())
    config = run.config
    pure = step.make_train_step(
        run.model,
        optim.build(config.optim, run.total_steps, run.steps_per_epoch),
        step.augment_settings(config),
        run.mesh,
        seed=config.seed,
        steps_per_epoch=run.steps_per_epoch,
        log_every=1,
        ema_decay=config.train.ema_decay,
        aggregate="int8",
    )
    state = step.place_state(run.make_state, run.mesh, run.model)
    jitted = step.jit_step(pure, state, run.mesh, run.model)
    split, ids = run.dataset.train, np.arange(16, dtype=np.int32)
    arrays = (split.images[ids], split.labels[ids], ids)
    batch = tuple(mesh_lib.put_batch(run.mesh, a) for a in arrays)
    state, _ = jitted(state, batch)
    return run, lambda state: jitted(jax.tree.map(jnp.copy, state), batch), state


def test_a_training_state_keeps_residuals_on_their_devices():
    run, _, state = trained()
    feedback = state["feedback"]
    assert feedback.shape == (8, len(run.dataset.train), 8)
    assert {s.data.shape[0] for s in feedback.addressable_shards} == {2}
    held = np.asarray(feedback)
    assert np.abs(held[::2, :16]).max(2).min() > 0
    assert not held[1::2].any() and not held[:, 16:].any()


def test_a_step_that_is_not_finite_keeps_the_residuals():
    _, take, state = trained()
    bias = state["params"]["head"]["linear"]["bias"]
    broken = {**state, "params": {**state["params"]}}
    broken["params"]["head"] = {
        **state["params"]["head"],
        "linear": {**state["params"]["head"]["linear"], "bias": bias.at[0].set(jnp.nan)},
    }
    after, metrics = take(broken)
    assert int(metrics["bad"]) == 1
    np.testing.assert_array_equal(after["feedback"], state["feedback"])
    after, metrics = take(state)
    assert int(metrics["bad"]) == 0
    assert (np.asarray(after["feedback"]) != np.asarray(state["feedback"])).any()


def test_a_checkpoint_gives_residuals_to_any_mesh_but_to_no_other_aggregate(tmp_path):
    run, _, state = trained()
    with checkpoint.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, step.to_plain(state), run.meta, wait=True)
        for group, data in ((8, 1), (1, 1)):
            config = small_config(mesh__group=group, mesh__data=data, mesh__aggregate="int8")
            other = train.prepare(config, dataset=small_dataset())
            template = step.state_template(other.make_state, other.mesh, other.model)
            _, restored, _ = checkpoints.restore(template)
            np.testing.assert_array_equal(restored["feedback"], state["feedback"])
            shards = restored["feedback"].addressable_shards
            assert {s.data.shape[0] for s in shards} == {8 // group}
    with pytest.raises(ValueError, match=r"mesh\.aggregate='int8', now it is 'bf16'.*--workdir"):
        train.train(small_config(mesh__aggregate="bf16"), tmp_path, dataset=small_dataset())


@pytest.mark.parametrize("aggregate", ["psum", "ordered", "bf16"])
def test_no_other_aggregate_has_residuals(aggregate):
    run = train.prepare(small_config(mesh__aggregate=aggregate), dataset=small_dataset())
    assert "feedback" not in jax.eval_shape(run.make_state)
    assert not mesh_lib.has_feedback(mesh_lib.make(8, 1, groups=8), aggregate)
    assert not mesh_lib.has_feedback(mesh_lib.make(1, 8, groups=8), "int8")


# --- Gradients -----------------------------------------------------------------------------------


@functools.cache
def gradient(kind, group, data):
    """Gradients of `Votes` on a mesh, and the transfers of the program."""
    mesh, params, images = placed(group, data)
    apply = mesh_lib.spread(Votes(), mesh, "psum", kind)
    loss = jax.grad(lambda p, x: (apply(p, {}, x, train=True)[0] ** 2).sum() / 3)
    compiled = jax.jit(loss).lower(params, images).compile()
    return jax.device_get(compiled(params, images)), transfers(compiled, group)


def test_bytes_of_compressed_gradients_are_half():
    """One message for what is split over `group` (2 of 8 groups here), one for the head's."""
    _, plain = gradient("float32", 4, 2)
    _, sent = gradient("bf16", 4, 2)
    numbers = {"split": 2 * WIDTH, "whole": WIDTH}
    assert plain["data", "all-reduce"] == 4 * sum(numbers.values())
    filled = sum(n + n % 2 for n in numbers.values())  # up to equal shares for 2 devices
    assert {k: v for k, v in sent.items() if k[0] == "data"} == {
        ("data", "all-to-all"): 2 * filled,
        ("data", "all-gather"): 2 * filled,
    }
    assert {k: v for k, v in sent.items() if k[0] == "group"} == {
        ("group", "all-reduce"): plain["group", "all-reduce"]
    }


def test_error_of_compressed_gradients():
    """2^-8 of the sum and of the sizes of what is summed: the contributions of 4 data devices."""
    expected, _ = gradient("float32", 2, 4)
    got, _ = gradient("bf16", 2, 4)
    images = values()[1]
    grad_BD = 2 / 3 * exact() * images
    sizes = np.abs(grad_BD.reshape(4, -1, WIDTH).sum(1)).sum(0)
    for row, true in zip(got["groups"]["weight"], expected["groups"]["weight"], strict=True):
        np.testing.assert_allclose(true, grad_BD.sum(0), rtol=1e-4)
        assert (np.abs(row - true) <= 1.01 / 256 * (sizes + np.abs(true))).all()
        assert (row != true).any()
    head = 2 / 3 * np.abs((exact() ** 2).reshape(4, -1, WIDTH).sum(1)).sum(0)
    error = np.abs(got["head"]["weight"] - expected["head"]["weight"])
    assert (error <= 1.01 / 256 * 2 * head).all() and error.any()


def test_one_data_device_keeps_its_gradients():
    jax.tree.map(
        np.testing.assert_array_equal, *(gradient(k, 2, 1)[0] for k in ("float32", "bf16"))
    )
    assert gradient("bf16", 2, 1)[1] == gradient("float32", 2, 1)[1]


# --- Mistakes ------------------------------------------------------------------------------------


def test_settings_are_known_wherever_they_are_checked():
    assert config_lib.AGGREGATES == mesh_lib.AGGREGATES
    assert config_lib.GRADIENTS == mesh_lib.GRADIENTS
    mesh = placed(1, 1)[0]
    for key, arguments in (("aggregate", ("fp8",)), ("gradients", ("psum", "fp8"))):
        with pytest.raises(ValueError, match=rf"mesh\.{key} must be one of .*got 'fp8'"):
            mesh_lib.spread(Votes(), mesh, *arguments)
        with pytest.raises(ValueError, match=rf"mesh\.{key} must be one of .*got 'fp8'"):
            train.prepare(small_config(**{f"mesh__{key}": "fp8"}), dataset=small_dataset())
