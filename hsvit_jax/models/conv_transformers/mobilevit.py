"""MobileViT: inverted residuals, and blocks with a transformer between two convolutions.

Such a block unfolds its map into 2×2 patches, and the pixels at the same position of every patch
attend to each other; a map that patches do not divide is resized before and after. A linear
classifier on the mean of the last map.

Source: Mehta & Rastegari 2022, MobileViT, section 3 and table 4, as in the `transformers` library.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers, settings
from hsvit_jax.models.conv_layers import Chain, Conv, ConvNorm, rounded, size_out
from hsvit_jax.models.conv_transformers.stages import StageSizes
from hsvit_jax.models.family import Family
from hsvit_jax.models.layers import LayerNorm, Linear
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.ops.activations import activation as by_name

Array = jax.Array

#: Transformer blocks of the third, fourth and fifth layer; all published sizes have these.
DEPTHS = (2, 4, 3)
#: Inverted residuals of the first and second layer, and the first one's stride.
RESIDUALS = ((1, 1), (3, 2))

#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "s": {},
    "xs": {"channels": (16, 32, 48, 64, 80, 96, 384), "widths": (96, 120, 144)},
    "xxs": {"channels": (16, 16, 24, 48, 64, 80, 320), "widths": (64, 80, 96), "expand_ratio": 2.0},
}


@dataclasses.dataclass(frozen=True)
class MobileViTConfig(StageSizes):
    """Sizes of a MobileViT.

    The channels are those of the stem, the five layers and the last convolution. The widths are
    those of the tokens of the third to fifth layer.
    """

    channels: tuple[int, ...] = settings.width(
        (16, 32, 64, 96, 128, 160, 640), "channels of each stage"
    )
    widths: tuple[int, ...] = settings.widths((144, 192, 240), per="")
    heads: int = settings.heads(4)
    mlp_ratio: float = settings.mlp_ratio(2.0)
    expand_ratio: float = settings.ratio(4.0, "expansion ratio of an inverted residual")
    kernel: int = settings.kernel(
        3, "kernel size of the convolutions around a transformer", odd=True
    )
    patch: int = settings.patch(2)
    output_stride: int = settings.setting(
        32, "stride of the last map; further strides become dilation", choices=(8, 16, 32)
    )
    activation: str = settings.activation("silu")
    qkv_bias: bool = settings.qkv_bias(True)
    dropout: float = settings.dropout(0.1)
    attention_dropout: float = settings.attention_dropout(0.0)
    head_dropout: float = settings.head_dropout(0.1)
    eps: float = settings.epsilon(1e-5, meaning="epsilon of normalisation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.channels) != 7 or len(self.widths) != 3:
            raise ValueError(
                "a MobileViT has seven channels (stem, five layers, last convolution) and three "
                f"widths of tokens; got channels={self.channels} and widths={self.widths}"
            )
        if any(width % self.heads for width in self.widths):
            raise ValueError(f"widths={self.widths} are not all divisible by heads={self.heads}")
        by_name(self.activation)
        self.maps()  # raises for too small an image

    def strides(self) -> tuple[tuple[int, int], ...]:
        """(stride, dilation) of the first inverted residual of the third to fifth layer."""
        first = {32: 3, 16: 2, 8: 1}[self.output_stride]  # layer with dilation, from 1 on
        return tuple((2, 1) if i < first else (1, 2 ** (i - first)) for i in range(3))

    def maps(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns after the stem and each layer."""
        steps = [(2, 1), *((stride, 1) for _, stride in RESIDUALS), *self.strides()]
        maps, size = [], self.image_size
        for stride, dilation in steps:
            size = size_out(size, 3, stride, dilation=dilation)
            maps.append(size)
        return tuple(maps)


class InvertedResidual(nnx.Module):
    """Pointwise expansion, depthwise 3×3, pointwise reduction; residual where shapes agree."""

    def __init__(
        self, c: MobileViTConfig, c_in: int, c_out: int, key: Array, stride: int, dilation: int = 1
    ) -> None:
        keys, inner = jax.random.split(key, 3), rounded(round(c_in * c.expand_ratio), 8)
        self.residual = stride == 1 and c_in == c_out
        self.expand = _conv(c, c_in, inner, 1, keys[0])
        around = {"stride": stride, "dilation": dilation}
        self.depthwise = _conv(c, inner, inner, 3, keys[1], groups=inner, **around)
        self.reduce = ConvNorm(inner, c_out, 1, keys[2], init="normal")

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', C')."""
        y = self.reduce(self.depthwise(self.expand(x_BHWC, context), context), context)
        return x_BHWC + y if self.residual else y


def _conv(
    c: MobileViTConfig, c_in: int, c_out: int, size: int, key: Array, **others: Any
) -> ConvNorm:
    """A convolution with BatchNorm and the network's activation."""
    return ConvNorm(c_in, c_out, size, key, activation=c.activation, init="normal", **others)


