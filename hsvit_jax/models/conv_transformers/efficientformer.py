"""EfficientFormer: stages of pooling blocks on the map, attention blocks on the last map's tokens.

Stem of two stride-2 convolutions; a pooling block adds the neighbours' mean minus the pixel, then
pointwise convolutions with BatchNorm; the last blocks are pre-norm attention with a learned bias
for every offset between two positions, and a feed-forward. Two linear classifiers on the mean token
are averaged.

Source: Li et al. 2022, EfficientFormer, section 3 and table 5, as in the `transformers` library
(4.x), the network with a teacher's head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Chain, ConvNorm
from hsvit_jax.models.conv_transformers.stages import StagedConfig
from hsvit_jax.models.family import Family, scaled
from hsvit_jax.models.layers import LayerNorm, Linear, merge_heads
from hsvit_jax.models.network import BoundModules, ForwardContext, Network, grid_of
from hsvit_jax.ops.attention import biased_attention, biased_weights
from hsvit_jax.ops.max_pool import windows

Array = jax.Array

#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "l1": {},
    "l3": {"depths": (4, 4, 12, 6), "widths": (64, 128, 320, 512), "attention_blocks": 4},
}
_ATTENDS = {"attention_blocks": settings.ON}


@dataclasses.dataclass(frozen=True)
class EfficientFormerConfig(StagedConfig):
    """Sizes of an EfficientFormer; all blocks but the last attention blocks pool."""

    depths: tuple[int, ...] = settings.depths((3, 2, 6, 4))
    widths: tuple[int, ...] = settings.widths((48, 96, 224, 448))
    attention_blocks: int = settings.depth(1, "attention blocks of the last stage", low=0)
    heads: int = settings.heads(8, when=_ATTENDS)
    key_dim: int = settings.width(32, "width of a head's queries and keys", when=_ATTENDS)
    attention_ratio: float = settings.ratio(4.0, "width of values over that of keys", when=_ATTENDS)
    pool_window: int = settings.kernel(3, "window of a pool", odd=True)
    eps: float = settings.epsilon(1e-12, meaning="epsilon of normalisation")
    norm_eps: float = settings.epsilon(1e-5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_blocks > self.depths[-1]:
            raise ValueError(
                f"attention_blocks={self.attention_blocks} must be at most the last stage's depth, "
                f"{self.depths[-1]}"
            )

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return scaled(self.key_dim, self.attention_ratio)


def neighbour_mean(x_BHWC: Array, window: int) -> Array:
    """The mean of the window×window pixels around each pixel, of those inside the map."""

    def total(x: Array) -> Array:
        for axis in (1, 2):
            x = sum(windows(x, axis, window, 1, window // 2))
        return x

    count = total(jnp.ones((1, *x_BHWC.shape[1:3], 1), x_BHWC.dtype))
    return total(x_BHWC) / count


class PoolBlock(nnx.Module):
    """x + s₁·(mean of neighbours − x), then x + s₂·(pointwise convolutions with BatchNorm).

    rate: of stochastic depth; stream: of its masks.
    """

    def __init__(
        self, c: EfficientFormerConfig, stage: int, rate: float, stream: int, key: Array
    ) -> None:
        up_key, down_key = jax.random.split(key)
        self.window, self.rate, self.dropout = c.pool_window, rate, c.dropout
        self.stream = stream
        width, hidden = c.widths[stage], c.hidden_widths[stage]
        shared = {"bias": True, "eps": c.norm_eps, "init": "normal"}
        self.up = ConvNorm(width, hidden, 1, up_key, activation=c.activation, **shared)
        self.down = ConvNorm(hidden, width, 1, down_key, **shared)
        self.scales = layers.LayerScales(width, c.layer_scale)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        stream = self.stream
        y = self.scales(0, neighbour_mean(x_BHWC, self.window) - x_BHWC)
        x_BHWC = x_BHWC + layers.drop_path(y, self.rate, context, stream)
        y = layers.dropout(self.up(x_BHWC, context), self.dropout, context, stream + 1)
        y = layers.dropout(self.down(y, context), self.dropout, context, stream + 2)
        return x_BHWC + layers.drop_path(self.scales(1, y), self.rate, context, stream + 3)


class BiasedAttention(nnx.Module):
    """Attention with a learned bias of the scores for each head and offset (|Δrow|, |Δcolumn|)."""

    def __init__(self, c: EfficientFormerConfig, map_size: tuple[int, int], key: Array) -> None:
        qkv_key, out_key = jax.random.split(key)
        dim, self.heads = c.widths[-1], c.heads
        self.map_size, self.key_dim, self.value_dim = map_size, c.key_dim, c.value_dim
        inner = c.heads * (2 * c.key_dim + c.value_dim)
        self.qkv = Linear(dim, inner, qkv_key, init="normal")
        self.out = Linear(c.heads * c.value_dim, dim, out_key, init="normal")
        self.offset_bias = nnx.Param(jnp.zeros((c.heads, map_size[0] * map_size[1])))

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T, D)."""
        batch, tokens, _ = x_BTD.shape
        parts = self.qkv(x_BTD).reshape(batch, tokens, self.heads, -1).swapaxes(1, 2)
        q, k, v = jnp.split(parts, (self.key_dim, 2 * self.key_dim), axis=-1)
        bias_1NTS = self.offset_bias[...][None, :, offsets(self.map_size)]
        context.call_hook("attention", lambda: biased_weights(q, k, bias_1NTS))
        o_BNTE = biased_attention(q, k, v, bias_1NTS)
        return self.out(merge_heads(o_BNTE))


