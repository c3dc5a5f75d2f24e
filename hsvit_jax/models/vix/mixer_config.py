"""`Mixing`: the settings of a token mixer."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from hsvit_jax.models.family import Checked, Family, defaults_of, scaled

#: The mixers.
NAMES = ("softmax", "performer", "linformer", "nystrom", "fnet", "mlp_mixer")
_ATTENTION = ("softmax", "performer", "linformer", "nystrom")
#: Iterations of the pseudo-inverse.
PINV_STEPS = 6


@dataclasses.dataclass(frozen=True)
class Mixing(Checked):
    """A mixer's name and settings.

    Attributes:
        dropout: rate, of the output; linformer's of the weights.
        one_kv_head: linformer's keys and values have one head for all heads of queries.
        residual_kernel: odd length of nystrom's convolution of the values.
        features: performer's random features; 0 for ⌊E·ln E⌋.
        batch_coupling: performer and nystrom take their maxima for stability over the batch, as the
            authors' code does, so that an example's output depends on the others; else over each
            example.
        project_one: softmax projects the output of a single head as wide as a token too, which the
            authors' ViT does not.

    Raises:
        ValueError: the settings do not fit each other.
    """

    name: str
    heads: int = 4
    head_dim: int = 32
    dropout: float = 0.0
    attention_dropout: float = 0.0
    rope: bool = False
    projections: int = 64
    one_kv_head: bool = True
    landmarks: int = 64
    residual_kernel: int = 33
    features: int = 0
    expansion: float = 1.0
    batch_coupling: bool = False
    init: str = "torch"
    project_one: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown model.mixer {self.name!r}; choose one of {list(NAMES)}")
        least = {"heads": 1, "head_dim": 1, "projections": 1, "landmarks": 1, "features": 0}
        wrong = [name for name, low in least.items() if getattr(self, name) < low]
        wrong += ["expansion"] * (self.expansion <= 0)
        if wrong:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in wrong)
            raise ValueError(f"a mixer's sizes must be positive; got {given}")
        self.check_rates("dropout", "attention_dropout")
        self.check_odd("residual_kernel")
        if self.name == "performer" and not self.feature_count:
            raise ValueError(
                f"head_dim={self.head_dim} gives performer features=0: set model.features"
            )
        if self.rope and self.name not in _ATTENTION:
            raise ValueError(
                f"positions='rope' turns queries and keys, and mixer={self.name!r} has none: "
                f"choose positions='learned', or a mixer of {list(_ATTENTION)}"
            )
        if self.rope and self.head_dim % 2:
            raise ValueError(f"positions='rope' turns pairs; got an odd head_dim={self.head_dim}")
        if self.rope and self.name == "linformer" and self.one_kv_head:
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
        if self.name == "mlp_mixer" and not scaled(tokens, self.expansion):
            raise ValueError(
                f"expansion={self.expansion} leaves mlp_mixer no hidden unit for {tokens} tokens: "
                f"set model.expansion to at least {math.ceil(1000 / tokens) / 1000}"
            )
        if self.name == "nystrom" and self.landmarks > tokens:
            raise ValueError(
                f"nystrom with landmarks={self.landmarks} needs at least as many tokens; there "
                f"are {tokens}: lower model.landmarks, or use smaller patches or larger images"
            )


_BY_FAMILY = ("attention_dropout", "rope", "expansion", "init", "project_one")
#: What a `Mixing` reads, with the papers' values.
DEFAULTS = {"mixer": "softmax", **defaults_of(Mixing, without=_BY_FAMILY)}

#: Settings that may differ within a named variant.
_FREE = frozenset(
    (
        *("batch_coupling", "features", "drop_path", "patch"),
        *("dropout", "embed_dropout", "attention_dropout"),
        *("stem_strides", "stage_strides", "conv_strides"),
    )
)


def mixed(config: Callable[..., Any], fixed: Mapping[str, Any], /, **settings: Any) -> Any:
    """A config with the mixer's settings as one `mixing`, in which the family fixes some."""
    mixer = {("name" if k == "mixer" else k): settings[k] for k in DEFAULTS if k not in fixed}
    rest = {key: value for key, value in settings.items() if key not in DEFAULTS}
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


def family(*, defaults: Mapping[str, Any], **record: Any) -> Family:
    """The record of a family of the ViX paper's; what `_FREE` names tells no variants apart."""
    named_by = tuple(key for key in defaults if key not in _FREE)
    shared = {"named_by": named_by, "paper_recipe": "vix", "tiny": tiny, "digits": digits}
    return Family(defaults=defaults, **shared, **record)
