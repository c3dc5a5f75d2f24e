"""Layers that the families are composed of: linear, normalisation, attention, block, head.

Dimensions, here and in every model: B batch, H and W image rows and columns, C channels, G
attention groups, T tokens of a group (CLS included), S keys, D embedding, N heads, E width of a
head, K classes. A name carries its shape: `z_GBTD`.

A residual branch is a mixer (tokens attend to each other) or a feed-forward (each token alone);
both are called as `(x_BTD, context, stream)`. A dropout mask is a function of (the step's key,
example, stream) alone, where the stream numbers the dropout layers of a network: a branch may use
stream … stream + 3, and `Block` gives each branch of each block its own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hsvit_jax.models.network import ForwardContext, draw
from hsvit_jax.ops import normalise, remat, varying
from hsvit_jax.ops.activations import activation as by_name
from hsvit_jax.ops.attention import attention, attention_weights
from hsvit_jax.ops.dropout import dropout_scale

Array = jax.Array

#: Streams from here on belong to what comes before the first block.
EMBEDDING = 1 << 20
STREAMS_PER_BLOCK = 16


#: A mixer or a feed-forward: from x (B, T, D), the context and the stream to (B, T, D).
TokenMap = Callable[[Array, ForwardContext, int], Array]

# --- Initialisation and linear layers ------------------------------------------------------------


def uniform(key: Array, shape: Sequence[int], bound: float) -> Array:
    """Draws float32 values uniformly from [-bound, bound]."""
    return draw(jax.random.uniform, key, shape, -bound, bound)


def normal(key: Array, shape: Iterable[int]) -> Array:
    """Draws float32 values from N(0, 1)."""
    return draw(jax.random.normal, key, shape)


def init_kernel(key: Array, shape: tuple[int, ...], fan_in: int, init: str) -> Array:
    """Initial float32 weights of this shape.

    Args:
        init: 'torch', uniform in ±1/√fan_in; 'normal', N(0, 0.02²) without truncation (the
            reference truncates at ±2, a hundred standard deviations); 'kaiming', N(0, 2/fan_in).
    """
    if init == "torch":
        return uniform(key, shape, fan_in**-0.5)
    std = {"normal": 0.02, "kaiming": (2 / fan_in) ** 0.5}[init]
    return std * normal(key, shape)


def init_bias(key: Array, features: int, fan_in: int, init: str) -> Array:
    """Initial float32 biases: uniform in ±1/√fan_in for 'torch', else zero."""
    return uniform(key, (features,), fan_in**-0.5) if init == "torch" else jnp.zeros(features)


def over_last(vector: Array, like: Array) -> Array:
    """A (…, C) parameter in the dtype and rank of `like`, to broadcast over its last axes."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def add_bias(y: Array, bias: Array) -> Array:
    """y + bias over the last axis (or axes), computed in at least float32, in y's dtype.

    The bias's gradient is a sum over everything else, which stalls in bfloat16.
    """
    wide = y.astype(normalise.moments_dtype(y))
    return (wide + over_last(bias, wide)).astype(y.dtype)


def multiply(y: Array, factor: Array) -> Array:
    """y·factor over the last axis; as `add_bias`."""
    wide = y.astype(normalise.moments_dtype(y))
    return (wide * over_last(factor, wide)).astype(y.dtype)


class Linear(nnx.Module):
    """x·kernel + bias over the last axis; kernel (fan_in, fan_out)."""

    def __init__(
        self, fan_in: int, fan_out: int, key: Array, *, bias: bool = True, init: str = "torch"
    ) -> None:
        k_key, b_key = jax.random.split(key)
        self.kernel = nnx.Param(init_kernel(k_key, (fan_in, fan_out), fan_in, init))
        self.bias = nnx.Param(init_bias(b_key, fan_out, fan_in, init)) if bias else None

    def __call__(self, x: Array) -> Array:
        """(…, fan_in) → (…, fan_out), in x's dtype."""
        # Narrowed last: where devices share the kernel, its gradient is summed in float32.
        y = x @ varying.vary_like(self.kernel[...], x).astype(x.dtype)
        return y if self.bias is None else add_bias(y, self.bias[...])


