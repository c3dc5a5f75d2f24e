"""HSViT's sizes: the named variants, what fits together, and pool strides by image size."""

import dataclasses
from collections.abc import Mapping
from math import gcd, log, prod
from typing import Any

from hsvit_jax.models import settings
from hsvit_jax.models.family import Sizes, check_heads, differences
from hsvit_jax.text import few

#: Sizes that may differ in a network that is grown from another.
_GROWS = ("conv_channels", "groups", "towers", "trunk", "votes")

#: Named sizes (paper, table 1), as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "c2a2": {},
    "c3a4": {"conv_channels": (64, 128, 256), "conv_kernels": (3, 3, 3), "depth": 4},
    "c4a8": {"conv_channels": (64, 128, 256, 512), "conv_kernels": (3, 3, 3, 3), "depth": 8},
}
#: Pool strides of a variant by the pixels of an image's side (paper, table 1; 28: its code).
STRIDES: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "c2a2": {28: (2, 2), 32: (2, 2), 64: (4, 2), 128: (4, 4)},
    "c3a4": {28: (2, 1, 2), 32: (2, 1, 2), 64: (2, 2, 2), 128: (4, 2, 2)},
    "c4a8": {28: (2, 1, 2, 1), 32: (2, 1, 2, 1), 64: (2, 2, 2, 1), 128: (2, 2, 2, 2)},
}


_CONVOLVES = {"ablation": ("none", "conv_only")}
_ATTENDS = {"ablation": ("none", "attention_only")}
_WITH_GROUPS = (_ATTENDS, {"groups": settings.ON})


@dataclasses.dataclass(frozen=True)
class GroupSizes(Sizes):
    """The sizes of attention groups on a feature map; a learned vote is initially 1/groups."""

    groups: int = settings.width(16, "attention groups; 0: none", low=0, when=_ATTENDS)
    depth: int = settings.depth(2, "attention blocks", low=0, when=_WITH_GROUPS)
    embed_dim: int = settings.width(64, "token width")
    heads: int = settings.heads(8, when=_WITH_GROUPS)
    dropout: float = settings.dropout(0.2)
    trunk: str = settings.setting(
        "replicated",
        "trunk on every device, or sharded by output channel",
        choices=("replicated", "sharded"),
    )
    group_dropout: float = settings.rate(
        0.0,
        "probability of dropping a group's CLS token in training",
        when=_WITH_GROUPS,
        off=0.0,
    )
    votes: str = settings.setting(
        "equal",
        "weights of the groups' CLS tokens",
        choices=("equal", "learned"),
        when=_WITH_GROUPS,
        off="equal",
    )

    def check_groups(self) -> None:
        """Raises ValueError for groups that do not split the tokens, or heads their width."""
        channels = self.conv_channels[-1]
        if self.groups and channels % self.groups:
            raise ValueError(
                f"{channels} channel tokens cannot split into groups={self.groups}: "
                f"choose a divisor of {channels}: {divisors(channels)}"
            )
        if self.groups and self.depth < 1:
            raise ValueError("attention groups need depth of at least 1; for none set groups=0")
        if self.groups:
            check_heads(self.embed_dim, self.heads)
        elif self.trunk == "sharded":
            raise ValueError("without attention groups trunk must stay 'replicated'")


