"""The three ways to spread a network: the same numbers, and no more messages than was meant."""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from support import hlo, small_runs

from hsvit_jax import augment
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.ops import conv
from hsvit_jax.train import evaluate

SIZES = {"image_size": (8, 12), "image_channels": 3, "num_classes": 7, "conv_channels": (16, 32)}
SIZES |= {"pool_strides": (2, 2), "groups": 8, "embed_dim": 10}
BASE = dataclasses.replace(small_runs.HSVIT, **SIZES)
BATCH = 8
NETWORKS = {
    "replicated": hsvit.HSViT(BASE),
    "sharded": hsvit.HSViT(dataclasses.replace(BASE, trunk="sharded")),
    "towers": hsvit.TowerHSViT(dataclasses.replace(BASE, towers=8)),
}
#: Of which the numbers alone are compared.
OTHERS = {
    "separable": hsvit.HSViT(dataclasses.replace(BASE, trunk="sharded", convolution="separable")),
    "tiles": hsvit.TowerHSViT(dataclasses.replace(BASE, towers=8, tiles=(2, 4))),
}
WAYS = NETWORKS | OTHERS


CONFIG = ml_collections.ConfigDict(
    {"data": {"mean": (0.5,) * 3, "std": (0.25,) * 3}, "eval": {"tta": "none"}}
)
VOTES_G = np.array([1.0, 1, 0, 1, 1, 0, 1, 1], np.float32)
SLOW = pytest.mark.slow
#: group × data
MESHES = [(2, 4), pytest.param((1, 8), marks=SLOW), pytest.param((8, 1), marks=SLOW)]


def inputs():
    """Images, and the examples' identities, which choose their masks of dropout."""
    rng = np.random.default_rng(3)
    images = rng.normal(size=(BATCH, *BASE.image_size, 3)).astype(np.float32)
    return images, rng.permutation(1000)[:BATCH].astype(np.int32)


def pixels():
    """Bytes that normalise to about the same values."""
    return np.clip((inputs()[0] * 0.25 + 0.5) * 255, 0, 255).astype(np.uint8)


def objective(apply):
    """(params, stats, images, ids) → (loss, (logits, new stats)), in training, with dropout."""
    labels = np.random.default_rng(4).integers(0, BASE.num_classes, BATCH)

    def loss(params, stats, images, ids):
        key = jax.random.key(5)
        logits, stats = apply(params, stats, images, train=True, dropout_key=key, example_ids_B=ids)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean(), (logits, stats)

    return loss


def gradient(apply):
    return jax.jit(jax.value_and_grad(objective(apply), has_aux=True))


def placed(network, group, data, *arrays):
    """A mesh, and parameters, statistics and arrays (default: `inputs`) where they belong on it."""
    devices = jax.devices()[: group * data]
    mesh = mesh_lib.make(group, data, groups=network.group_axis_limit, batch=BATCH, devices=devices)
    params, stats = small_runs.made_up_values(network)
    trees = [jax.device_put(t, mesh_lib.state_shardings(mesh, t, network)) for t in (params, stats)]
    return mesh, (*trees, *(mesh_lib.put_batch(mesh, x) for x in arrays or inputs()))


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))


@functools.cache
def trained(way, group, data):
    """Loss, logits, statistics and gradients on a mesh, and the program that computed them."""
    mesh, arguments = placed(WAYS[way], group, data)
    compiled = gradient(mesh_lib.spread(WAYS[way], mesh)).lower(*arguments).compile()
    return jax.device_get(compiled(*arguments)), compiled.as_text()


@functools.cache
def evaluated(way, group, data):
    """Logits of the evaluation's forward with some groups' votes, and its program."""
    mesh, arguments = placed(WAYS[way], group, data, pixels())
    forward = evaluate.make_forward(WAYS[way], mesh, CONFIG, votes_G=VOTES_G)
    compiled = forward.lower(*arguments).compile()
    return jax.device_get(compiled(*arguments)), compiled.as_text()


