"""The mesh: the same numbers however it is cut, and no more communication than was meant."""

import functools

import jax
import ml_collections
import numpy as np
import optax
import pytest
from support.small_runs import made_up_values, small_config, small_dataset

from hsvit_jax import augment, train
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.models.hsvit.hsvit import HSViT, HSViTConfig
from hsvit_jax.planner import hlo
from hsvit_jax.train import evaluate, step

BATCH, CLASSES, EMBED = 16, 7, 12
SLOW = pytest.mark.slow
#: group × data
SHAPES = [(2, 4), pytest.param((1, 8), marks=SLOW), pytest.param((8, 1), marks=SLOW)]
CONFIG = ml_collections.ConfigDict({"data": {"mean": (0.5,) * 3, "std": (0.25,) * 3}, "eval": {}})
MODEL = HSViT(
    HSViTConfig(
        image_size=(12, 8),
        image_channels=3,
        num_classes=CLASSES,
        conv_channels=(32,),
        conv_kernels=(3,),
        pool_strides=(4,),
        groups=8,
        depth=2,
        embed_dim=EMBED,
        heads=3,
        dropout=0.2,
    )
)


def make_mesh(group: int, data: int):
    return mesh_lib.make(group, data, groups=8, batch=BATCH)


def inputs():
    """A network with statistics that are not the initial ones, and a batch."""
    params, stats = made_up_values(MODEL)
    rng = np.random.default_rng(2)
    images = rng.normal(size=(BATCH, 12, 8, 3)).astype(np.float32)
    labels = rng.integers(CLASSES, size=BATCH).astype(np.int32)
    ids = rng.permutation(1000)[:BATCH].astype(np.int32)
    return params, stats, images, labels, ids


def make_loss(apply):
    def loss(params, stats, images, labels, ids):
        logits, stats = apply(
            params, stats, images, train=True, dropout_key=jax.random.key(5), example_ids_B=ids
        )
        losses_B = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses_B.mean(), (logits, stats)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def placed(mesh, params, stats, *arrays):
    """The same inputs, where the mesh wants them."""
    params = jax.device_put(params, mesh_lib.state_shardings(mesh, params))
    stats = jax.device_put(stats, mesh_lib.replicated(mesh))
    return params, stats, *(mesh_lib.put_batch(mesh, a) for a in arrays)


@functools.cache
def unsharded():
    """The loss function on one device, without any mesh, and its results; run once."""
    loss = make_loss(MODEL.apply)
    return loss, jax.device_get(loss(*inputs()))


@functools.cache
def trained(group: int, data: int):
    """Loss, logits, statistics and gradients on a mesh, and the program that computed them."""
    mesh = make_mesh(group, data)
    arguments = placed(mesh, *inputs())
    compiled = make_loss(mesh_lib.spread(MODEL, mesh)).lower(*arguments).compile()
    return jax.device_get(compiled(*arguments)), compiled.as_text()


@functools.cache
def evaluated(group: int, data: int):
    """Logits of the evaluation's forward on a mesh, and the program that computed them."""
    mesh = make_mesh(group, data)
    params, stats, images, _, _ = inputs()
    arguments = placed(mesh, params, stats, to_pixels(images))
    forward = evaluate.make_forward(MODEL, mesh, CONFIG)
    compiled = forward.lower(*arguments).compile()
    return jax.device_get(compiled(*arguments)), compiled.as_text()


def to_pixels(images):
    """Bytes that normalise to about the same values."""
    return np.clip((images * 0.25 + 0.5) * 255, 0, 255).astype(np.uint8)


def assert_close(got, expected, tolerance=1e-5):
    """Each tensor to `tolerance` of its largest entry."""
    expected_flat, tree = jax.tree_util.tree_flatten_with_path(expected)
    got_flat, got_tree = jax.tree_util.tree_flatten_with_path(jax.device_get(got))
    assert got_tree == tree
    for (path, a), (_, b) in zip(got_flat, expected_flat, strict=True):
        error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
        assert error < tolerance, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("shape", SHAPES)
def test_sharded_training_and_evaluation_equal_unsharded(shape):
    assert_close(trained(*shape)[0], unsharded()[1])  # loss, logits, statistics, every gradient
    params, stats, images, _, _ = inputs()
    x_BHWC = augment.normalise(to_pixels(images), (0.5,) * 3, (0.25,) * 3)
    expected = jax.device_get(jax.jit(MODEL.apply)(params, stats, x_BHWC)[0])
    assert_close(evaluated(*shape)[0], expected)


def test_the_comparison_sees_dropout():
    """The masks are part of it: other examples are given others."""
    params, stats, images, labels, ids = inputs()
    loss, ((_, (one, _)), _) = unsharded()
    (_, (other, _)), _ = loss(params, stats, images, labels, ids + 1)
    assert np.abs(one - other).max() > 1e-2 * np.abs(one).max()


# --- Communication of the compiled programs ------------------------------------------------------


