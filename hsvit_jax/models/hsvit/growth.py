"""Grows a trained network: more towers, or more channels and groups, with the same logits.

New groups start without a vote (see `model.votes`), and kernels from new channels to old ones at
zero, so the larger network computes the same function until it is trained.
"""

from typing import Any

import jax
import numpy as np

Array = jax.Array


def grow(params: dict, stats: dict, old: Any, new: Any, key: Array) -> tuple[dict, dict]:
    """Grows the weights of the network `old` to `new`, which then computes the same logits.

    Args:
      new: the larger network, whose config `cannot_grow` has nothing against.
      key: draws the leaves that `old` does not have.

    Returns:
      (params, stats) of `new`, NumPy arrays.
    """
    fresh_params, fresh_stats = jax.tree.map(np.asarray, jax.jit(new.init)(key))
    if getattr(new.config, "votes", "equal") == "learned":
        params = jax.tree.map(np.asarray, params)  # dicts of our own
        groups, fresh_groups = old.body(params)["groups"], new.body(fresh_params)["groups"]
        equal = np.full(groups["cls"].shape[:-1], 1 / old.config.groups, np.float32)
        groups.setdefault("vote", equal)
        fresh_groups["vote"] = np.zeros_like(fresh_groups["vote"])
    if new.splits == "towers" != old.splits:
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
