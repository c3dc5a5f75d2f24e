"""HSViT: the feature map of every convolution kernel is one token, attended to in groups.

Source: the HSViT paper. Section 3.1, the feature processing pipeline, for K groups of N kernels:

    x                                  an image, C × H × W
    F = trunk(x)                       K·N feature maps, downsampled by Q: H/Q × W/Q each
    z = embed(flatten(F))              K·N image-level embeddings of width D
    z_k = (CLS_k, z[kN : (k+1)N])      attention group k of K: 1 + N tokens, plus positions
    z_k ← z_k + MHSA(LN(z_k))          in each attention block, within the group
    CLS = 1/K · Σ_k z_k[0]             average pooling, or a vote, of the groups' CLS tokens
    logits = FC(LN(CLS))               the final prediction

Section 3.2, horizontal scalability: groups exchange nothing but their CLS tokens, so each device
computes groups of its own (`HSViT`, with one trunk for all groups) or whole submodules, kernels and
groups (`TowerHSViT`). The projection, positions, norms and dropout are those of the authors' code.

Here K is G, and 1 + N is T. Everything that can be spread over devices has a leading axis of groups
or towers, or is a kernel's output channels; `ForwardContext.shard` names this device's part.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.family import Family
from hsvit_jax.models.hsvit import growth, votes
from hsvit_jax.models.hsvit.groups import Groups
from hsvit_jax.models.hsvit.sizes import VARIANTS, HSViTConfig
from hsvit_jax.models.hsvit.trunk import Trunk
from hsvit_jax.models.network import (
    UNSHARDED,
    BoundModules,
    ForwardContext,
    GroupShard,
    Network,
    grid_of,
)
from hsvit_jax.ops import normalise

Array = jax.Array


class Head(nnx.Module):
    """The final prediction from the averaged CLS token: LayerNorm and a linear classifier."""

    def __init__(self, c: HSViTConfig, key: Array) -> None:
        self.norm_scale = nnx.Param(jnp.ones(c.embed_dim))
        self.norm_bias = nnx.Param(jnp.zeros(c.embed_dim))
        self.linear = layers.Linear(c.embed_dim, c.num_classes, key)

    def __call__(self, cls_BD: Array) -> Array:
        """(B, D) → logits (B, K)."""
        scale_1D, bias_1D = self.norm_scale[...][None], self.norm_bias[...][None]
        return self.linear(normalise.layer_norm(cls_BD, scale_1D, bias_1D))


class HSViT(Network):
    """One trunk, whose kernels all groups share (section 3.1), as in the authors' code.

    A subclass may replace modules. Its own groups run together on one device, unless it sets
    `splits` and `independent`.

    Parameters: {'trunk', 'groups' (each leaf with a leading G axis), 'head'}.

    Attributes:
        trunk_module, groups_module, head_module: classes of the modules; each takes config and key.
        splits: 'groups' if a group reads others by `GroupShard` alone; see `Network`.
        independent: whether a group reads nothing of another one.
        silent: numbers of groups without a vote, see `silencing`.
    """

    trunk_module: type[nnx.Module] = Trunk
    groups_module: type[nnx.Module] = Groups
    head_module: type[nnx.Module] = Head
    splits = "groups"
    independent = True
    silent: frozenset[int] = frozenset()
    whitens = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "groups_module" in vars(cls):
            for name, careful in (("splits", None), ("independent", False)):
                if name not in vars(cls):
                    setattr(cls, name, careful)

    def __init__(self, config: HSViTConfig, dtype: jnp.dtype = jnp.float32) -> None:
        super().__init__(config, dtype)
        if not config.groups:
            self.splits = None
        self.voters = self.units = config.groups if self.independent else 0
        if self.splits:
            self.group_axis_limit = config.groups
            if config.trunk == "sharded":
                self.group_axis_limit = gcd(config.groups, *config.conv_channels)

    @classmethod
    def of(cls, config: HSViTConfig, dtype: jnp.dtype = jnp.float32) -> Network:
        if getattr(config, "towers", 1) == 1:
            return cls(config, dtype)
        if cls is not HSViT:
            raise ValueError(
                f"model.towers={config.towers}, but {cls.__name__} has one trunk: set 1"
            )
        return TowerHSViT(config, dtype)

    @staticmethod
    def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns changes as `Network.tiny`, for as many convolution blocks as in `settings`."""
        channels = (8,) * (len(settings["conv_channels"]) - 1) + (16,)
        return {"conv_channels": channels, "groups": 4, "depth": 2, "embed_dim": 16, "heads": 2}

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        c, (trunk_key, groups_key, head_key) = self.config, jax.random.split(key, 3)
        parts = {"trunk": self.trunk_module(c, trunk_key), "head": self.head_module(c, head_key)}
        if c.groups:
            parts["groups"] = self.groups_module(c, groups_key)
        return parts

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Returns the map of a kernel, as `Network.grid`; with tiles it is a tile's."""
        return grid_of([self.config.map_size], tokens)

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        if path[0] == "groups":
            return 0
        if self.config.trunk == "sharded" and path[:2] == ("trunk", "blocks"):
            return 3 if {"kernels", "depthwise"} & {*path} else 0
        return None

    def without(self, lost: Collection[int]) -> Network:
        if not self.voters or self.config.trunk == "sharded":
            raise ValueError("only independent groups behind a whole trunk can be lost")
        if self.config.votes == "learned":  # normalised by all groups' weights
            raise ValueError("a network with model.votes='learned' cannot lose groups in training")
        return super().without(lost)

    def silencing(self, lost: Collection[int]) -> "HSViT":
        """Returns this network with votes of weight 0 for these groups or towers."""
        silenced, left = copy.copy(self), self.without(lost).group_ids()
        silenced.silent = frozenset(range(self.config.groups)) - frozenset(left.tolist())
        return silenced

    def grown(self, params: dict, stats: dict, old: Network, key: Array) -> tuple[dict, dict]:
        return growth.grow(params, stats, old, self, key)

    def resized(self, **sizes: Any) -> Network:
        resized = super().resized(**sizes)
        resized.silent = self.silent
        return resized

    def group_ids(self) -> np.ndarray:
        """Returns the sorted numbers of the surviving attention groups."""
        per_unit = self.config.groups // max(self.group_axis_limit + len(self.lost), 1)
        ids = (g for g in range(self.config.groups) if g // per_unit not in self.lost)
        return np.fromiter(ids, np.int32)

    def group_cls(
        self,
        bound: BoundModules,
        images_BHWC: Array,
        context: ForwardContext,
        first_group: Array | int = 0,
    ) -> Array:
        """Returns CLS tokens (G, B, D) of this device's groups after self-attention.

        Args:
            bound: the modules with their parameters.
            images_BHWC: normalised images, the same on every device.
            first_group: number of the network's first group, which is not 0 for a tower.
        """
        c, shard, sharded = self.config, context.shard, self.config.trunk == "sharded"
        per_group = c.conv_channels[-1] // c.groups
        group_ids_G = shard.slice(first_group + jnp.asarray(self.group_ids()), 0)
        first_token = (group_ids_G[0] if sharded else first_group) * per_group
        # F = trunk(x), z = embed(flatten(F)): of all kernels, or of this device's.
        kernels = shard if sharded else UNSHARDED
        z_BCD = self.channel_tokens(bound, images_BHWC, context, kernels, first_token)
        # z[kN : (k+1)N]: contiguous embeddings make a group.
        z_BGTD = z_BCD.reshape(images_BHWC.shape[0], -1, per_group, z_BCD.shape[-1])
        # The trunk of a part has only the surviving groups' kernels.
        if self.lost and z_BGTD.shape[1] > self.group_axis_limit:
            z_BGTD = z_BGTD[:, self.surviving()]
        if shard.ordered:  # the trunk's fusions must not depend on the mesh
            z_BGTD = jax.lax.optimization_barrier(z_BGTD)
        if not sharded:
            z_BGTD = shard.slice(z_BGTD, 1)
        # z_k ← z_k + MHSA(LN(z_k)), up to the CLS tokens.
        if not shard.ordered:
            return bound["groups"](z_BGTD, context, group_ids_G)
        if not self.independent:
            raise ValueError(
                "mesh.aggregate='ordered' computes each attention group by itself, and those "
                f"of {type(self).__name__} read each other: set 'psum'"
            )
        # One group at a time: a product's rounding can depend on the number of groups.
        cls, params = [], bound.trees("groups")[0]
        for i in range(len(group_ids_G)):
            group = {"groups": jax.tree.map(lambda x, i=i: x[i : i + 1], params)}
            groups = self.bind(group, {})["groups"]
            cls.append(groups(z_BGTD[:, i : i + 1], context, group_ids_G[i : i + 1]))
        return jnp.concatenate(cls)

    def channel_tokens(
        self,
        bound: BoundModules,
        images_BHWC: Array,
        context: ForwardContext,
        kernels: GroupShard,
        first_token: Array | int,
    ) -> Array:
        """Returns embeddings (B, C, D) of this device's kernels, numbered from first_token."""
        return bound["trunk"](images_BHWC, context, kernels, first_token)

    def cls_tokens(
        self, bound: BoundModules, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        """Returns CLS tokens (G, B, D) of this device's groups, and new statistics."""
        return self.group_cls(bound, images_BHWC, context), bound.stats()

    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        """Returns FC(LN(CLS)) for CLS = 1/K · Σ_k z_k[0] of all devices' groups."""
        c, bound = self.config, self.bind(params, stats)
        if not c.groups:
            cls_BD = self.channel_tokens(bound, images_BHWC, context, UNSHARDED, 0).mean(1)
            return bound["head"](cls_BD), bound.stats()
        cls_GBD, stats = self.cls_tokens(bound, images_BHWC, context)
        ids_G = self.group_ids()
        silent = self.silent | {*range(c.groups)} - {*ids_G.tolist()}
        weights_GB = votes.weights(cls_GBD, c.groups, silent, c.group_dropout, context)
        if weights_GB is not None and self.lost:
            weights_GB = weights_GB[ids_G]
        cls_BD = votes.average(cls_GBD, weights_GB, self.learned(params), context.shard)
        (g, batch, d), head = cls_GBD.shape, bound["head"]
        context.call_hook(
            "votes", lambda: head(cls_GBD.reshape(g * batch, d)).reshape(g, batch, -1)
        )
        return head(cls_BD), stats

    def learned(self, params: dict) -> Array | None:
        """Returns the learned weights of the groups in `params`; None for the plain average."""
        vote = self.body(params)["groups"].get("vote")
        return None if vote is None else vote.reshape(-1)

    def terms(self, params: dict, stats: dict, images_BHWC: Array) -> Array:
        """Returns each group's CLS token times its weight, the terms (G, B, D) of a `tally`.

        They are an evaluation's, in at least float32.
        """
        x_BHWC = images_BHWC.astype(self.dtype)
        context = ForwardContext(False, None, jnp.arange(x_BHWC.shape[0]))
        cls_GBD = self.cls_tokens(self.bind(params, stats), x_BHWC, context)[0]
        cls_GBD = normalise.wide(cls_GBD)
        if (vote_G := self.learned(params)) is not None:
            cls_GBD *= vote_G[:, None, None]
        if self.silent:
            cls_GBD *= np.array([[[g not in self.silent]] for g in self.group_ids()])
        return cls_GBD

    def saved_multiply_adds(self) -> dict[str, int]:
        """Returns those of the last attention block, which `forward` computes for CLS alone."""
        c = self.config
        if not c.groups:
            return {}
        d, t = c.embed_dim, c.tokens
        projections, attention = 2 * (t - 1) * d * d, 2 * (t - 1) * t * d
        return {f"groups.blocks.{c.depth - 1}": c.groups * (projections + attention)}


class TowerHSViT(HSViT):
    """K submodules (section 3.2): each a small HSViT with its own kernels and groups, and no head.

    Only the CLS tokens are exchanged. The authors' code has one submodule.

    Parameters: {'towers' (a tower's 'trunk' and 'groups', each leaf with a leading K axis),
    'head'}.
    """

    splits = "towers"

    def __init__(self, config: HSViTConfig, dtype: jnp.dtype = jnp.float32) -> None:
        super().__init__(config, dtype)
        self.tower = HSViT(config.tower, dtype)
        self.group_axis_limit = self.units = config.towers
        for kind, shapes in self.tower.shapes.items():
            self.shapes[kind] |= {
                ("towers", *path): (config.towers, *shape)
                for path, shape in shapes.items()
                if path[0] != "head"
            }

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        return {"head": self.head_module(self.config, key)}

    def body(self, tree: dict) -> dict:
        return tree["towers"]

    @staticmethod
    def of_one(tree: dict) -> dict:
        """Turns the tree of a network without towers into that of a network with one."""
        inside = {part: tree[part] for part in ("trunk", "groups") if part in tree}
        outside = {part: tree[part] for part in tree if part not in inside}
        return {**outside, "towers": jax.tree.map(lambda x: np.asarray(x)[None], inside)}

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

    def init(self, key: Array) -> tuple[dict, dict]:
        """Draws (params, stats); each tower starts as a separate network."""
        head_key, *tower_keys = jax.random.split(key, self.config.towers + 1)
        params, stats = super().init(head_key)
        towers, tower_stats = jax.vmap(self.tower.init)(jnp.stack(tower_keys))
        towers.pop("head")
        if self.config.votes == "learned":
            towers["groups"]["vote"] /= self.config.towers
        return {**params, "towers": towers}, {**stats, "towers": tower_stats}

    def cls_tokens(
        self, bound: BoundModules, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        """Returns CLS tokens (G, B, D) of this device's towers' groups, and new statistics."""
        tower_ids_K = context.shard.slice(self.surviving(), 0)
        tower_context = dataclasses.replace(context, shard=UNSHARDED)

        def run(tower: tuple[dict, dict, Array]) -> tuple[Array, dict]:
            *trees, number = tower
            modules, first_group = self.tower.bind(*trees), number * self.tower.config.groups
            tile_BHWC = self.tile(images_BHWC, number)
            cls_GBD = self.tower.group_cls(modules, tile_BHWC, tower_context, first_group)
            return cls_GBD, modules.stats()

        towers = (*bound.trees("towers"), tower_ids_K)
        # A loop would be compiled differently, and a hook's arrays could not leave it.
        if len(tower_ids_K) == 1 or context.shard.ordered or context.hook is not None:
            each = [jax.tree.map(lambda x, k=k: x[k], towers) for k in range(len(tower_ids_K))]
            cls, tower_stats = jax.tree.map(lambda *x: jnp.stack(x), *map(run, each))
        else:
            cls, tower_stats = jax.lax.map(run, towers)
        return cls.reshape(-1, *cls.shape[2:]), {**bound.stats(), "towers": tower_stats}

    def tile(self, images_BHWC: Array, tower: Array | int) -> Array:
        """Returns a tower's tile of each image: (B, H / rows, W / columns, C)."""
        c = self.config
        if c.tiles == (1, 1):
            return images_BHWC
        tiles_K = np.arange(c.towers) % prod(c.tiles)
        corners_K2 = np.stack(np.divmod(tiles_K, c.tiles[1]), 1) * np.array(c.tile_size)
        zero = jnp.int32(0)  # indices of one dtype, in double precision too
        corner = (zero, *jnp.asarray(corners_K2, jnp.int32)[tower], zero)
        size = (images_BHWC.shape[0], *c.tile_size, images_BHWC.shape[3])
        return jax.lax.dynamic_slice(images_BHWC, corner, size)

    def saved_multiply_adds(self) -> dict[str, int]:
        tower = self.tower.saved_multiply_adds()
        return {f"towers.{name}": self.config.towers * macs for name, macs in tower.items()}


FAMILY = Family(
    name="hsvit",
    variants=VARIANTS,
    config=HSViTConfig,
    network=HSViT,
    automatic={"pool_strides": lambda settings, image_size: ()},  # `HSViTConfig` fills them
    named_by=("conv_channels", "depth"),
    paper_recipe="hsvit",
)
