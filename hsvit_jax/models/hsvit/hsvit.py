"""HSViT: every convolution kernel's whole feature map is one token, attended to in groups.

Trunk: convolution blocks, then each channel's map is flattened and projected to one token. Groups:
the tokens are split into G contiguous attention groups that never meet; each has its own CLS,
positions and encoder. Head: the groups' CLS tokens are averaged, normalised and classified.

Source: HSViT paper, sections 3.1 to 3.3; where it is silent (projection, learned positions,
dropout) the authors' code. What can be spread over devices has a leading axis of groups or towers,
or is a kernel's output channels; the `GroupShard` in a call says which part is here.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.family import Family
from hsvit_jax.models.hsvit.groups import Groups
from hsvit_jax.models.hsvit.sizes import (
    DEFAULTS,
    VARIANTS,
    HSViTConfig,
    check_tiles,
    default_strides,
)
from hsvit_jax.models.hsvit.trunk import Trunk
from hsvit_jax.models.network import UNSHARDED, BoundModules, ForwardContext, GroupShard, Network
from hsvit_jax.ops import normalise
from hsvit_jax.ops.dropout import dropout_scale

__all__ = [
    "FAMILY",
    "VARIANTS",
    "HSViT",
    "HSViTConfig",
    "TowerHSViT",
    "default_strides",
]

Array = jax.Array

#: A trunk's convolutions: as in the paper, or depthwise and pointwise ones in their place.
CONVOLUTIONS = ("dense", "separable")

#: Stream of group dropout's masks; the embedding's is 0 and an attention block's its number from 1.
_VOTES = 1 << 20


class Head(nnx.Module):
    """LayerNorm and a linear classifier on the averaged CLS token."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.norm_scale = nnx.Param(jnp.ones(c.embed_dim))
        self.norm_bias = nnx.Param(jnp.zeros(c.embed_dim))
        self.linear = nnx.Dict(layers.torch_linear(key, (), c.embed_dim, c.num_classes))

    def __call__(self, cls_BD: Array) -> Array:
        """(B, D) → logits (B, K)."""
        y_BD = normalise.layer_norm(cls_BD, self.norm_scale[...][None], self.norm_bias[...][None])
        kernel_DK = self.linear["kernel"][...].astype(y_BD.dtype)
        return y_BD @ kernel_DK + self.linear["bias"][...].astype(y_BD.dtype)[None]


def average_votes(
    c: HSViTConfig, context: ForwardContext, cls_GBD: Array, here_G: Array, vote_G: Array | None
) -> Array:
    """The CLS outputs of the groups that vote, averaged over all devices: (B, D).

    cls: of the groups that are here, numbered here_G among all c.groups; vote: their learned
    weights, None where all count alike. A group whose weight in the call is 0, or that group
    dropout leaves out, does not count; an example that would lose all keeps all. Learned weights of
    the groups left are then divided by their share of all groups' (of absolute values).
    """
    if vote_G is not None:
        vote_G = vote_G.astype(cls_GBD.dtype)
        cls_GBD = cls_GBD * vote_G[:, None, None]
    if context.votes_G is None and (context.key_words is None or not c.group_dropout):
        total_BD = context.shard.sum(cls_GBD)
        return total_BD / c.groups if vote_G is None else total_BD
    weights_GB = jnp.ones((c.groups, cls_GBD.shape[1]), cls_GBD.dtype)
    if context.votes_G is not None:
        weights_GB *= context.votes_G.astype(cls_GBD.dtype)[:, None]
    if context.key_words is not None and c.group_dropout:
        groups, examples = jnp.arange(c.groups)[:, None], context.example_ids_B[None]
        words = (*context.key_words, _VOTES, groups, examples)
        kept_GB = weights_GB * (dropout_scale(words, weights_GB.shape, c.group_dropout) > 0)
        weights_GB = jnp.where(kept_GB.sum(0, keepdims=True) > 0, kept_GB, weights_GB)
    if vote_G is None:
        total_BD = context.shard.sum(cls_GBD * weights_GB[here_G][:, :, None])
        return total_BD / weights_GB.sum(0)[:, None]
    size_G = jnp.abs(context.shard.all_gather(vote_G, 0))
    share_B = (weights_GB * size_G[:, None]).sum(0) / size_G.sum()
    share_B = jnp.where(share_B > 0, share_B, 1)  # of those left none has a vote
    return context.shard.sum(cls_GBD * (weights_GB[here_G] / share_B[None])[:, :, None])


