"""Grows a trained network: more towers, or more channels and groups, with the same logits.

New groups start without a vote (see `model.votes`), and kernels from new channels to old ones at
zero, so the larger network computes the same function until it is trained.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hsvit_jax.models.hsvit.hsvit import HSViTConfig, TowerHSViT

Array = jax.Array

#: Sizes that growth leaves as they are.
_FIXED = (
    *("image_size", "image_channels", "num_classes", "conv_kernels", "pool_strides"),
    *("depth", "embed_dim", "heads", "separable", "tiles"),
)


def misfits(old: Any, new: Any) -> list[str]:
    """Lists the reasons why a network of config `new` cannot be grown from one of config `old`.

    Families other than HSViT do not grow; their rates of dropout may differ. Towers: any number
    more, each of the same size. One tower: no fewer channels in each block, and as many tokens in a
    group as before. More groups need learned votes.
    """
    if type(old) is not type(new):
        return [f"sizes: checkpoint {old}, config {new}"]
    if not isinstance(old, HSViTConfig):
        return _differences(old, new, [field.name for field in dataclasses.fields(old)])
    lines = _differences(old, new, _FIXED)
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


def _differences(old: Any, new: Any, names: Sequence[str], place: str = "") -> list[str]:
    """Lists the settings of these names that differ, but for rates of dropout, also those of a
    mixer's or a backbone's config inside."""
    lines = []
    for name in names:
        a, b = getattr(old, name), getattr(new, name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            inner = [field.name for field in dataclasses.fields(a)]
            lines += _differences(a, b, inner, f"{place}{name}.")
        elif a != b and "drop" not in name:
            lines.append(f"{place}{name}: checkpoint {a}, config {b}")
    return lines


def check(old: Any, new: Any) -> None:
    """Raises ValueError with every difference when `new` is not a larger `old`; see `misfits`."""
    lines = misfits(old, new)
    if lines:
        # They follow the image's size.
        strided = any(line.startswith("pool_strides") for line in lines)
        if strided and len(old.pool_strides) == len(new.pool_strides):
            strides = ",".join(map(str, old.pool_strides))
            lines.append(f"set --config.model.pool_strides={strides} to keep the checkpoint's")
        raise ValueError(
            "the network to start from is neither of the same sizes nor a smaller one:\n  "
            + "\n  ".join(lines)
        )


def grow(params: dict, stats: dict, old: Any, new: Any, key: Array) -> tuple[dict, dict]:
    """Grows the weights of the network `old` to `new`, which then computes the same logits.

    Args:
      new: the larger network, for which `check` must pass.
      key: draws the leaves that `old` does not have.

    Returns:
      (params, stats) of `new`, NumPy arrays.
    """
    fresh_params, fresh_stats = jax.tree.map(np.asarray, jax.jit(new.init)(key))
    if getattr(new.config, "votes", "equal") == "learned":
        params = jax.tree.map(np.asarray, params)  # dicts of our own
        groups, fresh_groups = (old.body(params)["groups"], new.body(fresh_params)["groups"])
        equal = np.full(groups["cls"].shape[:-1], 1 / old.config.groups, np.float32)
        groups.setdefault("vote", equal)
        fresh_groups["vote"] = np.zeros_like(fresh_groups["vote"])
    if isinstance(new, TowerHSViT) and not isinstance(old, TowerHSViT):
        params, stats = new.of_one(params), new.of_one(stats)
    return _placed(fresh_params, params), _placed(fresh_stats, stats)


def _placed(fresh: dict, old: dict) -> dict:
    """Places each old array in the first corner of the new one."""

    def place(path: tuple[Any, ...], new: np.ndarray, old: Any) -> np.ndarray:
        new, old = np.array(new), np.asarray(old)
        if "kernels" in {k.key for k in path}:  # old channels must not depend on new ones
            new[..., old.shape[-2] :, : old.shape[-1]] = 0
        new[tuple(slice(n) for n in old.shape)] = old
        return new

    return jax.tree_util.tree_map_with_path(place, fresh, old)
