"""EfficientViT: cascaded attention in windows between depthwise convolutions and feed-forwards.

Stem of four stride-2 convolutions. In a block a depthwise convolution and a feed-forward, attention
in windows, and the two again, each with a residual sum; BatchNorm alone normalises. Each head of
the attention sees its part of the channels plus the output of the head before it, and has a learned
bias for every offset between two positions. Between stages the map is halved. BatchNorm and a
linear classifier on the mean of the last map.

Source: Liu et al. 2023, EfficientViT: Memory Efficient Vision Transformer with Cascaded Group
Attention, section 3 and table 2, as in the authors' code and timm: windows are padded with zeros
that are not masked and enter the statistics of BatchNorm.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Chain, ConvNorm
from hsvit_jax.models.conv_transformers.efficientformer import offsets
from hsvit_jax.models.family import Family, Sizes
from hsvit_jax.models.network import BoundModules, ForwardContext, Network, grid_of
from hsvit_jax.ops.attention import biased_attention, biased_weights

Array = jax.Array


def _variant(
    widths: tuple[int, ...],
    heads: tuple[int, ...],
    kernels: tuple[int, ...] = (7, 5, 3, 3),
    depths: tuple[int, ...] = (1, 2, 3),
) -> dict[str, tuple[int, ...]]:
    return {"widths": widths, "heads": heads, "kernels": kernels, "depths": depths}


#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "m0": _variant((64, 128, 192), (4, 4, 4), (5, 5, 5, 5)),
    "m1": _variant((128, 144, 192), (2, 3, 3)),
    "m2": _variant((128, 192, 224), (4, 3, 2)),
    "m3": _variant((128, 240, 320), (4, 3, 4), (5, 5, 5, 5)),
    "m4": _variant((128, 256, 384), (4, 4, 4)),
    "m5": {},
}


@dataclasses.dataclass(frozen=True)
class EfficientViTConfig(Sizes):
    """Sizes of an EfficientViT, one depth, width, number of heads, … per stage.

    A window is cut to the map where that is smaller. A stage whose width differs from that before
    it must begin with a downsampling.
    """

    depths: tuple[int, ...] = settings.depths((1, 3, 4))
    widths: tuple[int, ...] = settings.widths((192, 288, 384))
    heads: tuple[int, ...] = settings.stage_heads((3, 3, 4))
    key_dims: tuple[int, ...] = settings.width(
        (16, 16, 16), "width of a head's queries and keys, by stage", per="depths"
    )
    windows: tuple[int, ...] = settings.width(
        (7, 7, 7), "side of each stage's attention windows", per="depths"
    )
    kernels: tuple[int, ...] = settings.kernel(
        (7, 5, 3, 3), "kernel size of each head's queries", odd=True
    )
    downsamples: tuple[bool, ...] = settings.setting(
        (False, True, True), "downsampling before each stage", per="depths"
    )
    head_dropout: float = settings.head_dropout(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.widths[0] < 8:
            raise ValueError(f"widths[0]={self.widths[0]} must be at least 8, for the stem")
        if min(self.image_size) < 16:
            raise ValueError(
                f"an image of {self.image_size[0]}×{self.image_size[1]} pixels is too small for "
                "the stem's stride of 16: use a larger data.image_size"
            )
        before = (self.widths[0], *self.widths[:-1])
        for i, (width, heads) in enumerate(zip(self.widths, self.heads, strict=True)):
            if width % heads:
                raise ValueError(f"widths[{i}]={width} must be divisible by heads[{i}]={heads}")
            if width != before[i] and not self.downsamples[i]:
                raise ValueError(
                    f"the width changes from {before[i]} to {width}, which needs "
                    f"downsamples[{i}]=True"
                )
        if len(self.kernels) < max(self.heads):
            raise ValueError(
                f"kernels={self.kernels} must be one for each of {max(self.heads)} heads"
            )

    def window(self, stage: int) -> int:
        """Rows and columns of a stage's windows.

        The reference cuts them to the side of a square map, which is rounded down once.
        """
        side = min(self.image_size) // 16
        for down in self.downsamples[: stage + 1]:
            side = -(-side // 2) if down else side
        return min(self.windows[stage], side)


def _starts_at_zero(layer: ConvNorm) -> ConvNorm:
    """The layer with a BatchNorm that starts from factors of zero."""
    layer.norm.scale = nnx.Param(jnp.zeros_like(layer.norm.scale[...]))
    return layer


class LocalMix(nnx.Module):
    """x + depthwise convolution(x), then x + feed-forward(x)."""

    def __init__(self, width: int, key: Array, *, zero_local: bool) -> None:
        local_key, up_key, down_key = jax.random.split(key, 3)
        local = ConvNorm(width, width, 3, local_key, groups=width)
        self.local = _starts_at_zero(local) if zero_local else local
        self.up = ConvNorm(width, 2 * width, 1, up_key, activation="relu")
        self.down = _starts_at_zero(ConvNorm(2 * width, width, 1, down_key))

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        x_BHWC = x_BHWC + self.local(x_BHWC, context)
        return x_BHWC + self.down(self.up(x_BHWC, context), context)


class Merge(nnx.Module):
    """An inverted residual of stride 2 with squeeze-and-excitation, without a shortcut."""

    def __init__(self, c_in: int, c_out: int, key: Array) -> None:
        keys, inner = jax.random.split(key, 4), 4 * c_in
        squeezed = max(8, (c_in + 4) // 8 * 8)
        self.expand = ConvNorm(c_in, inner, 1, keys[0], activation="relu")
        self.local = ConvNorm(
            *(inner, inner, 3, keys[1]), stride=2, groups=inner, activation="relu"
        )
        self.squeeze = conv_layers.SqueezeExcite(inner, squeezed, "relu", keys[2], init="torch")
        self.project = ConvNorm(inner, c_out, 1, keys[3])

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, C')."""
        y_BHWC = self.local(self.expand(x_BHWC, context), context)
        return self.project(self.squeeze(y_BHWC), context)


