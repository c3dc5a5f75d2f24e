"""CvT: three stages of overlapping patches, and attention with convolutional projections.

Stage: a strided convolution, LayerNorm, pre-norm blocks on the map's tokens; the last stage has a
CLS token, which is classified. Queries, keys and values are projected by depthwise convolutions of
the map, with stride 2 for keys and values, and linear maps; the CLS token skips the convolutions.
There are no positions.

Source: Wu et al. 2021, CvT, section 3 and table 2, as in the `transformers` library. There the
scores are divided by the root of D, not of the head's width, and in training
(`drop_path_of='tokens'`) the second stochastic depth of a block drops the example's tokens, not
just the branch, in all blocks of stage s at the rate of its block s. `drop_path_of='branch'` is the
paper's: both branches are dropped, at rates that grow linearly within the stage.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Conv, ConvNorm, size_out
from hsvit_jax.models.conv_transformers.stages import StageSizes
from hsvit_jax.models.family import Family
from hsvit_jax.models.layers import LayerNorm, Linear, split_heads
from hsvit_jax.models.network import BoundModules, ForwardContext, Network

Array = jax.Array

_21 = {"depths": (1, 4, 16)}
_PATCH_4 = {"patches": (4, 3, 3)}

#: Named variants, as they differ from the defaults; those with patches of 4 are HSViT's table 2.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "13": {},
    "21": _21,
    "13-patch4": _PATCH_4,
    "21-patch4": {**_21, **_PATCH_4},
}


@dataclasses.dataclass(frozen=True)
class CvTConfig(StageSizes):
    """Sizes of a CvT; a tuple has one entry per stage, and the module describes `drop_path_of`."""

    patches: tuple[int, ...] = settings.patch(
        (7, 3, 3), meaning="patch size of each stage", per="depths"
    )
    strides: tuple[int, ...] = settings.stride((4, 2, 2), "stride of each stage", per="depths")
    paddings: tuple[int, ...] = settings.kernel(
        (2, 1, 1), "padding of each stage", low=0, per="depths"
    )
    widths: tuple[int, ...] = settings.widths((64, 192, 384))
    heads: tuple[int, ...] = settings.stage_heads((1, 3, 6))
    depths: tuple[int, ...] = settings.depths((1, 2, 10))
    mlp_ratios: tuple[float, ...] = settings.mlp_ratios((4.0, 4.0, 4.0))
    qkv_bias: tuple[bool, ...] = settings.setting(
        (True, True, True), "biases of queries, keys and values, by stage", per="depths"
    )
    kernels: tuple[int, ...] = settings.kernel(
        (3, 3, 3), "kernel size of each stage's projections", per="depths"
    )
    query_paddings: tuple[int, ...] = settings.kernel(
        (1, 1, 1), "padding of each stage's queries", low=0, per="depths"
    )
    key_paddings: tuple[int, ...] = settings.kernel(
        (1, 1, 1), "padding of each stage's keys", low=0, per="depths"
    )
    key_strides: tuple[int, ...] = settings.stride(
        (2, 2, 2), "stride of each stage's keys and values", per="depths"
    )
    dropouts: tuple[float, ...] = settings.rate(
        (0.0, 0.0, 0.0), "dropout rate of each stage", per="depths"
    )
    attention_dropouts: tuple[float, ...] = settings.rate(
        (0.0, 0.0, 0.0), "dropout rate of attention weights, by stage", per="depths"
    )
    drop_paths: tuple[float, ...] = settings.rate(
        (0.0, 0.0, 0.1), "stochastic depth rate of each stage", per="depths"
    )
    drop_path_of: str = settings.setting(
        "tokens",
        "unit of stochastic depth: each token or the whole branch",
        choices=("tokens", "branch"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % heads:
                raise ValueError(f"a width of {width} is not divisible by heads={heads}")
        for kernel, padding in zip(self.kernels, self.query_paddings, strict=True):
            if kernel != 2 * padding + 1:
                raise ValueError(
                    f"query_paddings={padding} with kernels={kernel} does not keep the map's size, "
                    "as queries must: it has to be half of an odd kernel, rounded down"
                )
        for stage in range(len(self.depths)):
            self.key_map(stage)  # raises for too small an image

    def maps(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the tokens, by stage."""
        maps, size = [], self.image_size
        for shape in zip(self.patches, self.strides, self.paddings, strict=True):
            size = size_out(size, *shape)
            maps.append(size)
        return tuple(maps)

    def key_map(self, stage: int) -> tuple[int, int]:
        """Rows and columns of this stage's keys and values."""
        shape = (self.kernels[stage], self.key_strides[stage], self.key_paddings[stage])
        return size_out(self.maps()[stage], *shape)

    def has_cls(self, stage: int) -> bool:
        """Whether this stage has a CLS token: the last one has."""
        return stage == len(self.depths) - 1

    def drop_path_rate(self, stage: int, block: int) -> float:
        """The rate of stochastic depth of a block of this stage."""
        rates = layers.drop_path_rates(self.drop_paths[stage], self.depths[stage])
        chosen = min(stage, self.depths[stage] - 1) if self.drop_path_of == "tokens" else block
        return rates[chosen]


