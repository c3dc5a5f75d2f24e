"""Layers shared by the model families: convolution, pooling, normalisation, attention, dropout.

Legend of dimensions, here and in every model: B batch, H/W image rows and columns, C channels,
G attention groups, T tokens of a group (CLS included), D embedding, N heads, K classes.
A name carries its shape: `z_GBTD`. Nothing here knows of devices, except where a formula is picked
for the back end that compiles it; the plain XLA formula is always the reference in the tests.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hsvit_jax.models.recompute import recomputed

Array = jax.Array


# --- Initialisation ------------------------------------------------------------------------------


def uniform(key: Array, shape: Sequence[int], bound: float) -> Array:
    """Draws float32 values uniformly from [-bound, bound]."""
    return jax.random.uniform(key, tuple(shape), jnp.float32, -bound, bound)


def torch_linear(key: Array, groups: tuple[int, ...], fan_in: int, fan_out: int) -> dict:
    """A linear layer as PyTorch starts it: weight and bias uniform in ±1/√fan_in.

    Returns float32 parameters `kernel` (*groups, fan_in, fan_out) and `bias` (*groups, fan_out).
    """
    k_key, b_key = jax.random.split(key)
    bound = fan_in**-0.5
    return {
        "kernel": nnx.Param(uniform(k_key, (*groups, fan_in, fan_out), bound)),
        "bias": nnx.Param(uniform(b_key, (*groups, fan_out), bound)),
    }


# --- Inside a mesh -------------------------------------------------------------------------------


def vary_like(x: Array, like: Array) -> Array:
    """Marks x as differing along the mesh axes that `like` differs along, inside a manual region.

    A custom gradient must hand back what it was given; this makes the sum over devices, which the
    gradient of a replicated kernel needs, part of the step before it.
    """
    missing = tuple(jax.typeof(like).mat.varying - jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: Array) -> list[Array]:
    """Marks each as differing along every mesh axis that any of them differs along."""
    for like in arrays:
        arrays = tuple(vary_like(x, like) for x in arrays)
    return list(arrays)


# --- Normalisation -------------------------------------------------------------------------------


def moments_dtype(x: Array) -> jnp.dtype:
    """The dtype of x's moments: never less than float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


class BatchNorm(nnx.Module):
    """Batch normalisation over all axes but the last, with PyTorch's running statistics.

    momentum, in Flax's sense: the part of the old statistics that stays; PyTorch's is 1 − momentum.
    Normalises by the biased variance of the batch and, as PyTorch does, keeps the unbiased one for
    inference. `batch_axes` names mesh axes over which the batch is split by hand; the moments are
    then averaged over them.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, momentum: float = 0.9) -> None:
        self.eps, self.momentum = eps, momentum
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))

    def __call__(self, x: Array, *, train: bool, batch_axes: tuple[str, ...] = ()) -> Array:
        """(…, C) → (…, C); in training the running mean and variance (C,) are updated."""
        return scale_shift(x, *self.line(x, train=train, batch_axes=batch_axes))

    def line(
        self,
        x: Array,
        *,
        train: bool,
        batch_axes: tuple[str, ...] = (),
        moments: tuple[Array, ...] = (),
    ) -> tuple[Array, Array]:
        """The (factor, shift), each (C,), that normalise x, for `scale_shift`; else as a call.

        moments: where they are known already, the mean and variance of equal parts of x, (S, C).
        """
        dtype = moments_dtype(x)
        if train:
            axes = tuple(range(x.ndim - 1))
            count = x.size // x.shape[-1] * (lax.axis_size(batch_axes) if batch_axes else 1)
            if count < 2:
                raise ValueError(
                    "batch normalisation needs more than one value per channel in training; "
                    f"got a batch of shape {x.shape}: use a larger batch or image"
                )
            mean = moments[0].mean(0) if moments else x.astype(dtype).mean(axes)
            if batch_axes:
                mean = lax.pmean(mean, batch_axes)
            if moments:
                var = (moments[1] + jnp.square(moments[0] - mean[None])).mean(0)
            else:
                var = recomputed(
                    lambda x, m: jnp.square(x.astype(dtype) - _last(m, x.ndim)).mean(axes), x, mean
                )
            if batch_axes:
                var = lax.pmean(var, batch_axes)
            unbiased = var * (count / (count - 1))
            for kept, new in ((self.mean, mean), (self.var, unbiased)):
                fresh = (1 - self.momentum) * new.astype(kept.dtype)
                kept[...] = self.momentum * kept[...] + fresh
        else:
            mean, var = self.mean[...].astype(dtype), self.var[...].astype(dtype)
        factor = self.scale[...].astype(dtype) * lax.rsqrt(var + self.eps)
        return factor, self.bias[...].astype(dtype) - mean * factor


def scale_shift(x: Array, factor: Array, shift: Array) -> Array:
    """x·factor + shift over the last axis, computed in at least float32, in x's dtype."""
    return (x * _last(factor, x.ndim) + _last(shift, x.ndim)).astype(x.dtype)


