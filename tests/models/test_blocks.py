"""The pieces families are composed of, each against a formula written another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.models import layers, network
from hsvit_jax.ops import remat


def context(key=None, ids=range(64)):
    """A pass whose masks are keyed by `key`, of examples with these identities."""
    words = None if key is None else tuple(np.uint32([key, 7 * key + 1]))
    return network.ForwardContext(train=True, key_words=words, example_ids_B=jnp.array(list(ids)))


def test_dropout_is_a_function_of_key_example_and_place():
    x = jnp.ones((64, 30, 10))
    y = layers.dropout(x, 0.25, context(3), 5)
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
    assert np.mean(np.asarray(y) == 0) == pytest.approx(0.25, abs=0.01)
    np.testing.assert_array_equal(
        layers.dropout(x[:3], 0.25, context(3, [9, 2, 40]), 5), y[np.array([9, 2, 40])]
    )
    for other in (layers.dropout(x, 0.25, context(4), 5), layers.dropout(x, 0.25, context(3), 6)):
        assert np.mean(np.asarray(other) != np.asarray(y)) == pytest.approx(
            2 * 0.25 * 0.75, abs=0.02
        )
    np.testing.assert_array_equal(layers.dropout(x, 0.25, context(), 5), x)


def test_dropped_paths_are_whole_examples():
    x = jnp.ones((64, 3, 2))
    y = np.asarray(layers.drop_path(x, 0.5, context(3), 5))
    assert set(np.unique(y)) == {0, 2} and 16 < (y[:, 0, 0] == 0).sum() < 48
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1, :1], y.shape))
    np.testing.assert_array_equal(layers.drop_path(x, 0.5, context(), 5), x)
    assert layers.drop_path_rates(0.1, 5) == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])


def test_the_two_halves_of_a_block_drop_apart():
    """Each half has its own mask: all four combinations of dropped halves occur."""

    def one(x, context, stream):
        return jnp.ones_like(x)

    def ten(x, context, stream):
        return 10 * jnp.ones_like(x)

    block = layers.Block(2, one, ten, drop_path=0.5)
    x_BTD = jnp.zeros((64, 1, 2))
    sums = [np.asarray(block(x_BTD, context(3), index))[:, 0, 0] for index in (0, 1)]
    assert set(sums[0]) == set(sums[1]) == {0, 2, 20, 22}
    assert (sums[0] != sums[1]).any()


# --- What is computed again for the gradient -----------------------------------------------------


def test_recomputed_changes_neither_value_nor_gradient():
    """By float32 rounding, also for what it closes over: weights, and integers that key a mask."""
    up, down = (jax.random.normal(jax.random.key(i), (5, 5)) for i in range(2))
    x = jax.random.normal(jax.random.key(2), (4, 3, 5))

    def results(wrap):
        def loss(x, up, down, ids):
            now = network.ForwardContext(train=True, key_words=(ids[0], ids[1]), example_ids_B=ids)

            def function(x, y):
                return layers.dropout(jnp.sin(x @ up) * y, 0.4, now, 3) @ down

            return jnp.square(wrap(function, x, jnp.cos(x))).mean()

        ids = jnp.array([5, 2, 9, 4])
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, up, down, ids)

    (value, grads), (value_2, grads_2) = (
        results(wrap) for wrap in (remat.recomputed, lambda f, *args: f(*args))
    )
    np.testing.assert_allclose(value, value_2, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, grads_2)
    assert np.abs(grads[1]).max() > 0.01


def test_what_is_recomputed_is_not_held():
    """A chain of wide layers: the program holds a wide array or two, not one of each layer."""
    kernels = jax.ShapeDtypeStruct((8, 4, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((256, 4), jnp.float32)

    def held(wrap):
        def loss(kernels, x):
            for kernel in kernels:
                x = wrap(lambda x, kernel=kernel: jnp.sin(jnp.sin(x @ kernel)) @ kernel.T, x)
            return x.mean()

        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(kernels, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert held(remat.recomputed) < 0.5 * held(lambda f, *args: f(*args))
