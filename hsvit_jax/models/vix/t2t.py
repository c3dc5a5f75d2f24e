"""T2T-ViT: overlapping patches that attend to each other before they are joined; a ViT behind them.

Source: Yuan et al., "Tokens-to-Token ViT", sections 3.1 and 3.2; the authors' code where the two
differ (the skip of a token layer, the scale of its scores, dropout in the Performer).
"""

import dataclasses
from functools import partial
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.family import Family, Sizes, check_heads, scaled
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vix import mixers
from hsvit_jax.ops import remat
from hsvit_jax.ops.attention import attention

Array = jax.Array

#: (size, stride, padding) of each soft split: the overlapping windows that are joined to tokens.
_SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


@dataclasses.dataclass(frozen=True)
class T2TConfig(Sizes):
    """Sizes of a T2T-ViT; the authors' published weights have a `qk_scale` of embed_dim^-0.5."""

    token_layer: str = settings.setting(
        "performer", "attention of the layers that make tokens", choices=("performer", "softmax")
    )
    token_dim: int = settings.width(64, "token width in the layers that make tokens", low=2)
    token_dropout: float = settings.rate(0.1, "dropout rate in the layers that make tokens")
    embed_dim: int = settings.width(384, "token width")
    depth: int = settings.depth(14, "blocks")
    heads: int = settings.heads(6)
    mlp_ratio: float = settings.mlp_ratio(3.0)
    qkv_bias: bool = settings.qkv_bias(False)
    qk_scale: float = settings.setting(
        0.0, "factor of attention scores; 0: by the head's width", low=0.0, high=1.0
    )
    drop_path: float = settings.drop_path(0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.embed_dim, self.heads)

    @property
    def hidden(self) -> int:
        """Width inside a block's feed-forward."""
        return scaled(self.embed_dim, self.mlp_ratio)

    @property
    def tokens(self) -> int:
        """Tokens of the first block, CLS included."""
        return 1 + prod(self.grids[-1])

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of tokens after each soft split."""
        sizes = [self.image_size]
        for split in _SPLITS:
            sizes.append(conv_layers.size_out(sizes[-1], *split))
        return tuple(sizes[1:])

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of what each soft split joins."""
        channels = (self.image_channels, self.token_dim, self.token_dim)
        return tuple(c * size**2 for c, (size, *_) in zip(channels, _SPLITS, strict=True))


