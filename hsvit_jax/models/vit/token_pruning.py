"""PoWER: a block keeps the tokens that its attention looks at, and drops the rest for good.

The significance of a token is the attention it receives, summed over heads and queries; after the
attention of block i the most significant `retained[i]` tokens go on, in their order. A CLS token
always stays.

Source: Goyal et al., PoWER-BERT (ICML 2020), section 3. Their retention schedules are learnt; the
one behind the HVT paper's DeiT + PoWER is not published. `linear_schedule` makes one that costs
what that paper's table 1 says.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from hsvit_jax.models import layers
from hsvit_jax.models.network import ForwardContext

Array = jax.Array


def check_retained(retained: Sequence[int], depth: int, tokens: int) -> None:
    """Raises ValueError unless there is one number per block, not growing, from 1 to `tokens`."""
    if len(retained) != depth:
        raise ValueError(
            f"retained needs one number for each of depth={depth} blocks; got {len(retained)}: "
            f"{tuple(retained)}"
        )
    before = tokens
    for i, kept in enumerate(retained):
        if not 1 <= kept <= before:
            raise ValueError(
                f"retained[{i}]={kept} must be from 1 to {before}, the tokens that are left there"
            )
        before = kept


def linear_schedule(
    depth: int, tokens: int, share: float, cost: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    """Tokens that each block keeps, falling evenly, so that a pass costs `share` of the full one.

    cost: multiply-adds of a network with the schedule it is given. Raises ValueError for a share
    outside (0, 1], or that not even one token at the end would reach.
    """
    if not 0 < share <= 1:
        raise ValueError(f"flops_share must be in (0, 1]; got {share}")

    def falling(last: int) -> tuple[int, ...]:
        return tuple(max(1, tokens + (last - tokens) * (i + 1) // depth) for i in range(depth))

    full = cost((tokens,) * depth)
    lowest = cost(falling(1)) / full
    if share < lowest:
        raise ValueError(
            f"flops_share={share} cannot be reached by tokens that fall evenly: the least is "
            f"{lowest:.3f}; give each block's number in model.retained"
        )
    candidates = [falling(last) for last in range(1, tokens + 1)]
    return min(candidates, key=lambda retained: abs(cost(retained) - share * full))


def keep_significant(x_BTD: Array, significance_BT: Array, keep: int, *, cls: bool) -> Array:
    """The `keep` most significant tokens of each example, in their order: (B, keep, D)."""
    if cls:  # attention weights are finite, so nothing is more significant
        first_T = jnp.arange(x_BTD.shape[1])[None] == 0
        significance_BT = jnp.where(first_T, jnp.inf, significance_BT)
    _, kept_BK = lax.top_k(lax.stop_gradient(significance_BT), keep)
    kept_BK = jnp.sort(kept_BK, axis=1)
    return jnp.take_along_axis(x_BTD, kept_BK[:, :, None], axis=1)


def block_with_elimination(
    block: layers.Block, x_BTD: Array, context: ForwardContext, index: int, keep: int, *, cls: bool
) -> Array:
    """A block of softmax attention that keeps `keep` tokens between its halves: (B, keep, D)."""
    if keep == x_BTD.shape[1]:
        return block(x_BTD, context, index)
    stream = index * layers.STREAMS_PER_BLOCK
    q_BNTE, k_BNSE, v_BNSE = block.mixer.project(block.norm1(x_BTD))
    scores_BNTS = jnp.einsum("bnte,bnse->bnts", q_BNTE, k_BNSE) * q_BNTE.shape[-1] ** -0.5
    wide = jnp.promote_types(scores_BNTS.dtype, jnp.float32)
    weights_BNTS = jax.nn.softmax(scores_BNTS.astype(wide), axis=-1)
    context.call_hook("attention", lambda: weights_BNTS)
    o_BNTE = jnp.einsum("bnts,bnse->bnte", weights_BNTS.astype(v_BNSE.dtype), v_BNSE)
    x_BTD = block.add(x_BTD, block.mixer.output(o_BNTE, context, stream), context, stream)
    x_BTD = keep_significant(x_BTD, weights_BNTS.sum((1, 2)), keep, cls=cls)
    return block.feed(x_BTD, context, index)