def unfold(x_BHWD: Array, patch: int) -> Array:
    """A sequence of patches for each place inside a patch: (B·patch², H·W/patch², D)."""
    batch, rows, columns, dim = x_BHWD.shape
    x = x_BHWD.reshape(batch, rows // patch, patch, columns // patch, patch, dim)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(batch * patch * patch, -1, dim)


def fold(x_STD: Array, map_size: tuple[int, int], patch: int) -> Array:
    """Inverse of `unfold`: a map of this size, (B, H, W, D)."""
    rows, columns = map_size
    x = x_STD.reshape(-1, patch, patch, rows // patch, columns // patch, x_STD.shape[-1])
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(-1, rows, columns, x_STD.shape[-1])


def resized(x_BHWD: Array, map_size: tuple[int, int]) -> Array:
    """The map resized bilinearly between pixel centres; unchanged where the size fits."""
    if x_BHWD.shape[1:3] == map_size:
        return x_BHWD
    shape = (x_BHWD.shape[0], *map_size, x_BHWD.shape[-1])
    return jax.image.resize(x_BHWD, shape, "bilinear", antialias=False)


class TransformerLayer(nnx.Module):
    """Inverted residual, convolutions to tokens, blocks, convolutions back, fused with the map."""

    def __init__(self, c: MobileViTConfig, number: int, key: Array) -> None:
        keys = jax.random.split(key, 5 + DEPTHS[number])
        c_in, channels = c.channels[2 + number : 4 + number]
        width, stride = c.widths[number], c.strides()[number]
        self.patch, self.first = c.patch, sum(DEPTHS[:number])
        self.down = InvertedResidual(c, c_in, channels, keys[0], *stride)
        self.local = _conv(c, channels, channels, c.kernel, keys[1])
        self.project = Conv(channels, width, 1, keys[2], bias=False, init="normal")
        self.blocks = nnx.List(
            layers.vit_block(c, width, c.hidden_widths[number], *jax.random.split(k))
            for k in keys[5:]
        )
        self.norm = LayerNorm(width, c.eps)
        self.back = _conv(c, width, channels, 1, keys[3])
        self.fuse = _conv(c, 2 * channels, channels, c.kernel, keys[4])

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', C')."""
        x_BHWC = self.down(x_BHWC, context)
        map_size, patch = x_BHWC.shape[1:3], self.patch
        divisible = tuple(-(-n // patch) * patch for n in map_size)
        y_BHWD = resized(self.project(self.local(x_BHWC, context)), divisible)
        y_STD = unfold(y_BHWD, patch)
        # Each sequence of an example has its own identity, and with it its own masks.
        places = jnp.arange(patch * patch)
        ids_BP = context.example_ids_B[:, None] * (patch * patch) + places[None]
        inner = dataclasses.replace(context, example_ids_B=ids_BP.reshape(-1), hook=None)
        for i, block in enumerate(self.blocks):
            y_STD = block(y_STD, inner, self.first + i)
        y_BHWD = resized(fold(self.norm(y_STD), divisible, patch), map_size)
        y_BHWC = self.back(y_BHWD, context)
        return self.fuse(jnp.concatenate([x_BHWC, y_BHWC], axis=-1), context)


def _residuals(c: MobileViTConfig, number: int, key: Array) -> Chain:
    """The inverted residuals of the first (0) or second (1) layer."""
    count, stride = RESIDUALS[number]
    c_in, c_out = c.channels[number : number + 2]
    blocks = [
        InvertedResidual(c, c_out if i else c_in, c_out, k, 1 if i else stride)
        for i, k in enumerate(jax.random.split(key, count))
    ]
    return Chain(blocks=nnx.List(blocks))


class MobileViT(Network):
    """Parameters: {'stem', 'layer0', …, 'layer4', 'last', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c, keys = self.config, jax.random.split(key, 8)
        stages = [_residuals(c, i, keys[i]) for i in range(2)]
        stages += [TransformerLayer(c, i, keys[2 + i]) for i in range(3)]
        return {
            "stem": _conv(c, c.image_channels, c.channels[0], 3, keys[5], stride=2),
            **{f"layer{i}": layer for i, layer in enumerate(stages)},
            "last": _conv(c, *c.channels[5:], 1, keys[6]),
            "head": Linear(c.channels[6], c.num_classes, keys[7], init="normal"),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BHWC = images_BHWC
        for name in ("stem", *(f"layer{i}" for i in range(5)), "last"):
            x_BHWC = bound[name](x_BHWC, context)
        rate, stream = self.config.head_dropout, layers.EMBEDDING
        pooled_BC = layers.dropout(x_BHWC.mean((1, 2)), rate, context, stream)
        return bound["head"](pooled_BC)


FAMILY = Family(
    name="mobilevit",
    variants=VARIANTS,
    default_variant="xs",
    config=MobileViTConfig,
    network=MobileViT,
    paper_recipe="hsvit_enlarged",
    tiny=lambda settings: {"channels": (4, 4, 8, 8, 8, 8, 16), "widths": (8, 8, 8), "heads": 2},
)