class CascadedAttention(nnx.Module):
    """Attention whose heads take their channels plus the output of the head before, in windows."""

    def __init__(self, c: EfficientViTConfig, stage: int, key: Array) -> None:
        dim, heads, key_dim = c.widths[stage], c.heads[stage], c.key_dims[stage]
        self.window, self.key_dim = c.window(stage), key_dim
        out_key, *keys = jax.random.split(key, 2 * heads + 1)
        value_dim = dim // heads
        self.qkv = nnx.List(
            ConvNorm(value_dim, 2 * key_dim + value_dim, 1, k) for k in keys[:heads]
        )
        self.local = nnx.List(
            ConvNorm(key_dim, key_dim, kernel, k, groups=key_dim)
            for kernel, k in zip(c.kernels, keys[heads:], strict=False)
        )
        self.offset_bias = nnx.Param(jnp.zeros((heads, self.window**2)))
        self.out = _starts_at_zero(ConvNorm(dim, dim, 1, out_key))

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        batch, rows, columns, dim = x_BHWC.shape
        side = self.window
        if (rows, columns) == (side, side):
            return self.attend(x_BHWC, context)
        below, right = -rows % side, -columns % side
        x_BHWC = jnp.pad(x_BHWC, ((0, 0), (0, below), (0, right), (0, 0)))
        high, wide = (rows + below) // side, (columns + right) // side
        x = x_BHWC.reshape(batch, high, side, wide, side, dim).swapaxes(2, 3)
        y = self.attend(x.reshape(-1, side, side, dim), context).reshape(x.shape)
        return y.swapaxes(2, 3).reshape(x_BHWC.shape)[:, :rows, :columns]

    def attend(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """Attention in each window (B, H, W, C), B windows of all images."""
        bias_1NTS = self.offset_bias[...][None, :, offsets((self.window,) * 2)]
        outputs: list[Array] = []
        queries, keys = [], []
        for i, part in enumerate(jnp.split(x_BHWC, len(self.qkv), axis=-1)):
            part = part + outputs[-1] if outputs else part
            qkv = self.qkv[i](part, context)
            q, k, v = jnp.split(qkv, (self.key_dim, 2 * self.key_dim), axis=-1)
            q = self.local[i](q, context)
            q, k, v = (conv_layers.flatten(y)[:, None] for y in (q, k, v))
            queries.append(q)
            keys.append(k)
            outputs.append(biased_attention(q, k, v, bias_1NTS[:, i : i + 1]).reshape(part.shape))
        if x_BHWC.shape[0] == context.example_ids_B.shape[0]:  # a window is the whole map
            heads = (jnp.concatenate(parts, axis=1) for parts in (queries, keys))
            context.call_hook("attention", lambda: biased_weights(*heads, bias_1NTS))
        return self.out(jax.nn.relu(jnp.concatenate(outputs, axis=-1)), context)


class Block(nnx.Module):
    """`LocalMix`, x + attention(x), `LocalMix`."""

    def __init__(self, c: EfficientViTConfig, stage: int, key: Array) -> None:
        before_key, attention_key, after_key = jax.random.split(key, 3)
        self.before = LocalMix(c.widths[stage], before_key, zero_local=True)
        self.attention = CascadedAttention(c, stage, attention_key)
        self.after = LocalMix(c.widths[stage], after_key, zero_local=True)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        x_BHWC = self.before(x_BHWC, context)
        return self.after(x_BHWC + self.attention(x_BHWC, context), context)


def _stage(c: EfficientViTConfig, number: int, key: Array) -> Chain:
    """A downsampling where there is one, and blocks."""
    down_key, *keys = jax.random.split(key, c.depths[number] + 1)
    blocks = nnx.List(Block(c, number, k) for k in keys)
    if not c.downsamples[number]:
        return Chain(blocks=blocks)
    before_key, merge_key, after_key = jax.random.split(down_key, 3)
    c_in, c_out = c.widths[max(number - 1, 0)], c.widths[number]
    down = Chain(
        before=LocalMix(c_in, before_key, zero_local=False),
        merge=Merge(c_in, c_out, merge_key),
        after=LocalMix(c_out, after_key, zero_local=False),
    )
    return Chain(down=down, blocks=blocks)


class EfficientViT(Network):
    """Parameters: {'stem', 'stage0', …, 'norm', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        stem_key, head_key, *keys = jax.random.split(key, len(c.depths) + 2)
        widths = (c.image_channels, *(c.widths[0] // n for n in (8, 4, 2, 1)))
        return {
            "stem": conv_layers.normed_stem(widths, stem_key, linear=True),
            **{f"stage{i}": _stage(c, i, k) for i, k in enumerate(keys)},
            "norm": layers.BatchNorm(c.widths[-1]),
            "head": layers.Linear(c.widths[-1], c.num_classes, head_key, init="normal"),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BHWC = bound.through_stages(bound["stem"](images_BHWC, context), context)
        x_BC = x_BHWC.mean((1, 2))
        x_BC = bound["norm"](x_BC, train=context.train, batch_axes=context.batch_axes)
        x_BC = layers.dropout(x_BC, self.config.head_dropout, context, layers.EMBEDDING)
        return bound["head"](x_BC)

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Overrides `Network.grid` with a stage whose windows have as many places."""
        sides = map(self.config.window, range(len(self.config.depths)))
        return grid_of(((side, side) for side in sides), tokens)


FAMILY = Family(
    name="efficientvit",
    variants=VARIANTS,
    default_variant="m5",
    config=EfficientViTConfig,
    network=EfficientViT,
    native_size=224,
    paper_recipe="efficientvit",
    tiny=lambda settings: {
        "depths": (1, 1),
        "widths": (8, 16),
        "heads": (1, 2),
        "key_dims": (4, 4),
        "windows": (7, 7),
        "downsamples": (False, True),
    },
)