def offsets(map_size: tuple[int, int]) -> np.ndarray:
    """The offset's index |Δrow|·columns + |Δcolumn| of every pair of positions, int32 (T, T)."""
    places = np.stack(np.meshgrid(*map(np.arange, map_size), indexing="ij"), -1).reshape(-1, 2)
    apart = np.abs(places[:, None] - places[None])
    return (apart[..., 0] * map_size[1] + apart[..., 1]).astype(np.int32)


class AttentionBlock(nnx.Module):
    """x + s₁·attention(LN(x)), then x + s₂·feed_forward(LN(x)) on the map's tokens."""

    def __init__(
        self, c: EfficientFormerConfig, stage: int, rate: float, stream: int, key: Array
    ) -> None:
        attention_key, feed_key = jax.random.split(key)
        self.rate, self.stream, width = rate, stream, c.widths[stage]
        self.norm1, self.norm2 = LayerNorm(width, c.eps), LayerNorm(width, c.eps)
        self.attention = BiasedAttention(c, c.maps()[-1], attention_key)
        self.feed_forward = layers.FeedForward(
            *(width, c.hidden_widths[stage], feed_key),
            dropout=c.dropout,
            activation=c.activation,
            init="normal",
        )
        self.scales = layers.LayerScales(width, c.layer_scale)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        x_BTD, stream = conv_layers.flatten(x_BHWC), self.stream
        y = self.scales(0, self.attention(self.norm1(x_BTD), context))
        x_BTD = x_BTD + layers.drop_path(y, self.rate, context, stream)
        y = self.scales(1, self.feed_forward(self.norm2(x_BTD), context, stream + 1))
        x_BTD = x_BTD + layers.drop_path(y, self.rate, context, stream + 3)
        context.call_hook("tokens", lambda: x_BTD)
        return x_BTD.reshape(x_BHWC.shape)


def _stage(c: EfficientFormerConfig, number: int, key: Array) -> Chain:
    """Pooling blocks, attention blocks in the last stage, and a convolution to the next."""
    *keys, down_key = jax.random.split(key, c.depths[number] + 1)
    first, last = sum(c.depths[:number]), number == len(c.depths) - 1
    rates = layers.drop_path_rates(c.drop_path, sum(c.depths))[first:]
    pools = len(keys) - c.attention_blocks * last
    blocks = [
        (PoolBlock if i < pools else AttentionBlock)(
            *(c, number, rates[i], (first + i) * layers.STREAMS_PER_BLOCK, k)
        )
        for i, k in enumerate(keys)
    ]
    return Chain(
        pool_blocks=nnx.List(blocks[:pools]),
        attention_blocks=nnx.List(blocks[pools:]),
        down=c.down(number, c.norm_eps, down_key),
    )


class EfficientFormer(Network):
    """Parameters: {'stem', 'stage0', …, 'norm', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        stem_key, head_key, *keys = jax.random.split(key, len(c.depths) + 2)
        return {
            "stem": c.stem(c.norm_eps, stem_key),
            **{f"stage{i}": _stage(c, i, k) for i, k in enumerate(keys)},
            "norm": LayerNorm(c.widths[-1], c.eps),
            "head": layers.TwoHeads(c.widths[-1], c.num_classes, head_key),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BHWC = bound.through_stages(bound["stem"](images_BHWC, context), context)
        x_BTD = bound["norm"](conv_layers.flatten(x_BHWC))
        return bound["head"](x_BTD.mean(1))

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Overrides `Network.grid` with the last map's rows and columns."""
        return grid_of(self.config.maps()[-1:], tokens)


FAMILY = Family(
    name="efficientformer",
    variants=VARIANTS,
    default_variant="l1",
    config=EfficientFormerConfig,
    network=EfficientFormer,
    paper_recipe="hsvit_enlarged",
    tiny=lambda settings: {
        "depths": (1, 1, 1, 2),
        "widths": (8, 8, 12, 16),
        "attention_blocks": 1,
        "heads": 2,
        "key_dim": 4,
    },
)
