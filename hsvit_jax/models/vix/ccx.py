"""CCX: a compact transformer with a convolutional tokenizer, any mixer (CCT, CCP, CCL, CCN).

Tokenizer: convolutions without bias, each with ReLU and a max pool; learned positions; blocks whose
feed-forward branches off the normalised tokens; LayerNorm; sequence pooling; a linear classifier.
There is no CLS token.

Source: the ViX paper, tables 3 and 4, and the authors' code. The paper has a feed-forward of width
256 and no dropout; the code, which the published counts are of, 512 and stochastic depth.
"""

import dataclasses
from functools import partial
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.family import check_heads
from hsvit_jax.models.layers import LayerNorm, Linear
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vix import mixer_config, mixers, stems
from hsvit_jax.ops import normalise
from hsvit_jax.ops.max_pool import max_pool

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class CCXConfig(mixer_config.Mixing):
    """Sizes of a CCX, whose mixers drop nothing but softmax's attention weights.

    Learned positions are added to the tokens.
    """

    head_dim: int = settings.width(
        0,
        "width of an attention head; 0: token width / heads",
        low=0,
        when={"mixer": mixer_config.ATTENTION},
    )
    attention_dropout: float = settings.attention_dropout(0.0, when={"mixer": ("softmax",)})
    conv_channels: tuple[int, ...] = settings.width(
        (64, 64), "channels of each convolution but the last"
    )
    conv_strides: tuple[int, ...] = settings.stride(
        (), "stride of each convolution; empty: by the image size", per="conv_widths"
    )
    conv_kernel: int = settings.kernel(3, "kernel size of the tokenizer's convolutions")
    conv_padding: int = settings.kernel(
        -1, "padding of the tokenizer's convolutions; -1: half the kernel", low=-1
    )
    pool_window: int = settings.kernel(3, "window of a pool")
    pool_stride: int = settings.stride(1, "stride of a pool")
    pool_padding: int = settings.kernel(-1, "padding of a pool; -1: half the window", low=-1)
    positions: bool = settings.setting(True, "learned positions")
    embed_dim: int = settings.width(128, "token width")
    depth: int = settings.depth(4, "blocks")
    mlp_dim: int = settings.mlp_dim(512)
    drop_path: float = settings.drop_path(0.1)
    mixer_dropout: ClassVar[float] = 0.0
    init: ClassVar[str] = "normal"
    project_one: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.head_dim:
            check_heads(self.embed_dim, self.heads)
            object.__setattr__(self, "head_dim", self.embed_dim // self.heads)
        super().__post_init__()
        if self.pool_padding > self.pool_window // 2:
            raise ValueError(
                f"pool_padding={self.pool_padding} is more than half of pool_window="
                f"{self.pool_window}: lower model.pool_padding"
            )
        self.check_tokens(self.tokens)

    @property
    def conv_widths(self) -> tuple[int, ...]:
        """Channels of every convolution of the tokenizer."""
        return (*self.conv_channels, self.embed_dim)

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the tokens."""
        size, (kernel, padding) = self.image_size, self.convolution
        for stride in self.conv_strides:
            for window in ((kernel, stride, padding), self.pool):
                size = conv_layers.size_out(size, *window)
        return size

    @property
    def convolution(self) -> tuple[int, int]:
        """Kernel and padding of the tokenizer's convolutions."""
        half = self.conv_kernel // 2
        return self.conv_kernel, half if self.conv_padding < 0 else self.conv_padding

    @property
    def pool(self) -> tuple[int, int, int]:
        """Window, stride and padding of the tokenizer's pools."""
        padding = self.pool_window // 2 if self.pool_padding < 0 else self.pool_padding
        return self.pool_window, self.pool_stride, padding

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return prod(self.map_size)


class Tokenizer(nnx.Module):
    """Convolutions without bias, each followed by ReLU and a max pool."""

    def __init__(self, c: CCXConfig, key: Array) -> None:
        self.pool, (kernel, padding) = c.pool, c.convolution
        sizes = ((c.image_channels, *c.conv_widths), c.conv_strides, kernel)
        others = {"bias": False, "init": "kaiming", "padding": padding}
        self.convs = conv_layers.convs(*sizes, key, **others)

    def __call__(self, images_BHWC: Array) -> Array:
        """(B, H, W, C) → (B, T, D)."""
        for conv in self.convs:
            images_BHWC = max_pool(jax.nn.relu(conv(images_BHWC)), *self.pool)
        return conv_layers.flatten(images_BHWC)


class Block(layers.Block):
    """s = LN(x + DropPath(mix(LN(x)))), then s + DropPath(FF(s)), a norm on the main path."""

    def __init__(self, c: CCXConfig, drop_path: float, key: Array) -> None:
        mixer_key, ff_key = jax.random.split(key)
        d = c.embed_dim
        mixer = mixers.build(c, c.tokens, d, mixer_key)
        feed_forward = layers.FeedForward(d, c.mlp_dim, ff_key, dropout=c.dropout, init="normal")
        super().__init__(d, mixer, feed_forward, drop_path=drop_path)

    def feed(self, x_BTD: Array, context: ForwardContext, index: int) -> Array:
        stream = index * layers.STREAMS_PER_BLOCK + layers.STREAMS_PER_BLOCK // 2
        s_BTD = self.norm2(x_BTD)
        s_BTD = self.add(s_BTD, self.feed_forward(s_BTD, context, stream), context, stream)
        context.call_hook("tokens", lambda: s_BTD)
        return s_BTD


class Encoder(layers.Encoder):
    """Learned positions and the blocks."""

    def __init__(self, c: CCXConfig, key: Array) -> None:
        position_key, *keys = jax.random.split(key, c.depth + 1)
        start = 0.2 * layers.normal(position_key, (c.tokens, c.embed_dim))
        self.position = nnx.Param(start) if c.positions else None
        super().__init__(map(partial(Block, c), layers.drop_path_rates(c.drop_path, c.depth), keys))

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T, D)."""
        if self.position is not None:
            x_BTD = layers.add_bias(x_BTD, self.position[...])
        return super().__call__(x_BTD, context)


class Head(nnx.Module):
    """LayerNorm, sequence pooling (an average by learned weights), a linear classifier."""

    def __init__(self, c: CCXConfig, key: Array) -> None:
        pool_key, linear_key = jax.random.split(key)
        self.norm = LayerNorm(c.embed_dim)
        self.pool = Linear(c.embed_dim, 1, pool_key, init="normal")
        self.linear = Linear(c.embed_dim, c.num_classes, linear_key, init="normal")

    def __call__(self, x_BTD: Array) -> Array:
        """(B, T, D) → logits (B, K)."""
        x_BTD = self.norm(x_BTD)
        scores_BT = normalise.wide(self.pool(x_BTD)[..., 0])
        weights_BT = jax.nn.softmax(scores_BT, axis=1).astype(x_BTD.dtype)
        return self.linear(jnp.einsum("bt,btd->bd", weights_BT, x_BTD))


class CCX(Network):
    """Parameters: {'tokenizer', 'encoder' (position, blocks), 'head'}."""

    modules: ClassVar = {"tokenizer": Tokenizer, "encoder": Encoder, "head": Head}

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        return bound["head"](bound["encoder"](bound["tokenizer"](images_BHWC), context))


FAMILY = mixer_config.family(
    CCXConfig,
    name="ccx",
    variants={  # ViX paper, tables 3 and 4
        "cct": {"mixer": "softmax", "attention_dropout": 0.1},
        "ccp": {"mixer": "performer"},
        "ccl": {"mixer": "linformer"},
        "ccn": {"mixer": "nystrom"},
    },
    default_variant="ccn",
    network=CCX,
    automatic={"conv_strides": stems.strides_for("conv_channels", 1)},
)