def soft_split(x_BHWC: Array, size: int, stride: int, padding: int) -> Array:
    """Returns overlapping windows as tokens (B, T, size²·C), row by row, pixels before channels."""
    around = (padding, padding)
    x = jnp.pad(x_BHWC, ((0, 0), around, around, (0, 0)))
    rows, columns = ((n - size) // stride + 1 for n in x.shape[1:3])
    shifted = [
        x[:, i : i + stride * rows : stride, j : j + stride * columns : stride][:, :rows, :columns]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.stack(shifted, 3).reshape(x.shape[0], rows * columns, -1)


class TokenLayer(nnx.Module):
    """v + attention(LN(x)), then x + feed_forward(LN(x)), with one head narrower than x."""

    def __init__(self, c: T2TConfig, width: int, key: Array) -> None:
        qkv_key, out_key, feed_key = jax.random.split(key, 3)
        self.performer, self.rate, dim = c.token_layer == "performer", c.token_dropout, c.token_dim
        # The reference's order: keys, queries, values in a Performer, else queries first.
        self.qkv = layers.Linear(width, 3 * dim, qkv_key, bias=self.performer, init="normal")
        self.out = layers.Linear(dim, dim, out_key, init="normal")
        self.norm1, self.norm2 = layers.LayerNorm(width), layers.LayerNorm(dim)
        self.feed_forward = layers.FeedForward(
            dim, dim, feed_key, dropout=c.token_dropout, inner_dropout=False, init="normal"
        )

    def __call__(
        self, x_BTD: Array, features_RE: Array | None, context: ForwardContext, stream: int
    ) -> Array:
        """(B, T, D) → (B, T, E)."""
        first, second, v_BTE = jnp.split(self.qkv(self.norm1(x_BTD)), 3, axis=-1)
        if self.performer:
            y_BTE = remat.recomputed(
                lambda k, q, v: _performer(q, k, v, features_RE), first, second, v_BTE
            )
        else:
            # The scale follows the width of the joined tokens.
            first = first * (v_BTE.shape[-1] / x_BTD.shape[-1]) ** 0.5
            heads = (part[None, :, None] for part in (first, second, v_BTE))
            y_BTE = attention(0.0, *heads, ())[0, :, 0]
        y_BTE = v_BTE + layers.dropout(self.out(y_BTE), self.rate, context, stream)
        return y_BTE + self.feed_forward(self.norm2(y_BTE), context, stream + 1)


def _performer(q_BTE: Array, k_BTE: Array, v_BTE: Array, features_RE: Array) -> Array:
    """Attends by positive random features, without a shift for stability: (B, T, E)."""
    q_BTR, k_BTR = (
        jnp.exp(u - norm) * len(features_RE) ** -0.5
        for u, norm in (mixers.feature_exponents(x, features_RE) for x in (q_BTE, k_BTE))
    )
    values_BRE = jnp.einsum("btr,bte->bre", k_BTR, v_BTE.astype(k_BTR.dtype))
    norm_BT1 = jnp.einsum("btr,br->bt", q_BTR, k_BTR.sum(1))[..., None]
    return (jnp.einsum("btr,bre->bte", q_BTR, values_BRE) / (norm_BT1 + 1e-8)).astype(v_BTE.dtype)


class Embedding(nnx.Module):
    """Soft splits with token layers between them, a linear map, and the CLS token."""

    def __init__(self, c: T2TConfig, key: Array) -> None:
        *keys, project_key, cls_key = jax.random.split(key, len(_SPLITS) + 1)
        self.grids = c.grids
        self.layers = nnx.List(
            TokenLayer(c, width, k) for width, k in zip(c.widths, keys, strict=False)
        )
        self.project = layers.Linear(c.widths[-1], c.embed_dim, project_key, init="normal")
        self.cls = nnx.Param(0.02 * layers.normal(cls_key, (c.embed_dim,)))

    def __call__(self, x_BHWC: Array, features: list[Array], context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, T, D), CLS first."""
        for i, layer in enumerate(self.layers):
            stream = layers.EMBEDDING + i * layers.STREAMS_PER_BLOCK
            x_BTD = soft_split(x_BHWC, *_SPLITS[i])
            x_BTD = layer(x_BTD, features[i] if features else None, context, stream)
            x_BHWC = x_BTD.reshape(x_BTD.shape[0], *self.grids[i], -1)
        x_BTD = self.project(soft_split(x_BHWC, *_SPLITS[-1]))
        return layers.prepend(self.cls[...], x_BTD)


class Constants(nnx.Module):
    """Parameters that are never trained: the token layers' random features, and the positions."""

    def __init__(self, c: T2TConfig, key: Array) -> None:
        shape = (c.token_dim // 2, c.token_dim)
        keys = jax.random.split(key, 2) if c.token_layer == "performer" else ()
        self.features = nnx.List(
            nnx.Param(mixers.orthogonal_rows([k], *shape) * shape[0] ** 0.5) for k in keys
        )
        self.position = nnx.Param(sinusoids(c.tokens, c.embed_dim))

    def __call__(self) -> tuple[list[Array], Array]:
        """Returns each token layer's features, none for softmax, and the positions (T, D)."""
        return lax.stop_gradient(([f[...] for f in self.features], self.position[...]))


def sinusoids(tokens: int, dim: int) -> Array:
    """Returns sine (even j) and cosine (odd j) of the angles p/10000^(2⌊j/2⌋/D), (T, D)."""
    rates = 10000.0 ** (-2 * (np.arange(dim) // 2) / dim)
    angles = np.arange(tokens)[:, None] * rates[None]
    return jnp.asarray(np.where(np.arange(dim) % 2, np.cos(angles), np.sin(angles)), jnp.float32)


class Attention(layers.MultiHeadAttention):
    """Softmax attention whose scores have a factor of their own."""

    def __init__(self, c: T2TConfig, key: Array) -> None:
        super().__init__(c.embed_dim, c.heads, key, bias=c.qkv_bias, init="normal")
        self.factor = c.qk_scale * (c.embed_dim // c.heads) ** 0.5 or 1.0

    def project(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        q, k, v = super().project(x_BTD)
        return q * self.factor, k, v


def _block(c: T2TConfig, drop_path: float, key: Array) -> layers.Block:
    mix_key, feed_key = jax.random.split(key)
    feed_forward = layers.FeedForward(c.embed_dim, c.hidden, feed_key, init="normal")
    return layers.Block(c.embed_dim, Attention(c, mix_key), feed_forward, drop_path=drop_path)


def _encoder(c: T2TConfig, key: Array) -> layers.Encoder:
    rates, keys = layers.drop_path_rates(c.drop_path, c.depth), jax.random.split(key, c.depth)
    return layers.Encoder(map(partial(_block, c), rates, keys))


class T2T(Network):
    """Parameters: {'embedding', 'constants', 'encoder', 'head'}."""

    frozen = frozenset({"constants"})

    modules: ClassVar = {
        "embedding": Embedding,
        "constants": Constants,
        "encoder": _encoder,
        "head": lambda c, key: layers.TokenHead(c.embed_dim, c.num_classes, key, init="normal"),
    }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        features, position_TD = bound["constants"]()
        x_BTD = bound["embedding"](images_BHWC, features, context)
        return bound["head"](bound["encoder"](layers.add_bias(x_BTD, position_TD), context))


FAMILY = Family(
    name="t2t",
    variants={  # the paper's tables 1 and 2, as they differ from T2T-ViT-14
        "7": {"embed_dim": 256, "depth": 7, "heads": 4, "mlp_ratio": 2.0},
        "14": {},
        "19": {"embed_dim": 448, "depth": 19, "heads": 7},
        "24": {"embed_dim": 512, "depth": 24, "heads": 8},
        "t-14": {"token_layer": "softmax", "token_dropout": 0.0},
    },
    default_variant="14",
    config=T2TConfig,
    network=T2T,
    named_by=("token_layer", "embed_dim", "depth", "heads", "mlp_ratio"),
    native_size=224,
    paper_recipe="dhvt",
    tiny=lambda _: {"token_dim": 8, "embed_dim": 16, "depth": 2, "heads": 2, "mlp_ratio": 2.0},
)