@functools.cache
def whole_training(way):
    """The same without a mesh, and again with other examples' masks."""
    values, step = small_runs.made_up_values(WAYS[way]), gradient(WAYS[way].apply)
    images, ids = inputs()
    return jax.device_get([step(*values, images, ids), step(*values, images, ids + 1)])


@functools.cache
def whole_evaluation(way):
    """The same logits without a mesh, and gradients of their sum."""
    params, stats = small_runs.made_up_values(WAYS[way])
    x_BHWC = augment.normalise(pixels(), CONFIG.data.mean, CONFIG.data.std)

    def total(params):
        logits = WAYS[way].apply(params, stats, x_BHWC, votes_G=VOTES_G)[0]
        return logits.sum(), logits

    gradients, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    return jax.device_get((logits, gradients))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("way", [*NETWORKS, *(pytest.param(n, marks=SLOW) for n in OTHERS)])
def test_spread_equals_whole(way, shape):
    """Loss, logits, statistics and every gradient, with dropout on, BatchNorm over all examples;
    and logits of an evaluation."""
    close(trained(way, *shape)[0], whole_training(way)[0])
    close(evaluated(way, *shape)[0], whole_evaluation(way)[0])


def test_masks_are_part_of_it():
    """Other examples are given other ones."""
    logits, other = (result[0][1][0] for result in whole_training("replicated"))
    assert np.abs(logits - other).max() > 1e-2 * np.abs(logits).max()


def test_sharded_trunk_is_the_reference_network():
    """Its parameters are the reference's own, and so are its logits without a mesh."""
    logits = [whole_evaluation(way)[0] for way in ("replicated", "sharded")]
    np.testing.assert_array_equal(*logits)


