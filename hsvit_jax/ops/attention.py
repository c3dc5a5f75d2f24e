"""Softmax attention of many heads and groups, with a gradient that recomputes its weights.

Heads and groups are batch axes of one computation: G groups, B batch, N heads, T queries, S keys, E
the width of a head. T is 1 where only the CLS token's output is used.

On a CPU large weights are computed for a few groups at a time, so that they stay in the cache, and
products over the queries by a transpose. Measured with jax 0.10.2 on two cores: 33 tokens, forward
18 → 10 ms, with gradient 66 → 42; products over the queries 15 → 2 ms (docs/performance.md).
`_by_groups` can go when XLA for CPU fuses the softmax with its products, `_over_queries` when it
runs batches of small transposed products without an allocation for each.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops.conv import use_cpu_formulas
from hsvit_jax.ops.dropout import dropout_scale
from hsvit_jax.ops.normalise import moments_dtype
from hsvit_jax.ops.remat import recomputed

Array = jax.Array


def attention_weights(q_GBNTE: Array, k_GBNSE: Array) -> Array:
    """Softmax over keys of the scaled scores, (G, B, N, T, S), in at least float32."""
    scores = jnp.einsum("gbnte,gbnse->gbnts", q_GBNTE, k_GBNSE)
    scores = scores.astype(moments_dtype(scores)) * q_GBNTE.shape[-1] ** -0.5
    return jax.nn.softmax(scores, axis=-1)


def biased_weights(q_BNTE: Array, k_BNSE: Array, bias_BNTS: Array) -> Array:
    """Softmax over keys of the scaled scores plus a bias, (…, B, N, T, S), in at least float32."""
    scores = jnp.einsum("...te,...se->...ts", q_BNTE, k_BNSE)
    wide = scores.astype(moments_dtype(scores)) * q_BNTE.shape[-1] ** -0.5
    return jax.nn.softmax(wide + bias_BNTS.astype(wide.dtype), axis=-1)


def biased_attention(q_BNTE: Array, k_BNSE: Array, v_BNSE: Array, bias_BNTS: Array) -> Array:
    """Attention whose scores have a bias; the gradient recomputes the weights.

    Args:
        v_BNSE: values, of any width.
        bias_BNTS: of each score, broadcast over axes of length 1.

    Returns:
        (…, B, N, T, E) of the values' width.
    """

    def weighted(q: Array, k: Array, v: Array) -> Array:
        weights = biased_weights(q, k, bias_BNTS).astype(v.dtype)
        return jnp.einsum("...ts,...se->...te", weights, v)

    return recomputed(weighted, q_BNTE, k_BNSE, v_BNSE)


def _attention(
    rate: float, q_GBNTE: Array, k_GBNSE: Array, v_GBNSE: Array, counters: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Each head's weighted values, and each query's log-sum-exp (…, T, 1).

    The division by the sum of weights follows the product with the values, the smaller array.
    """
    scores = jnp.einsum("gbnte,gbnse->gbnts", q_GBNTE, k_GBNSE)
    scores = scores.astype(moments_dtype(scores)) * q_GBNTE.shape[-1] ** -0.5
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if rate:
        weights = weights * dropout_scale(counters, weights.shape, rate)
    out = jnp.einsum("gbnts,gbnse->gbnte", weights.astype(v_GBNSE.dtype), v_GBNSE)
    return (out / total).astype(v_GBNSE.dtype), largest + jnp.log(total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    rate: float, q_GBNTE: Array, k_GBNSE: Array, v_GBNSE: Array, counters: tuple[Array, ...]
) -> Array:
    """Scaled dot-product attention, softmax over keys, dropout on the weights.

    The gradient recomputes the weights and the dropout mask, which are cheap and larger than
    everything else here.

    Args:
        rate: dropout probability, 0 for none.
        counters: of rank five, for `dropout.counter_bits`; ignored at rate 0.

    Returns:
        (G, B, N, T, E). Source: HSViT paper, section 3.2; Vaswani et al. (2017), equation 1.
    """
    return _attention_fwd(rate, q_GBNTE, k_GBNSE, v_GBNSE, counters)[0]


