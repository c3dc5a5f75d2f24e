"""DeiT, with or without a CLS token, and with PoWER's token pruning by attention.

The network of `vit` with timm's sizes. Source: the HVT paper, which compares with it in tables 1,
2, 4 and 9 (HVT-S-0 is DeiT-S without CLS token).

PoWER: the significance of a token is the attention it receives, summed over heads and queries.
After the attention of block i the `retained[i]` most significant tokens remain, in their order; a
CLS token always does. Source: Goyal et al., PoWER-BERT (ICML 2020), section 3. Their retention
schedules are learned, by weighing tokens by rank before any is dropped (`weigh`,
`learned_schedule`). The HVT paper's for DeiT + PoWER is not published: `linear_schedule` is one
with the FLOPs of that paper's table 1.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from hsvit_jax.models import layers, settings
from hsvit_jax.models.family import Family
from hsvit_jax.models.network import BoundModules, ForwardContext
from hsvit_jax.models.vit import hvt, vit
from hsvit_jax.ops import normalise

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DeiTConfig(hvt.SmallSizes):
    """Sizes of a DeiT; retained tokens include CLS.

    A flops_share below 1 makes PoWER's schedule of retained tokens.
    """

    cls: bool = settings.setting(True, "classify a CLS token rather than the tokens' mean")
    retained: tuple[int, ...] = settings.setting(
        (), "tokens kept by each block; empty: all", low=1, high=2**26
    )
    flops_share: float = settings.setting(
        1.0,
        "fraction of the FLOPs that a token-pruning schedule keeps; sets retained",
        above=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flops_share < 1:
            if self.retained:
                raise ValueError(
                    f"model.retained={self.retained} and model.flops_share={self.flops_share} both "
                    "set how many tokens stay: set one of them to () or 1.0"
                )
            schedule = linear_schedule(
                self.depth, self.tokens, self.flops_share, partial(multiply_adds, self)
            )
            object.__setattr__(self, "retained", schedule)
            object.__setattr__(self, "flops_share", 1.0)
        if len(self.retained) not in (0, self.depth):
            raise ValueError(
                f"retained={self.retained} needs one number for each of depth={self.depth} blocks"
            )
        for i, (before, after) in enumerate(pairwise((self.tokens, *self.retained))):
            if after > before:
                raise ValueError(
                    f"retained[{i}]={after} must be at most {before}, the tokens that are left"
                )


def multiply_adds(c: DeiTConfig, retained: tuple[int, ...]) -> int:
    """Returns the multiply-adds of one image, with retained[i] tokens after block i's attention."""
    # The search for a schedule evaluates this formula for every number of tokens.
    d = c.dim
    total = prod(c.grid) * c.patch**2 * c.image_channels * d + d * c.num_classes
    for before, after in pairwise((c.tokens, *retained)):
        total += before * (4 * d * d + 2 * before * d) + 2 * after * d * c.hidden
    return total


