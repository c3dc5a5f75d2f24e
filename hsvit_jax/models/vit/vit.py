"""ViT: patch embedding, a CLS token, learned positions, pre-norm blocks, a classifier on CLS.

    x = (CLS, image's patches · E) + positions      1 + H·W/P² tokens of width D
    x ← x + MSA(LN(x)); x ← x + MLP(LN(x))           in each block
    logits = FC(LN(x)[0])

Its sizes, the norms' epsilon and the dropout layers are those of the `transformers` library. The
HSViT paper's "ViT-B/16" has patches of 4 pixels on images of 64 (table 2); ImageNet's have 16.
Source: Dosovitskiy et al., "An Image is Worth 16×16 Words", section 3.1.
"""

import dataclasses
from math import prod
from typing import ClassVar

import jax
from flax import nnx

from hsvit_jax.models import layers, settings
from hsvit_jax.models.family import Family, Sizes, scaled
from hsvit_jax.models.network import BoundModules, ForwardContext, Network

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PatchSizes(Sizes):
    """Sizes of a transformer of patches, with the settings that some families fix.

    A family adds patch, heads, depth, qkv_bias, eps and drop_path, and head_dim or its own `dim`.

    Attributes:
        cls: whether the classifier gets a CLS token rather than the mean of all tokens.
        dropout: rate for the embedding and both branches' outputs.
    """

    cls: ClassVar[bool] = True
    activation: ClassVar[str] = "gelu"
    dropout: ClassVar[float] = 0.0
    attention_dropout: ClassVar[float] = 0.0
    patch_init: ClassVar[str] = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        layers.check_patches(self.image_size, self.patch)

    @property
    def dim(self) -> int:
        """Width of a token, D."""
        return self.heads * self.head_dim

    @property
    def hidden(self) -> int:
        """Width inside a feed-forward."""
        return scaled(self.dim, self.mlp_ratio)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def tokens(self) -> int:
        """Tokens of the first block, CLS included."""
        return prod(self.grid) + self.cls


@dataclasses.dataclass(frozen=True)
class ViTConfig(PatchSizes):
    """Sizes of a ViT."""

    patch: int = settings.patch(4)
    heads: int = settings.heads(12)
    head_dim: int = settings.width(64, "width of an attention head")
    depth: int = settings.depth(12, "blocks")
    mlp_dim: int = settings.mlp_dim(3072)
    qkv_bias: bool = settings.qkv_bias(True)
    eps: float = settings.epsilon(1e-12, meaning="epsilon of normalisation")
    activation: str = settings.activation("gelu")
    dropout: float = settings.dropout(0.0)
    attention_dropout: float = settings.attention_dropout(0.0)
    drop_path: float = settings.drop_path(0.0)
    patch_init: ClassVar[str] = "normal"

    @property
    def hidden(self) -> int:
        """Width inside a feed-forward."""
        return self.mlp_dim


class Embedding(nnx.Module):
    """Patch embedding, the CLS token if any, and positions."""

    def __init__(self, c: PatchSizes, key: Array) -> None:
        patch_key, cls_key, position_key = jax.random.split(key, 3)
        self.rate = c.dropout
        sizes = (c.patch, c.image_channels, c.dim)
        self.patches = layers.PatchEmbedding(*sizes, patch_key, c.patch_init)
        self.cls = nnx.Param(0.02 * layers.normal(cls_key, (c.dim,))) if c.cls else None
        self.position = nnx.Param(0.02 * layers.normal(position_key, (c.tokens, c.dim)))

    def __call__(self, images_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, T, D)."""
        x_BTD = self.patches(images_BHWC)
        if self.cls is not None:
            x_BTD = layers.prepend(self.cls[...], x_BTD)
        x_BTD = layers.add_bias(x_BTD, self.position[...])
        return layers.dropout(x_BTD, self.rate, context, layers.EMBEDDING)


class Encoder(layers.Encoder):
    """The blocks in a row; their rates of stochastic depth grow from 0 to `drop_path`."""

    def __init__(self, c: PatchSizes, key: Array) -> None:
        rates = layers.drop_path_rates(c.drop_path, c.depth)
        keys = (jax.random.split(block_key, 3) for block_key in jax.random.split(key, c.depth))
        super().__init__(
            layers.vit_block(c, c.dim, c.hidden, mix_key, feed_key, rate)
            for rate, (mix_key, feed_key, _) in zip(rates, keys, strict=True)
        )


def _head(c: PatchSizes, key: Array) -> layers.TokenHead:
    sizes = (c.dim, c.num_classes, key)
    return layers.TokenHead(*sizes, mean=not c.cls, eps=c.eps, init="normal")


class ViT(Network):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    modules: ClassVar = {"embedding": Embedding, "encoder": Encoder, "head": _head}

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD = bound["embedding"](images_BHWC, context)
        return bound["head"](bound["encoder"](x_BTD, context))

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Returns the grid as `Network.grid`; a shortened sequence has none."""
        return super().grid(tokens) if tokens == self.config.tokens else None


FAMILY = Family(
    name="vit",
    variants={
        "b-patch4": {},
        "b-patch16": {"patch": 16},
        "l-patch16": {"heads": 16, "depth": 24, "mlp_dim": 4096, "patch": 16},
    },
    config=ViTConfig,
    network=ViT,
    paper_recipe="hsvit_vit",
    tiny=lambda settings: {"heads": 2, "head_dim": 8, "depth": 2, "mlp_dim": 32, "patch": 4},
)
