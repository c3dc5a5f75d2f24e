"""Growth: the same answers at the moment of it, then the new parts learn; and learned votes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import mesh as mesh_lib
from hsvit_jax import models
from hsvit_jax.models.family import misfits
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.weights import adapt

SMALL = small_runs.HSVIT
LARGER = {
    "groups": ({}, {"conv_channels": (2, 8), "groups": 4}),
    "channels before them too": ({}, {"conv_channels": (3, 6), "groups": 3}),
    "separable": ({"convolution": "separable"}, {"conv_channels": (3, 8), "groups": 4}),
    "one tower to two": ({}, {"conv_channels": (4, 8), "groups": 4, "towers": 2}),
    "two towers to three": ({"towers": 2}, {"conv_channels": (3, 6), "groups": 3, "towers": 3}),
}


def network(config):
    return (hsvit.TowerHSViT if config.towers > 1 else hsvit.HSViT)(config)


@functools.cache
def pair(name):
    """The smaller network with weights, and the larger one grown from it."""
    first, then = LARGER[name]
    old = dataclasses.replace(SMALL, **first)
    new = dataclasses.replace(old, **then, votes="learned")
    small, large = network(old), network(new)
    values = small_runs.made_up_values(small)
    return small, values, large, large.grown(*values, small, jax.random.key(1))


IMAGES = np.random.default_rng(3).normal(size=(6, 4, 8, 1)).astype(np.float32)


@functools.cache
def program(network):
    """The evaluation of a network, compiled once."""
    return jax.jit(lambda values: network.apply(*values, IMAGES)[0])


def answers_agree(a, b):
    np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 * np.abs(a).max())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [n if n in ("groups", "two towers to three") else pytest.param(n, marks=SLOW) for n in LARGER],
)
def test_the_answers_are_the_same_at_the_moment_of_growth(name):
    """In evaluation, and in training with the batch's statistics and dropout."""
    small, before, large, after = pair(name)
    shapes = large.init_shapes()
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, shapes)
    answers_agree(program(small)(before), program(large)(after))
    how = {"train": True, "dropout_key": jax.random.key(2)}
    train = [jax.jit(lambda v, n=n: n.apply(*v, IMAGES, **how)[0]) for n in (small, large)]
    answers_agree(train[0](before), train[1](after))


