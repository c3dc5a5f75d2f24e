"""ResNet: residual networks of basic or bottleneck blocks, as feature extractor and classifier.

Source: He et al., "Deep Residual Learning for Image Recognition", table 1, with the stride of a
bottleneck in its 3×3 convolution; initialisation, and the settings for strides elsewhere, as in the
`transformers` library.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import settings
from hsvit_jax.models.convnets.convnet import Conv, ConvNet, ConvNetConfig, ConvNorm, Head
from hsvit_jax.models.family import Family
from hsvit_jax.models.network import UNSHARDED, ForwardContext, GroupShard
from hsvit_jax.ops.activations import activation as by_name
from hsvit_jax.ops.max_pool import max_pool

Array = jax.Array

_BASIC = {"block": "basic", "channels": (64, 128, 256, 512)}

#: Named networks of the paper's table 1, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "18": {**_BASIC, "depths": (2, 2, 2, 2)},
    "34": {**_BASIC, "depths": (3, 4, 6, 3)},
    "50": {},
    "101": {"depths": (3, 4, 23, 3)},
    "152": {"depths": (3, 8, 36, 3)},
}

#: The stem's max pool, described as the convolution that shrinks a map alike.
_POOL = Conv(1, 1, 3, stride=2, padding=None)


class Residual(NamedTuple):
    """The description of a block: its convolutions, and its shortcut's if not the identity."""

    convs: tuple[Conv, ...]
    shortcut: Conv | None


@dataclasses.dataclass(frozen=True)
class ResNetConfig(ConvNetConfig):
    """Sizes of a ResNet; see `resnext` for groups, base_width and zero_init."""

    block: str = settings.setting(
        "bottleneck", "kind of residual block", choices=("basic", "bottleneck")
    )
    stem_channels: int = settings.width(64, "channels of the first convolution")
    channels: tuple[int, ...] = settings.width(
        (256, 512, 1024, 2048), "channels of each stage", per="depths"
    )
    depths: tuple[int, ...] = settings.depths((3, 4, 6, 3))
    activation: str = settings.setting(
        "relu", "name of the activation of the stem and after each sum; inside a block it is ReLU"
    )
    stride_in_first_stage: bool = settings.setting(False, "stride in the first stage")
    stride_in_first_conv: bool = settings.setting(
        False, "stride in a bottleneck's first convolution", when={"block": ("bottleneck",)}
    )
    bn_momentum: float = settings.momentum(0.9)
    groups: int = settings.width(1, "groups of a bottleneck's 3×3 convolution")
    base_width: int = settings.width(
        64, "channels of a group where a stage's bottlenecks would have 64"
    )
    zero_init: bool = False

    def __post_init__(self) -> None:
        settings.check(self)
        super().__post_init__()

    def head(self, key: Array) -> Head:
        return Head(self.channels[-1], self.num_classes, key, init="torch")

    def conv(self, c_in: int, c_out: int, size: int, stride: int = 1, **more: Any) -> Conv:
        """A convolution padded by size//2 on all sides."""
        usual = {"padding": None, "momentum": self.bn_momentum, "init": "fan_out"}
        return Conv(c_in, c_out, size, stride, **usual, **more)

    @property
    def stem(self) -> Conv:
        """The first convolution; a max pool follows."""
        return self.conv(self.image_channels, self.stem_channels, 7, 2, activation=self.activation)

    def blocks(self) -> Iterator[Residual]:
        """In order of computation."""
        c_in = self.stem_channels
        for i, (c_out, depth) in enumerate(zip(self.channels, self.depths, strict=True)):
            for j in range(depth):
                stride = 1 if j or not (i or self.stride_in_first_stage) else 2
                yield self._residual(c_in, c_out, stride)
                c_in = c_out

    def _residual(self, c_in: int, c_out: int, stride: int) -> Residual:
        shortcut = self.conv(c_in, c_out, 1, stride) if stride > 1 or c_in != c_out else None
        relu = {"activation": "relu"}
        if self.block == "basic":
            first = self.conv(c_in, c_out, 3, stride, **relu)
            return Residual((first, self.conv(c_out, c_out, 3)), shortcut)
        inner = c_out // 4 * self.base_width // 64 * self.groups
        strides = (stride, 1) if self.stride_in_first_conv else (1, stride)
        reduce = self.conv(c_in, inner, 1, strides[0], **relu)
        middle = self.conv(inner, inner, 3, strides[1], groups=self.groups, **relu)
        return Residual((reduce, middle, self.conv(inner, c_out, 1)), shortcut)

    def convs(self) -> Iterator[Conv]:
        yield self.stem
        for block in self.blocks():
            if block.shortcut is not None:
                yield block.shortcut
            yield from block.convs

    def main_path(self) -> Iterator[Conv]:
        yield self.stem
        yield _POOL
        for block in self.blocks():
            yield from block.convs

    def features(self, key: Array) -> nnx.Module:
        return Features(self, key)


#: The settings of the `model` section of ResNet-50, which variants change.
KEYS = settings.keys_of(ResNetConfig, without=["groups", "base_width", "zero_init"])


class Block(nnx.Module):
    """Two or three convolutions, the sum with the shortcut, activation."""

    def __init__(self, block: Residual, activation: str, key: Array) -> None:
        self.activation = activation
        shortcut_key, *keys = jax.random.split(key, len(block.convs) + 1)
        self.convs = nnx.List(ConvNorm(c, k) for c, k in zip(block.convs, keys, strict=True))
        self.shortcut = None if block.shortcut is None else ConvNorm(block.shortcut, shortcut_key)

    def __call__(self, x_BHWC: Array, context: ForwardContext, kernels: GroupShard) -> Array:
        """(B, H, W, C) → (B, H', W', C'), this device's channels."""
        y_BHWC = kernels.all_gather(x_BHWC, 3)
        if self.shortcut is not None:
            x_BHWC = self.shortcut(y_BHWC, context, kernels)
        for conv in self.convs:
            y_BHWC = conv(y_BHWC, context, kernels)
        return by_name(self.activation)(x_BHWC + y_BHWC)


class Features(nnx.Module):
    """The backbone: images to the last map."""

    def __init__(self, c: ResNetConfig, key: Array) -> None:
        residuals = list(c.blocks())
        stem_key, *keys = jax.random.split(key, len(residuals) + 1)
        self.stem = ConvNorm(c.stem, stem_key)
        self.blocks = nnx.List(
            Block(block, c.activation, k) for block, k in zip(residuals, keys, strict=True)
        )
        for block in self.blocks if c.zero_init else ():
            scale = block.convs[-1].norm.scale
            scale[...] = jnp.zeros_like(scale[...])

    def __call__(
        self, images_BHWC: Array, context: ForwardContext, kernels: GroupShard = UNSHARDED
    ) -> Array:
        """(B, H, W, C) → (B, h, w, C'), this device's channels."""
        x_BHWC = max_pool(self.stem(images_BHWC, context, kernels), 3, 2)
        for block in self.blocks:
            x_BHWC = block(x_BHWC, context, kernels)
        return x_BHWC


FAMILY = Family(
    name="resnet",
    keys=KEYS,
    variants=VARIANTS,
    default_variant="50",
    config=ResNetConfig,
    network=ConvNet,
    native_size=224,
    paper_recipe="hsvit_convnet",
    tiny=lambda settings: {
        **{"stem_channels": 8, "channels": (8, 16, 16, 32)},
        "depths": tuple(max(1, round(depth / 4)) for depth in settings["depths"]),
    },
)
