"""FastViT: sums of convolutions in training, each one convolution in inference; attention last.

Stem of three units; in the first stages a depthwise mixer and a convolutional feed-forward, in the
last attention behind a positional convolution. A unit adds the outputs of a convolution, of a 1×1
convolution and of the identity, each behind BatchNorm: such a sum is linear in evaluation, and
`FastViT.fused` folds it into one convolution. Between stages the sum of a 7×7 and a 3×3 convolution
halves the map; a depthwise unit with squeeze-and-excitation stands before the classifier.

Source: Vasu et al. 2023, FastViT, section 3 and table 1, as in the authors' code and timm.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Chain, Conv, ConvNorm, size_out
from hsvit_jax.models.conv_transformers.stages import StageSizes
from hsvit_jax.models.family import Family, scaled
from hsvit_jax.models.layers import BatchNorm
from hsvit_jax.models.network import BoundModules, ForwardContext, Network, grid_of
from hsvit_jax.ops.activations import activation as by_name

Array = jax.Array

HEAD_DIM = 32  # width of a head in every published network

_NO_ATTENTION = {"mixers": ("repmixer",) * 4, "position_kernels": (0,) * 4, "drop_path": 0.0}
_RATIO_3 = {"mlp_ratios": (3.0,) * 4}
_DEPTHS_12, _DEPTHS_36 = {"depths": (2, 2, 6, 2)}, {"depths": (6, 6, 18, 6)}

#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "t8": {
        **{"depths": (2, 2, 4, 2), "widths": (48, 96, 192, 384)},
        **_RATIO_3,
        **_NO_ATTENTION,
    },
    "t12": {**_DEPTHS_12, **_RATIO_3, **_NO_ATTENTION},
    "s12": {**_DEPTHS_12, **_NO_ATTENTION},
    "sa12": _DEPTHS_12,
    "sa24": {},
    "sa36": {**_DEPTHS_36, "drop_path": 0.2},
    "ma36": {**_DEPTHS_36, "widths": (76, 152, 304, 608), "drop_path": 0.35},
}


@dataclasses.dataclass(frozen=True)
class FastViTConfig(StageSizes):
    """Sizes of a FastViT, one depth, width, mixer, … per stage.

    Attention has heads of 32 channels. A stage of another width always begins with a downsampling.
    """

    depths: tuple[int, ...] = settings.depths((4, 4, 12, 4))
    widths: tuple[int, ...] = settings.widths((64, 128, 256, 512))
    mlp_ratios: tuple[float, ...] = settings.mlp_ratios((4.0, 4.0, 4.0, 4.0))
    mixers: tuple[str, ...] = settings.setting(
        ("repmixer", "repmixer", "repmixer", "attention"),
        "token mixer of each stage",
        choices=("repmixer", "attention"),
        per="depths",
    )
    position_kernels: tuple[int, ...] = settings.kernel(
        (0, 0, 0, 7),
        "positional convolution before each stage; 0: none",
        odd=True,
        besides=(0,),
        per="depths",
    )
    kernel: int = settings.kernel(3, "kernel size of depthwise mixers", odd=True)
    downsamples: tuple[bool, ...] = settings.setting(
        (False, True, True, True), "downsampling before each stage", per="depths"
    )
    squeezes: tuple[bool, ...] = settings.setting(
        (False, False, False, False),
        "squeeze-and-excitation in the downsampling before each stage",
        per="depths",
    )
    down_kernel: int = settings.kernel(
        7, "kernel size of downsampling convolutions", low=3, odd=True
    )
    down_stride: int = settings.stride(2, "stride of downsampling convolutions")
    down_activation: str = settings.setting(
        "none", "name of the activation behind a large downsampling kernel"
    )
    top_ratio: float = settings.ratio(
        2.0, "channels before the classifier over the last stage's width"
    )
    layer_scale: float = settings.layer_scale(1e-5)
    dropout: float = settings.dropout(0.0)
    head_dropout: float = settings.head_dropout(0.0)
    drop_path: float = settings.drop_path(0.1)
    fused: bool = settings.setting(False, "each sum of branches as one convolution, for inference")

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = zip(self.widths, (*self.widths[1:], self.top), strict=True)
        for width, following in pairs:
            if following % width:
                raise ValueError(f"a width of {following} must be a multiple of {width} before it")
        for width, mixer in zip(self.widths, self.mixers, strict=True):
            if mixer == "attention" and width % HEAD_DIM:
                raise ValueError(f"attention needs a width divisible by {HEAD_DIM}; got {width}")
        by_name(self.down_activation)
        self.maps()  # raises for too small an image

    @property
    def top(self) -> int:
        """Channels before the classifier."""
        return scaled(self.widths[-1], self.top_ratio)

    def width_before(self, stage: int) -> int:
        """Channels that a stage gets."""
        return self.widths[max(stage - 1, 0)]

    def starts_down(self, stage: int) -> bool:
        """Whether a stage begins with a downsampling."""
        return self.downsamples[stage] or self.width_before(stage) != self.widths[stage]

    def maps(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the map of every stage."""
        size, sizes = conv_layers.map_size(self.image_size, (2, 2)), []
        for stage in range(len(self.depths)):
            if self.starts_down(stage):
                size = size_out(size, self.down_kernel, self.down_stride)
            sizes.append(size)
        return tuple(sizes)