@pytest.mark.parametrize("name", ["groups", pytest.param("one tower to two", marks=SLOW)])
def test_new_groups_get_a_vote_and_then_learn(name):
    """At first only their votes have a gradient, after one step their parameters too."""
    _, _, large, (params, stats) = pair(name)
    gradient = jax.jit(jax.grad(lambda p: jnp.square(large.apply(p, stats, IMAGES)[0]).sum()))

    def of_new(grads):
        groups = grads.get("towers", grads)["groups"]
        new = jax.tree.map(lambda x: np.abs(np.asarray(x)).reshape(4, -1)[2:].max(), groups)
        return float(new["vote"]), float(new["position"])

    grads = gradient(params)
    vote, position = of_new(grads)
    assert vote > 0 and position == 0
    grads = gradient(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    assert min(of_new(grads)) > 0


def test_growing_again_keeps_the_learned_votes():
    _, _, large, (params, stats) = pair("groups")
    vote = np.array([0.5, 0.2, 0.1, -0.1], np.float32)
    params = {**params, "groups": {**params["groups"], "vote": vote}}
    larger = network(dataclasses.replace(large.config, conv_channels=(2, 12), groups=6))
    grown = larger.grown(params, stats, large, jax.random.key(4))
    np.testing.assert_array_equal(grown[0]["groups"]["vote"], [*vote, 0, 0])
    answers_agree(program(large)((params, stats)), program(larger)(grown))


def test_what_cannot_be_grown_says_why():
    elsewhere = {"trunk": "sharded", "dropout": 0.0, "group_dropout": 0.1}
    adapt.check(SMALL, dataclasses.replace(SMALL, **elsewhere))
    three = {"conv_channels": (2, 4, 4), "conv_kernels": (3,) * 3, "pool_strides": (2, 1, 1)}
    for changes, message in (
        ({"depth": 2}, "depth: checkpoint 1, config 2"),
        ({"num_classes": 6, "heads": 3}, "(?s)num_classes: checkpoint 5.*heads: checkpoint 2"),
        ({"groups": 4, "conv_channels": (2, 8), "votes": "equal"}, "set votes='learned'"),
        ({"conv_channels": (1, 4)}, "fewer in a block"),
        ({"pool_strides": (2, 2)}, "add --config.model.pool_strides=2,1"),
        ({"conv_channels": (2, 8)}, "4 channel tokens in 2 groups; keep their ratio"),
        ({"conv_channels": (4, 8), "groups": 2, "towers": 2}, "and groups=4"),
        (three, r"conv_channels: checkpoint \(2, 4\)"),
    ):
        new = network(dataclasses.replace(SMALL, **{"votes": "learned", **changes}))
        with pytest.raises(ValueError, match=message):
            adapt.check(SMALL, new.config)
    conv_only = dataclasses.replace(SMALL, groups=0)
    with pytest.raises(ValueError, match="more channels in the last block change the answers"):
        adapt.check(conv_only, dataclasses.replace(conv_only, conv_channels=(2, 8)))


def test_rates_of_dropout_may_differ_inside_a_mixer_and_a_backbone():
    for family, rate, size in (
        ("vix", {"dropout": 0.1}, {"heads": 2}),
        ("ccx", {"attention_dropout": 0.3}, {"heads": 2}),
        ("hsvit_backbone", {"backbone_settings": {"dropout": 0.1}}, {"groups": 2}),
    ):
        record = models.FAMILIES[family]
        variant = "efficientnet_b0" if family == "hsvit_backbone" else ""
        settings = record.settings(variant)
        if inner := rate.get("backbone_settings"):
            rate = {"backbone_settings": settings["backbone_settings"] | inner}
        old, new, other = (
            record.sizes(settings | changes, image_size=(64, 64), channels=3, num_classes=5)
            for changes in ({}, rate, size)
        )
        assert old != new and not misfits(old, new)
        assert misfits(old, other)[0].text.startswith(next(iter(size)))


def test_towers_do_not_become_fewer():
    config = dataclasses.replace(SMALL, towers=2)
    assert "which are fewer" in misfits(config, SMALL)[0].text


# --- Learned votes -------------------------------------------------------------------------------


@pytest.mark.parametrize("towers", [pytest.param(1, marks=SLOW), 2])
def test_votes_start_equal(towers):
    """Fresh learned votes give the equal ones' answers, also when groups are lost."""
    config = dataclasses.replace(SMALL, towers=towers, votes="learned")
    learned, equal = network(config), network(dataclasses.replace(config, votes="equal"))
    params, stats = small_runs.made_up_values(equal)
    groups = params.get("towers", params)["groups"]

    def fresh_vote(key):  # nothing else is compiled
        fresh, _ = learned.init(key)
        return fresh.get("towers", fresh)["groups"]["vote"]

    with_vote = {**groups, "vote": jax.jit(fresh_vote)(jax.random.key(0))}
    parts = {"groups": with_vote}
    ours = {**params, **({"towers": {**params["towers"], **parts}} if towers > 1 else parts)}

    def lost(network, params):
        return jax.jit(lambda p: network.apply(p, stats, IMAGES, votes_G=jnp.array([0.0, 1.0]))[0])(
            params
        )

    answers_agree(lost(equal, params), lost(learned, ours))


def test_learned_votes_of_the_groups_left():
    """cls = Σ kept v·cls ÷ (Σ kept |v| ÷ Σ |v|), on one device and on four."""
    config = dataclasses.replace(SMALL, conv_channels=(4, 8), groups=4, votes="learned")
    large = network(config)
    params, stats = small_runs.made_up_values(large)
    params["groups"]["vote"] = vote = np.array([0.5, 0.25, 0.0, -0.25], np.float32)

    @jax.jit
    def weighted(votes_G):
        keep = small_runs.Keep()
        logits = large.apply(params, stats, IMAGES, shard=keep, votes_G=votes_G)[0]
        return keep.cls, logits

    whole, _ = weighted(jnp.ones(4))
    left, logits = weighted(jnp.array([1.0, 0, 1, 1]))
    kept = np.array([1, 0, 1, 1])[:, None, None]
    np.testing.assert_allclose(left, whole * kept / 0.75, rtol=1e-5, atol=1e-7)
    assert np.isfinite(weighted(jnp.array([0.0, 0, 1, 0]))[1]).all()
    mesh = mesh_lib.make(4, 1, groups=4, devices=jax.devices()[:4])
    trees = [jax.device_put(t, mesh_lib.state_shardings(mesh, t, large)) for t in (params, stats)]
    run = jax.jit(mesh_lib.spread(large, mesh))
    spread = run(*trees, mesh_lib.put_batch(mesh, IMAGES), votes_G=jnp.array([1.0, 0, 1, 1]))[0]
    np.testing.assert_allclose(spread, logits, rtol=0, atol=1e-5)
    assert vote[3] < 0
