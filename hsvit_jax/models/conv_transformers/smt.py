"""SMT: scale-aware modulation in the first stages, self-attention in the last, both in the third.

A modulation multiplies a linear map of the tokens by what depthwise convolutions of several sizes,
one for each head's channels, make of another. In the third stage every second block attends. A
residual sum has a feed-forward with a depthwise convolution. Stages are joined by stride-2
convolutions and end in LayerNorm; a linear classifier on the mean token.

Source: Lin et al. 2023, Scale-Aware Modulation Meet Transformer, section 3, and the authors' code.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Conv, ConvNorm, size_out
from hsvit_jax.models.conv_transformers.stages import StageSizes
from hsvit_jax.models.family import Family
from hsvit_jax.models.layers import LayerNorm, Linear
from hsvit_jax.models.network import BoundModules, ForwardContext, Network, grid_of
from hsvit_jax.ops.activations import gelu

Array = jax.Array

EPS = 1e-6  # of the LayerNorms in blocks and behind stages; 1e-5 behind convolutions
_conv = partial(Conv, init="kaiming_out")

_LARGE = {"mlp_ratios": (8.0, 6.0, 4.0, 2.0), "stem_kernel": 7}

#: Named variants, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "t": {},
    "s": {"depths": (3, 4, 18, 2), "drop_path": 0.2},
    "b": {**_LARGE, "depths": (4, 6, 28, 2), "drop_path": 0.3},
    "l": {**_LARGE, **{"depths": (4, 6, 28, 4), "widths": (96, 192, 384, 768), "drop_path": 0.4}},
}


@dataclasses.dataclass(frozen=True)
class SMTConfig(StageSizes):
    """Sizes of an SMT, one depth, width, … per stage.

    Each modulation head has a size of convolution, 3, 5, 7, …
    """

    depths: tuple[int, ...] = settings.depths((2, 2, 8, 1))
    widths: tuple[int, ...] = settings.widths((64, 128, 256, 512))
    modulated: tuple[bool, ...] = settings.setting(
        (True, True, True, False),
        "scale-aware modulation in each stage, in the third in turn",
        per="depths",
    )
    modulation_heads: tuple[int, ...] = settings.setting(
        (4, 4, 4, 0), "modulation heads of each stage; 0: none", low=0, high=128, per="depths"
    )
    heads: tuple[int, ...] = settings.stage_heads(
        (0, 0, 8, 16), meaning="self-attention heads of each stage; 0: none", low=0
    )
    mlp_ratios: tuple[float, ...] = settings.mlp_ratios((4.0, 4.0, 4.0, 2.0))
    expand_ratio: int = settings.setting(
        2, "expansion ratio of a modulation's convolutions", low=1, high=64
    )
    qkv_bias: bool = settings.qkv_bias(True)
    stem_kernel: int = settings.kernel(3, "kernel size of the first convolution")
    layer_scale: float = settings.layer_scale(0.0)
    dropout: float = settings.dropout(0.0)
    attention_dropout: float = settings.attention_dropout(0.0)
    drop_path: float = settings.drop_path(0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for stage, width in enumerate(self.widths):
            kinds = {self.attends(stage, block) for block in range(self.depths[stage])}
            for attends in kinds:
                name = "heads" if attends else "modulation_heads"
                heads = getattr(self, name)[stage]
                if heads < 1 or width % heads:
                    raise ValueError(
                        f"{name}[{stage}]={heads} must be positive and divide widths[{stage}]="
                        f"{width}"
                    )
        self.maps()  # raises for too small an image

    @property
    def stem_padding(self) -> int:
        """Zeros around the image."""
        return 3 if self.stem_kernel == 7 else 1

    def attends(self, stage: int, block: int) -> bool:
        """Whether a block of a stage attends; else it modulates."""
        return not self.modulated[stage] or (stage == 2 and block % 2 == 1)

    def maps(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the map of every stage."""
        size = size_out(self.image_size, self.stem_kernel, 2, self.stem_padding)
        sizes = [size_out(size, 2, 2, 0)]
        for _ in self.depths[1:]:
            sizes.append(size_out(sizes[-1], 3, 2))
        return tuple(sizes)