def collectives(text, group):
    """(axis, kind, bytes) of every collective of the main computation, in order."""
    return [(o.axis, o.kind, o.bytes) for o in hlo.overlaps(text, group)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("way", NETWORKS)
def test_collectives_of_each_way(way, shape):
    """Forward: the one sum of the groups' CLS tokens, and a sharded trunk's maps. Backward: nothing
    more for towers, the tokens' gradient for a replicated trunk; none over both axes at once but
    the projection's of a sharded one."""
    group, data = shape
    cls = BATCH // data * BASE.embed_dim * 4
    votes = [("group", "all-reduce", cls)]
    forward = collectives(evaluated(way, *shape)[1], group)
    gathers = [one for one in forward if one[:2] == ("group", "all-gather")]
    assert len(gathers) == 3 * (way == "sharded" and group > 1)  # between four convolutions
    assert [one for one in forward if one not in gathers] == votes * (group > 1)
    backward = collectives(trained(way, *shape)[1], group)
    if way != "towers":  # whose own gradients are summed in a computation of theirs
        sent = hlo.count(trained(way, *shape)[1], group)[1]
        assert sum(size for *_, size in backward) == sum(sent.values())
    over_group = Counter(kind for axis, kind, _ in backward if axis == "group")
    expected = {"all-reduce": 1, "all-gather": 3, "reduce-scatter": 3}
    expected |= {"all-reduce": 2} if data == 1 else {}  # the projection's, of all devices' tokens
    if way != "sharded":
        expected = {"all-reduce": 1 if way == "towers" else 2}
    assert over_group == (expected if group > 1 else {})
    if way == "replicated" and group > 1:
        sizes = [size for axis, _, size in backward if axis == "group"]
        assert sizes == [cls, BASE.conv_channels[-1] * cls]
    others = {(axis, kind) for axis, kind, _ in backward if axis != "group"}
    both = way == "sharded" and group > 1
    axes = {"data"} | ({"data+group"} if both else set()) if data > 1 else set()
    assert others == {(axis, "all-reduce") for axis in axes}


@pytest.mark.parametrize("way", NETWORKS)
def test_groups_without_a_vote_do_not_count(way):
    """Any subset of groups votes: averaged over those present, and deaf to the others' weights."""
    gradients = whole_evaluation(way)[1]
    groups = gradients["towers"]["groups"] if way == "towers" else gradients["groups"]
    per_group = groups["cls"].reshape(8, -1)
    assert (np.abs(per_group).max(1) > 0).tolist() == (VOTES_G > 0).tolist()


FEW = dataclasses.replace(
    BASE, conv_channels=(16,), conv_kernels=(3,), pool_strides=(4,), depth=1, embed_dim=6
)


def test_what_a_device_could_compute_while_it_waits():
    """Nothing while the CLS tokens are summed: the head, and by it the gradient, waits for them.
    While the groups' gradients travel, the trunk's backward pass."""
    network = hsvit.HSViT(FEW)
    mesh, arguments = placed(network, 2, 4)
    spread = mesh_lib.spread(network, mesh, gradients="bf16")
    with conv.as_on_accelerators():
        text = gradient(spread).lower(*arguments).compile().as_text()
    found = hlo.overlaps(text, 2)
    votes = BATCH // 4 * FEW.embed_dim * 4
    assert [o.free_flops for o in found if (o.axis, o.bytes) == ("group", votes)] == [0]
    groups = [o.free_flops for o in found if o.axis == "data" and o.kind == "all-to-all"]
    assert len(groups) == 2
    maps, tokens = FEW.image_size[0] * FEW.image_size[1], FEW.conv_channels[0]
    kernels = maps * 9 * (3 * tokens + 2 * tokens**2)  # their gradients, and the second's input's
    assert max(groups) >= 2 * BATCH // 4 * kernels
    assert min(groups) < 0.1 * max(groups)  # what is whole everywhere waits for the first kernel


@pytest.mark.parametrize("name", NETWORKS)
def test_sums_over_devices_are_of_float32(name):
    """Of a bfloat16 network too: parameters' gradients over both axes, CLS tokens over the groups.
    The trunk's activations and their gradients stay in bfloat16."""
    network = type(NETWORKS[name])(NETWORKS[name].config, jnp.bfloat16)
    mesh, arguments = placed(network, 2, 4)
    text = str(jax.make_jaxpr(gradient(mesh_lib.spread(network, mesh)))(*arguments))
    sums = re.findall(r":(\w+)\[([\d,]*)\](?:\{\S*\})? = psum\w*\[\s*axes=\('(\w+)'", text)
    over_data = {kind for kind, _, axis in sums if axis == "data"}
    tokens = {kind for kind, shape, axis in sums if (shape, axis) == ("2,10", "group")}
    assert over_data == tokens == {"f32"}
    projection = f"{math.prod(network.config.map_size)},10"
    over_group = {kind for kind, shape, axis in sums if (shape, axis) == (projection, "group")}
    assert over_group == ({"f32"} if name == "sharded" else set())


def test_towers_are_small_networks_averaged():
    network = NETWORKS["towers"]
    params, stats = small_runs.made_up_values(network)
    images = inputs()[0]

    def run(network):
        @jax.jit
        def cls_and_logits(params, stats):
            keep = small_runs.Keep()
            logits, _ = network.apply(params, stats, images, shard=keep)
            return keep.cls, logits

        return cls_and_logits

    small, seen = run(hsvit.HSViT(network.config.tower)), []
    for k in range(8):
        own = jax.tree.map(lambda x, k=k: x[k], (params["towers"], stats["towers"]))
        seen.append(small({**own[0], "head": params["head"]}, own[1])[0])
    cls, logits = run(network)(params, stats)
    np.testing.assert_allclose(cls, np.concatenate(seen), rtol=0, atol=1e-5)
    head = network.bind(params, {})["head"]
    mean_BD = jnp.asarray(np.concatenate(seen).mean(0))
    np.testing.assert_allclose(logits, head(mean_BD), rtol=0, atol=1e-5)


def test_ordered_aggregation_gives_the_same_bits_on_any_number_of_devices(bits_of_a_run):
    """Loss, logits and statistics in training."""
    network, results = hsvit.HSViT(FEW), []
    for group in (1, 4):
        mesh, arguments = placed(network, group, 1)
        loss = objective(mesh_lib.spread(network, mesh, "ordered"))
        results.append(jax.jit(loss, compiler_options=mesh_lib.compiler_options())(*arguments))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicated", "towers"])
def test_so_do_the_groups_gradients(way, bits_of_a_run):
    """And the rest of such a step.

    A trunk's own gradient agrees to rounding: a replicated one is scheduled around the all-reduce
    of the tokens' gradient, and the sums of a tower's normalisations are fused with what else the
    program holds.
    """
    network, reference = hsvit.HSViT(FEW), None
    if way == "towers":
        network = hsvit.TowerHSViT(dataclasses.replace(FEW, towers=8))
    # As a run's programs are made: at the level 0 of other tests a tower's sums differ in rounding.
    options = {**mesh_lib.compiler_options(), "xla_backend_optimization_level": 2}
    for group in (1, 2, 8):
        mesh, arguments = placed(network, group, 1)
        spread = mesh_lib.spread(network, mesh, "ordered")
        step = jax.value_and_grad(objective(spread), has_aux=True)
        step = jax.jit(step, compiler_options=options)
        result = jax.tree.map(np.asarray, step(*arguments))
        owner = result[1]["towers"] if way == "towers" else result[1]
        trunk = owner.pop("trunk")
        if reference is None:
            reference, reference_trunk = result, trunk
        close(trunk, reference_trunk)
        jax.tree.map(np.testing.assert_array_equal, result, reference)


@pytest.mark.parametrize("way", NETWORKS)
def test_an_ordered_norm_has_the_same_bits_on_any_number_of_devices(way, bits_of_a_run):
    network = NETWORKS[way]
    shapes, _ = network.init_shapes()
    rng = np.random.default_rng(7)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    true = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in jax.tree.leaves(grads)))
    norms = []
    for group in (1, 2, 8):
        mesh = placed(network, group, 1)[0]
        spread = jax.device_put(grads, mesh_lib.state_shardings(mesh, grads, network))
        norm = jax.jit(
            lambda grads, mesh=mesh: mesh_lib.ordered_norm(mesh, grads, network),
            compiler_options=mesh_lib.compiler_options(),
        ).lower(spread)
        norm = norm.compile()
        sent = re.findall(r"= (\S+) (?:all-\w+|collective-\w+|reduce-scatter)\(", norm.as_text())
        # One message, of a number for each group: it is not added up on its way.
        assert sent == (["f32[8]{0}"] if group > 1 else []), sent
        norms.append(float(norm(spread)))
    assert norms == norms[:1] * 3
    np.testing.assert_allclose(norms[0], true, rtol=1e-6)


def test_group_dropout_is_for_training_and_leaves_someone_to_vote():
    config = dataclasses.replace(BASE, dropout=0.0, group_dropout=0.9)
    network = hsvit.HSViT(config)
    params, stats = small_runs.made_up_values(network)
    images = np.repeat(inputs()[0][:1], 64, 0)
    apply = jax.jit(lambda key: network.apply(params, stats, images, dropout_key=key)[0])
    plain, dropped = apply(None), apply(jax.random.key(1))
    assert np.isfinite(dropped).all()
    assert len(np.unique(np.asarray(dropped).round(5), axis=0)) > 8  # each example its own voters
    assert np.unique(np.asarray(plain).round(5), axis=0).shape[0] == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"towers": 3}, r"cannot split into towers=3: choose one of 1, 2, 4, 8"),
        ({"towers": 2, "trunk": "sharded"}, "set trunk='replicated'"),
        ({"towers": 2, "groups": 0}, "need both convolution and attention groups"),
    ],
)
def test_ways_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)
