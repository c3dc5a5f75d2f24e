"""HSViT's sizes: the named variants, what fits together, and pool strides by image size."""

import dataclasses
from collections.abc import Mapping
from math import gcd, log, prod
from typing import Any

from hsvit_jax.models import settings
from hsvit_jax.models.family import Difference, Sizes, check_heads, differences
from hsvit_jax.text import few

#: Sizes that may differ in a network that is grown from another.
_GROWS = ("conv_channels", "groups", "towers", "trunk", "votes")

#: Named sizes (paper, table 1), as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "c2a2": {},
    "c3a4": {"conv_channels": (64, 128, 256), "conv_kernels": (3, 3, 3), "depth": 4},
    "c4a8": {"conv_channels": (64, 128, 256, 512), "conv_kernels": (3, 3, 3, 3), "depth": 8},
}
#: Pool strides by the number of blocks and an image's side (paper, table 1; 28: its code).
_STRIDES: Mapping[int, Mapping[int, tuple[int, ...]]] = {
    2: {28: (2, 2), 32: (2, 2), 64: (4, 2), 128: (4, 4)},
    3: {28: (2, 1, 2), 32: (2, 1, 2), 64: (2, 2, 2), 128: (4, 2, 2)},
    4: {28: (2, 1, 2, 1), 32: (2, 1, 2, 1), 64: (2, 2, 2, 1), 128: (2, 2, 2, 2)},
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

    @property
    def tokens(self) -> int:
        """Tokens of one group, its CLS included."""
        return self.conv_channels[-1] // self.groups + 1

    def check_groups(self) -> None:
        """Raises ValueError unless groups split the tokens, and heads their width."""
        channels = self.conv_channels[-1]
        if not self.groups:
            if self.trunk == "sharded":
                raise ValueError("without attention groups trunk must stay 'replicated'")
            return
        if channels % self.groups:
            raise ValueError(
                f"{channels} channel tokens cannot split into groups={self.groups}: "
                f"choose a divisor of {channels}: {divisors(channels)}"
            )
        if self.depth < 1:
            raise ValueError("attention groups need depth of at least 1; for none set groups=0")
        check_heads(self.embed_dim, self.heads)


@dataclasses.dataclass(frozen=True)
class HSViTConfig(GroupSizes):
    """The sizes of an HSViT (paper, section 4.1, and the authors' code).

    The last block's channels are the tokens; a last kernel of 0 means no convolution. Each tower
    has 1/towers of every block's kernels and of the groups. Tower k sees tile k mod (rows ×
    columns), counted row by row.
    """

    ablation: str = settings.setting(
        "none", "ablation of the HSViT paper", choices=("none", "conv_only", "attention_only")
    )
    convolution: str = settings.setting(
        "dense",
        "kind of the trunk's convolutions: the paper's, or depthwise and pointwise ones",
        choices=("dense", "separable"),
    )
    towers: int = settings.width(1, "independent towers")
    tiles: tuple[int, int] = settings.setting(
        (1, 1),
        "rows and columns of image tiles, each seen by its own towers",
        low=1,
        high=2**13,
        per="image_size",
    )
    conv_channels: tuple[int, ...] = settings.width(
        (64, 128), "channels of each convolution block", per="conv_channels"
    )
    conv_kernels: tuple[int, ...] = settings.kernel(
        (3, 3),
        "kernel size of each convolution block",
        low=0,
        when=_CONVOLVES,
        per="conv_channels",
    )
    pool_strides: tuple[int, ...] = settings.stride(
        (),
        "stride of each block's pool; empty: by the image size",
        when=_CONVOLVES,
        per="conv_channels",
    )

    def __post_init__(self) -> None:
        if self.ablation == "attention_only":
            object.__setattr__(self, "conv_kernels", (*self.conv_kernels[:-1], 0))
        elif self.ablation == "conv_only":
            object.__setattr__(self, "groups", 0)
        if not self.pool_strides and len(self.tiles) == 2:
            object.__setattr__(self, "pool_strides", self._usual_strides())
        super().__post_init__()
        self._check_tiles()
        if self.convolves and not all(kernel % 2 for kernel in self.conv_kernels):
            raise ValueError(f"conv_kernels={self.conv_kernels}: set odd sizes")
        if not self.convolves and self.separable:
            raise ValueError("without convolution nothing can be separable: choose 'dense'")
        if not self.convolves and prod(self.image_size) != self.embed_dim:
            raise ValueError(
                "without convolution each colour plane is a token, so height × width must equal "
                f"embed_dim={self.embed_dim}; got {self.image_size[0]}×{self.image_size[1]}"
            )
        self.check_groups()
        self._check_spread()

    def _usual_strides(self) -> tuple[int, ...]:
        """Returns the paper's strides; of other images, those that leave a map nearest to 8×8.

        Strides that divide both sides come first; others round up.
        """
        table, (rows, columns) = _STRIDES.get(len(self.conv_channels), {}), self.tile_size
        if not self.convolves:
            return (1,) * len(self.conv_channels)
        if rows == columns and rows in table:
            return table[rows]
        exact = [s for s in table.values() if rows % prod(s) == columns % prod(s) == 0]
        candidates = exact or table.values()
        off = {s: abs(log(rows * columns / prod(s) ** 2 / 64)) for s in candidates}
        return min(off, key=off.__getitem__, default=())

    def _check_tiles(self) -> None:
        """Raises ValueError unless tiles are equal parts that equally many towers see."""
        tiles, sides = self.tiles, ("rows", "columns")
        for side, count, name in zip(self.image_size, tiles, sides, strict=True):
            if side % count:
                raise ValueError(
                    f"{side} {name} of pixels cannot be cut into tiles={tiles}, {count} {name} of "
                    f"tiles: choose a divisor of {side}: {divisors(side)}"
                )
        if self.towers % prod(tiles):
            raise ValueError(
                f"towers={self.towers} cannot see the {prod(tiles)} tiles of tiles={tiles} "
                f"equally: make towers a multiple of {prod(tiles)}"
            )

    def _check_spread(self) -> None:
        """Raises ValueError for towers or a sharded trunk with nothing to divide."""
        if self.towers == 1 and self.trunk == "replicated":
            return
        if not self.groups or not self.convolves:
            raise ValueError(
                f"towers={self.towers} and trunk={self.trunk!r} need both convolution and "
                "attention groups: leave them at 1 and 'replicated' for an ablation"
            )
        if self.towers > 1 and self.trunk == "sharded":
            raise ValueError(
                f"towers={self.towers} already spread the convolutions: set trunk='replicated'"
            )
        common = gcd(*self.conv_channels, self.groups)
        if common % self.towers:
            raise ValueError(
                f"conv_channels={self.conv_channels} and groups={self.groups} cannot split into "
                f"towers={self.towers}: choose one of {divisors(common)}"
            )

    def cannot_grow(self, old: "HSViTConfig") -> list[Difference]:
        """Lists the reasons why a network of these sizes cannot be grown from one of config `old`.

        Towers: any number more, each of the same size. One tower: no fewer channels in each block,
        and as many tokens in a group as before. More groups need learned votes.
        """
        names = [f.name for f in dataclasses.fields(self) if f.name not in _GROWS]
        found, now, before = differences(old, self, names), self.conv_channels, old.conv_channels
        lines, changed = [], f"conv_channels: checkpoint {before}, config {now}"
        if self.towers < old.towers:
            lines.append(f"towers: checkpoint {old.towers}, config {self.towers}, which are fewer")
        elif len(now) != len(before):
            lines.append(changed)
        elif self.towers > 1:
            fitting = tuple(c * self.towers // old.towers for c in before)
            if now != fitting or self.groups * old.towers != old.groups * self.towers:
                lines.append(
                    f"conv_channels={now} and groups={self.groups}: {self.towers} towers as large "
                    f"as the checkpoint's {old.towers} have conv_channels={fitting} and "
                    f"groups={old.groups * self.towers // old.towers}"
                )
        else:
            if any(b < a for a, b in zip(before, now, strict=True)):
                lines.append(f"{changed}, fewer in a block")
            if before[-1] * self.groups != now[-1] * old.groups:
                lines.append(
                    f"conv_channels={now} and groups={self.groups}: the checkpoint has "
                    f"{before[-1]} channel tokens in {old.groups} groups; keep their ratio"
                )
        if not old.groups and now[-1] != before[-1]:
            lines.append(
                f"{changed}; without groups, more channels in the last block change the answers"
            )
        theirs = {"towers": old.towers, "conv_channels": before, "groups": old.groups}
        found += [Difference(line, theirs) for line in lines]
        more = old.votes == "learned" or self.groups > old.groups
        if not lines and self.votes == "equal" and more:
            text = "votes: 'equal', but new groups start without a vote: set votes='learned'"
            found.append(Difference(text, {"votes": "learned"}))
        return found

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
    def convolves(self) -> bool:
        """False for the attention-only ablation."""
        return self.conv_kernels[-1:] != (0,)

    @property
    def separable(self) -> bool:
        """Whether convolutions are depthwise and pointwise, see `trunk`."""
        return self.convolution == "separable"

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the feature map that becomes a token."""
        stride = prod(self.pool_strides) if self.convolves else 1
        return -(-self.tile_size[0] // stride), -(-self.tile_size[1] // stride)


def divisors(n: int) -> str:
    """Returns the first divisors of n, ascending, for an error message."""
    return few(d for d in range(1, n + 1) if n % d == 0)
