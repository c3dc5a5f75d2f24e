"""Softmax attention of many heads and groups, with a gradient that recomputes its weights.

Heads and groups are batch axes of one computation: G groups, B batch, N heads, T queries, S keys, E
the width of a head. T is 1 where only the CLS token's output is used.

On a CPU large weights are computed for a few groups at a time, so that they stay in the cache, and
products over the queries by a transpose. Measured with jax 0.10.2 on two cores: 33 tokens, forward
18 → 10 ms, with gradient 66 → 42; products over the queries 15 → 2 ms (docs/performance.md).
`_by_groups` can go when XLA for CPU fuses the softmax with its products, `over_queries` when it
runs batches of small transposed products without an allocation for each.

A TPU pads each product of a few tokens by a few features to the 128×128 of its matrix unit, and
what it makes to tiles; `_Lanes` adds elementwise products up instead (docs/performance.md).
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.ops.conv import platform, use_cpu_formulas
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


@dataclasses.dataclass(frozen=True)
class _Dots:
    """Products of arrays (G, B, N, T, E) and weights (G, B, N, T, S) by XLA's dots."""

    axis = -1  # of a head's features, and of the keys in weights

    def scores(self, q_GBNTE: Array, k_GBNSE: Array) -> Array:
        return jnp.einsum("gbnte,gbnse->gbnts", q_GBNTE, k_GBNSE)

    def values(self, weights_GBNTS: Array, v_GBNSE: Array) -> Array:
        return jnp.einsum("gbnts,gbnse->gbnte", weights_GBNTS, v_GBNSE)

    def over_queries(self, x_GBNTS: Array, y_GBNTE: Array) -> Array:
        """xᵀ·y for each head, (G, B, N, S, E), as the transpose of yᵀ·x.

        The barriers keep XLA from folding the transposes into the product: on a CPU each of the
        many small products would then be a library call with an allocation of its own.
        """
        y_GBNET = lax.optimization_barrier(y_GBNTE.swapaxes(3, 4))
        out_GBNES = jnp.einsum("gbnet,gbnts->gbnes", y_GBNET, x_GBNTS)
        return lax.optimization_barrier(out_GBNES).swapaxes(3, 4)

    def dropout(self, counters: tuple[Array, ...], weights_GBNTS: Array, rate: float) -> Array:
        return dropout_scale(counters, weights_GBNTS.shape, rate)

    def enter(self, x_GBNTE: Array) -> Array:
        return x_GBNTE

    leave = enter


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """Products of arrays (T, E, N, L) and weights (T, S, N, L) by elementwise ones, in float32.

    L = G·B fills the lanes of a vector unit, and N its sublanes.
    """

    groups: int
    batch: int
    axis = 1

    def scores(self, q_TENL: Array, k_SENL: Array) -> Array:
        return _sum_of_products(
            (q_TENL[:, None, e], k_SENL[None, :, e]) for e in range(q_TENL.shape[1])
        )

    def values(self, weights_TSNL: Array, v_SENL: Array) -> Array:
        return _sum_of_products(
            (weights_TSNL[:, s, None], v_SENL[None, s]) for s in range(len(v_SENL))
        )

    def over_queries(self, x_TSNL: Array, y_TENL: Array) -> Array:
        return _sum_of_products((x_TSNL[t, :, None], y_TENL[None, t]) for t in range(len(y_TENL)))

    def dropout(self, counters: tuple[Array, ...], weights_TSNL: Array, rate: float) -> Array:
        queries, keys, heads, _ = weights_TSNL.shape
        shape = (self.groups, self.batch, heads, queries, keys)
        return self.enter(dropout_scale(counters, shape, rate))

    def enter(self, x_GBNTE: Array) -> Array:
        *_, heads, tokens, width = x_GBNTE.shape
        return x_GBNTE.transpose(3, 4, 2, 0, 1).reshape(tokens, width, heads, -1)

    def leave(self, x_TENL: Array) -> Array:
        x_TENGB = x_TENL.reshape(*x_TENL.shape[:3], self.groups, self.batch)
        return x_TENGB.transpose(3, 4, 2, 0, 1)


def _sum_of_products(pairs: Iterable[tuple[Array, Array]]) -> Array:
    wide = (tuple(x.astype(moments_dtype(x)) for x in pair) for pair in pairs)
    return functools.reduce(operator.add, itertools.starmap(operator.mul, wide))


#: Tokens that a TPU attends to in fewer cycles by `_Lanes` than by dots, in heads of 8 features;
#: more where a batch fills lanes of 128 by itself (estimated for 9, 17 and 33 tokens).
_FEW, _FEW_IN_FULL_LANES = 17, 33


def _products(q_GBNTE: Array, k_GBNSE: Array) -> _Dots | _Lanes:
    groups, batch, _, queries, width = q_GBNTE.shape
    few = _FEW if batch % 128 else _FEW_IN_FULL_LANES
    if platform() == "tpu" and width <= 8 and max(queries, k_GBNSE.shape[3]) <= few:
        return _Lanes(groups, batch)
    return _Dots()


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
    products = _products(q_GBNTE, k_GBNSE)
    arrays = (products.enter(x) for x in (q_GBNTE, k_GBNSE, v_GBNSE))
    return products.leave(_attention(products, rate, *arrays, counters))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(products, rate, q, k, v, counters):
    return _attention_fwd(products, rate, q, k, v, counters)[0]


def _attention_fwd(products, rate, q, k, v, counters):
    """Each head's weighted values, and each query's log-sum-exp for the gradient.

    The division by the sum of weights follows the product with the values, the smaller array.
    """
    axis, scale = products.axis, q.shape[products.axis] ** -0.5

    def slice_(q, k, v, counters):
        scores = products.scores(q, k)
        scores = scores.astype(moments_dtype(scores)) * scale
        largest = scores.max(axis, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis, keepdims=True)
        if rate:
            weights = weights * products.dropout(counters, weights, rate)
        out = products.values(weights.astype(v.dtype), v)
        return (out / total).astype(v.dtype), largest + jnp.log(total)

    out, sums = _by_groups(slice_, (q, k, v), counters)
    return out, (q, k, v, out, sums, counters)


def _attention_bwd(products, rate, residuals, grad):
    """Softmax attention's gradient: dS = P ∘ (dP − Σ P ∘ dP), with the weights P recomputed.

    Σ P ∘ dP over the keys equals the sum of output times output gradient over the head's width.
    """
    axis = products.axis

    def slice_(q, k, v, out, sums, grad, counters):
        scale = q.shape[axis] ** -0.5
        scores = products.scores(q, k)
        weights = jnp.exp(scores.astype(sums.dtype) * scale - sums)
        inner = (grad * out).astype(sums.dtype).sum(axis, keepdims=True)
        grad_weights = products.scores(grad, v).astype(sums.dtype)
        dropped = weights
        if rate:
            factors = products.dropout(counters, weights, rate)
            dropped, grad_weights = weights * factors, grad_weights * factors
        grad_v = products.over_queries(dropped.astype(v.dtype), grad)
        grad_scores = (weights * (grad_weights - inner) * scale).astype(q.dtype)
        grads = products.values(grad_scores, k), products.over_queries(grad_scores, q), grad_v
        return tuple(x.astype(q.dtype) for x in grads)

    *arrays, counters = residuals
    return (*_by_groups(slice_, (*arrays, grad), counters), None)


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


_attention.defvjp(_attention_fwd, _attention_bwd)