class BatchNorm(nnx.Module):
    """Batch normalisation over all axes but the last, with PyTorch's running statistics.

    Normalises by the batch's biased variance; the running variance is the unbiased one. `momentum`
    is Flax's, the weight of the old statistics (PyTorch's is 1 − momentum). Over `batch_axes`, mesh
    axes over which the batch is split, the moments are averaged.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, momentum: float = 0.9) -> None:
        self.eps, self.momentum = eps, momentum
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))

    def __call__(self, x: Array, *, train: bool, batch_axes: tuple[str, ...] = ()) -> Array:
        """(…, C) → (…, C); in training the running mean and variance (C,) are updated."""
        return normalise.scale_shift(x, *self.affine(x, train=train, batch_axes=batch_axes))

    def affine(
        self,
        x: Array,
        *,
        train: bool,
        batch_axes: tuple[str, ...] = (),
        moments: tuple[Array, ...] = (),
    ) -> tuple[Array, Array]:
        """The normalisation as an affine map, and in training the update of running statistics.

        Args:
            train: normalise by the moments of x, not by the running statistics.
            batch_axes: see the class.
            moments: mean and variance of S equal parts of x, each (S, C), where already computed.

        Returns:
            (factor, shift), each (C,), for `normalise.scale_shift`.

        Raises:
            ValueError: training has a single value per channel.
        """
        dtype = normalise.moments_dtype(x)
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

                def variance(x: Array, mean: Array) -> Array:
                    centred = x.astype(dtype) - normalise.last_axis(mean, x.ndim)
                    return jnp.square(centred).mean(axes)

                var = remat.recomputed(variance, x, mean)
            if batch_axes:
                var = lax.pmean(var, batch_axes)
            unbiased = var * (count / (count - 1))
            for running, batch in ((self.mean, mean), (self.var, unbiased)):
                update = (1 - self.momentum) * batch.astype(running.dtype)
                running.set_value(self.momentum * running[...] + update)
        else:
            mean, var = self.mean[...].astype(dtype), self.var[...].astype(dtype)
        factor = self.scale[...].astype(dtype) * lax.rsqrt(var + self.eps)
        return factor, self.bias[...].astype(dtype) - mean * factor


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis; moments in float32 at least."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.scale, self.bias = nnx.Param(jnp.ones(features)), nnx.Param(jnp.zeros(features))

    def __call__(self, x: Array) -> Array:
        """(…, D) → (…, D)."""
        shape = (1,) * (x.ndim - 1) + self.scale.shape
        scale, bias = self.scale[...].reshape(shape), self.bias[...].reshape(shape)
        return remat.recomputed(lambda x: normalise.layer_norm(x, scale, bias, self.eps), x)


# --- Dropout -------------------------------------------------------------------------------------


def _dropout_scale(
    shape: tuple[int, ...], rate: float, context: ForwardContext, stream: int
) -> Array:
    """The factors of inverted dropout; axis 0 of `shape` is the batch."""
    ids = context.example_ids_B.reshape((-1,) + (1,) * (len(shape) - 1))
    return dropout_scale((*context.key_words, stream, ids), shape, rate)


def dropout(x: Array, rate: float, context: ForwardContext, stream: int) -> Array:
    """Inverted dropout of single values; axis 0 is the batch. The identity without key words."""
    if not rate or context.key_words is None:
        return x
    return x * _dropout_scale(x.shape, rate, context, stream).astype(x.dtype)


def drop_path(x: Array, rate: float, context: ForwardContext, stream: int) -> Array:
    """Stochastic depth: drops an example's whole branch, or scales it by 1/(1 − rate)."""
    if not rate or context.key_words is None:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * _dropout_scale(shape, rate, context, stream).astype(x.dtype)


# --- From images to tokens -----------------------------------------------------------------------