def _last(vector: Array, ndim: int) -> Array:
    """A (C,) vector with leading axes of one, so that nothing broadcasts by accident."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def layer_norm(x: Array, scale: Array, bias: Array, eps: float = 1e-5) -> Array:
    """Layer normalisation over the last axis; scale and bias have x's rank."""
    dtype = moments_dtype(x)
    wide = x.astype(dtype)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.square(wide - mean).mean(-1, keepdims=True)
    out = (wide - mean) * lax.rsqrt(var + eps) * scale.astype(dtype) + bias.astype(dtype)
    return out.astype(x.dtype)


# --- Dropout as a function of who is dropped -----------------------------------------------------


def _mix(bits: Array) -> Array:
    """Scrambles 32-bit words (two multiply-xorshift rounds; each input bit reaches all outputs)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def counter_base(words: Sequence[Array | int], rank: int) -> Array:
    """What counters say before positions: uint32 of the shape that the words broadcast to.

    words: ints, or integer arrays of `rank` axes, as `counter_bits` takes them.
    """
    base = jnp.full((1,) * rank, 0x9E3779B9, jnp.uint32)
    for word in words:
        word = jnp.asarray(word).astype(jnp.uint32)
        word = word if word.ndim else word.reshape((1,) * rank)
        base = _mix(base + word * jnp.uint32(0x85EBCA6B) + jnp.uint32(0xC2B2AE35))
    return base


def counter_at(base: Array, position: Array) -> Array:
    """Random uint32 bits at positions (uint32) of what `counter_base` says."""
    return _mix(base ^ (position * jnp.uint32(0x9E3779B1)))


def drop_below(rate: float) -> int:
    """Random uint32 bits less than this are dropped, which happens with probability `rate`."""
    return min(round(rate * 2**32), 2**32 - 1)


def counter_bits(words: Sequence[Array | int], shape: tuple[int, ...]) -> Array:
    """Random uint32 bits (broadcast of words and shape) that depend only on the counters given.

    words: key words and identities (example index, group index, …), uint32 or int32 arrays of the
    rank of `shape`, or ints. The last counter is each element's position in the trailing axes that
    no word spans. The same identities give the same bits on any number of devices; a threefry
    call per element would cost more than the attention it drops.
    """
    rank = len(shape)
    base, spanned = counter_base(words, rank), [False] * rank
    for word in words:
        if jnp.ndim(word):
            spanned = [s or n > 1 for s, n in zip(spanned, word.shape, strict=True)]
    position = jnp.zeros((1,) * rank, jnp.uint32)
    size = 1
    for axis in reversed(range(rank)):
        if spanned[axis]:
            continue
        position = position + lax.broadcasted_iota(
            jnp.uint32, tuple(shape[axis] if a == axis else 1 for a in range(rank)), axis
        ) * jnp.uint32(size)
        size *= shape[axis]
    return counter_at(base, position)


def dropout_scale(words: Sequence[Array | int], shape: tuple[int, ...], rate: float) -> Array:
    """Inverted-dropout factors (shape, float32): 0 with probability `rate`, else 1/(1 − rate)."""
    keep = counter_bits(words, shape) >= jnp.uint32(drop_below(rate))
    return jnp.where(keep, jnp.float32(1 / (1 - rate)), jnp.float32(0))


# --- Attention core ------------------------------------------------------------------------------
# Heads and groups are batch axes of one computation. E is the width of a head, S the tokens
# that are attended to (T may be 1: the last block asks for CLS alone).


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
