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


def test_patches_are_read_row_by_row_channel_last():
    module = layers.PatchEmbedding(2, 3, 12, jax.random.key(0))
    module.linear.kernel[...], module.linear.bias[...] = jnp.eye(12), jnp.zeros(12)
    images = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    tokens = module(jnp.asarray(images))
    assert tokens.shape == (2, 6, 12)
    np.testing.assert_array_equal(tokens[1, 4], images[1, 2:4, 2:4].ravel())


@pytest.mark.parametrize(("init", "std", "cut"), [("torch", 40**-0.5 / 3**0.5, 40**-0.5)])
def test_uniform_start(init, std, cut):
    kernel = layers.init_kernel(jax.random.key(0), (40, 300), 40, init)
    assert np.std(kernel) == pytest.approx(std, rel=0.03)
    assert 0.99 * cut < np.abs(kernel).max() <= cut
    bias = layers.init_bias(jax.random.key(0), 300, 40, init)
    assert 0.95 * cut < np.abs(bias).max() <= cut


@pytest.mark.parametrize(("init", "std"), [("normal", 0.02), ("kaiming", (2 / 40) ** 0.5)])
def test_normal_start(init, std):
    kernel = layers.init_kernel(jax.random.key(0), (40, 300), 40, init)
    assert np.std(kernel) == pytest.approx(std, rel=0.03)
    assert np.abs(kernel).max() > 3 * std  # not cut off
    assert not np.any(layers.init_bias(jax.random.key(0), 300, 40, init))


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


@pytest.mark.parametrize(("dim_head", "bias"), [(None, True), (5, False)])
def test_attention_of_heads_of_any_width(dim_head, bias):
    module = layers.MultiHeadAttention(6, 2, jax.random.key(0), dim_head=dim_head, bias=bias)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 4, 6))
    width = dim_head or 3
    qkv = np.asarray(module.qkv(x_BTD)).reshape(2, 4, 3, 2, width)
    heads = []
    for n in range(2):
        q, k, v = (qkv[:, :, j, n] for j in range(3))
        weights = np.exp(q @ k.transpose(0, 2, 1) / width**0.5)
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    expected = module.out(jnp.concatenate(heads, -1))
    np.testing.assert_allclose(module(x_BTD, context(ids=range(2)), 0), expected, atol=1e-6)
    assert (module.qkv.bias is not None) == bias


def test_dropout_of_attention_weights_needs_a_key():
    module = layers.MultiHeadAttention(6, 2, jax.random.key(0), attention_dropout=0.5)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 4, 6))
    plain, dropped = (module(x_BTD, context(key, range(2)), 0) for key in (None, 3))
    assert np.abs(plain - dropped).max() > 1e-3
    np.testing.assert_allclose(module(x_BTD[1:], context(3, [1]), 0), dropped[1:], atol=1e-6)


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


def test_an_image_that_patches_do_not_divide():
    with pytest.raises(ValueError, match=r"30×32 pixels.*patch=4.*model.patch"):
        layers.check_patches((30, 32), 4)


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
