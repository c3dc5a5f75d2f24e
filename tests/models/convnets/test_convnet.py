"""What convolutional networks share: padding, depthwise strides, statistics, freezing, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import small_runs

from hsvit_jax import models
from hsvit_jax.models.conv_layers import convolve
from hsvit_jax.models.convnets import convnet
from hsvit_jax.models.convnets.convnet import Conv
from hsvit_jax.models.network import ForwardContext
from hsvit_jax.ops.activations import ACTIVATIONS

CALL = ForwardContext(train=True, key_words=None, example_ids_B=np.arange(3))


def built(family, size=(33, 40), **changes):
    settings = {**models.FAMILIES[family].defaults, "family": family, "dtype": "float32"}
    return models.build(settings | changes, image_size=size, channels=3, num_classes=5)


@pytest.mark.parametrize("stride, dilation, size", [(1, 2, 3), (2, 1, 3), (2, 1, 5), (1, 1, 3)])
@pytest.mark.parametrize("padding", ["same", (0, 1), (2, 2)])
@pytest.mark.parametrize("depthwise", [False, True])
def test_a_convolution_is_xla_s(depthwise, padding, stride, dilation, size):
    """And 'same' leaves what XLA's SAME leaves, at even and odd sides."""
    spec = Conv(6, 6, size, stride, padding, dilation, depthwise)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 12, 6)).astype(np.float32)
    kernel = rng.normal(size=(size, size, 1 if depthwise else 6, 6)).astype(np.float32)
    expected = lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME" if padding == "same" else (padding, padding),
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=6 if depthwise else 1,
    )
    ours = convolve(jnp.asarray(x), jnp.asarray(kernel), stride, spec.pads((9, 12)), dilation)
    assert ours.shape[1:3] == spec.map_size((9, 12))
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_statistics_follow_momentum_and_eps():
    spec = Conv(2, 3, 1, momentum=0.25, eps=0.5, activation="relu")
    unit = convnet.ConvNorm(spec, jax.random.key(0))
    x = np.random.default_rng(1).normal(size=(3, 4, 5, 2)).astype(np.float32)
    y = x @ np.asarray(unit.kernel[...])[0, 0]
    out = unit(jnp.asarray(x), CALL)
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    np.testing.assert_allclose(out, np.maximum((y - mean) / np.sqrt(var + 0.5), 0), atol=1e-5)
    np.testing.assert_allclose(unit.norm.mean[...], 0.75 * mean, atol=1e-6)
    np.testing.assert_allclose(unit.norm.var[...], 0.25 + 0.75 * var * 60 / 59, rtol=1e-5)


def test_activations_by_their_published_names():
    x = jnp.array([-2.0, 0.5, 7.0])
    for name, expected in (
        ("relu6", [0, 0.5, 6]),
        ("relu2", [0, 0.25, 49]),
        ("swish", x / (1 + np.exp(-x))),
        ("quick_gelu", x / (1 + np.exp(-1.702 * x))),
        ("gelu_new", 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("leaky_relu", [-0.02, 0.5, 7]),
    ):
        np.testing.assert_allclose(ACTIVATIONS[name](x), expected, atol=1e-6)


@pytest.fixture(scope="module")
def small():
    """A small ResNet with parameters, statistics and images."""
    network = built(
        "resnet", block="basic", stem_channels=4, channels=(4, 6), depths=(1, 1), size=(17, 20)
    )
    params, stats = small_runs.random_tree(jax.eval_shape(network.init, jax.random.key(0)))
    images = np.random.default_rng(2).normal(size=(4, 17, 20, 3)).astype(np.float32)
    return network, params, stats, images


def test_features_are_what_the_head_classifies(small):
    network, params, stats, images = small
    x_BHWC = network.features(params, stats, images)
    assert x_BHWC.shape == (4, *network.config.map_size, 6) == (4, 3, 3, 6)
    linear = params["head"]["linear"]
    expected = x_BHWC.mean((1, 2)) @ linear["kernel"] + linear["bias"][None]
    logits, _ = network.apply(params, stats, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_frozen_backbone_neither_learns_nor_counts(small):
    network, params, stats, images = small
    frozen = convnet.ConvNet(network.config)
    assert frozen.frozen == frozenset()
    frozen.frozen = frozenset({"backbone"})

    def loss(model):
        def value(params):
            logits, new = model.apply(params, stats, images, train=True)
            return (logits**2).mean(), (logits, new)

        return jax.jit(jax.grad(value, has_aux=True))(params)

    grads, (logits, new) = loss(frozen)
    assert not any(np.any(x) for x in jax.tree.leaves(grads["backbone"]))
    assert np.any(grads["head"]["linear"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, new, stats)
    np.testing.assert_allclose(logits, network.apply(params, stats, images)[0], atol=1e-5)
    learned, (_, moved) = loss(network)
    assert all(np.any(x) for x in jax.tree.leaves(learned["backbone"]))
    assert not np.array_equal(moved["backbone"]["stem"]["norm"]["mean"], 0)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)


@pytest.mark.parametrize(
    ("family", "side"), [("resnet", 17), ("efficientnet", 32), ("mobilenet_v2", 17)]
)
def test_an_image_too_small_for_the_strides_says_so(family, side):
    assert built(family, (side, 64)).config.map_size == (1, 2)
    with pytest.raises(ValueError, match=f"image of 64×{side - 1} pixels is too small for this"):
        built(family, (64, side - 1))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("resnet", {"block": "wide"}, "unknown model.block 'wide'; choose one of"),
        ("resnet", {"depths": (1, 2)}, "channels and a depth of at least 1 for each stage"),
        ("resnet", {"activation": "prelu"}, "unknown activation 'prelu'; choose one of"),
        ("resnet", {"bn_momentum": 1.0}, r"momentum in \[0, 1\) and a positive eps; got 1.0"),
        ("resnet", {"channels": (2, 4, 8, 16)}, "sizes of a convolution must be positive"),
        ("efficientnet", {"padding": "valid"}, r"unknown model.padding"),
        ("efficientnet", {"drop": "all"}, r"unknown model.drop"),
        ("efficientnet", {"pooling": "sum"}, "unknown model.pooling 'sum'"),
        ("mobilenet_v2", {"dropout": 1.0}, r"dropout must be in \[0, 1\); got 1.0"),
        ("mobilenet_v2", {"padding": "valid"}, "unknown model.padding 'valid'"),
    ],
)
def test_sizes_that_do_not_fit_say_so(family, changes, message):
    with pytest.raises(ValueError, match=message):
        built(family, **changes)