class Modulation(nnx.Module):
    """v ∘ the mixed convolutions of s, with v and s linear maps of the tokens."""

    def __init__(self, c: SMTConfig, stage: int, key: Array) -> None:
        width, heads = c.widths[stage], c.modulation_heads[stage]
        per_head, inner, self.rate = width // heads, width * c.expand_ratio, c.dropout
        v_key, s_key, mix_key, back_key, out_key, *keys = jax.random.split(key, 5 + heads)
        self.v = Linear(width, width, v_key, bias=c.qkv_bias, init="normal")
        self.s = Linear(width, width, s_key, bias=c.qkv_bias, init="normal")
        self.local = nnx.List(
            _conv(per_head, per_head, 3 + 2 * i, k, groups=per_head) for i, k in enumerate(keys)
        )
        self.mix = ConvNorm(
            *(width, inner, 1, mix_key),
            groups=per_head,
            bias=True,
            activation="gelu",
            init="kaiming_out",
        )
        self.back = _conv(inner, width, 1, back_key)
        self.out = Linear(width, width, out_key, init="normal")

    def __call__(self, x_BHWC: Array, context: ForwardContext, stream: int) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        parts = jnp.split(self.s(x_BHWC), len(self.local), axis=-1)
        parts = [layer(part) for layer, part in zip(self.local, parts, strict=True)]
        y_BHWC = jnp.stack(parts, axis=-1).reshape(x_BHWC.shape)  # channel·heads + head
        y_BHWC = self.out(self.v(x_BHWC) * self.back(self.mix(y_BHWC, context)))
        return layers.dropout(y_BHWC, self.rate, context, stream + 1)


class LocalAttention(nnx.Module):
    """Self-attention whose values are also convolved depthwise, and added."""

    def __init__(self, c: SMTConfig, stage: int, key: Array) -> None:
        width, self.heads = c.widths[stage], c.heads[stage]
        self.rate, self.attention_rate = c.dropout, c.attention_dropout
        q_key, kv_key, local_key, out_key = jax.random.split(key, 4)
        self.q = Linear(width, width, q_key, bias=c.qkv_bias, init="normal")
        self.kv = Linear(width, 2 * width, kv_key, bias=c.qkv_bias, init="normal")
        self.local = _conv(width, width, 3, local_key, groups=width)
        self.out = Linear(width, width, out_key, init="normal")

    def __call__(self, x_BHWC: Array, context: ForwardContext, stream: int) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        k_BHWC, v_BHWC = jnp.split(self.kv(x_BHWC), 2, axis=-1)
        q_BNTE, k_BNTE, v_BNTE = (
            layers.split_heads(conv_layers.flatten(y), self.heads)
            for y in (self.q(x_BHWC), k_BHWC, v_BHWC)
        )
        o_BNTE = layers.attend(q_BNTE, k_BNTE, v_BNTE, self.attention_rate, context, stream)
        o_BHWC = layers.merge_heads(o_BNTE).reshape(x_BHWC.shape)
        y_BHWC = self.out(o_BHWC + self.local(v_BHWC))
        return layers.dropout(y_BHWC, self.rate, context, stream + 1)


class FeedForward(nnx.Module):
    """Linear, u + depthwise convolution(u), GELU, linear, with dropout behind the last two."""

    def __init__(self, c: SMTConfig, stage: int, key: Array) -> None:
        up_key, local_key, down_key = jax.random.split(key, 3)
        width, hidden, self.rate = c.widths[stage], c.hidden_widths[stage], c.dropout
        self.up = Linear(width, hidden, up_key, init="normal")
        self.local = _conv(hidden, hidden, 3, local_key, groups=hidden)
        self.down = Linear(hidden, width, down_key, init="normal")

    def __call__(self, x_BHWC: Array, context: ForwardContext, stream: int) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        y_BHWC = self.up(x_BHWC)
        y_BHWC = gelu(y_BHWC + self.local(y_BHWC))
        y_BHWC = self.down(layers.dropout(y_BHWC, self.rate, context, stream))
        return layers.dropout(y_BHWC, self.rate, context, stream + 1)


