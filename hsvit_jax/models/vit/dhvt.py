"""DHVT: a vision transformer with convolutional embedding and feed-forward, and head tokens.

SOPE embeds overlapping patches by stride-2 convolutions; HI-MHSA adds a token for every head, to
which all tokens attend; DAFF convolves the patches inside the feed-forward and gates the CLS token
by their mean. There are no learned positions.

Source: DHVT supplement, section 1 (the three modules), table 11 (sizes), tables 2 to 5 and figure 1
(ablations); the authors' code where the two differ (no bias in SOPE, dropped paths).
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.conv_layers import Conv
from hsvit_jax.models.family import Family, check_heads
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vit import vit
from hsvit_jax.ops import normalise
from hsvit_jax.ops.activations import gelu

Array = jax.Array

_NORMS = ("batch", "layer")


class Operations(NamedTuple):
    """The operations of a feed-forward besides its two linear maps (supplement, tables 2 and 3).

    Attributes:
        split: whether the CLS token bypasses it.
        neighbours: over 3×3 patches, a 'depthwise' convolution, an 'average' or none ('').
        shortcut: whether a residual connection goes around the neighbours' operation.
        aggregate: whether the patches' mean gates the 'cls' token, 'all' tokens or none ('').
        norm: whether a norm follows each map.
    """

    split: bool = True
    neighbours: str = ""
    shortcut: bool = False
    aggregate: str = ""
    norm: bool = False


FEED_FORWARDS: Mapping[str, Operations] = {
    "daff": Operations(True, "depthwise", True, "cls", True),
    "daff-no-shortcut": Operations(True, "depthwise", False, "cls", True),
    "daff-aggregate-all": Operations(True, "depthwise", True, "all", True),
    "ffn": Operations(split=False),
    "ffn-split": Operations(),
    "ffn-split-aggregate": Operations(aggregate="cls"),
    "ffn-split-average": Operations(neighbours="average"),
}


@dataclasses.dataclass(frozen=True)
class DHVTConfig(vit.PatchSizes):
    """Sizes of a DHVT, and its ablations.

    A patch of SOPE is a power of two, with a stride-2 convolution for each factor. Learned
    positions are added to the CLS token and the patches.
    """

    patch: int = settings.patch(4)
    heads: int = settings.heads(4)
    embed_dim: int = settings.width(192, "token width", low=4)
    depth: int = settings.depth(12, "blocks")
    mlp_ratio: float = settings.mlp_ratio(4.0)
    qkv_bias: bool = settings.qkv_bias(True)
    drop_path: float = settings.drop_path(0.1)
    head_tokens: bool = settings.setting(True, "head tokens in attention")
    sope: bool = settings.setting(True, "patch embedding by several convolutions (SOPE)")
    affine: bool = settings.setting(
        True, "affine maps around the patch embedding", when={"sope": (True,)}
    )
    sope_norm: str = settings.setting(
        "batch", "normalisation in the patch embedding", choices=_NORMS, when={"sope": (True,)}
    )
    feed_forward: str = settings.setting(
        "daff", "kind of the feed-forward", choices=tuple(FEED_FORWARDS)
    )
    daff_norm: str = settings.setting(
        "batch",
        "normalisation in the feed-forward (DAFF)",
        choices=_NORMS,
        when={"feed_forward": tuple(name for name, ops in FEED_FORWARDS.items() if ops.norm)},
    )
    positions: bool = settings.setting(False, "learned positions")
    representation: int = settings.width(
        0, "width of a tanh layer before the classifier; 0: none", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.embed_dim, self.heads)
        if self.sope and (self.patch < 2 or self.patch & (self.patch - 1)):
            raise ValueError(
                f"SOPE halves the image by each convolution, so patch must be 2, 4, 8 or 16; got "
                f"patch={self.patch}"
            )
        if self.sope and self.sope_channels[0] < 1:
            raise ValueError(
                f"embed_dim={self.embed_dim} is too narrow for patch={self.patch}, whose first "
                f"convolution has embed_dim/{self.patch // 2} channels"
            )

    @property
    def dim(self) -> int:
        """Width of a token, D."""
        return self.embed_dim

    @property
    def sope_channels(self) -> tuple[int, ...]:
        """Channels of SOPE's convolutions: …, D/4, D/2, D."""
        steps = self.patch.bit_length() - 1
        return tuple(self.embed_dim >> (steps - 1 - i) for i in range(steps))

    @property
    def operations(self) -> Operations:
        """The feed-forward's operations."""
        return FEED_FORWARDS[self.feed_forward]


