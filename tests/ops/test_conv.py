"""Convolutions in slices, with what surrounds them, against XLA's in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.ops import conv, conv_direct, conv_im2col, conv_winograd, normalise, tiling

# kernel, channels in and out, and which formula is taken for four images
CASES = {
    "winograd": (3, 32, 33, conv_winograd),
    "few channels in": (3, 3, 7, conv_im2col),
    "one channel in": (5, 1, 4, conv_im2col),
    "few channels out": (3, 32, 5, conv_direct),
    "1×1": (1, 6, 5, conv_direct),
    "5×5": (5, 6, 7, conv_direct),
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[1, 2, 1000], ids="{} images in a slice".format)
def sliced(request, monkeypatch):
    """Slices of so many images, and each call's number of them."""
    seen = []

    def cut(x, limit, channels=0):
        assert limit > 1 << 10
        seen.append(max(1, len(x) // request.param))
        return tiling.split(x, seen[-1])

    monkeypatch.setattr(conv.tiling, "cut_batch", cut)
    return seen


def arrays(size, c_in, c_out, rows=6, columns=6, batch=4):
    rng = np.random.default_rng(0)
    shapes = (batch, rows, columns, c_in), (c_in,), (c_in,), (size, size, c_in, c_out)
    return tuple(jnp.asarray(rng.normal(size=s)) for s in shapes)


def plain(x, factor, shift, kernel):
    """Normalised, rectified and convolved, with the batch's mean and variance, by XLA."""
    y = conv_direct.conv2d_xla(jax.nn.relu(normalise.scale_shift(x, factor, shift)), kernel)
    mean = y.mean((0, 1, 2))
    return y, mean, jnp.square(y - mean[None, None, None]).mean((0, 1, 2))


def ours(x, factor, shift, kernel):
    """The same; the moments of the slices are put together as BatchNorm does."""
    y, (means, variances) = conv.rectified_conv2d(x, (factor, shift), kernel, moments=True)
    mean = means.mean(0)
    return y, mean, (variances + jnp.square(means - mean[None])).mean(0)


def assert_same(function, reference, arguments):
    """Values and, for random cotangents of all of them, gradients: nothing but rounding is left."""
    (found, back), (expected, plain_back) = (
        jax.vjp(jax.jit(lambda *args, f=f: f(*args)), *arguments) for f in (function, reference)
    )
    rng = np.random.default_rng(9)
    grads = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape)), expected)
    for a, b in zip(
        jax.tree.leaves((found, back(grads))),
        jax.tree.leaves((expected, plain_back(grads))),
        strict=True,
    ):
        assert a.shape == b.shape and a.dtype == b.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * abs(b).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_with_what_surrounds_it(case, sliced):
    *sizes, formula = case
    x, factor, shift, kernel = arrays(*sizes)
    assert next(f for f in conv._FORMULAS if f.fits(x.shape, kernel.shape)) is formula
    assert_same(ours, plain, (x, factor, shift, kernel))
    assert len(sliced) >= 2  # forward and backward
    assert set(sliced) <= {1, 2, 4}


@pytest.mark.parametrize("rows_columns", [(6, 5), (7, 5)])
def test_alone_and_with_odd_sides(rows_columns):
    """Where the 2×2 outputs of Winograd's do not divide the map, and without a line or moments."""
    x, _, _, kernel = arrays(3, 32, 32, *rows_columns)
    assert conv_winograd.fits(x.shape, kernel.shape)
    assert_same(conv.conv2d, conv_direct.conv2d_xla, (x, kernel))
    assert_same(ours, plain, arrays(3, 32, 32, *rows_columns))


def test_what_winograds_is_not_taken_for():
    """Other kernels, few channels, small maps, a single image; and what is told to be plain."""
    x, kernel = (4, 8, 8, 64), (3, 3, 64, 64)
    assert conv_winograd.fits(x, kernel)
    assert not conv_winograd.fits(x, (5, 5, 64, 64))
    assert not conv_winograd.fits(x, (3, 3, 64, 16))
    assert not conv_winograd.fits((4, 3, 8, 64), kernel)
    assert not conv_winograd.fits((1, 8, 8, 64), kernel)
    x, _, _, kernel = arrays(3, 32, 32)
    with conv.as_on_accelerators():
        text = jax.jit(lambda x, k: conv.conv2d(x, k)).lower(x, kernel).as_text()
    assert "convolution" in text and "dot_general" not in text
    assert "dot_general" in jax.jit(conv.conv2d).lower(x, kernel).as_text()


def test_single_precision_is_as_good_as_the_direct_one():
    """Errors against double precision: not more than twice the direct convolution's."""
    x, _, _, kernel = arrays(3, 64, 32, 16, 16)
    exact = conv_direct.conv2d_xla(x, kernel)
    narrow = x.astype(jnp.float32), kernel.astype(jnp.float32)
    errors = [
        float(abs(f(*narrow) - exact).max() / abs(exact).max())
        for f in (conv.conv2d, conv_direct.conv2d_xla)
    ]
    assert errors[0] <= max(2 * errors[1], 2e-6), errors


def test_half_precision_is_kept_and_its_moments_are_single():
    x, factor, shift, kernel = (a.astype(jnp.bfloat16) for a in arrays(3, 32, 32))
    y, moments = conv.rectified_conv2d(x, (factor, shift), kernel, moments=True)
    assert y.dtype == jnp.bfloat16
    assert [m.dtype for m in moments] == [jnp.float32] * 2
    exact = plain(*(a.astype(jnp.float64) for a in (x, factor, shift, kernel)))[0]
    np.testing.assert_allclose(y.astype(jnp.float64), exact, rtol=0, atol=0.02 * abs(exact).max())


def test_slices_are_whole_images_that_divide_the_batch():
    x = jnp.zeros((12, 4, 4, 8))
    assert tiling.cut_batch(x, 4 * 128).shape == (3, 4, 4, 4, 8)
    assert tiling.cut_batch(x, 5 * 128).shape == (3, 4, 4, 4, 8)
    assert tiling.cut_batch(x, 4 * 128, channels=16).shape == (6, 2, 4, 4, 8)
    assert tiling.cut_batch(x, 1).shape == (12, 1, 4, 4, 8)
    np.testing.assert_array_equal(tiling.join_batch(tiling.cut_batch(x + 1, 256)), x + 1)
