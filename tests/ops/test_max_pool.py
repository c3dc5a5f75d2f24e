"""Max pooling against XLA's, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hsvit_jax.ops.max_pool import max_pool


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [
        *itertools.product((3, 5), (1, 2, 3, 4), (None,)),
        *((1, 2, None), (7, 2, None), (2, 2, 0), (2, 1, 1), (3, 2, 0), (4, 3, None), (5, 2, 1)),
    ],
)
def test_it_is_xlas_and_so_is_its_gradient(window, stride, padding):
    pad = window // 2 if padding is None else padding

    def plain(x):
        return lax.reduce_window(
            x,
            -jnp.inf,
            lax.max,
            (1, window, window, 1),
            (1, stride, stride, 1),
            ((0, 0), (pad, pad), (pad, pad), (0, 0)),
        )

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(2, 11, 12, 3)))

        def value_and_gradient(pool):
            y, back = jax.vjp(pool, x)
            return y, back(jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

        (ours, grads), (theirs, expected) = (
            jax.jit(value_and_gradient, static_argnums=0)(pool)
            for pool in (lambda x: max_pool(x, window, stride, padding), plain)
        )
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(grads, expected, rtol=0, atol=1e-14)


def test_negative_maps_ignore_the_border():
    x = -jnp.ones((1, 5, 5, 1))
    np.testing.assert_array_equal(max_pool(x, 3, 2), -np.ones((1, 3, 3, 1)))
