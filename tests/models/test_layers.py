"""Layers against XLA's plain operations, in float64 where numbers are compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.models import layers
from hsvit_jax.ops import attention, dropout


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def value_and_pullback(function, *arguments, seed=9):
    """A function's value and its gradients for a random cotangent, compiled."""

    @jax.jit
    def run(*args):
        out, pull = jax.vjp(function, *args)
        return out, pull(normal(seed, *out.shape).astype(out.dtype))

    return run(*arguments)


def assert_close(ours, theirs, tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-30, np.abs(b).max()))


def test_batch_norm_refuses_a_single_value():
    with pytest.raises(ValueError, match="more than one value per channel"):
        layers.BatchNorm(3)(jnp.ones((1, 1, 1, 3)), train=True)


WORDS = (jnp.uint32(11), jnp.uint32(22))


def identities(groups, examples, layer=1):
    """Counters as an attention layer gives them."""
    return (
        *WORDS,
        layer,
        jnp.asarray(groups).reshape(-1, 1, 1, 1, 1),
        jnp.asarray(examples).reshape(1, -1, 1, 1, 1),
    )


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("queries", [5, 1])
def test_attention_equals_the_plain_formula(rate, queries, x64):
    groups, batch, heads, tokens, width = 3, 2, 2, 5, 7
    words = identities(range(groups), [4, 9])

    def plain(q, k, v):
        scores = jnp.einsum("gbnte,gbnse->gbnts", q, k) / np.sqrt(width)
        weights = jax.nn.softmax(scores, -1)
        if rate:
            weights = weights * dropout.dropout_scale(words, weights.shape, rate)
        return jnp.einsum("gbnts,gbnse->gbnte", weights, v)

    def ours(q, k, v):
        return attention.attention(rate, q, k, v, words)

    q = normal(0, groups, batch, heads, queries, width)
    k, v = (normal(i, groups, batch, heads, tokens, width) for i in (1, 2))
    plain_result = value_and_pullback(plain, q, k, v)
    assert_close(value_and_pullback(ours, q, k, v), plain_result, 1e-12)
    if rate:  # the mask did something
        undropped = attention.attention(0.0, q, k, v, ())
        assert np.abs(plain_result[0] - undropped).max() > 0.01


@pytest.mark.parametrize("combine", [layers.add_bias, layers.multiply])
def test_gradients_of_vectors_are_summed_in_float32(combine):
    y, cotangent = (normal(seed, 256, 16, 16, 8) + 0.3 for seed in (0, 1))
    y, cotangent = jnp.abs(y).astype(jnp.bfloat16), cotangent.astype(jnp.bfloat16)
    pull = jax.jit(lambda y, v, g: jax.vjp(lambda v: combine(y, v), v)[1](g)[0])
    terms = np.asarray(cotangent, np.float64)
    if combine is layers.multiply:
        terms *= np.asarray(y, np.float64)
    found = pull(y, jnp.ones(8), cotangent)
    np.testing.assert_allclose(found, terms.sum((0, 1, 2)), rtol=0.02)
    assert combine(y, jnp.ones(8)).dtype == y.dtype


def test_dropout_rate_and_scale():
    factors = np.asarray(
        dropout.dropout_scale(identities(range(7), range(31)), (7, 31, 8, 9, 9), 0.2)
    )
    assert set(np.unique(factors)) == {np.float32(0), np.float32(1.25)}
    dropped = (factors == 0).mean()
    n = factors.size
    assert abs(dropped - 0.2) < 4 * np.sqrt(0.2 * 0.8 / n)
    for axes in ((0,), (1,), (2,), (3, 4)):  # no slice is favoured
        other = tuple(a for a in range(5) if a not in axes)
        rates = (factors == 0).mean(other)
        deviation = np.sqrt(0.2 * 0.8 / (n / rates.size))
        assert np.abs(rates - 0.2).max() < 5 * deviation


def test_counter_bits_are_uniform():
    bits = np.asarray(dropout.counter_bits(identities(range(5), range(13)), (5, 13, 3, 17, 17)))
    assert bits.dtype == np.uint32
    n = bits.size
    assert abs(bits.mean() / 2**32 - 0.5) < 4 / np.sqrt(12 * n)
    for position in range(32):
        assert abs(((bits >> position) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(n)
    assert len(np.unique(bits)) > n - 40  # n²/2³³ ≈ 0.4 chance collisions expected


def test_masks_of_different_identities_are_independent():
    shape = (1, 1, 8, 33, 33)

    def mask(groups=0, examples=0, layer=1, words=WORDS):
        counters = (*words, *identities([groups], [examples], layer)[2:])
        return np.asarray(dropout.dropout_scale(counters, shape, 0.2)).ravel() == 0

    base = mask()
    n, variance = base.size, 0.2 * 0.8
    others = {
        "group": [mask(groups=g) for g in (1, 2, 15)],
        "example": [mask(examples=e) for e in (1, 2, 3, 1000)],
        "layer": [mask(layer=i) for i in (2, 3, 8)],
        "key": [mask(words=(jnp.uint32(12), WORDS[1])), mask(words=(WORDS[0], jnp.uint32(23)))],
        "swapped identities": [mask(groups=1, examples=0), mask(groups=0, examples=1)],
        "shifted": [np.roll(base, s) for s in (1, 33, 33 * 33)],
    }
    for what, masks in others.items():
        for other in masks:
            correlation = ((base - 0.2) * (other - 0.2)).mean() / variance
            assert abs(correlation) < 5 / np.sqrt(n), what


@pytest.mark.cpu
def test_attention_for_some_groups_at_a_time_is_the_same(monkeypatch):
    """Cut along the groups, as for large weights on a CPU: outputs, gradients and masks."""
    rng = np.random.default_rng(2)
    shapes = ((4, 3, 2, 5, 6), (4, 3, 2, 7, 6), (4, 3, 2, 7, 6))
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    groups, examples = jnp.arange(4).reshape(-1, 1, 1, 1, 1), jnp.arange(3).reshape(1, -1, 1, 1, 1)
    words = (jnp.uint32(1), jnp.uint32(2), 3, groups)

    def results(numbers, batch):
        """Output and gradients of the first examples where that many weights fit, and how many
        loops that took. Each batch once: what was traced with another number is remembered."""
        monkeypatch.setattr(attention, "_CACHED_WEIGHTS", numbers)
        first = [x[:, :batch] for x in (q, k, v)]

        def both(q, k, v):
            keys = (*words, examples[:, :batch])
            out, back = jax.vjp(lambda *qkv: attention.attention(0.4, *qkv, keys), q, k, v)
            return out, back(out)

        traced = jax.make_jaxpr(both)(*first)
        loops = sum(equation.primitive.name == "scan" for equation in traced.eqns)
        return jax.tree.leaves(jax.jit(both)(*first)), loops

    whole, loops = results(1 << 21, 3)
    assert loops == 0
    for numbers, batch in ((1, 2), (2 * 2 * 5 * 7, 1)):  # one group at a time, and two
        cut, loops = results(numbers, batch)
        assert loops == 2  # forward and backward
        for a, b in zip(cut, whole, strict=True):
            np.testing.assert_allclose(a, b[:, :batch], rtol=0, atol=1e-6)
