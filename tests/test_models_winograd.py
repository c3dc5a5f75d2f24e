"""Winograd's convolution against XLA's, in double precision: outputs and both gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.models import layers, winograd

# images, rows, columns, channels in and out: one slice and several, odd columns, few rows
SHAPES = {"one": (2, 4, 6, 5, 3), "odd columns": (3, 6, 5, 4, 6), "two rows": (4, 2, 3, 8, 2)}


def arrays(shape):
    batch, rows, columns, c_in, c_out = shape
    rng = np.random.default_rng(0)
    sizes = ((batch, rows, columns, c_in), (3, 3, c_in, c_out), (batch, rows, columns, c_out))
    return tuple(jnp.asarray(rng.normal(size=s)) for s in sizes)


@pytest.mark.parametrize("images_in_a_slice", [1, 1000])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_the_convolution_and_so_are_its_gradients(shape, images_in_a_slice, monkeypatch):
    """In double precision nothing but rounding is left: no coefficient is merely close."""
    monkeypatch.setattr(winograd, "_SLICE", images_in_a_slice * int(np.prod(shape[1:4])))
    with jax.enable_x64(True):
        images, kernel, grad = arrays(shape)
        assert images.dtype == jnp.float64
        assert winograd.fits(images.shape, kernel.shape)
        out, back = jax.vjp(layers.conv2d_xla, images, kernel)
        mine = winograd.convolve(images, kernel)
        np.testing.assert_allclose(mine, out, rtol=0, atol=1e-13 * abs(out).max())
        expected = back(grad)
        found = winograd.gradients(images, kernel, grad, jnp.zeros(()))
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * abs(b).max())


def test_single_precision_is_as_good_as_the_direct_one():
    """Errors against double precision: not more than twice the direct convolution's."""
    with jax.enable_x64(True):
        images, kernel, _ = arrays((4, 16, 16, 64, 32))
        exact = layers.conv2d_xla(images, kernel)
        narrow = images.astype(jnp.float32), kernel.astype(jnp.float32)
        errors = [
            float(abs(f(*narrow) - exact).max() / abs(exact).max())
            for f in (winograd.convolve, layers.conv2d_xla)
        ]
    assert errors[0] <= max(2 * errors[1], 2e-6), errors


def test_what_it_does_not_take():
    """Odd numbers of rows, other kernels, and a single image."""
    assert not winograd.fits((2, 5, 4, 8), (3, 3, 8, 8))
    assert not winograd.fits((2, 4, 4, 8), (5, 5, 8, 8))
    assert not winograd.fits((1, 4, 4, 8), (3, 3, 8, 8))
    images, kernel, _ = arrays((2, 5, 4, 6, 6))
    np.testing.assert_allclose(
        layers.conv2d(images, kernel), layers.conv2d_xla(images, kernel), rtol=0, atol=1e-5
    )
