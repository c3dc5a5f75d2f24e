"""DeiT, with or without a CLS token, and with PoWER's token pruning.

The network of `vit` by timm's sizes. Source: the HVT paper, which compares with it in tables 1, 2,
4 and 9 (HVT-S-0 is DeiT-S without CLS token).
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import settings
from hsvit_jax.models.family import Family, scaled
from hsvit_jax.models.network import BoundModules, ForwardContext
from hsvit_jax.models.vit import hvt, token_pruning, vit

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DeiTConfig(vit.PatchSizes):
    """Sizes of a DeiT; retained tokens include CLS (`token_pruning`)."""

    patch: int = settings.patch(16, meaning="patch size in pixels; 0: by the image size", low=0)
    heads: int = settings.heads(6)
    head_dim: int = settings.width(64, "width of an attention head")
    depth: int = settings.depth(12, "blocks")
    mlp_ratio: float = settings.mlp_ratio(4.0)
    qkv_bias: bool = settings.qkv_bias(True)
    eps: float = settings.epsilon(1e-6, meaning="epsilon of normalisation")
    drop_path: float = settings.drop_path(0.1)
    cls: bool = settings.setting(True, "classify a CLS token rather than the tokens' mean")
    retained: tuple[int, ...] = settings.setting(
        (), "tokens kept by each block; empty: all", low=1, high=2**26
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retained:
            token_pruning.check_retained(self.retained, self.depth, self.tokens)

    @property
    def hidden(self) -> int:
        """Width inside a feed-forward."""
        return scaled(self.dim, self.mlp_ratio)


#: The settings of DeiT-S; an empty patch is `hvt.default_patch`'s.
KEYS: Mapping[str, settings.Key] = {
    **settings.keys_of(DeiTConfig, patch=0),
    "flops_share": settings.Key(
        "fraction of the FLOPs that a token-pruning schedule keeps, in place of retained",
        above=0.0,
        high=1.0,
        default=1.0,
    ),
}
#: Named systems, as they differ from the defaults. The shares are the FLOPs of the HVT paper's
#: table 1 over those of the network that keeps all tokens: 0.80 of 1.2537 G and 2.70 of 4.5989 G.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "ti": {"heads": 3},
    "s": {},
    "ti-nocls": {"heads": 3, "cls": False},
    "s-nocls": {"cls": False},
    "ti-power": {"heads": 3, "flops_share": 0.80 / 1.2537},
    "s-power": {"flops_share": 2.70 / 4.5989},
}


def multiply_adds(c: DeiTConfig, retained: tuple[int, ...]) -> int:
    """Multiply-adds of one image, with retained[i] tokens left after the attention of block i.

    A formula, because the search for a schedule evaluates it for every number of tokens.
    """
    d = c.dim
    total = prod(c.grid) * c.patch**2 * c.image_channels * d + d * c.num_classes
    for before, after in pairwise((c.tokens, *retained)):
        total += before * (4 * d * d + 2 * before * d) + 2 * after * d * c.hidden
    return total


def _config(*, retained: tuple[int, ...], flops_share: float, **values: Any) -> DeiTConfig:
    """A DeiT's sizes. flops_share below 1 makes PoWER's schedule, `token_pruning.linear_schedule`;
    the paper's own is not published. Raises ValueError when `retained` is given as well."""
    config = DeiTConfig(retained=retained, **values)
    if flops_share == 1:
        return config
    if retained:
        raise ValueError(
            f"model.retained={retained} and model.flops_share={flops_share} both say how many "
            "tokens stay: leave one of them at () or 1.0"
        )
    cost = partial(multiply_adds, config)
    schedule = token_pruning.linear_schedule(config.depth, config.tokens, flops_share, cost)
    return dataclasses.replace(config, retained=schedule)


class Encoder(vit.Encoder):
    """Blocks that keep the most significant tokens alone, where `retained` asks for it."""

    def __init__(self, c: DeiTConfig, key: Array) -> None:
        super().__init__(c, key)
        self.retained, self.cls = c.retained, c.cls

    def __call__(self, x_BTD: Array, context: ForwardContext) -> Array:
        """(B, T, D) → (B, T', D), T' of the last block."""
        kept = self.retained or (x_BTD.shape[1],) * len(self.blocks)
        for i, (block, count) in enumerate(zip(self.blocks, kept, strict=True)):
            if count == x_BTD.shape[1]:
                x_BTD = block(x_BTD, context, i)
                continue
            x_BTD, significance_BT = token_pruning.mix(block, x_BTD, context, i)
            x_BTD = token_pruning.keep_significant(x_BTD, significance_BT, count, cls=self.cls)
            x_BTD = block.feed(x_BTD, context, i)
        return x_BTD


class DeiT(vit.ViT):
    """Parameters: {'embedding', 'encoder', 'head'}."""

    encoder_module = Encoder

    def paper_flops(self, multiply_adds: int) -> tuple[int, str]:
        """The HVT paper's FLOPs, tables 1 to 9."""
        return multiply_adds, "multiply-adds, attention's included"


class SoftlyPruned(DeiT):
    """The network with which PoWER learns its schedule: parameters of DeiT, and 'retention'.

    That is how much of a patch stays after each block's attention, by the rank of its significance.
    """

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c = self.config
        ranks = nnx.Param(jnp.ones((c.depth, prod(c.grid))))
        return {**super().parts(key), "retention": nnx.Dict(ranks=ranks)}

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BTD, cls = bound["embedding"](images_BHWC, context), self.config.cls
        for i, block in enumerate(bound["encoder"].blocks):
            x_BTD, significance_BT = token_pruning.mix(block, x_BTD, context, i)
            ranks_P = bound["retention"]["ranks"][...][i]
            x_BTD = token_pruning.weigh(x_BTD, significance_BT, ranks_P, cls=cls)
            x_BTD = block.feed(x_BTD, context, i)
        return bound["head"](x_BTD)


FAMILY = Family(
    name="deit",
    keys=KEYS,
    variants=VARIANTS,
    default_variant="s",
    config=_config,
    network=DeiT,
    automatic=hvt.FAMILY.automatic,
    paper_recipe="hvt",
    tiny=hvt.tiny,
)