class Affine(nnx.Module):
    """x·scale + bias, per channel."""

    def __init__(self, channels: int) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))

    def __call__(self, x: Array) -> Array:
        """(…, C) → (…, C)."""
        return normalise.scale_shift(x, self.scale[...], self.bias[...])


class MapNorm(nnx.Module):
    """BatchNorm, or LayerNorm over channels, of a map."""

    def __init__(self, kind: str, channels: int) -> None:
        self.norm = layers.BatchNorm(channels) if kind == "batch" else layers.LayerNorm(channels)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H, W, C)."""
        if isinstance(self.norm, layers.BatchNorm):
            return self.norm(x_BHWC, train=context.train, batch_axes=context.batch_axes)
        return self.norm(x_BHWC)


class SOPE(nnx.Module):
    """Sequential overlapping patch embedding: stride-2 3×3 convolutions between two affine maps."""

    def __init__(self, c: DHVTConfig, key: Array) -> None:
        self.before = Affine(c.image_channels) if c.affine else None
        self.after = Affine(c.embed_dim) if c.affine else None
        widths = (c.image_channels, *c.sope_channels)
        strides = (2,) * len(c.sope_channels)
        self.convs = conv_layers.convs(widths, strides, 3, key, bias=False)
        self.norms = nnx.List(MapNorm(c.sope_norm, width) for width in c.sope_channels)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → patches (B, P, D), row by row."""
        if self.before is not None:
            x_BHWC = self.before(x_BHWC)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x_BHWC = norm(conv(x_BHWC), context)
            if i < len(self.convs) - 1 or len(self.convs) == 1:
                x_BHWC = gelu(x_BHWC)
        if self.after is not None:
            x_BHWC = self.after(x_BHWC)
        return conv_layers.flatten(x_BHWC)


class Embedding(nnx.Module):
    """The CLS token and the patches, with positions in an ablation."""

    def __init__(self, c: DHVTConfig, key: Array) -> None:
        patch_key, cls_key, position_key = jax.random.split(key, 3)
        self.sope = SOPE(c, patch_key) if c.sope else None
        sizes = (c.patch, c.image_channels, c.embed_dim)
        self.patches = None if c.sope else layers.PatchEmbedding(*sizes, patch_key)
        self.cls = nnx.Param(0.02 * layers.normal(cls_key, (c.embed_dim,)))
        position = 0.02 * layers.normal(position_key, (c.tokens, c.embed_dim))
        self.position = nnx.Param(position) if c.positions else None

    def __call__(self, images_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, T, D)."""
        sope = self.sope is not None
        x_BPD = self.sope(images_BHWC, context) if sope else self.patches(images_BHWC)
        x_BTD = layers.prepend(self.cls[...], x_BPD)
        return x_BTD if self.position is None else layers.add_bias(x_BTD, self.position[...])


class HeadInteractedAttention(nnx.Module):
    """HI-MHSA: attention of the tokens and one additional token per head.

    A head's token is projected from its D/N channels of the tokens' mean. After the attention the
    head tokens' mean is added to the CLS token. Source: supplement, section 1.
    """

    def __init__(self, dim: int, heads: int, key: Array, *, bias: bool) -> None:
        self.heads, width = heads, dim // heads
        attention_key, project_key, embed_key = jax.random.split(key, 3)
        self.attention = layers.MultiHeadAttention(
            dim, heads, attention_key, bias=bias, init="normal"
        )
        self.project = layers.Linear(width, dim, project_key, init="normal")
        self.norm = layers.LayerNorm(width)
        self.embedding = nnx.Param(0.02 * layers.normal(embed_key, (heads, dim)))

    def head_tokens(self, x_BTD: Array) -> Array:
        """Returns one token for each head, (B, N, D)."""
        batch, _, dim = x_BTD.shape
        mean_BNE = x_BTD.mean(1).reshape(batch, self.heads, -1)
        parts_BNNE = self.project(mean_BNE).reshape(batch, self.heads, self.heads, -1)
        h_BND = gelu(self.norm(parts_BNNE)).reshape(batch, self.heads, dim)
        return layers.add_bias(h_BND, self.embedding[...])

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), CLS first."""
        tokens = x_BTD.shape[1]
        y = self.attention(jnp.concatenate([x_BTD, self.head_tokens(x_BTD)], 1), context, stream)
        cls_B1D = y[:, :1] + y[:, tokens:].mean(1, keepdims=True)
        return jnp.concatenate([cls_B1D, y[:, 1:tokens]], axis=1)