# --- Sums of branches ----------------------------------------------------------------------------


class Foldable(nnx.Module):
    """Linear branches that are added; or fused, one convolution that equals them in evaluation."""

    fused: Conv | None = None

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', C')."""
        return self.branches(x_BHWC, context) if self.fused is None else self.fused(x_BHWC)

    @abc.abstractmethod
    def branches(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """The sum of the branches."""

    @abc.abstractmethod
    def folded(self) -> tuple[Array, Array]:
        """Kernel (k, k, C/groups, C') and bias (C',) of the one convolution."""


def _identity(size: int, groups: int, width: int) -> Array:
    """The kernel (size, size, C/groups, C) of the identity."""
    channel, centre = np.arange(width), size // 2
    kernel = np.zeros((size, size, width // groups, width))
    kernel[centre, centre, channel % (width // groups), channel] = 1
    return kernel


class Branches(Foldable):
    """Convolutions of several sizes, each with BatchNorm, and perhaps BatchNorm alone."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        sizes: tuple[int, ...],
        key: Array,
        *,
        stride: int = 1,
        groups: int = 1,
        identity: bool = False,
        fused: bool = False,
    ) -> None:
        self.size, self.groups, shared = max(sizes), groups, {"stride": stride, "groups": groups}
        if fused:
            self.fused = Conv(c_in, c_out, self.size, key, **shared)
            return
        keys = jax.random.split(key, len(sizes))
        self.convs = nnx.List(
            ConvNorm(c_in, c_out, size, k, **shared) for size, k in zip(sizes, keys, strict=True)
        )
        self.identity = BatchNorm(c_out) if identity else None

    def branches(self, x_BHWC: Array, context: ForwardContext) -> Array:
        total = sum(layer(x_BHWC, context) for layer in self.convs)
        if self.identity is None:
            return total
        return total + self.identity(x_BHWC, train=context.train, batch_axes=context.batch_axes)

    def folded(self) -> tuple[Array, Array]:
        parts = [(layer.conv.kernel[...], layer.norm) for layer in self.convs]
        if self.identity is not None:
            width = parts[0][0].shape[3]
            parts.append((_identity(self.size, self.groups, width), self.identity))
        kernel, bias = 0, 0
        for own, norm in parts:
            factor, shift = norm.affine(own, train=False)
            around = ((self.size - len(own)) // 2,) * 2
            own = own * layers.over_last(factor, own)
            kernel = kernel + jnp.pad(own, (around, around, (0, 0), (0, 0)))
            bias = bias + shift
        return kernel, bias


class RepMixer(Branches):
    """x + s·(M(x) − BatchNorm(x)), with M the sum of a depthwise unit's branches."""

    def __init__(self, c: FastViTConfig, width: int, key: Array) -> None:
        shared = {"groups": width, "identity": True, "fused": c.fused}
        super().__init__(width, width, _with_scale(c.kernel), key, **shared)
        if not c.fused:
            self.norm = BatchNorm(width)
            self.scale = layers.LayerScales(width, c.layer_scale, 1)

    def branches(self, x_BHWC: Array, context: ForwardContext) -> Array:
        y_BHWC = self.norm(x_BHWC, train=context.train, batch_axes=context.batch_axes)
        return x_BHWC + self.scale(0, super().branches(x_BHWC, context) - y_BHWC)

    def folded(self) -> tuple[Array, Array]:
        kernel, bias = super().folded()
        one = _identity(self.size, self.groups, len(bias))
        factor, shift = self.norm.affine(kernel, train=False)
        kernel = self.scale(0, kernel - one * layers.over_last(factor, one))
        return one + kernel, self.scale(0, bias - shift)


class Positions(Foldable):
    """x + depthwise convolution(x), which encodes positions."""

    def __init__(self, width: int, size: int, key: Array, fused: bool) -> None:
        conv = Conv(width, width, size, key, groups=width)
        if fused:
            self.fused = conv
        else:
            self.conv = conv

    def branches(self, x_BHWC: Array, context: ForwardContext) -> Array:
        return x_BHWC + self.conv(x_BHWC)

    def folded(self) -> tuple[Array, Array]:
        kernel, bias = self.conv.kernel[...], self.conv.bias[...]
        return kernel + _identity(len(kernel), len(bias), len(bias)), bias


def _with_scale(size: int) -> tuple[int, ...]:
    """Sizes of a unit's convolutions: its own, and 1 beside a larger one."""
    return (size, 1) if size > 1 else (size,)


class Unit(nnx.Module):
    """`Branches`, squeeze-and-excitation to `squeeze` channels (0 for none), activation."""

    def __init__(
        self, branches: Branches, width: int, key: Array, *, squeeze: int = 0, activation: str
    ) -> None:
        self.sum, self.activate = branches, by_name(activation)
        self.squeeze = (
            conv_layers.SqueezeExcite(width, squeeze, "relu", key, init="torch")
            if squeeze
            else None
        )

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', C')."""
        y_BHWC = self.sum(x_BHWC, context)
        return self.activate(y_BHWC if self.squeeze is None else self.squeeze(y_BHWC))


def _unit(
    c: FastViTConfig,
    c_in: int,
    c_out: int,
    size: int,
    key: Array,
    *,
    stride: int = 1,
    groups: int = 1,
    squeeze: int = 0,
) -> Unit:
    """MobileOne's unit: a convolution, a 1×1 one and, where the shape stays, the identity; GELU."""
    branch_key, squeeze_key = jax.random.split(key)
    branches = Branches(
        *(c_in, c_out, _with_scale(size), branch_key),
        stride=stride,
        groups=groups,
        identity=c_in == c_out and stride == 1,
        fused=c.fused,
    )
    return Unit(branches, c_out, squeeze_key, squeeze=squeeze, activation="gelu")