def without_votes(context: ForwardContext, groups: int, lost: Collection[int]) -> ForwardContext:
    """The call with the votes of lost groups taken away."""
    if not lost:
        return context
    votes_G = jnp.ones(groups) if context.votes_G is None else context.votes_G
    return dataclasses.replace(context, votes_G=votes_G.at[jnp.array(sorted(lost))].set(0.0))


def _refuse_learned(c: HSViTConfig) -> None:
    """Learned votes are normalised over all groups, lost ones too, and theirs are gone."""
    if c.votes == "learned":
        raise ValueError("a network with model.votes='learned' cannot lose groups in training")


def show_votes(head: Head, cls_GBD: Array, context: ForwardContext) -> None:
    """What the head would say to each group's CLS alone."""

    def votes_GBK() -> Array:
        g, batch, d = cls_GBD.shape
        return head(cls_GBD.reshape(g * batch, d)).reshape(g, batch, -1)

    context.call_hook("votes", votes_GBK)


class HSViT(Network):
    """The reference network. Parameters: {'trunk', 'groups' (leading G axis), 'head'}."""

    def __init__(self, config: HSViTConfig, dtype: jnp.dtype = jnp.float32) -> None:
        super().__init__(config, dtype)
        self.group_axis_limit = config.groups
        if config.trunk == "sharded":
            self.group_axis_limit = gcd(config.groups, *config.conv_channels)

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        trunk_key, groups_key, head_key = jax.random.split(key, 3)
        parts = {"trunk": Trunk(self.config, trunk_key), "head": Head(self.config, head_key)}
        if self.config.groups:
            parts["groups"] = Groups(self.config, groups_key)
        return parts

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        if path[0] == "groups":
            return 0
        if self.config.trunk == "sharded" and path[:2] == ("trunk", "blocks"):
            return 3 if {"kernels", "depthwise"} & {*path} else 0
        return None

    def without(self, lost: Collection[int]) -> Network:
        if not self.config.groups or self.config.trunk == "sharded":
            raise ValueError("only a network with groups and a whole trunk can lose groups")
        _refuse_learned(self.config)
        return super().without(lost)

    def _numbers(self) -> Array:
        """Of the groups that are there (with kernels spread, what is spread is not the groups)."""
        return self.surviving() if self.lost else jnp.arange(self.config.groups)

    def group_cls(
        self,
        bound: BoundModules,
        images_BHWC: Array,
        context: ForwardContext,
        first_group: Array | int = 0,
    ) -> Array:
        """CLS outputs (G, B, D) of the groups that are here; first_group numbers this network's."""
        c = self.config
        per_group = c.conv_channels[-1] // c.groups
        here = context.shard.slice(first_group + self._numbers(), 0)
        sharded = c.trunk == "sharded"
        first_token = (here[0] if sharded else first_group) * per_group
        kernels = context.shard if sharded else UNSHARDED
        z_BCD = self.channel_tokens(bound, images_BHWC, context, kernels, first_token)
        z_BGTD = z_BCD.reshape(len(images_BHWC), -1, per_group, z_BCD.shape[-1])
        if self.lost:
            z_BGTD = z_BGTD[:, self.surviving()]
        if context.shard.ordered:  # nothing of the trunk may be fused with what depends on the mesh
            z_BGTD = jax.lax.optimization_barrier(z_BGTD)
        if not sharded:
            z_BGTD = context.shard.slice(z_BGTD, 1)
        if not context.shard.ordered:
            return bound["groups"](z_BGTD, context, here)
        # One by one: a product's bits can depend on how many are batched with it.
        params = bound.params("groups")
        return jnp.concatenate(
            [
                self.bind({"groups": jax.tree.map(lambda x, i=i: x[i : i + 1], params)}, {})[
                    "groups"
                ](z_BGTD[:, i : i + 1], context, here[i : i + 1])
                for i in range(len(here))
            ]
        )

    def channel_tokens(
        self,
        bound: BoundModules,
        images_BHWC: Array,
        context: ForwardContext,
        kernels: GroupShard,
        first_token: Array | int,
    ) -> Array:
        """Tokens (B, C, D) of the channels that are here, the first numbered first_token."""
        return bound["trunk"](images_BHWC, context, kernels, first_token)

    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        bound = self.bind(params, stats)
        if self.config.groups:
            cls_GBD = self.group_cls(bound, images_BHWC, context)
            here_G = context.shard.slice(self._numbers(), 0)
            context = without_votes(context, self.config.groups, self.lost)
            vote_G = params["groups"].get("vote")
            cls_BD = average_votes(self.config, context, cls_GBD, here_G, vote_G)
            show_votes(bound["head"], cls_GBD, context)
        else:
            cls_BD = bound["trunk"](images_BHWC, context, UNSHARDED, 0).mean(1)
        return bound["head"](cls_BD), bound.stats()

    def saved_multiply_adds(self) -> dict[str, int]:
        """The last attention block's, which `forward` computes for the CLS token alone."""
        c = self.config
        if not c.groups:
            return {}
        others, d = c.tokens - 1, c.embed_dim  # two products with kernels, two of tokens
        return {f"groups.blocks.{c.depth - 1}": c.groups * 2 * others * d * (d + c.tokens)}