class PatchEmbedding(nnx.Module):
    """A linear map of each non-overlapping patch's pixels (row, column, channel).

    Equal to a convolution of the patch's size and stride, with its kernel flat, (patch·patch·C, D).
    """

    def __init__(
        self, patch: int, channels: int, dim: int, key: Array, init: str = "torch"
    ) -> None:
        self.patch = patch
        self.linear = Linear(patch * patch * channels, dim, key, init=init)

    def __call__(self, images_BHWC: Array) -> Array:
        """(B, H, W, C) → tokens (B, H·W/patch², D), row by row."""
        batch, rows, columns, channels = images_BHWC.shape
        p = self.patch
        x = images_BHWC.reshape(batch, rows // p, p, columns // p, p, channels).swapaxes(2, 3)
        return self.linear(x.reshape(batch, -1, p * p * channels))


def check_patches(image_size: tuple[int, int], patch: int) -> None:
    """Raises ValueError for an image that the patch does not divide."""
    rows, columns = image_size
    if patch < 1:
        raise ValueError(f"model.patch must be at least 1 in this network; got {patch}")
    if rows % patch or columns % patch:
        raise ValueError(
            f"an image of {rows}×{columns} pixels cannot be cut into patches of patch={patch}: "
            "both sides must be divisible by it; change data.image_size or model.patch"
        )


def prepend(cls_D: Array, x_BTD: Array) -> Array:
    """Every example's tokens behind the CLS token: (B, T + 1, D)."""
    cls_D = varying.vary_like(cls_D, x_BTD)
    cls_B1D = jnp.broadcast_to(cls_D[None, None], (x_BTD.shape[0], 1, cls_D.shape[0]))
    # Narrowed last: its gradient is summed over the examples as `add_bias` says.
    return jnp.concatenate([cls_B1D.astype(x_BTD.dtype), x_BTD], axis=1)


# --- Mixer, feed-forward, block ------------------------------------------------------------------


def split_heads(x_BTD: Array, heads: int) -> Array:
    """(B, T, N·E) → (B, N, T, E)."""
    return x_BTD.reshape(*x_BTD.shape[:2], heads, -1).swapaxes(1, 2)


def merge_heads(x_BNTE: Array) -> Array:
    """(B, N, T, E) → (B, T, N·E)."""
    batch, heads, tokens, width = x_BNTE.shape
    return x_BNTE.swapaxes(1, 2).reshape(batch, tokens, heads * width)


def attend(
    q_BNTE: Array, k_BNSE: Array, v_BNSE: Array, rate: float, context: ForwardContext, stream: int
) -> Array:
    """Softmax attention with dropout of its weights: each head's weighted values, (B, N, T, E)."""
    context.call_hook("attention", lambda: attention_weights(q_BNTE[None], k_BNSE[None])[0])
    rate = rate if context.key_words is not None else 0.0
    counters = ()
    if rate:
        counters = (*context.key_words, stream, context.example_ids_B.reshape(1, -1, 1, 1, 1))
    return attention(rate, q_BNTE[None], k_BNSE[None], v_BNSE[None], counters)[0]


class MultiHeadAttention(nnx.Module):
    """Multi-head softmax attention; queries, keys and values are thirds of one linear map.

    Args:
        dim_head: E; defaults to dim/heads.
        bias: of queries, keys and values.
        project: whether the output is projected; without, it has no dropout either.
        init: see `init_kernel`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        key: Array,
        *,
        dim_head: int | None = None,
        bias: bool = True,
        project: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        init: str = "torch",
    ) -> None:
        self.heads, self.rate, self.attention_rate = heads, dropout, attention_dropout
        inner = heads * (dim_head or dim // heads)
        qkv_key, out_key = jax.random.split(key)
        self.qkv = Linear(dim, 3 * inner, qkv_key, bias=bias, init=init)
        self.out = Linear(inner, dim, out_key, init=init) if project else None

    def project(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each (B, N, T, E)."""
        batch, tokens, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).reshape(batch, tokens, 3, self.heads, -1)
        q, k, v = (qkv[:, :, j].swapaxes(1, 2) for j in range(3))
        return q, k, v

    def output(self, o_BNTE: Array, context: ForwardContext, stream: int) -> Array:
        """The output projection of the concatenated heads: (B, T, D)."""
        o_BTD = merge_heads(o_BNTE)
        if self.out is None:
            return o_BTD
        return dropout(self.out(o_BTD), self.rate, context, stream + 1)

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D)."""
        o_BNTE = attend(*self.project(x_BTD), self.attention_rate, context, stream)
        return self.output(o_BNTE, context, stream)


class FeedForward(nnx.Module):
    """Linear, activation (by default the exact GELU), dropout, linear, dropout.

    Without inner_dropout there is the second dropout alone.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        key: Array,
        *,
        dropout: float = 0.0,
        inner_dropout: bool = True,
        activation: str = "gelu",
        init: str = "torch",
    ) -> None:
        self.rate, self.inner_rate = dropout, dropout if inner_dropout else 0.0
        self.activate = by_name(activation)
        up_key, down_key = jax.random.split(key)
        self.up = Linear(dim, hidden, up_key, init=init)
        self.down = Linear(hidden, dim, down_key, init=init)

    def __call__(self, x: Array, context: ForwardContext, stream: int) -> Array:
        """(B, …, D) → (B, …, D)."""

        def down(hidden: Array) -> Array:
            return self.down(dropout(self.activate(hidden), self.inner_rate, context, stream))

        return dropout(remat.recomputed(down, self.up(x)), self.rate, context, stream + 1)