def _attention_fwd(rate, q, k, v, counters):
    def slice_(q, k, v, counters):
        return _attention(rate, q, k, v, counters)

    out, sums = _by_groups(slice_, (q, k, v), counters)
    return out, (q, k, v, out, sums, counters)


def _attention_bwd(rate, residuals, grad_GBNTE):
    """Softmax attention's gradient: dS = P ∘ (dP − Σ P ∘ dP), with the weights P recomputed.

    Σ P ∘ dP over the keys equals the sum of output times output gradient over the head's width.
    """

    def slice_(q, k, v, out, sums, grad, counters):
        scale = q.shape[-1] ** -0.5
        scores = jnp.einsum("gbnte,gbnse->gbnts", q, k)
        weights = jnp.exp(scores.astype(sums.dtype) * scale - sums)
        inner = (grad * out).astype(sums.dtype).sum(-1, keepdims=True)
        grad_weights = jnp.einsum("gbnte,gbnse->gbnts", grad, v).astype(sums.dtype)
        dropped = weights
        if rate:
            factors = dropout_scale(counters, weights.shape, rate)
            dropped, grad_weights = weights * factors, grad_weights * factors
        grad_v = _over_queries(dropped.astype(v.dtype), grad)
        grad_scores = (weights * (grad_weights - inner) * scale).astype(q.dtype)
        grad_q = jnp.einsum("gbnts,gbnse->gbnte", grad_scores, k)
        return grad_q, _over_queries(grad_scores, q), grad_v

    *arrays, counters = residuals
    return (*_by_groups(slice_, (*arrays, grad_GBNTE), counters), None)


def _over_queries(x_GBNTS: Array, y_GBNTE: Array) -> Array:
    """xᵀ·y for each head, (G, B, N, S, E), as the transpose of yᵀ·x.

    The barriers keep XLA from folding the transposes into the product: on a CPU each of the many
    small products would then be a library call with an allocation of its own.
    """
    y_GBNET = lax.optimization_barrier(y_GBNTE.swapaxes(3, 4))
    out_GBNES = jnp.einsum("gbnet,gbnts->gbnes", y_GBNET, x_GBNTS)
    return lax.optimization_barrier(out_GBNES).swapaxes(3, 4)


#: Attention weights, in numbers, that stay in a CPU's cache from scores to output (measured).
_CACHED_WEIGHTS = 1 << 21


def _by_groups(function: Any, arrays: tuple[Array, ...], counters: tuple[Array, ...]) -> Any:
    """function(*arrays, counters); on a CPU, if the weights are large, a few groups at a time.

    The arrays' first axis is G, and of the counters it is G or 1.
    """
    if not use_cpu_formulas("attention"):
        return function(*arrays, counters)
    q_GBNTE, k_GBNSE = arrays[:2]
    groups = q_GBNTE.shape[0]
    size = q_GBNTE.size // q_GBNTE.shape[-1] * k_GBNSE.shape[3] // groups
    slice_groups = max(
        n
        for n in range(1, groups + 1)
        if groups % n == 0 and (n == 1 or n * size <= _CACHED_WEIGHTS)
    )
    if slice_groups == groups:
        return function(*arrays, counters)
    counters = tuple(jnp.asarray(counter) for counter in counters)
    by_group = [counter.ndim > 0 and counter.shape[0] > 1 for counter in counters]

    def cut(x: Array) -> Array:
        return x.reshape(groups // slice_groups, slice_groups, *x.shape[1:])

    def part(args: tuple[tuple[Array, ...], list[Array]]) -> Any:
        sliced = iter(args[1])
        parts = (next(sliced) if a else c for a, c in zip(by_group, counters, strict=True))
        return function(*args[0], tuple(parts))

    cut_counters = [cut(counter) for a, counter in zip(by_group, counters, strict=True) if a]
    parts = lax.map(part, (tuple(cut(x) for x in arrays), cut_counters))
    return jax.tree.map(lambda x: x.reshape(groups, *x.shape[2:]), parts)


attention.defvjp(_attention_fwd, _attention_bwd)