# --- Blocks and stages ---------------------------------------------------------------------------


class FeedForward(nnx.Module):
    """Depthwise 7×7 convolution with BatchNorm, then two linear layers with GELU between."""

    def __init__(self, c: FastViTConfig, stage: int, key: Array) -> None:
        local_key, feed_key = jax.random.split(key)
        width = c.widths[stage]
        self.local = ConvNorm(width, width, 7, local_key, groups=width, init="normal")
        self.feed = layers.FeedForward(
            width, c.hidden_widths[stage], feed_key, dropout=c.dropout, init="normal"
        )

    def __call__(self, x_BHWC: Array, context: ForwardContext, stream: int) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        return self.feed(self.local(x_BHWC, context), context, stream)


class MixerBlock(nnx.Module):
    """`RepMixer`, then x + s·feed_forward(x); stream: of its masks."""

    def __init__(self, c: FastViTConfig, stage: int, rate: float, stream: int, key: Array) -> None:
        mixer_key, feed_key = jax.random.split(key)
        self.rate, self.stream, width = rate, stream, c.widths[stage]
        self.mixer = RepMixer(c, width, mixer_key)
        self.feed_forward = FeedForward(c, stage, feed_key)
        self.scale = layers.LayerScales(width, c.layer_scale, 1)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        x_BHWC = self.mixer(x_BHWC, context)
        y_BHWC = self.scale(0, self.feed_forward(x_BHWC, context, self.stream))
        return x_BHWC + layers.drop_path(y_BHWC, self.rate, context, self.stream + 4)


