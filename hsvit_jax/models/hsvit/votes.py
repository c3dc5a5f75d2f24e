"""The groups' votes: the average of their CLS tokens, as a ratio of two sums.

Every average of the package is a `tally`: that of training, with groups dropped or learned weights,
without groups that were lost, and the sums of parts that are computed apart (`parts`). A group that
does not vote has the weight 0. Source: HSViT paper, sections 3.1 and 3.2.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.models import layers
from hsvit_jax.models.network import ForwardContext, GroupShard
from hsvit_jax.ops.dropout import dropout_scale

Array = jax.Array

#: Stream of group dropout's masks; the embedding's is 0, attention block i's is i + 1.
_VOTES = 1 << 20


def tally(
    cls_GBD: Array, weights_GB: Array | None, shard: GroupShard, per_B: Array | None = None
) -> tuple[Array, Array | int]:
    """Adds up the CLS tokens of all devices' groups, each by its weight.

    Args:
        cls_GBD: CLS tokens of this device's groups.
        weights_GB: of all devices' groups, by example; None: each is 1, and nothing is multiplied.
        per_B: a divisor of an example's weights in the sum.

    Returns:
        The weighted sum (B, D), and the sum of the weights, (B, 1) or a number.
    """
    if weights_GB is None:
        return shard.sum(cls_GBD), cls_GBD.shape[0] * shard.size
    # Gathered: where weights are learned, a slice would be compiled to other bits.
    numbers_G = jnp.asarray(np.arange(len(weights_GB), dtype=np.int32))
    own_GB = weights_GB[shard.slice(numbers_G, 0)]
    if per_B is not None:
        own_GB = (own_GB / per_B[None]).astype(cls_GBD.dtype)
    return shard.sum(cls_GBD * own_GB[:, :, None]), weights_GB.sum(0)[:, None]


def average(
    cls_GBD: Array, weights_GB: Array | None, vote_G: Array | None, shard: GroupShard
) -> Array:
    """Averages the CLS tokens of all devices' groups: (B, D).

    Learned weights are divided by the share that the voting groups have of all groups' absolute
    weights.

    Args:
        weights_GB: as for `tally`.
        vote_G: learned weights of this device's groups; None for the plain average.
    """
    if vote_G is None:
        total_BD, weight = tally(cls_GBD, weights_GB, shard)
        return total_BD / weight
    share_B = None
    if weights_GB is not None:
        magnitude_G = jnp.abs(shard.all_gather(vote_G, 0))
        share_B = (weights_GB * magnitude_G[:, None]).sum(0) / magnitude_G.sum()
        share_B = jnp.where(share_B > 0, share_B, 1)  # every remaining group has weight 0
    return tally(layers.multiply(cls_GBD, vote_G[:, None, None]), weights_GB, shard, share_B)[0]


def weights(
    cls_GBD: Array, groups: int, silent: Collection[int], dropout: float, context: ForwardContext
) -> Array | None:
    """Weighs all groups of the network in each example's average: (G, B); None: all are 1.

    An example that would lose every group by group dropout keeps all.

    Args:
        silent: numbers of groups without a vote.
        dropout: the rate of group dropout.
        context: its votes_G are weights, 0 for a lost group.
    """
    votes_G, drops = context.votes_G, context.key_words is not None and dropout
    if silent:
        votes_G = jnp.ones(groups) if votes_G is None else votes_G
        votes_G = votes_G.at[jnp.array(sorted(silent))].set(0.0)
    if votes_G is None and not drops:
        return None
    weights_GB = jnp.ones((groups, cls_GBD.shape[1]), cls_GBD.dtype)
    if votes_G is not None:
        weights_GB *= jnp.asarray(votes_G, cls_GBD.dtype)[:, None]
    if drops:
        counters = (jnp.arange(groups)[:, None], context.example_ids_B[None])
        counters = (*context.key_words, _VOTES, *counters)
        kept_GB = weights_GB * (dropout_scale(counters, weights_GB.shape, dropout) > 0)
        weights_GB = jnp.where(kept_GB.sum(0, keepdims=True) > 0, kept_GB, weights_GB)
    return weights_GB
