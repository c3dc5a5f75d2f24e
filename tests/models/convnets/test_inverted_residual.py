"""Inverted residual blocks: squeeze-and-excitation, and what is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.models.convnets import inverted_residual
from hsvit_jax.models.convnets.convnet import Conv
from hsvit_jax.models.network import UNSHARDED, ForwardContext


@pytest.fixture(scope="module")
def branch():
    """(drop, key, ids) → what a block with projection alone adds to each of eight examples."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3, 3, 4)), jnp.float32)

    def run(drop, seed, ids):
        narrow = Conv(4, 4, 1)
        block = inverted_residual.Block(
            inverted_residual.Inverted(
                None, Conv(4, 4, 3, depthwise=True), narrow, residual=True, rate=0.5, drop=drop
            ),
            jax.random.key(0),
        )
        words = None
        if seed is not None:
            bits = jax.random.bits(jax.random.key(seed), (2,), jnp.uint32)
            words = (bits[0], bits[1])
        context = ForwardContext(train=False, key_words=words, example_ids_B=jnp.asarray(ids))
        return np.asarray(block(x[jnp.asarray(ids)], context, UNSHARDED, 3) - x[jnp.asarray(ids)])

    return run


@pytest.mark.parametrize("drop", ("values", "paths"))
def test_what_is_dropped_follows_the_example_and_the_key(branch, drop):
    order = np.array([3, 1, 4, 0, 2, 7, 6, 5])
    whole, kept = branch(drop, 1, np.arange(8)), branch(drop, None, np.arange(8))
    np.testing.assert_allclose(branch(drop, 1, order), whole[order], atol=1e-6)
    assert np.abs(branch(drop, 2, np.arange(8)) - whole).max() > 1e-3
    gone = np.abs(whole) < 1e-6
    np.testing.assert_allclose(whole[~gone], 2 * kept[~gone], rtol=1e-3, atol=1e-5)
    assert 0.2 < gone.mean() < 0.8
    per_example = gone.reshape(8, -1).mean(1)
    assert ({*per_example} <= {0.0, 1.0}) == (drop == "paths")


def test_the_order_of_a_block_s_convolutions():
    wide, deep, narrow = Conv(2, 6, 1), Conv(6, 6, 3, depthwise=True), Conv(6, 2, 1)
    assert inverted_residual.Inverted(wide, deep, narrow).convs() == (wide, deep, narrow)
    assert inverted_residual.Inverted(None, deep, narrow).convs() == (deep, narrow)