def collectives(text: str, group: int) -> list[tuple[str, str, int]]:
    """(axis, kind, bytes) of every collective; there is none in a loop or another computation."""
    found = [(o.axis, o.kind, o.bytes) for o in hlo.overlaps(text, group)]
    assert sum(size for *_, size in found) == sum(hlo.count(text, group)[1].values())
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation_has_one_all_reduce_over_group_and_nothing_else(shape):
    """The sum of the groups' CLS tokens: batch/data × embed × 4 bytes."""
    group, data = shape
    expected = [("group", "all-reduce", BATCH // data * EMBED * 4)] * (group > 1)
    assert collectives(evaluated(*shape)[1], group) == expected


@pytest.mark.parametrize("shape", [(2, 4), pytest.param((8, 1), marks=SLOW)])
def test_backward_adds_one_all_reduce_over_group(shape):
    """The gradient of the tokens; none over both axes at once."""
    group, data = shape
    found = collectives(trained(*shape)[1], group)
    assert {kind for _, kind, _ in found} == {"all-reduce"}
    over_group = [size for axis, _, size in found if axis == "group"]
    cls, tokens = BATCH // data * EMBED * 4, 8 * (32 // 8)
    assert over_group == [cls, tokens * cls]
    assert {axis for axis, *_ in found} == ({"group", "data"} if data > 1 else {"group"})


# --- Where things live ---------------------------------------------------------------------------


def test_groups_live_on_their_own_devices():
    """Parameters, optimizer moments and the moving average: each device holds G/g groups."""
    config = small_config(mesh__group=4, mesh__data=2)
    run = train.prepare(config, dataset=small_dataset())
    state = step.first_state(run)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    split = [path for path, _ in leaves if "groups" in [getattr(k, "key", None) for k in path]]
    assert len(split) == 4 * len(jax.tree.leaves(state["params"]["groups"]))
    for path, leaf in leaves:
        expected = (8 // 4, *leaf.shape[1:]) if path in split else leaf.shape
        assert len(leaf.addressable_shards) == 8
        assert {s.data.shape for s in leaf.addressable_shards} == {expected}, path


def test_make_fills_in_the_rest():
    assert dict(mesh_lib.make(1, -1, groups=16, batch=8).shape) == {"data": 8, "group": 1}
    assert dict(mesh_lib.make(-1, 2, groups=16, batch=8).shape) == {"data": 2, "group": 4}
    assert dict(mesh_lib.make(-1, 1, groups=4, batch=8).shape) == {"data": 1, "group": 4}
    assert dict(mesh_lib.make(-1, 8, groups=0, batch=8).shape) == {"data": 8, "group": 1}
    three = jax.devices()[:3]
    assert dict(mesh_lib.make(-1, 1, groups=16, batch=8, devices=three).shape)["group"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"group": 3, "data": 1, "groups": 16}, ["16 groups", "3 devices", "[1, 2, 4, 8, 16]"]),
        ({"group": 16, "data": 1, "groups": 16}, ["mesh.group=16", "8", "-1"]),
        ({"group": 4, "data": 4, "groups": 16}, ["mesh.data=4", "mesh.group=4", "16", "8"]),
        ({"group": 2, "data": 1, "groups": 0}, ["0 groups", "2 devices", "[1]"]),
        ({"group": 1, "data": 8, "groups": 16, "batch": 12}, ["12", "data=8", "at most 6"]),
        ({"group": 1, "data": -1, "groups": 16, "batch": 10}, ["10", "mesh.data=8", "at most 5"]),
        (
            {"group": 1, "data": 8, "groups": 16, "batch": 48, "accumulate": 4},
            ["a batch of 48 in train.accumulate=4 parts", "multiple of 32", "at most 6"],
        ),
        ({"group": -1, "data": -1, "groups": 16}, ["only one", "mesh.group", "mesh.data"]),
        ({"group": 0, "data": 1, "groups": 16}, ["mesh.group", "positive", "0"]),
        ({"group": 1, "data": -2, "groups": 16}, ["mesh.data", "positive", "-2"]),
        ({"group": 8, "data": 1, "groups": 4, "parts": "towers"}, ["4 towers cannot", "[1, 2, 4]"]),
    ],
)  # fmt: skip
def test_make_names_what_does_not_fit(arguments, words):
    with pytest.raises(ValueError) as caught:
        mesh_lib.make(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model__towers": 4}, r"^4 towers cannot split over 8 devices.*\[1, 2, 4\]"),
        ({"model__trunk": "sharded"}, r"^4 groups and kernels cannot split over 8 devices"),
        ({"model__groups": 2}, r"^2 groups cannot split over 8 devices.*\[1, 2\]"),
    ],
)
def test_a_run_names_the_parts_of_its_network(model, words):
    with pytest.raises(ValueError, match=words):
        train.prepare(small_config(mesh__group=8, **model), dataset=small_dataset())
