"""HSViT on a backbone: exact sizes, the mesh, frozen and lost parts, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import config as config_lib
from hsvit_jax import mesh, models
from hsvit_jax.models.hsvit import backbone


def settings(variant, **changes):
    own = {**backbone.FAMILY.defaults, **backbone.VARIANTS[variant], **changes}
    return {"family": "hsvit_backbone", "dtype": "float32", **own}


def built(variant, size, classes, **changes):
    return models.build(
        settings(variant, **changes), image_size=size, channels=3, num_classes=classes
    )


@pytest.mark.parametrize(("side", "width"), [(224, 56), (380, 144), (456, 232)])
def test_a_token_s_width_is_the_map_s_size_rounded_up_to_eights(side, width):
    variant = {224: "resnet50", 380: "efficientnet_b4", 456: "efficientnet_b5"}[side]
    config = models.FAMILIES["hsvit_backbone"].sizes(
        settings(variant), image_size=(side, side), channels=3, num_classes=1000
    )
    assert config.embed_dim == width


def small(**changes):
    """Four groups on a ResNet of two blocks and few channels."""
    own = backbone.backbone_settings("resnet")
    own |= {"stem_channels": 4, "channels": (8, 16), "depths": (1, 1)}
    sizes = {"groups": 4, "depth": 1, "heads": 2, "dropout": 0.0} | changes
    return built("resnet50", (33, 40), 5, backbone_settings=own, **sizes)


@pytest.fixture(scope="module")
def state():
    """Parameters, statistics and images for what `small` builds."""
    params, stats = small_runs.made_up_values(small())
    images = np.random.default_rng(2).normal(size=(4, 33, 40, 3)).astype(np.float32)
    return params, stats, images


def step(apply, state, **options):
    params, stats, images = state

    def loss(p):
        logits, new = apply(p, stats, images, train=True, **options)
        return (logits**2).mean(), (logits, new)

    with jax.numpy_rank_promotion("raise"):
        return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.fixture(scope="module")
def alone(state):
    """Gradients, logits and statistics of a step on one device, with dropout."""
    return step(small(dropout=0.2).apply, state, dropout_key=jax.random.key(3))


@pytest.mark.cpu
@pytest.mark.parametrize("trunk", [pytest.param("replicated", marks=pytest.mark.slow), "sharded"])
def test_the_mesh_changes_no_number(trunk, state, alone):
    """Groups, and where it is so the backbone's channels, on two devices."""
    network = small(dropout=0.2, trunk=trunk)
    spread = mesh.spread(network, mesh.make(2, 1, groups=network.group_axis_limit))
    many = step(spread, state, dropout_key=jax.random.key(3))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(alone))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest), many, alone)


@pytest.mark.slow
def test_squeezed_and_dropped_channels_can_be_spread():
    """Gates need all channels' means; which values are dropped does not depend on the mesh."""
    own = backbone.backbone_settings("efficientnet")
    own |= {"in_channels": (32, 24), "out_channels": (24, 16), "repeats": (1, 2)}
    own |= {"strides": (1, 2), "kernels": (3, 5), "expand": (1, 2), "width": 0.1, "divisor": 4}
    changes = {"backbone_settings": {**own, "drop_rate": 0.5}, "groups": 4, "heads": 2}

    def network(trunk):
        return built("efficientnet_b0", (33, 40), 5, **changes, depth=1, trunk=trunk)

    params, stats = small_runs.made_up_values(network("replicated"))
    images = np.random.default_rng(2).normal(size=(4, 33, 40, 3)).astype(np.float32)
    state, key = (params, stats, images), jax.random.key(3)
    one = step(network("replicated").apply, state, dropout_key=key)
    spread = mesh.spread(network("sharded"), mesh.make(2, 1, groups=4))
    many = step(spread, state, dropout_key=key)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest), many, one)
    undropped = step(network("replicated").apply, state)
    assert np.abs(undropped[1][0] - one[1][0]).max() > 1e-3


def test_what_a_sharded_backbone_spreads():
    network = small(trunk="sharded")
    assert (small().group_axis_limit, network.group_axis_limit) == (
        4,
        2,
    )  # 2 channels inside the first bottleneck
    assert network.spread_axis(("backbone", "stem", "kernel")) == 3
    assert network.spread_axis(("backbone", "blocks", "0", "convs", "1", "norm", "scale")) == 0
    assert network.spread_axis(("backbone", "blocks", "0", "squeeze", "reduce", "kernel")) is None
    assert network.spread_axis(("backbone", "blocks", "0", "squeeze", "expand", "kernel")) == 1
    assert network.spread_axis(("backbone", "blocks", "0", "squeeze", "expand", "bias")) == 0
    assert network.spread_axis(("trunk", "embed", "kernel")) is None
    assert small().spread_axis(("backbone", "stem", "kernel")) is None


@pytest.mark.cpu
def test_a_frozen_backbone_on_a_mesh(state):
    network = small()
    network.frozen = frozenset({"backbone"})
    spread = mesh.spread(network, mesh.make(2, 1, groups=4))
    grads, (logits, new) = step(spread, state)
    assert not any(np.any(x) for x in jax.tree.leaves(grads["backbone"]))
    assert np.any(grads["trunk"]["embed"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, new, state[1])
    expected, _ = jax.jit(network.apply)(*state)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_lost_groups_have_no_vote(state):
    network, (params, stats, images) = small(), state
    smaller = network.without({1})
    left = {**params, "groups": jax.tree.map(lambda x: np.delete(x, 1, 0), params["groups"])}
    voted, _ = jax.jit(network.apply)(params, stats, images, votes_G=jnp.array([1.0, 0, 1, 1]))
    without, _ = jax.jit(smaller.apply)(left, stats, images)
    np.testing.assert_allclose(without, voted, atol=1e-5 * np.abs(voted).max())


def test_the_backbone_s_settings_from_the_command_line():
    config = config_lib.get_config(
        "backbone:efficientnet_b4,digits",
        *("model.backbone_settings.padding=same", "model.backbone_settings.drop_rate=0"),
    )
    own = config.model.backbone_settings
    assert (own.padding, own.drop_rate, own.width) == ("same", 0.0, 1.4)
    with pytest.raises(ValueError, match="name the network by"):
        config_lib.get_config("backbone:resnet50", "model.backbone=resnet18")
    with pytest.raises(ValueError, match=r"did you mean model.backbone_settings.depths\?"):
        config_lib.get_config("backbone:resnet50", "model.backbone_settings.depts=1,1")


def test_unknown_variants_of_a_backbone_are_told():
    with pytest.raises(ValueError, match=r"unknown model.backbone 'resnet20'; resnet has 18, 34"):
        backbone.backbone_settings("resnet20")