class TowerHSViT(Network):
    """K independent towers, each a small HSViT with its own kernels; only CLS tokens meet.

    Parameters: {'towers' (a tower's 'trunk' and 'groups', each leaf with a leading K axis),
    'head'}. Source: paper, section 3.2; the reference implementation has one tower.
    """

    def __init__(self, config: HSViTConfig, dtype: jnp.dtype = jnp.float32) -> None:
        super().__init__(config, dtype)
        self.tower = HSViT(config.tower, dtype)
        self.group_axis_limit = config.towers

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        return {"head": Head(self.config, key)}

    @property
    def part_names(self) -> tuple[str, ...]:
        return ("towers", "head")

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        return 0 if path[0] == "towers" else None

    def with_frozen(self, names: Collection[str]) -> Network:
        frozen = super().with_frozen(names)
        if "towers" in names:
            frozen.tower = copy.copy(self.tower)
            frozen.tower.frozen = frozenset(self.tower.part_names)
        return frozen

    def without(self, lost: Collection[int]) -> Network:
        _refuse_learned(self.config)
        return super().without(lost)

    def init(self, key: Array) -> tuple[dict, dict]:
        """Fresh (params, stats); each tower is started as a network of its own."""
        head_key, *tower_keys = jax.random.split(key, self.config.towers + 1)
        params, stats = super().init(head_key)
        towers, tower_stats = jax.vmap(self.tower.init)(jnp.stack(tower_keys))
        towers.pop("head")
        if self.config.votes == "learned":
            towers["groups"]["vote"] /= self.config.towers
        return {**params, "towers": towers}, {**stats, "towers": tower_stats}

    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        ids_K = context.shard.slice(self.surviving(), 0)
        alone = dataclasses.replace(context, shard=UNSHARDED)

        def run(tower: tuple[dict, dict, Array]) -> tuple[Array, dict]:
            own_params, own_stats, number = tower
            bound = self.tower.bind(own_params, own_stats)
            first_group = number * self.tower.config.groups
            tile_BHWC = self.tile(images_BHWC, number)
            return self.tower.group_cls(bound, tile_BHWC, alone, first_group), bound.stats()

        here = (params["towers"], stats["towers"], ids_K)
        # No loop where it would be compiled differently, nor where what is shown must leave it.
        if len(ids_K) == 1 or context.shard.ordered or context.hook is not None:
            own = [jax.tree.map(lambda x, k=k: x[k], here) for k in range(len(ids_K))]
            cls, stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(run, own))
        else:
            cls, stacked = jax.lax.map(run, here)
        cls_GBD = cls.reshape(-1, *cls.shape[2:])
        per_tower = jnp.arange(self.tower.config.groups)
        here_G = (ids_K[:, None] * len(per_tower) + per_tower[None]).reshape(-1)
        context = without_votes(
            context,
            self.config.groups,
            [k * len(per_tower) + g for k in self.lost for g in range(len(per_tower))],
        )
        vote_KG = params["towers"]["groups"].get("vote")
        vote_G = None if vote_KG is None else vote_KG.reshape(-1)
        cls_BD = average_votes(self.config, context, cls_GBD, here_G, vote_G)
        head = self.bind(params, {})["head"]
        show_votes(head, cls_GBD, context)
        return head(cls_BD), {**stats, "towers": stacked}

    def tile(self, images_BHWC: Array, tower: Array | int) -> Array:
        """The part of each image that a tower sees: (B, H / rows, W / columns, C)."""
        c = self.config
        if c.tiles == (1, 1):
            return images_BHWC
        zero = jnp.int32(0)  # all of one type, in double precision too
        row, column = jnp.divmod(zero + tower % prod(c.tiles), c.tiles[1])
        places = (zero, row * c.tile_size[0], column * c.tile_size[1], zero)
        size = (images_BHWC.shape[0], *c.tile_size, images_BHWC.shape[3])
        return jax.lax.dynamic_slice(images_BHWC, places, size)

    def saved_multiply_adds(self) -> dict[str, int]:
        tower = self.tower.saved_multiply_adds()
        return {f"towers.{name}": self.config.towers * macs for name, macs in tower.items()}