@dataclasses.dataclass(frozen=True)
class HSViTConfig(GroupSizes):
    """The sizes of an HSViT.

    The last block's channels are the tokens; a last kernel of 0 leaves convolution out. Each tower
    has 1/towers of every block's kernels and of the groups. Tower k sees tile k mod (rows ×
    columns), counted row by row.
    """

    conv_channels: tuple[int, ...] = settings.width((64, 128), "channels of each convolution block")
    conv_kernels: tuple[int, ...] = settings.kernel(
        (3, 3), "kernel size of each convolution block", low=0, when=_CONVOLVES
    )
    pool_strides: tuple[int, ...] = settings.stride(
        (), "stride of each block's pool; empty: by the image size", when=_CONVOLVES
    )
    towers: int = settings.width(1, "independent towers")
    separable: bool = False  # depthwise and pointwise convolutions, see `trunk`
    tiles: tuple[int, int] = settings.setting(
        (1, 1), "rows and columns of image tiles, each seen by its own towers", low=1, high=2**13
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tiles(self.image_size, self.tiles, self.towers)
        if not self.pool_strides:
            object.__setattr__(self, "pool_strides", _usual_strides(self))
        _check_sizes(self)
        _check_spread(self)

    def cannot_grow(self, old: "HSViTConfig") -> list[str]:
        """Lists the reasons why a network of these sizes cannot be grown from one of config `old`.

        Towers: any number more, each of the same size. One tower: no fewer channels in each block,
        and as many tokens in a group as before. More groups need learned votes.
        """
        return _cannot_grow(old, self)

    @property
    def tower(self) -> "HSViTConfig":
        """The sizes of one tower."""
        return dataclasses.replace(
            self,
            image_size=self.tile_size,
            tiles=(1, 1),
            conv_channels=tuple(c // self.towers for c in self.conv_channels),
            groups=self.groups // self.towers,
            towers=1,
        )

    @property
    def tile_size(self) -> tuple[int, int]:
        """Rows and columns of pixels that one tower sees."""
        return self.image_size[0] // self.tiles[0], self.image_size[1] // self.tiles[1]

    @property
    def convolution(self) -> bool:
        """False for the attention-only ablation."""
        return self.conv_kernels[-1:] != (0,)

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the feature map that becomes a token."""
        stride = prod(self.pool_strides) if self.convolution else 1
        return -(-self.tile_size[0] // stride), -(-self.tile_size[1] // stride)

    @property
    def tokens(self) -> int:
        """Tokens of one group, its CLS included."""
        return self.conv_channels[-1] // self.groups + 1


#: The settings of a `model` section (paper, section 4.1, and the authors' code).
KEYS: Mapping[str, settings.Key] = {
    "ablation": settings.Key(
        "ablation of the HSViT paper",
        kind=str,
        choices=("none", "conv_only", "attention_only"),
        default="none",
    ),
    "convolution": settings.Key(
        "kind of the trunk's convolutions: the paper's, or depthwise and pointwise ones",
        kind=str,
        choices=("dense", "separable"),
        default="dense",
    ),
    **settings.keys_of(HSViTConfig, without=["separable"]),
}


def _check_sizes(c: HSViTConfig) -> None:
    """Names both numbers of every pair that does not fit, and the way out."""
    blocks = len(c.conv_channels)
    if not blocks or blocks != len(c.conv_kernels) or blocks != len(c.pool_strides):
        raise ValueError(
            "conv_channels, conv_kernels and pool_strides need one entry per block; got "
            f"{c.conv_channels}, {c.conv_kernels} and {c.pool_strides}"
        )
    if c.convolution:
        if any(kernel % 2 == 0 for kernel in c.conv_kernels):
            raise ValueError(f"convolution kernels must be odd; got conv_kernels={c.conv_kernels}")
    elif c.separable:
        raise ValueError("without convolution nothing can be separable: choose 'dense'")
    elif c.image_size[0] * c.image_size[1] != c.embed_dim:
        raise ValueError(
            "without convolution each colour plane is a token, so height × width must equal "
            f"embed_dim={c.embed_dim}; got {c.image_size[0]}×{c.image_size[1]}"
        )
    c.check_groups()


def check_tiles(image_size: tuple[int, int], tiles: tuple[int, ...], towers: int) -> None:
    """Tiles must be equal parts of the image, seen by equally many towers; ValueError if not."""
    if len(tiles) != 2:
        raise ValueError(f"tiles must be a number of rows and one of columns; got {tiles}")
    for side, count, name in zip(image_size, tiles, ("rows", "columns"), strict=True):
        if side % count:
            raise ValueError(
                f"{side} {name} of pixels cannot be cut into tiles={tiles}, {count} {name} of "
                f"tiles: choose a divisor of {side}: {divisors(side)}"
            )
    if towers % prod(tiles):
        raise ValueError(
            f"towers={towers} cannot see the {prod(tiles)} tiles of tiles={tiles} equally: make "
            f"towers a multiple of {prod(tiles)}"
        )


def _check_spread(c: HSViTConfig) -> None:
    """Towers and sharded trunks need something to divide."""
    if c.towers == 1 and c.trunk == "replicated":
        return
    if not c.groups or not c.convolution:
        raise ValueError(
            f"towers={c.towers} and trunk={c.trunk!r} need both convolution and attention groups: "
            "leave them at 1 and 'replicated' for an ablation"
        )
    if c.towers > 1 and c.trunk == "sharded":
        raise ValueError(
            f"towers={c.towers} already spread the convolutions: leave trunk at 'replicated'"
        )
    common = gcd(*c.conv_channels, c.groups)
    if common % c.towers:
        raise ValueError(
            f"conv_channels={c.conv_channels} and groups={c.groups} cannot split into "
            f"towers={c.towers}: choose one of {divisors(common)}"
        )


def divisors(n: int) -> str:
    """The first divisors of n, ascending: what an error message offers."""
    return few(d for d in range(1, n + 1) if n % d == 0)


def _usual_strides(c: HSViTConfig) -> tuple[int, ...]:
    """The pool strides of the named variant with as many blocks; () where there is none."""
    variant = {len(row[32]): name for name, row in STRIDES.items()}.get(len(c.conv_channels))
    if not c.convolution:
        return (1,) * len(c.conv_channels)
    return default_strides(variant, c.tile_size) if variant else ()


def default_strides(variant: str, image_size: tuple[int, int]) -> tuple[int, ...]:
    """Pool strides of a named variant for an image size.

    The paper's for 28, 32, 64 and 128 pixels square. For other sizes those of the table that leave
    a map nearest to 8×8, of those that divide both sides where there are any; others round up.

    Raises:
        ValueError: an unknown variant.
    """
    if variant not in STRIDES:
        raise ValueError(f"unknown model.variant {variant!r}; choose one of {sorted(STRIDES)}")
    table = STRIDES[variant]
    rows, columns = image_size
    if rows == columns and rows in table:
        return table[rows]
    exact = [s for s in table.values() if rows % prod(s) == 0 and columns % prod(s) == 0]
    candidates = exact or table.values()
    return min(candidates, key=lambda s: abs(log(rows * columns / prod(s) ** 2 / 64)))


def _cannot_grow(old: HSViTConfig, new: HSViTConfig) -> list[str]:
    lines = differences(old, new, [f.name for f in dataclasses.fields(new) if f.name not in _GROWS])
    if new.towers < old.towers:
        lines.append(f"towers: checkpoint {old.towers}, config {new.towers}, which are fewer")
    elif len(new.conv_channels) != len(old.conv_channels):
        lines.append(f"conv_channels: checkpoint {old.conv_channels}, config {new.conv_channels}")
    elif new.towers > 1:
        fitting = tuple(c * new.towers // old.towers for c in old.conv_channels)
        if new.conv_channels != fitting or new.groups * old.towers != old.groups * new.towers:
            lines.append(
                f"conv_channels={new.conv_channels} and groups={new.groups}: {new.towers} towers "
                f"as large as the checkpoint's {old.towers} have conv_channels={fitting} and "
                f"groups={old.groups * new.towers // old.towers}"
            )
    else:
        if any(b < a for a, b in zip(old.conv_channels, new.conv_channels, strict=True)):
            lines.append(
                f"conv_channels: checkpoint {old.conv_channels}, config {new.conv_channels}, "
                "fewer in a block"
            )
        if old.conv_channels[-1] * new.groups != new.conv_channels[-1] * old.groups:
            lines.append(
                f"conv_channels={new.conv_channels} and groups={new.groups}: the checkpoint has "
                f"{old.conv_channels[-1]} channel tokens in {old.groups} groups; keep their ratio"
            )
    if not old.groups and new.conv_channels[-1] != old.conv_channels[-1]:
        lines.append(
            f"conv_channels: checkpoint {old.conv_channels}, config {new.conv_channels}; without "
            "groups, more channels in the last block change the answers"
        )
    if new.votes == "equal" and (old.votes == "learned" or new.groups > old.groups):
        lines.append("votes: 'equal', but new groups start without a vote: set votes='learned'")
    return lines
