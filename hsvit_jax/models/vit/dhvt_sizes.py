"""DHVT's sizes: the named variants, the ablations' feed-forwards, and what fits together.

Source: DHVT supplement, table 11 (sizes), tables 2 to 5 and figure 1 (ablations).
"""

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

from hsvit_jax.models import layers
from hsvit_jax.models.family import Sizes, check_heads

NORMS = ("batch", "layer")

_T16, _S = {"patch": 16}, {"heads": 8, "embed_dim": 384}
_S16 = {"patch": 16, "heads": 6, "embed_dim": 384}
#: Named systems: supplement, table 11, and its ablations of DHVT-T, as changes of the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "t-patch4": {},
    "t-patch2": {"patch": 2},
    "s-patch4": _S,
    "s-patch2": {**_S, "patch": 2},
    "t-patch16": _T16,
    "s-patch16": _S16,
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
} | {
    f"vit-t{suffix}": {
        "head_tokens": False,
        "sope": False,
        "positions": True,
        "feed_forward": f"ffn{suffix}",
    }
    for suffix in ("", "-split", "-split-aggregate", "-split-average")
}


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a feed-forward besides its two linear maps (supplement, tables 2 and 3).

    Attributes:
        split: the CLS token bypasses it.
        neighbours: over 3×3 patches, a 'depthwise' convolution, an 'average' or none ('').
        shortcut: a residual connection around the neighbours' operation.
        aggregate: the patches' mean gates the 'cls' token, 'all' tokens or none ('').
        norm: after each map.
    """

    split: bool = True
    neighbours: str = ""
    shortcut: bool = False
    aggregate: str = ""
    norm: bool = False


_DAFF = Operations(True, "depthwise", True, "cls", True)
FEED_FORWARDS: Mapping[str, Operations] = {
    "daff": _DAFF,
    "daff-no-shortcut": dataclasses.replace(_DAFF, shortcut=False),
    "daff-aggregate-all": dataclasses.replace(_DAFF, aggregate="all"),
    "ffn": Operations(split=False),
    "ffn-split": Operations(),
    "ffn-split-aggregate": Operations(aggregate="cls"),
    "ffn-split-average": Operations(neighbours="average"),
}


@dataclasses.dataclass(frozen=True)
class DHVTConfig(Sizes):
    """Sizes of a DHVT, and its ablations.

    Attributes:
        patch: a power of two, with a stride-2 convolution for each factor.
        head_tokens: HI-MHSA, else plain attention.
        sope: overlapping patches, else plain ones.
        positions: learned, added to the CLS token and the patches.
    """

    patch: int = 4
    heads: int = 4
    embed_dim: int = 192
    depth: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    drop_path: float = 0.1
    head_tokens: bool = True
    sope: bool = True
    affine: bool = True
    sope_norm: str = "batch"
    feed_forward: str = "daff"
    daff_norm: str = "batch"
    positions: bool = False

    def __post_init__(self) -> None:
        self.check_sizes(self.embed_dim, self.depth, self.hidden)
        layers.check_patches(self.image_size, self.patch)
        check_heads(self.embed_dim, self.heads)
        self.check_rates("drop_path")
        self.check_choices(sope_norm=NORMS, daff_norm=NORMS, feed_forward=[*FEED_FORWARDS])
        if self.sope and (self.patch < 2 or self.patch & (self.patch - 1)):
            raise ValueError(
                f"SOPE halves the image by each convolution, so patch must be 2, 4, 8 or 16; got "
                f"patch={self.patch}"
            )
        if self.embed_dim < 4 or (self.sope and self.sope_channels[0] < 1):
            raise ValueError(
                f"embed_dim={self.embed_dim} is too narrow for patch={self.patch}, whose first "
                f"convolution has embed_dim/{self.patch // 2} channels"
            )

    @property
    def hidden(self) -> int:
        """Width inside a feed-forward."""
        return int(round(self.embed_dim * self.mlp_ratio, 6))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def tokens(self) -> int:
        """Tokens: CLS and patches."""
        return prod(self.grid) + 1

    @property
    def sope_channels(self) -> tuple[int, ...]:
        """Channels of SOPE's convolutions: …, D/4, D/2, D."""
        steps = self.patch.bit_length() - 1
        return tuple(self.embed_dim >> (steps - 1 - i) for i in range(steps))

    @property
    def operations(self) -> Operations:
        """The feed-forward's operations."""
        return FEED_FORWARDS[self.feed_forward]
