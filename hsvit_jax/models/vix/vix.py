"""ViX: a vision transformer on pixels, with any mixer (ViT, ViP, ViL, ViN, FNet, MLP-Mixer).

Patch embedding by a linear map, or a convolutional stem ('hybrid'); a CLS token and positions,
learned or rotary; blocks x + mix(LN(x)), x + FF(LN(x)); LN and a linear classifier on CLS, or on
the mean of all tokens. MLP-Mixer has neither CLS token nor positions: LN, mean over tokens,
classifier.

Source: the ViX paper, tables 1, 2 and 6, and the authors' code, which the published numbers are of.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import ClassVar

import jax
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.family import scaled
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vix import mixer_config, mixers, stems

Array = jax.Array

_WITH_CLS = tuple(name for name in mixer_config.NAMES if name != "mlp_mixer")


@dataclasses.dataclass(frozen=True)
class ViXConfig(stems.StemSizes):
    """Sizes of a ViX: without stem_channels it has patches, and behind a stem patches of 1 pixel.

    An MLP-Mixer's `expansion` makes both of its hidden widths.
    """

    mlp_dim: int = settings.mlp_dim(256, when={"mixer": _WITH_CLS})
    patch: int = settings.patch(1, meaning="patch size in pixels; 0: by the image size", low=0)
    embed_dropout: float = settings.rate(0.0, "dropout rate of the embedded tokens")
    head_pool: str = settings.setting(
        "cls",
        "what is classified: the CLS token or the tokens' mean",
        choices=("cls", "mean"),
        when={"mixer": _WITH_CLS},
    )
    positions: str = settings.setting("learned", "positional encoding", choices=("learned", "rope"))
    expansion: float = settings.ratio(
        1.0, "expansion ratio of MLP-Mixer", when={"mixer": ("mlp_mixer",)}
    )

    def __post_init__(self) -> None:
        if not self.cls:
            object.__setattr__(self, "mlp_dim", scaled(self.embed_dim, self.expansion))
        settings.check(self)
        if self.stem_channels and self.patch != 1:
            raise ValueError(
                f"behind a stem each position of the map is a token; got patch={self.patch} and "
                f"stem_channels={self.stem_channels}: set model.patch=1; strides are "
                "model.stem_strides"
            )
        layers.check_patches(self.image_size, self.patch)
        super().__post_init__()
        reasons = {
            f"mixer={self.mixer!r} has none": self.mixer not in mixer_config.ATTENTION,
            f"head_dim={self.head_dim} is odd": self.head_dim % 2,
            "one_kv_head=True shares them": self.mixer == "linformer" and self.one_kv_head,
        }
        for reason in (reason for reason, wrong in reasons.items() if wrong and self.rope):
            raise ValueError(
                f"positions='rope' rotates pairs of each head's queries and keys, but {reason}: "
                "change that, or set model.positions='learned'"
            )

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Channels of every convolution of the stem."""
        return super().stem_widths if self.stem_channels else ()

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the tokens."""
        if self.stem_channels:
            return super().map_size
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def cls(self) -> bool:
        """Whether there is a CLS token."""
        return self.mixer != "mlp_mixer"

    @property
    def tokens(self) -> int:
        """Tokens of the sequence, CLS included."""
        return super().tokens + self.cls

    @property
    def dim_out(self) -> int:
        """Width of a token before the classifier."""
        return self.embed_dim

    @property
    def rope(self) -> bool:
        """Whether positions are rotary."""
        return self.positions == "rope"

    @property
    def position_table(self) -> bool:
        """Whether there are learned positions; the authors keep unused ones in two models."""
        return self.cls and (not self.rope or self.mixer in ("softmax", "linformer"))


class Patches(nnx.Module):
    """Images to tokens, by patch embedding or the stem."""

    def __init__(self, c: ViXConfig, key: Array) -> None:
        if c.stem_channels:
            self.embed = stems.ConvStem(c, key)
        else:
            self.embed = layers.PatchEmbedding(c.patch, c.image_channels, c.embed_dim, key)

    def __call__(self, images_BHWC: Array) -> Array:
        """(B, H, W, C) → (B, T, D), without CLS."""
        x = self.embed(images_BHWC)
        return conv_layers.flatten(x) if x.ndim == 4 else x


class Encoder(layers.Encoder):
    """The CLS token, positions and the blocks."""

    def __init__(self, c: ViXConfig, key: Array) -> None:
        cls_key, position_key, *block_keys = jax.random.split(key, c.depth + 2)
        self.prepare(c, cls_key, position_key)
        super().__init__(mixer_blocks(c, c.tokens, c.embed_dim, block_keys))

    def prepare(self, c: ViXConfig, cls_key: Array, position_key: Array) -> None:
        """Draws the CLS token and the positions, if any."""
        self.rope, self.rate, d = c.rope, c.embed_dropout, c.embed_dim
        self.cls = nnx.Param(layers.normal(cls_key, (d,))) if c.cls else None
        start = layers.normal(position_key, (c.tokens, d)) if c.position_table else None
        self.position = None if start is None else nnx.Param(start)

    def embed(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T + 1, D) with a CLS, first, or (B, T, D)."""
        if self.cls is not None:
            x_BTD = layers.prepend(self.cls[...], x_BTD)
        if self.position is not None and not self.rope:
            x_BTD = layers.add_bias(x_BTD, self.position[...])
        return layers.dropout(x_BTD, self.rate, context, layers.EMBEDDING)

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → the last block's tokens."""
        return super().__call__(self.embed(x_BTD, context), context)