def linear_schedule(
    depth: int, tokens: int, share: float, cost: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    """Returns a linear schedule of retained tokens with `share` of the full forward pass's cost.

    Args:
        share: fraction of the multiply-adds, in (0, 1].
        cost: maps a schedule to a network's multiply-adds.

    Raises:
        ValueError: the share is below that of a single token at the end.
    """

    def falling(last: int) -> tuple[int, ...]:
        return tuple(max(1, tokens + (last - tokens) * (i + 1) // depth) for i in range(depth))

    full = cost((tokens,) * depth)
    lowest = cost(falling(1)) / full
    if share < lowest:
        raise ValueError(
            f"flops_share={share} cannot be reached by tokens that fall evenly: the least is "
            f"{lowest:.3f}; set model.retained"
        )
    candidates = [falling(last) for last in range(1, tokens + 1)]
    return min(candidates, key=lambda retained: abs(cost(retained) - share * full))


def keep_significant(x_BTD: Array, significance_BT: Array, keep: int, *, cls: bool) -> Array:
    """Returns the `keep` most significant tokens of each example, in order: (B, keep, D)."""
    if cls:
        first_T = jnp.arange(x_BTD.shape[1])[None] == 0
        significance_BT = jnp.where(first_T, jnp.inf, significance_BT)
    _, kept_BK = lax.top_k(lax.stop_gradient(significance_BT), keep)
    kept_BK = jnp.sort(kept_BK, axis=1)
    return jnp.take_along_axis(x_BTD, kept_BK[:, :, None], axis=1)


def weigh(x_BTD: Array, significance_BT: Array, retention_P: Array, *, cls: bool) -> Array:
    """Multiplies each patch, but no CLS token, by the retention of its significance's rank."""
    significance_BP = lax.stop_gradient(significance_BT)[:, int(cls) :]
    rank_BP = jnp.argsort(jnp.argsort(-significance_BP, axis=1), axis=1)
    weight_BT = jnp.pad(retention_P[rank_BP], ((0, 0), (int(cls), 0)), constant_values=1.0)
    return x_BTD * weight_BT[:, :, None].astype(x_BTD.dtype)


def learned_schedule(retention_LP: np.ndarray, *, cls: bool) -> tuple[int, ...]:
    """Returns the tokens after each block: its retentions' sum, rounded up, and never growing."""
    sums_L = np.ceil(retention_LP.astype(np.float64).sum(1) - 1e-3).astype(int)
    return tuple(max(int(n) + cls, 1) for n in np.minimum.accumulate(sums_L))


def mix(
    block: layers.Block, x_BTD: Array, context: ForwardContext, index: int
) -> tuple[Array, Array]:
    """Returns the tokens after a block's attention, and their significance (B, T)."""
    stream = index * layers.STREAMS_PER_BLOCK
    q_BNTE, k_BNSE, v_BNSE = block.mixer.project(block.norm1(x_BTD))
    scores_BNTS = jnp.einsum("bnte,bnse->bnts", q_BNTE, k_BNSE) * q_BNTE.shape[-1] ** -0.5
    weights_BNTS = jax.nn.softmax(normalise.wide(scores_BNTS), axis=-1)
    context.call_hook("attention", lambda: weights_BNTS)
    o_BNTE = jnp.einsum("bnts,bnse->bnte", weights_BNTS.astype(v_BNSE.dtype), v_BNSE)
    x_BTD = block.add(x_BTD, block.mixer.output(o_BNTE, context, stream), context, stream)
    return x_BTD, weights_BNTS.sum((1, 2))


class Encoder(vit.Encoder):
    """Blocks that keep the `retained` most significant tokens."""

    def __init__(self, c: DeiTConfig, key: Array) -> None:
        super().__init__(c, key)
        self.retained, self.cls = c.retained, c.cls

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T', D), T' as the last block has them."""
        kept = self.retained or (x_BTD.shape[1],) * len(self.blocks)
        for i, (block, count) in enumerate(zip(self.blocks, kept, strict=True)):
            if count == x_BTD.shape[1]:
                x_BTD = block(x_BTD, context, i)
                continue
            x_BTD, significance_BT = mix(block, x_BTD, context, i)
            x_BTD = keep_significant(x_BTD, significance_BT, count, cls=self.cls)
            x_BTD = block.feed(x_BTD, context, i)
        return x_BTD


class DeiT(vit.ViT):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    modules: ClassVar = {**vit.ViT.modules, "encoder": Encoder}
    paper_flops = hvt.HVT.paper_flops


class SoftlyPruned(DeiT):
    """The network with which PoWER learns its schedule: parameters of DeiT, and 'retention'.

    'retention' is how much of a patch stays after a block's attention, by its significance's rank.
    """

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        ranks = nnx.Param(jnp.ones((c.depth, prod(c.grid))))
        return {**super().parts(key), "retention": nnx.Dict(ranks=ranks)}

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD, cls = bound["embedding"](images_BHWC, context), self.config.cls
        for i, block in enumerate(bound["encoder"].blocks):
            x_BTD, significance_BT = mix(block, x_BTD, context, i)
            ranks_P = bound["retention"]["ranks"][...][i]
            x_BTD = weigh(x_BTD, significance_BT, ranks_P, cls=cls)
            x_BTD = block.feed(x_BTD, context, i)
        return bound["head"](x_BTD)


FAMILY = Family(
    name="deit",
    keys=settings.keys_of(DeiTConfig, patch=0),
    # The shares are the FLOPs of the HVT paper's table 1 over those of the network that keeps all
    # tokens: 0.80 of 1.2537 G and 2.70 of 4.5989 G.
    variants={
        "ti": {"heads": 3},
        "s": {},
        "ti-nocls": {"heads": 3, "cls": False},
        "s-nocls": {"cls": False},
        "ti-power": {"heads": 3, "flops_share": 0.80 / 1.2537},
        "s-power": {"flops_share": 2.70 / 4.5989},
    },
    default_variant="s",
    config=DeiTConfig,
    network=DeiT,
    automatic=hvt.FAMILY.automatic,
    paper_recipe="hvt",
    tiny=hvt.tiny,
)