def _strides(settings: Mapping[str, Any], image_size: tuple[int, int]) -> tuple[int, ...]:
    """The variant's own pool strides for this size of image, or of tile."""
    tiles = settings["tiles"]
    check_tiles(image_size, tiles, settings["towers"])
    if settings["ablation"] == "attention_only":
        return (1,) * len(settings["conv_kernels"])
    tile = (image_size[0] // tiles[0], image_size[1] // tiles[1])
    return default_strides(settings["variant"], tile)


def _config(
    *, ablation: str, convolution: str, conv_kernels: tuple[int, ...], groups: int, **settings: Any
) -> HSViTConfig:
    """An HSViT's sizes.

    Args:
        ablation: 'none', 'conv_only' (no attention) or 'attention_only' (no convolution; images of
            embed_dim pixels).
        convolution: see `CONVOLUTIONS`.
    """
    if convolution not in CONVOLUTIONS:
        raise ValueError(f"unknown model.convolution {convolution!r}; choose one of {CONVOLUTIONS}")
    if ablation == "attention_only":
        conv_kernels = (*conv_kernels[:-1], 0)
    elif ablation == "conv_only":
        groups = 0
    elif ablation != "none":
        raise ValueError(
            f"unknown model.ablation {ablation!r}; choose none, conv_only or attention_only"
        )
    separable = convolution == "separable"
    return HSViTConfig(conv_kernels=conv_kernels, groups=groups, separable=separable, **settings)


def _network(config: HSViTConfig, dtype: jnp.dtype) -> HSViT:
    return TowerHSViT(config, dtype) if config.towers > 1 else HSViT(config, dtype)


def _tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a smoke run, with as many convolution blocks as its own."""
    channels = (8,) * (len(settings["conv_channels"]) - 1) + (16,)
    return {"conv_channels": channels, "groups": 4, "depth": 2, "embed_dim": 16, "heads": 2}


FAMILY = Family(
    name="hsvit",
    defaults=DEFAULTS,
    variants=VARIANTS,
    default_variant="c2a2",
    config=_config,
    network=_network,
    automatic={"pool_strides": _strides},
    named_by=("conv_channels", "depth"),
    tiny=_tiny,
)
