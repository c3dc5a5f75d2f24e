"""Softmax attention of many heads and groups, with a gradient that recomputes its weights.

Heads and groups are batch axes of one computation. G groups, B batch, N heads, T queries, S keys
(T may be 1: the last block asks for CLS alone), E the width of a head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops.dropout import dropout_scale
from hsvit_jax.ops.normalise import moments_dtype

Array = jax.Array


def attention_weights(q_GBNTE: Array, k_GBNSE: Array) -> Array:
    """Softmax over keys of the scaled scores, (G, B, N, T, S), in at least float32."""
    scores = jnp.einsum("gbnte,gbnse->gbnts", q_GBNTE, k_GBNSE)
    scores = scores.astype(moments_dtype(scores)) * q_GBNTE.shape[-1] ** -0.5
    return jax.nn.softmax(scores, axis=-1)


def _attention(
    rate: float, q_GBNTE: Array, k_GBNSE: Array, v_GBNSE: Array, words: tuple[Array, ...]
) -> tuple[Array, Array]:
    """What the heads find, and the logarithm of each query's sum of exponentials (…, T, 1).

    Weights are divided by their sum after the product with the values, which is the smaller array.
    """
    scores = jnp.einsum("gbnte,gbnse->gbnts", q_GBNTE, k_GBNSE)
    scores = scores.astype(moments_dtype(scores)) * q_GBNTE.shape[-1] ** -0.5
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if rate:
        weights = weights * dropout_scale(words, weights.shape, rate)
    out = jnp.einsum("gbnts,gbnse->gbnte", weights.astype(v_GBNSE.dtype), v_GBNSE)
    return (out / total).astype(v_GBNSE.dtype), largest + jnp.log(total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    rate: float, q_GBNTE: Array, k_GBNSE: Array, v_GBNSE: Array, words: tuple[Array, ...]
) -> Array:
    """Scaled dot-product attention, softmax over keys, dropout on the weights.

    rate: dropout probability, 0 for none. q (G, B, N, T, E), k and v (G, B, N, S, E), any float
    dtype; words: counters for `counter_bits` of rank five, ignored at rate 0. Returns
    (G, B, N, T, E). The gradient recomputes the weights and the dropout mask: both are larger than
    everything else here, and cheap.
    """
    return _attention_fwd(rate, q_GBNTE, k_GBNSE, v_GBNSE, words)[0]


def _attention_fwd(rate, q, k, v, words):
    def slice_(q, k, v, words):
        return _attention(rate, q, k, v, words)

    out, sums = _by_groups(slice_, (q, k, v), words)
    return out, (q, k, v, out, sums, words)


def _attention_bwd(rate, residuals, grad_GBNTE):
    """Softmax attention's gradient: dS = P ∘ (dP − Σ P ∘ dP), with the weights computed again.

    Σ P ∘ dP over the keys is the product of the output with its gradient, over the head's width.
    """

    def slice_(q, k, v, out, sums, grad, words):
        scale = q.shape[-1] ** -0.5
        scores = jnp.einsum("gbnte,gbnse->gbnts", q, k)
        weights = jnp.exp(scores.astype(sums.dtype) * scale - sums)
        inner = (grad * out).astype(sums.dtype).sum(-1, keepdims=True)
        grad_weights = jnp.einsum("gbnte,gbnse->gbnts", grad, v).astype(sums.dtype)
        dropped = weights
        if rate:
            factors = dropout_scale(words, weights.shape, rate)
            dropped, grad_weights = weights * factors, grad_weights * factors
        grad_v = _over_queries(dropped.astype(v.dtype), grad)
        grad_scores = (weights * (grad_weights - inner) * scale).astype(q.dtype)
        grad_q = jnp.einsum("gbnts,gbnse->gbnte", grad_scores, k)
        return grad_q, _over_queries(grad_scores, q), grad_v

    *arrays, words = residuals
    return (*_by_groups(slice_, (*arrays, grad_GBNTE), words), None)


def _over_queries(x_GBNTS: Array, y_GBNTE: Array) -> Array:
    """xᵀ·y for each head, (G, B, N, S, E), as the transpose of yᵀ·x.

    The smaller one is transposed, by itself: folded into the product, as XLA would, each of the
    many tiny products is one of Eigen's on a CPU, with an allocation of its own.
    """
    y_GBNET = lax.optimization_barrier(y_GBNTE.swapaxes(3, 4))
    out_GBNES = jnp.einsum("gbnet,gbnts->gbnes", y_GBNET, x_GBNTS)
    return lax.optimization_barrier(out_GBNES).swapaxes(3, 4)


#: Weights, as numbers, that stay in a CPU's cache through all that is done with them (measured).
_CACHED_WEIGHTS = 1 << 21


def _by_groups(function: Any, arrays: tuple[Array, ...], words: tuple[Array, ...]) -> Any:
    """function(*arrays, words), on a CPU for a few groups after the other if they are large.

    arrays have the groups in front; of the words those that do are cut likewise.
    """
    q_GBNTE, k_GBNSE = arrays[:2]
    groups = q_GBNTE.shape[0]
    size = q_GBNTE.size // q_GBNTE.shape[-1] * k_GBNSE.shape[3] // groups
    some = max(
        n
        for n in range(1, groups + 1)
        if groups % n == 0 and (n == 1 or n * size <= _CACHED_WEIGHTS)
    )
    if some == groups or jax.default_backend() != "cpu":
        return function(*arrays, words)
    words = tuple(jnp.asarray(word) for word in words)
    along = [word.ndim > 0 and word.shape[0] > 1 for word in words]

    def cut(x: Array) -> Array:
        return x.reshape(groups // some, some, *x.shape[1:])

    def part(args: tuple[tuple[Array, ...], list[Array]]) -> Any:
        mine = iter(args[1])
        own = (next(mine) if a else word for a, word in zip(along, words, strict=True))
        return function(*args[0], tuple(own))

    cut_words = [cut(word) for a, word in zip(along, words, strict=True) if a]
    parts = lax.map(part, (tuple(cut(x) for x in arrays), cut_words))
    return jax.tree.map(lambda x: x.reshape(groups, *x.shape[2:]), parts)


attention.defvjp(_attention_fwd, _attention_bwd)
