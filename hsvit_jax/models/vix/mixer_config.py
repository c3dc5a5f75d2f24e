"""`Mixing`: sizes of a network with a token mixer; every family of the ViX paper has them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from hsvit_jax.models import settings
from hsvit_jax.models.family import Family, Sizes, scaled

#: Mixers with queries and keys.
ATTENTION = ("softmax", "performer", "linformer", "nystrom")
#: All mixers.
NAMES = (*ATTENTION, "fnet", "mlp_mixer")
#: Iterations of the pseudo-inverse.
PINV_STEPS = 6


@dataclasses.dataclass(frozen=True)
class Mixing(Sizes):
    """Sizes of a network with a mixer; a family may turn the class attributes into fields.

    Attributes:
        rope: whether positions are rotary rather than learned.
        init: how linear maps of a mixer start, see `layers.init_kernel`.
        project_one: whether softmax projects a single head that is as wide as a token. The
            authors' ViT does not.
    """

    mixer: str = settings.setting("softmax", "token mixer", choices=NAMES)
    heads: int = settings.heads(4, when={"mixer": ATTENTION})
    head_dim: int = settings.width(32, "width of an attention head", when={"mixer": ATTENTION})
    dropout: float = settings.dropout(0.0)
    projections: int = settings.width(
        64, "Linformer's projected length", when={"mixer": ("linformer",)}
    )
    one_kv_head: bool = settings.setting(
        True, "one key and value head in Linformer", when={"mixer": ("linformer",)}
    )
    landmarks: int = settings.width(64, "number of Nyström landmarks", when={"mixer": ("nystrom",)})
    residual_kernel: int = settings.setting(
        33,
        "kernel size of Nyström's residual convolution",
        low=1,
        high=2**16 - 1,
        odd=True,
        when={"mixer": ("nystrom",)},
    )
    features: int = settings.width(
        0,
        "number of Performer's random features; 0: by the head's width",
        low=0,
        when={"mixer": ("performer",)},
    )
    batch_coupling: bool = settings.setting(
        False,
        "stabilising maximum of Performer and Nyström over the batch, as the authors', rather "
        "than over each image",
        when={"mixer": ("performer", "nystrom")},
    )
    attention_dropout: ClassVar[float] = 0.0
    expansion: ClassVar[float] = 1.0
    rope: ClassVar[bool] = False
    init: ClassVar[str] = "torch"
    project_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixer == "performer" and not self.feature_count:
            raise ValueError(
                f"head_dim={self.head_dim} gives performer features=0: set model.features"
            )

    @property
    def mixer_dropout(self) -> float:
        """Dropout rate within the mixer."""
        return self.dropout

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def feature_count(self) -> int:
        """Performer's random features per head."""
        return self.features or int(self.head_dim * math.log(self.head_dim))

    def check_tokens(self, tokens: int) -> None:
        """Raises ValueError if a sequence is too short for the landmarks or the token MLP."""
        if self.mixer == "mlp_mixer":
            scaled(tokens, self.expansion)
        if self.mixer == "nystrom" and self.landmarks > tokens:
            raise ValueError(
                f"nystrom with landmarks={self.landmarks} needs at least as many tokens; there "
                f"are {tokens}: lower model.landmarks, or use smaller patches or larger images"
            )


#: The settings of a `Mixing`, with the papers' values.
KEYS = settings.keys_of(Mixing)

#: Settings that may differ within a named variant.
_FREE = frozenset(
    (
        *("batch_coupling", "features", "drop_path", "patch"),
        *("dropout", "embed_dropout", "attention_dropout"),
        *("stem_strides", "stage_strides", "conv_strides"),
    )
)


def digits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sizes for digits of 8×8 pixels, enlarged to 32×32: a token for each original pixel.

    Landmarks and projected positions are fewer than these tokens.
    """
    return {**_tokens(settings, (2, 2, 1), 4), "landmarks": 16, "projections": 16}


def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a smoke run: narrow, shallow and with few tokens."""
    sizes = {"heads": 2, "mlp_dim": 32, "landmarks": 4, "projections": 4, "residual_kernel": 5}
    sizes |= {"embed_dim": 16, **_tokens(settings, (2, 2, 2), 8)}
    sizes |= {"head_dim": 8} if "head_dim" in settings else {}
    sizes |= {"depths": (1,) * len(settings["depths"])} if "depths" in settings else {"depth": 2}
    for key in ("stem_channels", "conv_channels"):
        if settings.get(key):
            sizes[key] = (4,) * len(settings[key])
    return sizes


def _tokens(settings: Mapping[str, Any], strides: tuple[int, ...], patch: int) -> dict[str, Any]:
    """Returns the strides or the patch, whichever makes this network's tokens."""
    for key, of in (
        ("conv_strides", "conv_channels"),
        ("stage_strides", "depths"),
        ("stem_strides", "stem_channels"),
    ):
        if key in settings and settings[of]:
            convolutions = len(settings[of]) + (of != "depths")
            return {key: (*strides, *(1,) * convolutions)[:convolutions]}
    return {"patch": patch} if "stem_strides" in settings else {}


def family(
    config: type[Mixing], keys: Mapping[str, settings.Key] | None = None, **record: Any
) -> Family:
    """Returns the record of a family of the ViX paper."""
    keys = keys or settings.keys_of(config)
    named_by = tuple(key for key in keys if key not in _FREE)
    shared = {"named_by": named_by, "paper_recipe": "vix", "tiny": tiny, "digits": digits}
    return Family(config=config, keys=keys, **shared, **record)