class AttentionBlock(nnx.Module):
    """x + s₁·attention(BatchNorm(x)), then x + s₂·feed_forward(x); stream: of its masks."""

    def __init__(self, c: FastViTConfig, stage: int, rate: float, stream: int, key: Array) -> None:
        attention_key, feed_key = jax.random.split(key)
        self.rate, self.stream, width = rate, stream, c.widths[stage]
        self.norm = BatchNorm(width)
        self.mixer = layers.MultiHeadAttention(
            *(width, width // HEAD_DIM, attention_key), bias=False, dropout=c.dropout, init="normal"
        )
        self.feed_forward = FeedForward(c, stage, feed_key)
        self.scales = layers.LayerScales(width, c.layer_scale)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        stream = self.stream
        y_BHWC = self.norm(x_BHWC, train=context.train, batch_axes=context.batch_axes)
        y_BTC = self.mixer(conv_layers.flatten(y_BHWC), context, stream)
        y_BHWC = self.scales(0, y_BTC.reshape(x_BHWC.shape))
        x_BHWC = x_BHWC + layers.drop_path(y_BHWC, self.rate, context, stream + 4)
        y_BHWC = self.scales(1, self.feed_forward(x_BHWC, context, stream + 5))
        x_BHWC = x_BHWC + layers.drop_path(y_BHWC, self.rate, context, stream + 9)
        context.call_hook("tokens", lambda: conv_layers.flatten(x_BHWC))
        return x_BHWC


def _downsampling(c: FastViTConfig, stage: int, key: Array) -> Chain:
    """A grouped convolution of a large and one of a small kernel, added, and a 1×1 unit."""
    large_key, squeeze_key, unit_key = jax.random.split(key, 3)
    before, width = c.width_before(stage), c.widths[stage]
    options = {"stride": c.down_stride, "groups": before, "fused": c.fused}
    large = Branches(before, width, (c.down_kernel, 3), large_key, **options)
    squeeze = max(8, int(width / 4 + 4) // 8 * 8) if c.squeezes[stage] else 0
    return Chain(
        large=Unit(large, width, squeeze_key, squeeze=squeeze, activation=c.down_activation),
        unit=_unit(c, width, width, 1, unit_key),
    )


def _stem(c: FastViTConfig, key: Array) -> Chain:
    """Three units: a dense and a depthwise one of stride 2, and a 1×1 one."""
    keys, width = jax.random.split(key, 3), c.widths[0]
    units = [
        _unit(c, c.image_channels, width, 3, keys[0], stride=2),
        _unit(c, width, width, 3, keys[1], stride=2, groups=width),
        _unit(c, width, width, 1, keys[2]),
    ]
    return Chain(units=nnx.List(units))


def _stage(c: FastViTConfig, number: int, key: Array) -> Chain:
    """Applies a stage: optional downsampling and positional convolution, then blocks."""
    down_key, position_key, *keys = jax.random.split(key, c.depths[number] + 2)
    size, first = c.position_kernels[number], sum(c.depths[:number])
    rates = layers.drop_path_rates(c.drop_path, sum(c.depths))[first:]
    block = AttentionBlock if c.mixers[number] == "attention" else MixerBlock
    blocks = [
        block(c, number, rates[i], (first + i) * layers.STREAMS_PER_BLOCK, k)
        for i, k in enumerate(keys)
    ]
    return Chain(
        down=_downsampling(c, number, down_key) if c.starts_down(number) else None,
        positions=Positions(c.widths[number], size, position_key, c.fused) if size else None,
        blocks=nnx.List(blocks),
    )


class FastViT(Network):
    """Parameters: {'stem', 'stage0', …, 'top', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        stem_key, top_key, head_key, *keys = jax.random.split(key, len(c.depths) + 3)
        width, squeeze = c.widths[-1], max(1, int(c.top / 16 + 0.5))
        return {
            "stem": _stem(c, stem_key),
            **{f"stage{i}": _stage(c, i, k) for i, k in enumerate(keys)},
            "top": _unit(c, width, c.top, 3, top_key, groups=width, squeeze=squeeze),
            "head": layers.Linear(c.top, c.num_classes, head_key, init="normal"),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BHWC = bound.through_stages(bound["stem"](images_BHWC, context), context)
        x_BC = bound["top"](x_BHWC, context).mean((1, 2))
        x_BC = layers.dropout(x_BC, self.config.head_dropout, context, layers.EMBEDDING)
        return bound["head"](x_BC)

    def fused(self, params: dict, stats: dict) -> tuple["FastViT", dict, dict]:
        """Overrides `Network.fused`: every sum of branches becomes one convolution with a bias."""
        config = dataclasses.replace(self.config, fused=True)
        if self.config.fused:
            return self, params, stats
        with jax.enable_x64(True):  # so that folding rounds once
            wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, stats))
            bound, trees = self.bind(*wide), [*map(flatten_dict, wide)]
            for name in self.part_names:
                for path, module in nnx.iter_modules(bound[name]):
                    if isinstance(module, Foldable):
                        place = (name, *map(str, path))
                        trees = [
                            {k: v for k, v in tree.items() if k[: len(place)] != place}
                            for tree in trees
                        ]
                        kernel, bias = module.folded()
                        trees[0][*place, "fused", "kernel"] = kernel
                        trees[0][*place, "fused", "bias"] = bias
        narrow = jax.tree.map(lambda x: np.asarray(x, np.float32), [*map(unflatten_dict, trees)])
        return type(self)(config, self.dtype), *narrow

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Overrides `Network.grid` with a stage that has attention."""
        stages = zip(self.config.maps(), self.config.mixers, strict=True)
        return grid_of((size for size, mixer in stages if mixer == "attention"), tokens)


FAMILY = Family(
    name="fastvit",
    variants=VARIANTS,
    default_variant="sa24",
    named_by=("depths", "widths", "mlp_ratios", "mixers", "position_kernels", "kernel"),
    config=FastViTConfig,
    network=FastViT,
    native_size=256,
    paper_recipe="fastvit",
    tiny=lambda settings: {
        "depths": (1, 1),
        "widths": (8, 32),
        "mlp_ratios": settings["mlp_ratios"][2:],
        "mixers": settings["mixers"][2:],
        "position_kernels": settings["position_kernels"][2:],
        "downsamples": (False, True),
        "squeezes": (False, False),
    },
)