class DAFF(nnx.Module):
    """Dynamic aggregation feed-forward, and its ablations (see `Operations`)."""

    def __init__(self, c: DHVTConfig, key: Array) -> None:
        d, hidden, ops = c.embed_dim, c.hidden, c.operations
        self.grid, self.does = c.grid, ops
        up_key, conv_key, down_key, squeeze_key, excite_key = jax.random.split(key, 5)
        # A convolution starts as PyTorch starts it, a linear map as the reference does.
        init = "torch" if ops.norm else "normal"
        self.up = layers.Linear(d, hidden, up_key, init=init)
        self.down = layers.Linear(hidden, d, down_key, init=init)
        conv = ops.neighbours == "depthwise"
        self.conv = Conv(hidden, hidden, 3, conv_key, groups=hidden) if conv else None
        widths = {"up": hidden, "conv": hidden, "down": d} if ops.norm else {}
        self.norms = nnx.Dict({name: MapNorm(c.daff_norm, n) for name, n in widths.items()})
        self.gate = nnx.Dict()
        if ops.aggregate:
            self.gate["squeeze"] = layers.Linear(d, d // 4, squeeze_key, init="normal")
            self.gate["excite"] = layers.Linear(d // 4, d, excite_key, init="normal")

    def _normed(self, name: str, x: Array, context: ForwardContext) -> Array:
        return self.norms[name](x, context) if name in self.norms else x

    def __call__(self, x_BTD: Array, context: ForwardContext, stream: int) -> Array:
        """(B, T, D) → (B, T, D), CLS first."""
        if not self.does.split:
            return self.down(gelu(self.up(x_BTD)))
        batch, _, dim = x_BTD.shape
        cls_B1D, t = x_BTD[:, :1], x_BTD[:, 1:].reshape(batch, *self.grid, dim)
        t = gelu(self._normed("up", self.up(t), context))
        if self.does.neighbours == "depthwise":
            met = gelu(self._normed("conv", self.conv(t), context))
            t = t + met if self.does.shortcut else met
        elif self.does.neighbours == "average":
            t = _neighbour_mean(t)
        t = self._normed("down", self.down(t), context)
        patches_BPD = t.reshape(batch, -1, dim)
        if self.does.aggregate:
            squeezed = gelu(self.gate["squeeze"](patches_BPD.mean(1, keepdims=True)))
            weight_B1D = self.gate["excite"](squeezed)  # without a sigmoid
            cls_B1D = cls_B1D * weight_B1D
            if self.does.aggregate == "all":
                patches_BPD = patches_BPD * weight_B1D
        return jnp.concatenate([cls_B1D, patches_BPD], axis=1)


def _neighbour_mean(x_BHWC: Array) -> Array:
    window, pads = (1, 3, 3, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    total = lax.reduce_window(x_BHWC, 0.0, lax.add, window, (1,) * 4, pads)
    # One image and channel: XLA computes what follows from constants while it compiles.
    inside = jnp.ones((1, *x_BHWC.shape[1:3], 1), x_BHWC.dtype)
    count = lax.reduce_window(inside, 0.0, lax.add, window, (1,) * 4, pads)
    return total / count


def _block(c: DHVTConfig, drop_path: float, key: Array) -> layers.Block:
    mix_key, feed_key = jax.random.split(key)
    plain = partial(layers.MultiHeadAttention, init="normal")
    attention = HeadInteractedAttention if c.head_tokens else plain
    mixer = attention(c.embed_dim, c.heads, mix_key, bias=c.qkv_bias)
    return layers.Block(c.embed_dim, mixer, DAFF(c, feed_key), eps=1e-6, drop_path=drop_path)


def _encoder(c: DHVTConfig, key: Array) -> layers.Encoder:
    rates, keys = layers.drop_path_rates(c.drop_path, c.depth), jax.random.split(key, c.depth)
    return layers.Encoder(map(partial(_block, c), rates, keys))


def _head(c: DHVTConfig, key: Array) -> layers.TokenHead:
    how = {"eps": 1e-6, "init": "normal", "representation": c.representation}
    return layers.TokenHead(c.dim, c.num_classes, key, **how)


class DHVT(Network):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    modules: ClassVar = {"embedding": Embedding, "encoder": _encoder, "head": _head}

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD = bound["encoder"](bound["embedding"](images_BHWC, context), context)
        return bound["head"](x_BTD)

    def paper_flops(self, multiply_adds: int) -> tuple[int, str]:
        """Returns the supplement's FLOPs, table 11: fvcore's without attention's products.

        A LayerNorm counts 5 and a BatchNorm 2 for each value, the mean before the squeeze 1.
        """
        c, d, ops = self.config, self.config.embed_dim, self.config.operations
        head_tokens, pixels = c.heads * c.head_tokens, prod(c.grid)
        counted = {"batch": 2, "layer": 5}
        attention = 2 * (c.tokens + head_tokens) ** 2 * d
        block = 5 * (2 * c.tokens * d + head_tokens**2 * (d // c.heads))
        daff = ops.norm * (c.hidden + d) + (ops.neighbours == "depthwise") * c.hidden
        block += pixels * (counted.get(c.daff_norm, 0) * daff + bool(ops.aggregate) * d)
        total = multiply_adds + c.depth * (block - attention) + 5 * c.tokens * d
        if c.sope:
            sizes = (prod(c.image_size) // 4 ** (i + 1) for i in range(len(c.sope_channels)))
            values = sum(n * width for n, width in zip(sizes, c.sope_channels, strict=True))
            total += counted.get(c.sope_norm, 0) * values
        return total, "multiply-adds without attention's, and normalisation"


_T16, _S = {"patch": 16}, {"heads": 8, "embed_dim": 384}
_VIT = {"head_tokens": False, "sope": False, "positions": True}

FAMILY = Family(
    name="dhvt",
    variants={  # supplement, table 11, and the ablations of DHVT-T
        "t-patch4": {},
        "t-patch2": {"patch": 2},
        "s-patch4": _S,
        "s-patch2": {**_S, "patch": 2},
        "t-patch16": _T16,
        "s-patch16": {**_S, **_T16, "heads": 6},
        "t-imagenet": {**_T16, "heads": 3},
        "s-heads4": {**_S, "heads": 4},
        "s-heads6": {**_S, "heads": 6},
        "t-heads3": {"heads": 3},
        "t-no-head-tokens": {"head_tokens": False},
        "t-no-affine": {"affine": False},
        "t-aggregate-all": {"feed_forward": "daff-aggregate-all"},
        "t-no-shortcut": {"feed_forward": "daff-no-shortcut"},
        "t-bn-ln": {"daff_norm": "layer"},
        "t-ln-bn": {"sope_norm": "layer"},
        "t-ln-ln": {"sope_norm": "layer", "daff_norm": "layer"},
        **{
            f"vit-t{suffix}": {**_VIT, "feed_forward": f"ffn{suffix}"}
            for suffix in ("", "-split", "-split-aggregate", "-split-average")
        },
    },
    config=DHVTConfig,
    network=DHVT,
    native_sizes={"t-patch16": 224, "t-imagenet": 224, "s-patch16": 224},
    paper_recipe="dhvt",
    tiny=lambda settings: {"heads": 2, "embed_dim": 16, "depth": 2},
)
