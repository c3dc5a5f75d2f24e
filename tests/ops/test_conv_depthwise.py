"""The depthwise convolution for CPUs against XLA's grouped one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.ops import conv_depthwise, conv_direct


@pytest.mark.parametrize(
    ("size", "stride", "times"), [(1, 1, 1), (3, 1, 1), (5, 1, 1), (7, 1, 1), (7, 2, 3)]
)
def test_shifted_products_are_the_grouped_convolution(size, stride, times):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 7, 11)).astype(np.float32)
    weight = rng.normal(size=(3, -(-5 // stride), -(-7 // stride), 11 * times)).astype(np.float32)
    kernel = rng.normal(size=(size, size, 1, 11 * times)).astype(np.float32)

    def both(convolve):
        run = jax.value_and_grad(
            lambda x, k: (convolve(x, k, stride) * weight).sum(), argnums=(0, 1)
        )
        return convolve(x, kernel, stride), run(x, kernel)[1]

    ours = jax.tree.leaves(both(conv_depthwise.depthwise_conv2d))
    theirs = jax.tree.leaves(both(conv_direct.conv2d_xla))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_it_keeps_the_dtype_of_the_images():
    x, kernel = jnp.ones((1, 4, 4, 2), jnp.bfloat16), jnp.ones((3, 3, 1, 2))
    assert conv_depthwise.depthwise_conv2d(x, kernel).dtype == jnp.bfloat16


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (7, 1)])
def test_the_kernel_s_gradient_is_summed_in_float32(size, stride):
    rng = np.random.default_rng(0)
    x = np.abs(rng.normal(size=(256, 16, 16, 4)))
    weight = rng.normal(size=(256, 16 // stride, 16 // stride, 4)) + 0.3
    x, weight = (jnp.asarray(a, jnp.bfloat16) for a in (x, weight))

    @jax.jit
    def gradient(x, weight):
        kernel = jnp.ones((size, size, 1, 4), x.dtype)
        _, pull = jax.vjp(lambda k: conv_depthwise.depthwise_conv2d(x, k, stride), kernel)
        return pull(weight)[0]

    expected = gradient(x.astype(jnp.float32), weight.astype(jnp.float32))
    error = jnp.linalg.norm(gradient(x, weight).astype(jnp.float32) - expected)
    assert error < 0.01 * jnp.linalg.norm(expected)
