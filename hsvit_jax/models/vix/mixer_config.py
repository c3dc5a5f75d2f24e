"""`Mixing`: the settings of a token mixer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from hsvit_jax.models import settings
from hsvit_jax.models.family import Family, scaled

_ATTENTION = ("softmax", "performer", "linformer", "nystrom")
#: The mixers.
NAMES = (*_ATTENTION, "fnet", "mlp_mixer")
#: Iterations of the pseudo-inverse.
PINV_STEPS = 6


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A mixer's name and settings; an even `residual_kernel` has no middle.

    Attributes:
        rope: rotary positions in place of learned ones.
        init: of its linear maps, see `layers.init_kernel`.
        project_one: softmax projects the output of a single head as wide as a token too, which the
            authors' ViT does not.

    Raises:
        ValueError: the settings do not fit each other.
    """

    mixer: str = settings.setting("softmax", "token mixer", choices=NAMES)
    heads: int = settings.heads(4, when={"mixer": _ATTENTION})
    head_dim: int = settings.width(32, "width of an attention head", when={"mixer": _ATTENTION})
    dropout: float = settings.dropout(0.0)
    attention_dropout: float = settings.attention_dropout(0.0, when={"mixer": ("softmax",)})
    rope: bool = False
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
    expansion: float = settings.ratio(
        1.0, "expansion ratio of MLP-Mixer", when={"mixer": ("mlp_mixer",)}
    )
    batch_coupling: bool = settings.setting(
        False,
        "stabilising maximum of Performer and Nyström over the batch, as the authors', rather "
        "than over each image",
        when={"mixer": ("performer", "nystrom")},
    )
    init: str = "torch"
    project_one: bool = False

    def __post_init__(self) -> None:
        settings.check(self)
        if self.mixer == "performer" and not self.feature_count:
            raise ValueError(
                f"head_dim={self.head_dim} gives performer features=0: set model.features"
            )
        if self.rope and self.mixer not in _ATTENTION:
            raise ValueError(
                f"positions='rope' turns queries and keys, and mixer={self.mixer!r} has none: "
                f"choose positions='learned', or a mixer of {list(_ATTENTION)}"
            )
        if self.rope and self.head_dim % 2:
            raise ValueError(f"positions='rope' turns pairs; got an odd head_dim={self.head_dim}")
        if self.rope and self.mixer == "linformer" and self.one_kv_head:
            raise ValueError(
                "positions='rope' turns each head's keys, and linformer has one_kv_head=True: "
                "set model.one_kv_head=False"
            )

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def feature_count(self) -> int:
        """Performer's random features per head."""
        return self.features or int(self.head_dim * math.log(self.head_dim))

    def check_tokens(self, tokens: int) -> None:
        """Raises ValueError for more landmarks than tokens, and for a hidden layer over the tokens
        without a unit."""
        if self.mixer == "mlp_mixer":
            scaled(tokens, self.expansion)
        if self.mixer == "nystrom" and self.landmarks > tokens:
            raise ValueError(
                f"nystrom with landmarks={self.landmarks} needs at least as many tokens; there "
                f"are {tokens}: lower model.landmarks, or use smaller patches or larger images"
            )


#: What a `Mixing` reads, with the papers' values.
KEYS = settings.keys_of(
    Mixing, without=("attention_dropout", "rope", "expansion", "init", "project_one")
)

#: Settings that may differ within a named variant.
_FREE = frozenset(
    (
        *("batch_coupling", "features", "drop_path", "patch"),
        *("dropout", "embed_dropout", "attention_dropout"),
        *("stem_strides", "stage_strides", "conv_strides"),
    )
)


def mixed(config: Callable[..., Any], fixed: Mapping[str, Any], /, **values: Any) -> Any:
    """A config with the mixer's settings as one `mixing`, in which the family fixes some."""
    mixer = {key: values[key] for key in KEYS if key not in fixed}
    rest = {key: value for key, value in values.items() if key not in KEYS}
    return config(mixing=Mixing(**mixer, **fixed), **rest)


def digits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """8×8 tokens, one for each pixel of a digit before it is enlarged to 32×32 pixels.

    Landmarks and projected positions are fewer than these tokens.
    """
    return {**_tokens(settings, (2, 2, 1), 4), "landmarks": 16, "projections": 16}


def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a smoke run: narrow, shallow and of few tokens, with its own mixer and stem."""
    sizes = {"heads": 2, "mlp_dim": 32, "landmarks": 4, "projections": 4, "residual_kernel": 5}
    sizes |= {"embed_dim": 16, **_tokens(settings, (2, 2, 2), 8)}
    sizes |= {"head_dim": 8} if "head_dim" in settings else {}
    sizes |= {"depths": (1,) * len(settings["depths"])} if "depths" in settings else {"depth": 2}
    for key in ("stem_channels", "conv_channels"):
        if settings.get(key):
            sizes[key] = (4,) * len(settings[key])
    return sizes


def _tokens(settings: Mapping[str, Any], strides: tuple[int, ...], patch: int) -> dict[str, Any]:
    """Strides of the first convolutions, or a patch: whichever makes this network's tokens."""
    for key, of in (
        ("conv_strides", "conv_channels"),
        ("stage_strides", "depths"),
        ("stem_strides", "stem_channels"),
    ):
        if key in settings and settings[of]:
            convolutions = len(settings[of]) + (of != "depths")
            return {key: (*strides, *(1,) * convolutions)[:convolutions]}
    return {"patch": patch} if "stem_strides" in settings else {}


def family(*, keys: Mapping[str, settings.Key], **record: Any) -> Family:
    """The record of a family of the ViX paper's; what `_FREE` names tells no variants apart."""
    keys = {**KEYS, **keys}
    named_by = tuple(key for key in keys if key not in _FREE)
    shared = {"named_by": named_by, "paper_recipe": "vix", "tiny": tiny, "digits": digits}
    return Family(keys=keys, **shared, **record)