class Block(nnx.Module):
    """x + DropPath(mixer(LN(x))), then x + DropPath(feed_forward(LN(x))).

    norm: makes what stands in LN's place, from a width and an epsilon.
    """

    def __init__(
        self,
        dim: int,
        mixer: TokenMap,
        feed_forward: TokenMap,
        *,
        eps: float = 1e-5,
        drop_path: float = 0.0,
        norm: Callable[[int, float], Callable[[Array], Array]] = LayerNorm,
    ) -> None:
        self.rate = drop_path
        self.norm1, self.mixer = norm(dim, eps), mixer
        self.norm2, self.feed_forward = norm(dim, eps), feed_forward

    def __call__(self, x_BTD: Array, context: ForwardContext, index: int) -> Array:
        """(B, T, D) → (B, T, D); the index among the blocks gives the streams of its masks."""
        return self.feed(self.mix(x_BTD, context, index), context, index)

    def mix(self, x_BTD: Array, context: ForwardContext, index: int) -> Array:
        """The residual branch of the mixer."""
        stream = index * STREAMS_PER_BLOCK
        return self.add(x_BTD, self.mixer(self.norm1(x_BTD), context, stream), context, stream)

    def feed(self, x_BTD: Array, context: ForwardContext, index: int) -> Array:
        """The residual branch of the feed-forward."""
        stream = index * STREAMS_PER_BLOCK + STREAMS_PER_BLOCK // 2
        x_BTD = self.add(
            x_BTD, self.feed_forward(self.norm2(x_BTD), context, stream), context, stream
        )
        context.call_hook("tokens", lambda: x_BTD)
        return x_BTD

    def add(self, x_BTD: Array, y_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """The residual sum with stochastic depth; stream: the branch's."""
        return x_BTD + drop_path(y_BTD, self.rate, context, stream + 4)


def vit_block(
    c: Any, dim: int, hidden: int, mix_key: Array, feed_key: Array, drop_path: float = 0.0
) -> Block:
    """A ViT's block, by the heads, qkv_bias, dropouts, activation and eps of a network's config."""
    mixer = MultiHeadAttention(
        *(dim, c.heads, mix_key),
        bias=c.qkv_bias,
        dropout=c.dropout,
        attention_dropout=c.attention_dropout,
        init="normal",
    )
    feed_forward = FeedForward(
        *(dim, hidden, feed_key),
        dropout=c.dropout,
        inner_dropout=False,
        activation=c.activation,
        init="normal",
    )
    return Block(dim, mixer, feed_forward, eps=c.eps, drop_path=drop_path)


class Encoder(nnx.Module):
    """Blocks in a row; first: the index of the first of them among the network's."""

    def __init__(self, blocks: Iterable[nnx.Module], first: int = 0) -> None:
        self.blocks, self.first = nnx.List(blocks), first

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T, D)."""
        for i, block in enumerate(self.blocks, self.first):
            x_BTD = block(x_BTD, context, i)
        return x_BTD


class TokenHead(nnx.Module):
    """LayerNorm, the CLS token or the mean of all tokens, a linear classifier.

    representation: width of a tanh layer before the classifier; 0 for none.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        key: Array,
        *,
        mean: bool = False,
        eps: float = 1e-5,
        init: str = "torch",
        representation: int = 0,
    ) -> None:
        self.mean, self.norm = mean, LayerNorm(dim, eps)
        self.linear = Linear(representation or dim, classes, key, init=init)
        if representation:
            self.represent = Linear(dim, representation, jax.random.fold_in(key, 0), init=init)

    def __call__(self, x_BTD: Array) -> Array:
        """(B, T, D) → logits (B, K)."""
        x_BD = self.norm(x_BTD).mean(1) if self.mean else self.norm(x_BTD[:, 0])
        return self.linear(jnp.tanh(self.represent(x_BD)) if hasattr(self, "represent") else x_BD)


class TwoHeads(nnx.Module):
    """The average of two linear classifiers, the second distilled from a teacher's labels."""

    def __init__(self, width: int, classes: int, key: Array) -> None:
        label_key, teacher_key = jax.random.split(key)
        self.own = Linear(width, classes, label_key, init="normal")
        self.teacher = Linear(width, classes, teacher_key, init="normal")

    def __call__(self, x_BD: Array) -> Array:
        """(B, D) → logits (B, K)."""
        return (self.own(x_BD) + self.teacher(x_BD)) / 2


class LayerScales(nnx.Module):
    """LayerScale: a learned factor for each channel of a block's residual branches.

    With initial value 0 there are no factors.
    """

    def __init__(self, width: int, initial: float, branches: int = 2) -> None:
        count = branches if initial else 0
        self.scales = nnx.List(
            nnx.Param(jnp.full(width, initial, jnp.float32)) for _ in range(count)
        )

    def __call__(self, branch: int, y: Array) -> Array:
        """(…, C) → (…, C); branch: its number from 0."""
        return multiply(y, self.scales[branch][...]) if len(self.scales) else y


def drop_path_rates(last: float, blocks: int) -> list[float]:
    """The rate of stochastic depth by block: linear from 0 to `last`."""
    return [last * i / max(blocks - 1, 1) for i in range(blocks)]
