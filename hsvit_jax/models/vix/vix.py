"""ViX: a vision transformer on pixels, with any mixer (ViT, ViP, ViL, ViN, FNet, MLP-Mixer).

Patch embedding by a linear map, or a convolutional stem ('hybrid'); a CLS token and positions,
learned or rotary; blocks x + mix(LN(x)), x + FF(LN(x)); LN and a linear classifier on CLS, or on
the mean of all tokens. MLP-Mixer has neither CLS token nor positions: LN, mean over tokens,
classifier.

Source: the ViX paper, tables 1, 2 and 6, and the authors' code, which the published numbers are of.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from hsvit_jax.models import conv_layers, layers, settings
from hsvit_jax.models.family import scaled
from hsvit_jax.models.network import BoundModules, ForwardContext, Network
from hsvit_jax.models.vix import mixer_config, mixers, stems

Array = jax.Array

_MIXERS = {
    "vit": {"mixer": "softmax", "dropout": 0.25},
    "vip": {"mixer": "performer"},
    "vil": {"mixer": "linformer"},
    "vin": {"mixer": "nystrom", "dropout": 0.25},
    "fnet": {"mixer": "fnet"},
    "mlp_mixer": {"mixer": "mlp_mixer"},
}
_HYBRID = {"stem_channels": (32, 64), "dropout": 0.0}
_WITH_CLS = tuple(name for name in mixer_config.NAMES if name != "mlp_mixer")
_ROPE = {"positions": "rope", "dropout": 0.0}
_ROTARY = {
    "vit": _ROPE,
    "vip": _ROPE,
    "vil": {**_ROPE, "one_kv_head": False},
    "vin": {**_ROPE, "embed_dropout": 0.5},
}

#: Named variants (ViX paper, tables 1, 2 and 6), as they differ from the defaults. Dropout is that
#: of the authors' scripts; the paper says there is none.
VARIANTS: Mapping[str, Mapping[str, Any]] = (
    _MIXERS
    | {f"hybrid_{name}": {**v, **_HYBRID} for name, v in _MIXERS.items()}
    | {f"{name}_rope": {**_MIXERS[name], **v} for name, v in _ROTARY.items()}
    | {f"hybrid_{name}_rope": {**_MIXERS[name], **_HYBRID, **v} for name, v in _ROTARY.items()}
    | {
        "hybrid_vin": {**_MIXERS["vin"], "stem_channels": (32, 64)},
        "hybrid_vin_rope": {**_MIXERS["vin"], **_HYBRID, **_ROTARY["vin"], "dropout": 0.5},
    }
)


@dataclasses.dataclass(frozen=True)
class ViXConfig(stems.StemSizes):
    """Sizes of a ViX; without stem_channels it has patches, and after a stem patches of 1."""

    mlp_dim: int = settings.mlp_dim(256, when={"mixer": _WITH_CLS})
    patch: int = settings.patch(1, meaning="patch size in pixels; 0: by the image size", low=0)
    embed_dropout: float = settings.rate(0.0, "dropout rate of the embedded tokens")
    head_pool: str = settings.setting(
        "cls",
        "what is classified: the CLS token or the tokens' mean",
        choices=("cls", "mean"),
        when={"mixer": _WITH_CLS},
    )

    def __post_init__(self) -> None:
        settings.check(self)
        if self.head_pool == "mean" and not self.cls:
            raise ValueError(
                f"mixer={self.mixing.mixer!r} classifies the mean of its normalised tokens in any "
                "case: leave out model.head_pool"
            )
        if self.stem_channels:
            stems.check_stem(self.stem_widths, self.stem_strides)
            if self.patch != 1:
                raise ValueError(
                    f"behind a stem each position of the map is a token; got patch={self.patch} "
                    f"and stem_channels={self.stem_channels}: set model.patch=1; strides are "
                    "model.stem_strides"
                )
        elif self.stem_strides:
            raise ValueError(
                f"stem_strides={self.stem_strides} are of a stem, and there is none: set "
                "model.stem_channels, or model.patch instead"
            )
        layers.check_patches(self.image_size, self.patch)
        super().__post_init__()

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the tokens."""
        if self.stem_channels:
            return super().map_size
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def cls(self) -> bool:
        """Whether there is a CLS token."""
        return self.mixing.mixer != "mlp_mixer"

    @property
    def tokens(self) -> int:
        """Tokens of the sequence, CLS included."""
        return super().tokens + self.cls

    @property
    def position_table(self) -> bool:
        """Whether there are learned positions; the authors keep unused ones in two models."""
        return self.cls and (not self.mixing.rope or self.mixing.mixer in ("softmax", "linformer"))


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
        self.rope, self.rate = c.mixing.rope, c.embed_dropout
        cls_key, position_key, *block_keys = jax.random.split(key, c.depth + 2)
        d = c.embed_dim
        self.cls = nnx.Param(layers.normal(cls_key, (d,))) if c.cls else None
        start = layers.normal(position_key, (c.tokens, d)) if c.position_table else None
        self.position = None if start is None else nnx.Param(start)
        super().__init__(mixer_blocks(c, c.tokens, d, block_keys))

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T + 1, D) with a CLS, first, or (B, T, D)."""
        if self.cls is not None:
            x_BTD = layers.prepend(self.cls[...], x_BTD)
        if self.position is not None and not self.rope:
            x_BTD = layers.add_bias(x_BTD, self.position[...])
        x_BTD = layers.dropout(x_BTD, self.rate, context, layers.EMBEDDING)
        return super().__call__(x_BTD, context)


def mixer_blocks(
    c: ViXConfig, tokens: int, dim: int, keys: Iterable[Array]
) -> Iterator[layers.Block]:
    """A pre-norm block of this width for each key: the mixer, then a feed-forward."""
    for key in keys:
        mixer_key, ff_key = jax.random.split(key)
        mixer = mixers.build(c.mixing, tokens, dim, mixer_key)
        feed_forward = layers.FeedForward(dim, c.mlp_dim, ff_key, dropout=c.mixing.dropout)
        yield layers.Block(dim, mixer, feed_forward)


class ViX(Network):
    """Parameters: {'patches', 'encoder' (cls, position, blocks), 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        patches_key, encoder_key, head_key = jax.random.split(key, 3)
        return {
            "patches": Patches(c, patches_key),
            "encoder": Encoder(c, encoder_key),
            "head": layers.TokenHead(c.embed_dim, c.num_classes, head_key, mean=not c.cls),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD = bound["encoder"](bound["patches"](images_BHWC), context)
        if self.config.head_pool == "mean":
            x_BTD = x_BTD.mean(1, keepdims=True)
        return bound["head"](x_BTD)


def _config(*, positions: str, expansion: float, **values: Any) -> ViXConfig:
    """For mlp_mixer, `expansion` makes both hidden widths, and mlp_dim is not used."""
    if values["mixer"] == "mlp_mixer":
        values["mlp_dim"] = scaled(values["embed_dim"], expansion)
    fixed = {"rope": positions == "rope", "expansion": expansion}
    return mixer_config.mixed(ViXConfig, fixed, **values)


FAMILY = mixer_config.family(
    name="vix",
    keys={
        **settings.keys_of(ViXConfig, patch=0),
        "positions": settings.Key(
            "positional encoding", kind=str, choices=("learned", "rope"), default="learned"
        ),
        "expansion": settings.keys_of(mixer_config.Mixing)["expansion"],
    },
    variants=VARIANTS,
    default_variant="hybrid_vin",
    config=_config,
    network=ViX,
    automatic=stems.AUTOMATIC,
)
