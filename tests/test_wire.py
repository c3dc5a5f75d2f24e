"""Codes for the way between devices: how many bytes, how far off, and what cannot be lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax import wire

ROWS, WIDTH = 5, 13


def rows():
    """Rows of very different sizes, one of them all zeros."""
    rng = np.random.default_rng(1)
    sizes = np.array([1e-20, 1.0, 3e7, 0.0, 1e30])[:, None]
    return (rng.normal(size=(ROWS, WIDTH)) * sizes).astype(np.float32)


def there_and_back(name, x):
    code = wire.CODES[name]
    return jax.jit(lambda x: code.decode(code.encode(x)))(x)


@pytest.mark.parametrize(("name", "kind", "width"), [("bf16", "uint16", 13), ("int8", "int8", 17)])
def test_what_is_sent(name, kind, width):
    sent = wire.CODES[name].encode(jnp.asarray(rows()))
    assert (sent.dtype, sent.shape) == (kind, (ROWS, width))
    back = wire.CODES[name].decode(sent)
    assert (back.dtype, back.shape) == (jnp.float32, (ROWS, WIDTH))


def test_bf16_is_within_a_256th_of_each_number():
    x = rows()
    assert (np.abs(there_and_back("bf16", x) - x) <= np.abs(x) / 256).all()
    assert (there_and_back("bf16", x) != x).any()
    vector = rows().reshape(-1)  # any shape will do
    np.testing.assert_array_equal(
        there_and_back("bf16", vector), there_and_back("bf16", x).reshape(-1)
    )


def test_int8_is_within_a_254th_of_a_rows_largest():
    x = rows()
    back = np.asarray(there_and_back("int8", x))
    bound = np.abs(x).max(1, keepdims=True) / 254
    assert (np.abs(back - x) <= bound * 1.0001).all()
    assert np.abs(back - x).max(1)[1] > bound[1] / 2  # and no better than eight bits
    largest = np.abs(x).argmax(1)[:, None]
    np.testing.assert_allclose(
        np.take_along_axis(back, largest, 1), np.take_along_axis(x, largest, 1), rtol=1e-6
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", wire.CODES)
def test_what_is_not_finite_arrives_so(name, value):
    x = rows()
    x[1, 4] = value
    back = np.asarray(there_and_back(name, x))
    assert not np.isfinite(back[1, 4])
    assert np.isfinite(back[[0, 2, 3, 4]]).all()
