"""PoWER: token pruning by attention.

The significance of a token is the attention it receives, summed over heads and queries. After the
attention of block i the `retained[i]` most significant tokens remain, in their order; a CLS token
always does.

Source: Goyal et al., PoWER-BERT (ICML 2020), section 3. Their retention schedules are learned, by
weighing tokens by rank before any is dropped (`weigh`, `learned_schedule`); the HVT paper's for
DeiT + PoWER is not published: `linear_schedule` is one with the FLOPs of that paper's table 1.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hsvit_jax.models import layers
from hsvit_jax.models.network import ForwardContext

Array = jax.Array


def check_retained(retained: Sequence[int], depth: int, tokens: int) -> None:
    """Raises ValueError unless each block has a number from 1 to that of the block before."""
    if len(retained) != depth:
        raise ValueError(
            f"retained needs one number for each of depth={depth} blocks; got {len(retained)}: "
            f"{tuple(retained)}"
        )
    before = tokens
    for i, after in enumerate(retained):
        if not 1 <= after <= before:
            raise ValueError(
                f"retained[{i}]={after} must be from 1 to {before}, the tokens that are left there"
            )
        before = after


def linear_schedule(
    depth: int, tokens: int, share: float, cost: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    """A linear schedule of retained tokens whose forward pass costs `share` of the full one.

    Args:
        share: of the multiply-adds, in (0, 1].
        cost: multiply-adds of a network with a given schedule.

    Returns:
        The tokens after each block's attention.

    Raises:
        ValueError: share is outside (0, 1], or below that of a single token at the end.
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
    """The `keep` most significant tokens of each example, in order: (B, keep, D)."""
    if cls:  # attention weights are finite, so nothing is more significant
        first_T = jnp.arange(x_BTD.shape[1])[None] == 0
        significance_BT = jnp.where(first_T, jnp.inf, significance_BT)
    _, kept_BK = lax.top_k(lax.stop_gradient(significance_BT), keep)
    kept_BK = jnp.sort(kept_BK, axis=1)
    return jnp.take_along_axis(x_BTD, kept_BK[:, :, None], axis=1)


def weigh(x_BTD: Array, significance_BT: Array, retention_P: Array, *, cls: bool) -> Array:
    """Multiplies each patch by the retention of its rank, the most significant first; a CLS token
    stays as it is: (B, T, D)."""
    significance_BP = lax.stop_gradient(significance_BT)[:, int(cls) :]
    rank_BP = jnp.argsort(jnp.argsort(-significance_BP, axis=1), axis=1)
    weight_BT = jnp.pad(retention_P[rank_BP], ((0, 0), (int(cls), 0)), constant_values=1.0)
    return x_BTD * weight_BT[:, :, None].astype(x_BTD.dtype)


def learned_schedule(retention_LP: np.ndarray, *, cls: bool) -> tuple[int, ...]:
    """The tokens after each block's attention: as many as its retentions' sum, rounded up, and no
    more than the block before; at least one."""
    sums_L = np.ceil(retention_LP.astype(np.float64).sum(1) - 1e-3).astype(int)
    return tuple(max(int(n) + cls, 1) for n in np.minimum.accumulate(sums_L))


def mix(
    block: layers.Block, x_BTD: Array, context: ForwardContext, index: int
) -> tuple[Array, Array]:
    """The residual branch of a block's attention, and the tokens' significance (B, T)."""
    stream = index * layers.STREAMS_PER_BLOCK
    q_BNTE, k_BNSE, v_BNSE = block.mixer.project(block.norm1(x_BTD))
    scores_BNTS = jnp.einsum("bnte,bnse->bnts", q_BNTE, k_BNSE) * q_BNTE.shape[-1] ** -0.5
    wide = jnp.promote_types(scores_BNTS.dtype, jnp.float32)
    weights_BNTS = jax.nn.softmax(scores_BNTS.astype(wide), axis=-1)
    context.call_hook("attention", lambda: weights_BNTS)
    o_BNTE = jnp.einsum("bnts,bnse->bnte", weights_BNTS.astype(v_BNSE.dtype), v_BNSE)
    x_BTD = block.add(x_BTD, block.mixer.output(o_BNTE, context, stream), context, stream)
    return x_BTD, weights_BNTS.sum((1, 2))