class Block(nnx.Module):
    """x + s₁·mixer(LN(x)), then x + s₂·feed_forward(LN(x)); the mixer attends or modulates."""

    def __init__(self, c: SMTConfig, stage: int, number: int, rate: float, key: Array) -> None:
        mixer_key, feed_key = jax.random.split(key)
        self.rate, width = rate, c.widths[stage]
        self.norm1, self.norm2 = LayerNorm(width, EPS), LayerNorm(width, EPS)
        mixer = LocalAttention if c.attends(stage, number) else Modulation
        self.mixer = mixer(c, stage, mixer_key)
        self.feed_forward = FeedForward(c, stage, feed_key)
        self.scales = layers.LayerScales(width, c.layer_scale)

    def __call__(self, x_BHWC: Array, context: ForwardContext, index: int) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        stream = index * layers.STREAMS_PER_BLOCK
        y_BHWC = self.scales(0, self.mixer(self.norm1(x_BHWC), context, stream))
        x_BHWC = x_BHWC + layers.drop_path(y_BHWC, self.rate, context, stream + 4)
        y_BHWC = self.scales(1, self.feed_forward(self.norm2(x_BHWC), context, stream + 5))
        x_BHWC = x_BHWC + layers.drop_path(y_BHWC, self.rate, context, stream + 9)
        context.call_hook("tokens", lambda: conv_layers.flatten(x_BHWC))
        return x_BHWC


class Stem(nnx.Module):
    """A stride-2 convolution with BatchNorm and ReLU, a 2×2 one of stride 2, LayerNorm."""

    def __init__(self, c: SMTConfig, key: Array) -> None:
        first_key, second_key = jax.random.split(key)
        width = c.widths[0]
        self.first = ConvNorm(
            *(c.image_channels, width, c.stem_kernel, first_key),
            stride=2,
            padding=c.stem_padding,
            activation="relu",
            init="kaiming_out",
        )
        self.second = _conv(width, width, 2, second_key, stride=2, padding=0)
        self.norm = LayerNorm(width)

    def __call__(self, images_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', D)."""
        return self.norm(self.second(self.first(images_BHWC, context)))


class Downsampling(nnx.Module):
    """A stride-2 convolution and LayerNorm."""

    def __init__(self, c_in: int, c_out: int, key: Array) -> None:
        self.conv, self.norm = _conv(c_in, c_out, 3, key, stride=2), LayerNorm(c_out)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, C')."""
        return self.norm(self.conv(x_BHWC))


class Stage(layers.Encoder):
    """A stem or downsampling, blocks, LayerNorm."""

    def __init__(self, c: SMTConfig, number: int, key: Array) -> None:
        embed_key, *keys = jax.random.split(key, c.depths[number] + 1)
        super().__init__((), first=sum(c.depths[:number]))
        self.embed = (
            Downsampling(*c.widths[number - 1 : number + 1], embed_key)
            if number
            else Stem(c, embed_key)
        )
        rates = layers.drop_path_rates(c.drop_path, sum(c.depths))[self.first :]
        self.blocks.extend(Block(c, number, i, rates[i], k) for i, k in enumerate(keys))
        self.norm = LayerNorm(c.widths[number], EPS)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', C')."""
        return self.norm(super().__call__(self.embed(x_BHWC, context), context))


class SMT(Network):
    """Parameters: {'stage0', …, 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        head_key, *keys = jax.random.split(key, len(c.depths) + 1)
        return {
            **{f"stage{i}": Stage(c, i, k) for i, k in enumerate(keys)},
            "head": Linear(c.widths[-1], c.num_classes, head_key, init="normal"),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        return bound["head"](bound.through_stages(images_BHWC, context).mean((1, 2)))

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Overrides `Network.grid` with a stage whose map has as many places."""
        return grid_of(self.config.maps(), tokens)


FAMILY = Family(
    name="smt",
    variants=VARIANTS,
    default_variant="t",
    named_by=("depths", "widths", "modulated", "modulation_heads", "heads", "mlp_ratios"),
    config=SMTConfig,
    network=SMT,
    native_size=224,
    paper_recipe="smt",
    tiny=lambda settings: {
        "depths": (1, 1),
        "widths": (8, 16),
        "modulated": (True, False),
        "modulation_heads": (4, 0),
        "heads": (0, 2),
        "mlp_ratios": settings["mlp_ratios"][1:3],
    },
)
