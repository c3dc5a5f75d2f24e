"""Convolutions with any padding against XLA's, and what follows them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hsvit_jax.models import conv_layers, layers, network
from hsvit_jax.ops import conv


@pytest.mark.parametrize(
    ("c_in", "c_out", "size", "groups", "options"),
    [
        (6, 10, 3, 1, {}),
        (6, 10, 1, 1, {}),
        (6, 10, 1, 1, {"stride": 2}),
        (6, 10, 1, 1, {"padding": 1}),
        (3, 10, 3, 1, {"stride": 2}),
        (6, 10, 4, 1, {"stride": 4, "padding": 2}),
        (6, 6, 3, 6, {}),
        (6, 12, 3, 6, {"stride": 2}),
        (6, 6, 5, 6, {}),
        (6, 6, 3, 6, {"stride": 2}),
        (6, 6, 5, 6, {"stride": 2, "padding": ((1, 2), (2, 1))}),
        (6, 6, 3, 6, {"padding": "same", "stride": 2}),
        (6, 6, 2, 6, {"padding": 0}),
        (6, 6, 3, 6, {"dilation": 2}),
        (6, 8, 3, 2, {"padding": "same", "stride": 3}),
        (6, 8, 3, 1, {"padding": "same", "stride": 2, "dilation": 2}),
    ],
)
def test_convolution_and_its_gradient_are_xla_s(c_in, c_out, size, groups, options):
    module = conv_layers.Conv(c_in, c_out, size, jax.random.key(0), groups=groups, **options)
    x_BHWC = jax.random.normal(jax.random.key(1), (2, 7, 8, c_in))
    stride, dilation = options.get("stride", 1), options.get("dilation", 1)
    padding = options.get("padding", size // 2 * dilation)
    padding = ((padding,) * 2,) * 2 if isinstance(padding, int) else padding

    def reference(x, kernel):
        y = lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME" if padding == "same" else padding,
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return y + module.bias[...].reshape(1, 1, 1, -1)

    def value_and_gradient(function):
        """Of the squares' sum."""
        y, back = jax.vjp(function, x_BHWC)
        return y, back(2 * y)[0]

    (found, ours), (expected, theirs) = (
        jax.jit(value_and_gradient, static_argnums=0)(function)
        for function in (module, lambda x: reference(x, module.kernel[...]))
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert expected.shape[1:3] == conv_layers.size_out(
        (7, 8), size, stride, options.get("padding"), dilation
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_on_a_gpu_no_strided_slice_comes_before_a_product(groups):
    # There XLA's compiler (jax 0.11.2) ends the process over one in ResNet's evaluation.
    module = conv_layers.Conv(6, 10, 1, jax.random.key(0), groups=groups, stride=2)
    x_BHWC = jax.random.normal(jax.random.key(1), (2, 7, 8, 6))
    expected = module(x_BHWC)
    with conv.traced_for("cuda"):
        traced = str(jax.make_jaxpr(module)(x_BHWC))
        np.testing.assert_allclose(module(x_BHWC), expected, atol=1e-5)
    assert "window_strides=(2, 2)" in traced
    assert "slice" not in traced and "dot_general" not in traced


def test_a_map_that_is_too_small_says_so():
    with pytest.raises(ValueError, match="map of 1×5 is too small for a convolution of size 3"):
        conv_layers.size_out((1, 5), 3, 2, 0)
    with pytest.raises(ValueError, match=r"map of 1×1 is too small for .* stride 2: use a"):
        conv_layers.size_out((1, 1), 3, 2)
    assert conv_layers.size_out((1, 2), 3, 2) == conv_layers.size_out((1, 1), 3) == (1, 1)


def test_with_norm_and_activation():
    """Statistics by the module's own momentum and eps, the activation last."""
    module = conv_layers.ConvNorm(
        *(3, 5, 3, jax.random.key(0)),
        activation="relu6",
        eps=0.5,
        momentum=0.01,
        init="kaiming_out",
    )
    assert np.std(module.conv.kernel[...]) == pytest.approx((2 / 45) ** 0.5, rel=0.2)
    assert module.conv.bias is None
    x_BHWC = 40 * jax.random.normal(jax.random.key(1), (2, 6, 8, 3))
    y = module.conv(x_BHWC)
    out = module(x_BHWC, network.ForwardContext(True, None, jnp.arange(2)))
    normed = (y - y.mean((0, 1, 2), keepdims=True)) / jnp.sqrt(
        y.var((0, 1, 2), keepdims=True) + 0.5
    )
    np.testing.assert_allclose(out, np.clip(normed, 0, 6), atol=1e-5)
    np.testing.assert_allclose(module.norm.mean[...], 0.99 * y.mean((0, 1, 2)), rtol=1e-5)
    unbiased = 0.01 + 0.99 * y.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(module.norm.var[...], unbiased, rtol=1e-5)
    still = layers.BatchNorm(5)
    assert (still.eps, still.momentum) == (1e-5, 0.9)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="unknown activation 'rleu'; known: none, linear, gelu"):
        conv_layers.ConvNorm(3, 5, 3, jax.random.key(0), activation="rleu")
