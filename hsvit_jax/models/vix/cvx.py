"""CvX: stages of a convolution and blocks on the token map, any mixer (CvT, CvP, CvL, CvN).

Stage: 3×3 convolution, norm over channels, blocks x + mix(norm(x)), x + FF(norm(x)). A linear
classifier on the mean over all tokens. No CLS token, no positions. With softmax, queries, keys and
values are projected by convolutions (CvT); with the other mixers by linear maps, to narrower heads.

Source: the ViX paper, tables 3 and 4, and the authors' notebooks.
"""

import dataclasses
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Conv
from hsvit_jax.models.layers import BatchNorm, Linear
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vix import mixer_config, mixers, stems
from hsvit_jax.ops import normalise

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class CvXConfig(mixer_config.Mixing):
    """Sizes of a CvX: a stage for each entry of depths and stage_strides, all of one width."""

    stage_strides: tuple[int, ...] = settings.stride(
        (), "stride of each stage; empty: by the image size", per="depths"
    )
    depths: tuple[int, ...] = settings.depths((1, 1, 2))
    embed_dim: int = settings.width(128, "token width")
    mlp_dim: int = settings.mlp_dim(256)

    def __post_init__(self) -> None:
        super().__post_init__()
        for map_size in self.map_sizes:
            self.check_tokens(prod(map_size))

    @property
    def map_sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the tokens, by stage."""
        strides = self.stage_strides
        return tuple(
            conv_layers.map_size(self.image_size, strides[: i + 1]) for i in range(len(strides))
        )


class ChannelNorm(layers.LayerNorm):
    """(x − mean)/(std + eps) over channels: the epsilon is added to the deviation."""

    def __call__(self, x: Array) -> Array:
        """(…, C) → (…, C)."""
        wide = normalise.wide(x)
        centred = wide - wide.mean(-1, keepdims=True)
        # The root of zero has an infinite derivative.
        variance = jnp.maximum(jnp.square(centred).mean(-1, keepdims=True), 1e-30)
        y = centred / (jnp.sqrt(variance) + self.eps) * layers.over_last(self.scale[...], wide)
        return (y + layers.over_last(self.bias[...], wide)).astype(x.dtype)


class ConvAttention(nnx.Module):
    """CvT's attention, projected by a depthwise 3×3 convolution, BatchNorm and a linear map.

    Keys and values share the convolution and its norm.
    """

    def __init__(self, c: CvXConfig, map_size: tuple[int, int], key: Array) -> None:
        self.heads, self.rate, self.map_size, dim = c.heads, c.dropout, map_size, c.embed_dim
        q_key, kv_key, query_key, key_value_key, out_key = jax.random.split(key, 5)
        self.q_conv, self.kv_conv = (
            Conv(dim, dim, 3, k, groups=dim, bias=False) for k in (q_key, kv_key)
        )
        self.q_norm, self.kv_norm = BatchNorm(dim), BatchNorm(dim)
        self.query = Linear(dim, c.inner, query_key, bias=False)
        self.key_value = Linear(dim, 2 * c.inner, key_value_key, bias=False)
        self.out = Linear(c.inner, dim, out_key)

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D)."""
        x_BHWD = x_BTD.reshape(x_BTD.shape[0], *self.map_size, x_BTD.shape[-1])

        def local(conv: Conv, norm: BatchNorm) -> Array:
            y = norm(conv(x_BHWD), train=context.train, batch_axes=context.batch_axes)
            return conv_layers.flatten(y)

        k_and_v = jnp.split(self.key_value(local(self.kv_conv, self.kv_norm)), 2, axis=-1)
        parts = (self.query(local(self.q_conv, self.q_norm)), *k_and_v)
        q, k, v = (layers.split_heads(part, self.heads) for part in parts)
        o_BTD = layers.merge_heads(layers.attend(q, k, v, 0.0, context, stream))
        return layers.dropout(self.out(o_BTD), self.rate, context, stream)


def _block(c: CvXConfig, map_size: tuple[int, int], key: Array) -> layers.Block:
    mixer_key, ff_key = jax.random.split(key)
    if c.mixer == "softmax":
        mixer = ConvAttention(c, map_size, mixer_key)
    else:
        mixer = mixers.build(c, prod(map_size), c.embed_dim, mixer_key)
    feed_forward = layers.FeedForward(c.embed_dim, c.mlp_dim, ff_key, dropout=c.dropout)
    return layers.Block(c.embed_dim, mixer, feed_forward, norm=ChannelNorm)


class Stage(layers.Encoder):
    """A convolution with its norm, then blocks."""

    def __init__(self, c: CvXConfig, number: int, key: Array) -> None:
        conv_key, *keys = jax.random.split(key, c.depths[number] + 1)
        channels = c.embed_dim if number else c.image_channels
        self.conv = Conv(channels, c.embed_dim, 3, conv_key, stride=c.stage_strides[number])
        self.norm = ChannelNorm(c.embed_dim)
        blocks = (_block(c, c.map_sizes[number], k) for k in keys)
        super().__init__(blocks, first=sum(c.depths[:number]))

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', D)."""
        x_BHWD = self.norm(self.conv(x_BHWC))
        return super().__call__(conv_layers.flatten(x_BHWD), context).reshape(x_BHWD.shape)


class CvX(Network):
    """Parameters: {'stage0', 'stage1', …, 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        head_key, *keys = jax.random.split(key, len(c.depths) + 1)
        stages = {f"stage{i}": Stage(c, i, k) for i, k in enumerate(keys)}
        return {**stages, "head": Linear(c.embed_dim, c.num_classes, head_key)}

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        return bound["head"](bound.through_stages(images_BHWC, context).mean((1, 2)))


FAMILY = mixer_config.family(
    CvXConfig,
    name="cvx",
    variants={  # ViX paper, tables 3 and 4
        "cvt": {"mixer": "softmax", "head_dim": 64},
        "cvp": {"mixer": "performer"},
        "cvl": {"mixer": "linformer"},
        "cvn": {"mixer": "nystrom"},
    },
    default_variant="cvn",
    network=CvX,
    automatic={"stage_strides": stems.strides_for("depths")},
)
