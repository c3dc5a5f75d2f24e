"""A trained HSViT cut into parts that can run apart, each on a device or program of its own.

A part is a tower, or a share of the attention groups with the trunk that they need; the head is
what remains. The average of votes is split into sums (HSViT paper, section 3.2: nothing but CLS
tokens is exchanged):

    total_BD, weight = part(images_BHWC)        each part, of uint8 images (B, H, W, C)
    logits_BK, probabilities_BK = head(Σ total_BD, Σ weight)

With all parts this is the whole network. Without some it is the network that has lost their groups,
as `votes_G` has it, and of one part alone that part's own vote. Parts and head are pure functions
with the parameters as constants, to be jitted or exported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.models.hsvit.sizes import divisors
from hsvit_jax.models.hsvit.votes import tally
from hsvit_jax.models.network import UNSHARDED, Network

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A share of a network's groups, or towers, with the trunk that it needs.

    Attributes:
        groups: numbers of its attention groups among the network's.
        voters: how many of them have a vote that is not zero.
        weight: of its votes among those of all parts; voters, or shares of learned weights.
        network: the network without the other groups.
        params, stats: its arrays.
        normalise: uint8 images to the network's.
    """

    groups: tuple[int, ...]
    voters: int
    weight: float
    network: Any
    params: dict
    stats: dict
    normalise: Callable[[Array], Array]

    def __call__(self, images_BHWC: Array) -> tuple[Array, Array]:
        """Uint8 images (B, H, W, C) → the weighted sum of CLS tokens (B, D), and the weight ()."""
        stats = jax.tree.map(jnp.asarray, self.stats)
        terms_GBD = self.network.terms(self.params, stats, self.normalise(images_BHWC))
        return tally(terms_GBD, None, UNSHARDED)[0], jnp.float32(self.weight)


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """The final prediction from the sums of the parts that have answered."""

    network: Network
    params: dict
    answer: Callable[[Array], Array] = jax.nn.softmax

    def __call__(self, total_BD: Array, weight: Array) -> tuple[Array, Array]:
        """Sums (B, D) and () over parts → logits and probabilities (or answers) (B, K)."""
        cls_BD = total_BD / jnp.where(weight > 0, weight, 1.0)
        logits_BK = self.network.bind(self.params, {})["head"](cls_BD.astype(self.network.dtype))
        logits_BK = logits_BK.astype(jnp.float32)
        return logits_BK, self.answer(logits_BK)


def cut(
    network: Network,
    params: dict,
    stats: dict,
    count: int,
    normalise: Callable[[Array], Array] = lambda x: x,
    answer: Callable[[Array], Array] = jax.nn.softmax,
) -> tuple[list[Part], Head]:
    """Cuts a network into `count` parts of equally many groups, in their order, and the head.

    A trunk that was sharded in training is the same function whole.

    Args:
        network: with attention groups.
        params, stats: its arrays.
        count: a divisor of its towers, or of its groups.
        normalise: makes the network's images of uint8 ones.
        answer: makes answers of logits.

    Raises:
        ValueError: the network has no groups, or they do not split.
    """
    groups = network.voters
    if not groups:
        raise ValueError(
            "only independent attention groups can be cut into parts: this network has none"
        )
    if network.config.trunk == "sharded":
        whole = dataclasses.replace(network.config, trunk="replicated")
        network = type(network)(whole, network.dtype)
    units = network.group_axis_limit
    if count < 1 or units % count:
        raise ValueError(
            f"{units} {network.splits} cannot split into {count} parts: choose one of "
            f"{divisors(units)}"
        )
    params, stats = jax.tree.map(np.asarray, (params, stats))
    head = {"head": params["head"]}
    body = {name: part for name, part in params.items() if name != "head"}
    vote, parts = network.learned(params), []
    weights_G = np.array([float(g not in network.silent) for g in range(groups)], np.float32)
    if vote is not None:
        weights_G *= np.abs(vote) / np.abs(vote).sum()
    for k in range(count):
        first, last = k * units // count, (k + 1) * units // count
        smaller = Network.without(network, {*range(units)} - {*range(first, last)})
        ours = tuple(range(k * groups // count, (k + 1) * groups // count))
        own_G = weights_G[list(ours)]
        trees = [_share(network, tree, k, count) for tree in (body, stats)]
        voters, weight = int(np.count_nonzero(own_G)), float(own_G.sum())
        parts.append(Part(ours, voters, weight, smaller, *trees, normalise))
    return parts, Head(network, head, answer)


def _share(network: Any, tree: dict, k: int, count: int) -> dict:
    """Part k of the leaves that belong to groups or towers; other leaves as they are."""

    def leaf(path: tuple[Any, ...], x: np.ndarray) -> np.ndarray:
        names = tuple(str(key.key) for key in path)
        axis = network.spread_axis(names)
        axis = _last_kernels(network, names) if axis is None else axis
        return x if axis is None else np.split(x, count, axis)[k]

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _last_kernels(network: Any, path: tuple[str, ...]) -> int | None:
    """The axis of the last convolution's kernels, of which a group needs only its own."""
    last = ("trunk", "blocks", str(len(network.config.conv_channels) - 1))
    if path[:3] != last or path[4] != "1" or path[3] == "depthwise":
        return None
    return 3 if path[3] == "kernels" else 0
