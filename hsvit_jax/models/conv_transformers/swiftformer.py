"""SwiftFormer: stages of convolutional blocks, the last block of each with additive attention.

Stem of two stride-2 convolutions; a block is a depthwise and two pointwise convolutions; the last
block of a stage adds attention of linear cost in the tokens, and a feed-forward. Two linear
classifiers on the mean of the normalised map are averaged.

Source: Shaker et al. 2023, SwiftFormer, section 3 and the authors' code, as in the `transformers`
library: there all queries have weight 1, because a softmax is taken over an axis of length one.
With `queries='weighted'` their weights are learned scores, divided by the scores' norm over tokens,
as the authors propose.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Chain, ConvNorm
from hsvit_jax.models.conv_transformers.stages import StagedConfig
from hsvit_jax.models.family import Family
from hsvit_jax.models.layers import Linear
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.ops.activations import gelu

Array = jax.Array

#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "xs": {},
    "s": {"depths": (3, 3, 9, 6), "widths": (48, 64, 168, 224)},
    "l1": {"depths": (4, 3, 10, 5), "widths": (48, 96, 192, 384)},
    "l3": {"depths": (4, 4, 12, 6), "widths": (64, 128, 320, 512)},
}


@dataclasses.dataclass(frozen=True)
class SwiftFormerConfig(StagedConfig):
    """Sizes of a SwiftFormer."""

    depths: tuple[int, ...] = settings.depths((3, 3, 6, 4))
    widths: tuple[int, ...] = settings.widths((48, 56, 112, 220))
    queries: str = settings.setting("equal", "pooling of queries", choices=("equal", "weighted"))
    conv_drop_path: float = settings.rate(0.0, "stochastic depth rate of convolution branches")
    eps: float = settings.epsilon(1e-5)


class ConvBlock(nnx.Module):
    """x + scale·(depthwise convolution, BatchNorm, pointwise convolution, GELU, pointwise).

    rate: of stochastic depth, whose masks are those of `stream`.
    """

    def __init__(
        self, c: SwiftFormerConfig, width: int, hidden: int, rate: float, stream: int, key: Array
    ) -> None:
        conv_key, up_key, down_key = jax.random.split(key, 3)
        self.rate, self.stream = rate, stream
        self.depthwise = ConvNorm(
            *(width, width, 3, conv_key), groups=width, bias=True, eps=c.eps, init="normal"
        )
        self.up = Linear(width, hidden, up_key, init="normal")
        self.down = Linear(hidden, width, down_key, init="normal")
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        y = self.down(gelu(self.up(self.depthwise(x_BHWC, context))))
        y = layers.multiply(y, self.scale[...])
        return x_BHWC + layers.drop_path(y, self.rate, context, self.stream)


class AdditiveAttention(nnx.Module):
    """Additive attention: W₂(W₁(g ∘ k) + q), with g the (weighted, see the module) sum of queries.

    Queries and keys are normalised to length 1.
    """

    def __init__(self, width: int, queries: str, key: Array) -> None:
        self.queries = queries
        keys = jax.random.split(key, 5)
        self.query, self.key, self.mix, self.out = (
            Linear(width, width, k, init="normal") for k in keys[:4]
        )
        self.score = nnx.Param(layers.normal(keys[4], (width,)))

    def __call__(self, x_BTD: Array) -> Array:
        """(B, T, D) → (B, T, D)."""
        q, k = _unit(self.query(x_BTD)), _unit(self.key(x_BTD))
        global_B1D = q.sum(1, keepdims=True)
        if self.queries == "weighted":
            weights_BT1 = (q @ self.score[...].astype(q.dtype)[:, None]) * q.shape[-1] ** -0.5
            global_B1D = (_unit(weights_BT1, 1) * q).sum(1, keepdims=True)
        return self.out(self.mix(global_B1D * k) + q)


def _unit(x: Array, axis: int = -1) -> Array:
    """Vectors along an axis divided by their length, of at least 1e-12."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Never the root of zero, whose derivative is infinite.
    square = jnp.maximum(jnp.square(wide).sum(axis, keepdims=True), 1e-24)
    return (wide / jnp.sqrt(square)).astype(x.dtype)


class AttentionBlock(nnx.Module):
    """A `ConvBlock` of the stage's width, attention, and a pre-norm feed-forward."""

    def __init__(
        self, c: SwiftFormerConfig, width: int, hidden: int, rate: float, stream: int, key: Array
    ) -> None:
        local_key, attention_key, feed_key = jax.random.split(key, 3)
        self.rate, self.stream = rate, stream
        self.local = ConvBlock(c, width, width, 0.0, stream, local_key)
        self.attention = AdditiveAttention(width, c.queries, attention_key)
        self.norm = layers.BatchNorm(width, eps=c.eps)
        self.feed_forward = layers.FeedForward(
            *(width, hidden, feed_key), dropout=c.dropout, activation=c.activation, init="normal"
        )
        self.scales = layers.LayerScales(width, c.layer_scale)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        x, stream = self.local(x_BHWC, context), self.stream
        y = self.attention(conv_layers.flatten(x)).reshape(x.shape)
        x = x + layers.drop_path(self.scales(0, y), self.rate, context, stream + 4)
        y = self.norm(x, train=context.train, batch_axes=context.batch_axes)
        y = self.scales(1, self.feed_forward(y, context, stream + 6))
        return x + layers.drop_path(y, self.rate, context, stream + 5)


def _stage(c: SwiftFormerConfig, number: int, key: Array) -> Chain:
    """Convolutional blocks, an attention block, and a convolution to the next stage if any."""
    *keys, last_key, down_key = jax.random.split(key, c.depths[number] + 1)
    first, sizes = sum(c.depths[:number]), (c.widths[number], c.hidden_widths[number])
    last = first + c.depths[number] - 1
    streams = [i * layers.STREAMS_PER_BLOCK for i in range(first, last + 1)]
    blocks = [
        ConvBlock(c, *sizes, c.conv_drop_path, stream, k)
        for stream, k in zip(streams, keys, strict=False)
    ]
    rate = layers.drop_path_rates(c.drop_path, sum(c.depths))[last]
    blocks.append(AttentionBlock(c, *sizes, rate, streams[-1], last_key))
    return Chain(blocks=nnx.List(blocks), down=c.down(number, c.eps, down_key))


class SwiftFormer(Network):
    """Parameters: {'stem', 'stage0', …, 'norm', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        stem_key, head_key, *keys = jax.random.split(key, len(c.depths) + 2)
        return {
            "stem": c.stem(c.eps, stem_key),
            **{f"stage{i}": _stage(c, i, k) for i, k in enumerate(keys)},
            "norm": layers.BatchNorm(c.widths[-1], eps=c.eps),
            "head": layers.TwoHeads(c.widths[-1], c.num_classes, head_key),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BHWC = bound.through_stages(bound["stem"](images_BHWC, context), context)
        x_BHWC = bound["norm"](x_BHWC, train=context.train, batch_axes=context.batch_axes)
        return bound["head"](x_BHWC.mean((1, 2)))


FAMILY = Family(
    name="swiftformer",
    variants=VARIANTS,
    default_variant="xs",
    config=SwiftFormerConfig,
    network=SwiftFormer,
    paper_recipe="hsvit_enlarged",
    tiny=lambda settings: {"depths": (1, 1, 2, 1), "widths": (8, 8, 12, 16)},
)