class ConvAttention(layers.MultiHeadAttention):
    """Attention of a map's tokens, projected by depthwise convolution, BatchNorm and linear."""

    def __init__(self, c: CvTConfig, stage: int, key: Array) -> None:
        own_key, *keys = jax.random.split(key, 4)
        dim = c.widths[stage]
        super().__init__(
            *(dim, c.heads[stage], own_key),
            bias=c.qkv_bias[stage],
            dropout=c.dropouts[stage],
            attention_dropout=c.attention_dropouts[stage],
            init="normal",
        )
        self.map_size, self.cls = c.maps()[stage], c.has_cls(stage)
        shapes = {name: (c.key_strides[stage], c.key_paddings[stage]) for name in ("key", "value")}
        shapes = {"query": (1, c.query_paddings[stage]), **shapes}
        self.local = nnx.Dict()
        for (name, (stride, padding)), conv_key in zip(shapes.items(), keys, strict=True):
            self.local[name] = ConvNorm(
                *(dim, dim, c.kernels[stage], conv_key),
                stride=stride,
                padding=padding,
                groups=dim,
                init="normal",
            )

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), the CLS token first if any."""
        batch, _, dim = x_BTD.shape
        cls_B1D = x_BTD[:, : int(self.cls)]
        x_BHWD = x_BTD[:, int(self.cls) :].reshape(batch, *self.map_size, dim)
        heads = []
        for i, name in enumerate(("query", "key", "value")):
            y_BTD = conv_layers.flatten(self.local[name](x_BHWD, context))
            y_BTD = jnp.concatenate([cls_B1D, y_BTD], axis=1)
            heads.append(split_heads(self._part(i, y_BTD), self.heads))
        q, k, v = heads
        # Scores are divided by the root of a head's width there; the reference divides by √D.
        q = q * self.heads**-0.5
        o_BNTE = layers.attend(q, k, v, self.attention_rate, context, stream)
        return self.output(o_BNTE, context, stream)

    def _part(self, i: int, x_BTD: Array) -> Array:
        """Queries (0), keys (1) or values (2): by a third of one linear map."""
        dim = x_BTD.shape[-1]
        third = slice(i * dim, (i + 1) * dim)
        y = x_BTD @ self.qkv.kernel[...][:, third].astype(x_BTD.dtype)
        return y if self.qkv.bias is None else layers.add_bias(y, self.qkv.bias[...][third])


class Block(layers.Block):
    """`layers.Block`; with drop_path_of='tokens' the second branch drops an example's tokens."""

    def __init__(self, c: CvTConfig, stage: int, number: int, key: Array) -> None:
        mix_key, feed_key = jax.random.split(key)
        feed_forward = layers.FeedForward(
            *(c.widths[stage], c.hidden_widths[stage], feed_key),
            dropout=c.dropouts[stage],
            inner_dropout=False,
            init="normal",
        )
        super().__init__(
            *(c.widths[stage], ConvAttention(c, stage, mix_key), feed_forward),
            drop_path=c.drop_path_rate(stage, number),
        )
        self.drops_tokens = c.drop_path_of == "tokens"

    def feed(self, x_BTD: Array, context: ForwardContext, index: int) -> Array:
        """The residual branch of the feed-forward."""
        if not self.drops_tokens:
            return super().feed(x_BTD, context, index)
        stream = index * layers.STREAMS_PER_BLOCK + layers.STREAMS_PER_BLOCK // 2
        x_BTD = x_BTD + self.feed_forward(self.norm2(x_BTD), context, stream)
        x_BTD = layers.drop_path(x_BTD, self.rate, context, stream + 4)
        context.call_hook("tokens", lambda: x_BTD)
        return x_BTD


class Stage(layers.Encoder):
    """Overlapping patches, LayerNorm, the CLS token if any, and blocks."""

    def __init__(self, c: CvTConfig, number: int, key: Array) -> None:
        conv_key, cls_key, *keys = jax.random.split(key, c.depths[number] + 2)
        self.number, self.rate = number, c.dropouts[number]
        width, channels = c.widths[number], (c.image_channels, *c.widths)[number]
        self.conv = Conv(
            *(channels, width, c.patches[number], conv_key),
            stride=c.strides[number],
            padding=c.paddings[number],
            init="normal",
        )
        self.norm = LayerNorm(width)
        normal = 0.02 * layers.normal(cls_key, (width,))
        self.cls = nnx.Param(normal) if c.has_cls(number) else None
        blocks = (Block(c, number, i, k) for i, k in enumerate(keys))
        super().__init__(blocks, first=sum(c.depths[:number]))

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', D), or tokens (B, T, D) with a CLS."""
        x_BHWD = self.norm(self.conv(x_BHWC))
        x_BHWD = layers.dropout(x_BHWD, self.rate, context, layers.EMBEDDING + self.number)
        x_BTD = conv_layers.flatten(x_BHWD)
        if self.cls is not None:
            return super().__call__(layers.prepend(self.cls[...], x_BTD), context)
        return super().__call__(x_BTD, context).reshape(x_BHWD.shape)


class CvT(Network):
    """Parameters: {'stage0', 'stage1', …, 'norm', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        head_key, *keys = jax.random.split(key, len(c.depths) + 1)
        return {
            **{f"stage{i}": Stage(c, i, k) for i, k in enumerate(keys)},
            "norm": LayerNorm(c.widths[-1]),
            "head": Linear(c.widths[-1], c.num_classes, head_key, init="normal"),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD = bound.through_stages(images_BHWC, context)
        return bound["head"](bound["norm"](x_BTD[:, 0]))

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Overrides `Network.grid` with the stages' maps and their keys' maps."""
        c = self.config
        for stage, query_map in enumerate(c.maps()):
            for rows, columns in (query_map, c.key_map(stage)):
                if tokens == rows * columns + c.has_cls(stage):
                    return int(c.has_cls(stage)), rows, columns
        return None


FAMILY = Family(
    name="cvt",
    variants=VARIANTS,
    default_variant="13-patch4",
    config=CvTConfig,
    network=CvT,
    paper_recipe="hsvit_cvt",
    tiny=lambda settings: {"depths": (1, 1, 2), "widths": (8, 12, 16), "heads": (1, 2, 2)},
)