def mixer_blocks(
    c: ViXConfig, tokens: int, dim: int, keys: Iterable[Array]
) -> Iterator[layers.Block]:
    """Yields a pre-norm block of this width for each key: the mixer, then a feed-forward."""
    for key in keys:
        mixer_key, ff_key = jax.random.split(key)
        mixer = mixers.build(c, tokens, dim, mixer_key)
        feed_forward = layers.FeedForward(dim, c.mlp_dim, ff_key, dropout=c.dropout)
        yield layers.Block(dim, mixer, feed_forward)


class ViX(Network):
    """Parameters: {'patches', 'encoder' (cls, position, blocks), 'head'}."""

    modules: ClassVar = {
        "patches": Patches,
        "encoder": Encoder,
        "head": lambda c, key: layers.TokenHead(c.dim_out, c.num_classes, key, mean=not c.cls),
    }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD = bound["encoder"](bound["patches"](images_BHWC), context)
        if self.config.head_pool == "mean":
            x_BTD = x_BTD.mean(1, keepdims=True)
        return bound["head"](x_BTD)


_MIXERS = {
    "vit": {"mixer": "softmax", "dropout": 0.25},
    "vip": {"mixer": "performer"},
    "vil": {"mixer": "linformer"},
    "vin": {"mixer": "nystrom", "dropout": 0.25},
    "fnet": {"mixer": "fnet"},
    "mlp_mixer": {"mixer": "mlp_mixer"},
}
_STEM = {"stem_channels": (32, 64)}
_HYBRID = {**_STEM, "dropout": 0.0}
_ROPE = {"positions": "rope", "dropout": 0.0}
_ROTARY = {
    "vit": _ROPE,
    "vip": _ROPE,
    "vil": {**_ROPE, "one_kv_head": False},
    "vin": {**_ROPE, "embed_dropout": 0.5},
}

FAMILY = mixer_config.family(
    ViXConfig,
    settings.keys_of(ViXConfig, patch=0),
    name="vix",
    # ViX paper, tables 1, 2 and 6. The rates of dropout are those of the authors' scripts; the
    # paper has none.
    variants={
        **_MIXERS,
        **{f"hybrid_{name}": {**v, **_HYBRID} for name, v in _MIXERS.items()},
        **{f"{name}_rope": {**_MIXERS[name], **v} for name, v in _ROTARY.items()},
        **{f"hybrid_{name}_rope": {**_MIXERS[name], **_STEM, **v} for name, v in _ROTARY.items()},
        "hybrid_vin": {**_MIXERS["vin"], **_STEM},
        "hybrid_vin_rope": {**_MIXERS["vin"], **_STEM, **_ROTARY["vin"], "dropout": 0.5},
    },
    default_variant="hybrid_vin",
    network=ViX,
    automatic=stems.AUTOMATIC,
)
