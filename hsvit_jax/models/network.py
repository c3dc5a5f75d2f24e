"""The interface of every family: a network as two pure functions over plain nested dicts.

A family lists its parts (Flax modules) and defines the forward pass through them. A
`ForwardContext` carries everything about a pass but parameters and images; a `GroupShard` names the
part of the network on this device.
"""

import contextvars
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from math import gcd, isqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from hsvit_jax.ops.normalise import moments_dtype, wide

Array = jax.Array


#: True while only shapes of parameters are needed: random numbers would trace slowly.
_shapes_only = contextvars.ContextVar("shapes_only", default=False)


def draw(sample: Callable[..., Array], key: Array, shape: Iterable[int], *args: float) -> Array:
    """Draws a parameter: `sample(key, shape, float32, *args)`, a function of `jax.random`."""
    shape = tuple(shape)
    return jnp.zeros(shape) if _shapes_only.get() else sample(key, shape, jnp.float32, *args)


class GroupShard:
    """The part of a network on this device: here, all of it. A mesh supplies its own."""

    size = 1  # devices that share the network
    ordered = False  # add in the order of the groups, each computed by itself

    def slice(self, x: Array, axis: int) -> Array:
        """Returns this device's part along `axis` of an array that every device has."""
        return x

    def all_gather(self, x: Array, axis: int) -> Array:
        """Concatenates all devices' parts of x in order along `axis`."""
        return x

    def sum(self, x_GBD: Array) -> Array:
        """Sums over the first axis and over all devices: (B, D)."""
        return x_GBD.sum(0)


UNSHARDED = GroupShard()


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """One forward pass: its mode, its randomness, and where it runs.

    Attributes:
        train: use the batch's statistics and update the running ones.
        key_words: two uint32 scalars that key this step's dropout masks; None for no dropout.
        example_ids_B: identity of each example; its masks do not depend on its place in the batch.
        batch_axes: mesh axes over which `shard_map` splits the batch.
        shard: the part of the network on this device.
        votes_G: weight of each group's CLS token in the average, 0 for a lost one; None: equal.
        hook: callback `(name, array)` that receives intermediate activations, see `call_hook`.
    """

    train: bool
    key_words: tuple[Array, ...] | None
    example_ids_B: Array
    batch_axes: tuple[str, ...] = ()
    shard: GroupShard = UNSHARDED
    votes_G: Array | None = None
    hook: Callable[[str, Array], None] | None = None

    def call_hook(self, name: str, compute: Callable[[], Array]) -> None:
        """Passes an intermediate activation to the hook, if any.

        Names: 'attention' (B, N, T, S), weights of a block's heads; 'tokens' (B, T, D), after a
        block; 'maps' (B, H, W, C), the last feature map. HSViT has also 'group attention' (G, B, N,
        T, S) and 'votes' (G, B, K), logits of each group's CLS token alone.
        """
        if self.hook is not None:
            self.hook(name, compute())

    def tap(self, name: str, x: Array) -> Array:
        """Passes an activation to the hook, and returns it or the hook's result, if it has one."""
        other = None if self.hook is None else self.hook(name, x)
        return x if other is None else other


class Network:
    """A family's network: `init` and `apply` over {'part': {…}} trees of parameters and statistics.

    A family defines `modules` or `parts`, and `logits` or `forward`.

    Attributes:
        modules: part name → what makes it from the config and a key, in the order of the keys.
        config: at least image_size (H, W), image_channels and num_classes.
        dtype: the computation's; parameters stay float32.
        splits: what the mesh's group axis divides: attention 'groups', 'towers', or None.
        group_axis_limit: the size that the group axis must divide: groups, towers, or their common
            divisor with the kernels; 0 if nothing can be spread.
        voters: attention groups that exchange nothing but the vote, so that any can be lost,
            computed alone or cut off; 0 for none.
        units: groups, or towers of them, that are lost as one; 0 for none.
        whitens: whether `init.whiten` can start the first convolution.
        shapes: shapes of the leaves of 'params' and of 'stats', by path.
        lost: numbers of the groups or towers that are missing, see `without`.
        frozen: names of parts that run as in evaluation and get no gradient, see `with_frozen`.
        part_hook: receives (name, output) of each part; its result replaces the output.
    """

    modules: Mapping[str, Callable[[Any, Array], nnx.Module]] = {}
    splits: str | None = None
    group_axis_limit: int = 0
    voters: int = 0
    units: int = 0
    whitens: bool = False
    frozen: frozenset[str] = frozenset()
    part_hook: Callable[[str, Any], Any] | None = None

    def __init__(self, config: Any, dtype: jnp.dtype = jnp.float32) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.lost: frozenset[int] = frozenset()
        before = _shapes_only.set(True)
        try:
            parts = nnx.eval_shape(lambda: self.parts(jax.random.key(0)))
        finally:
            _shapes_only.reset(before)
        self._graphs = {name: nnx.graphdef(module) for name, module in parts.items()}
        self.shapes = {
            kind: _shapes({name: plain(module, of) for name, module in parts.items()})
            for kind, of in (("params", nnx.Param), ("stats", nnx.BatchStat))
        }

    @classmethod
    def of(cls, config: Any, dtype: jnp.dtype = jnp.float32) -> "Network":
        """Returns the network of a config; a family of several classes chooses one."""
        return cls(config, dtype)

    @staticmethod
    def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns changes of a `model` section's settings for a smoke run of seconds."""
        return {}

    def body(self, tree: dict) -> dict:
        """Returns the modules of a tree of `init`, without the head where they have a section."""
        return tree

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        """Draws the modules by name; their variables make the trees of `init`."""
        keys = jax.random.split(key, len(self.modules))
        parts = zip(self.modules.items(), keys, strict=True)
        return {name: make(self.config, part_key) for (name, make), part_key in parts}

    def logits(self, bound: "BoundModules", images_BHWC: Array, context: ForwardContext) -> Array:
        """Returns logits (B, K) of images in the computation's dtype."""
        raise NotImplementedError

    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        """Returns `logits`, and the statistics after the pass."""
        bound = self.bind(params, stats)
        return self.logits(bound, images_BHWC, context), bound.stats()

    def saved_multiply_adds(self) -> dict[str, int]:
        """Returns by module the multiply-adds that the literature counts and `forward` saves."""
        return {}

    def paper_flops(self, multiply_adds: int) -> tuple[int, str] | None:
        """Returns one image's FLOPs as the family's paper counts them, and how; None: as 2·MAC.

        multiply_adds: `costs.multiply_adds`.
        """
        return None

    def without(self, lost: Collection[int]) -> "Network":
        """Returns this network without the attention groups or towers of these numbers.

        Its parameters are the same trees without the lost entries of the axis of groups or towers.
        The surviving ones keep their numbers, and with them their dropout masks.

        Raises:
            ValueError: none would survive, or this network cannot lose groups.
        """
        lost, count = self.lost | frozenset(lost), self.group_axis_limit + len(self.lost)
        if not lost < frozenset(range(count)):
            raise ValueError(f"cannot lose {sorted(lost)} of {count} groups or towers")
        smaller = copy.copy(self)
        smaller.group_axis_limit = count - len(lost)
        smaller.lost = lost
        return smaller

    def surviving(self) -> Array:
        """Returns the sorted numbers of the groups or towers that are not lost, int32."""
        numbers = range(self.group_axis_limit + len(self.lost))
        return jnp.array([i for i in numbers if i not in self.lost], jnp.int32)

    def grown(self, params: dict, stats: dict, old: "Network", key: Array) -> tuple[dict, dict]:
        """Turns the weights of `old` into this network's; `key` draws the leaves that are new."""
        return params, stats

    def resized(self, **sizes: Any) -> "Network":
        """Returns this network with other num_classes, image_channels or image_size, not frozen.

        Raises ValueError for sizes that do not fit.
        """
        return type(self)(dataclasses.replace(self.config, **sizes), self.dtype)

    def feature_network(self) -> tuple[str, "Network"] | None:
        """Returns (family, the classifier with this network's 'backbone'), or None."""
        return None

    def fused(self, params: dict, stats: dict) -> tuple["Network", dict, dict]:
        """Returns a network for inference that computes the same with fewer operations.

        Raises ValueError for a network with nothing to fuse.
        """
        raise ValueError("this network has no sums of branches to fuse; only FastViT has them")

    def unfrozen(self) -> "Network":
        """Returns this network with no part frozen."""
        whole = copy.copy(self)
        whole.frozen = frozenset()
        return whole

    def with_frozen(self, names: Collection[str]) -> "Network":
        """Returns this network with these parts frozen, some of `part_names`.

        They always run as in evaluation: BatchNorm keeps and uses its running statistics, and
        nothing is dropped. No gradient reaches their parameters.

        Raises:
            ValueError: the network has no such part, or none would be left to train.
        """
        unknown = sorted(set(names) - set(self.part_names))
        if unknown or self.frozen.union(names) >= set(self.part_names):
            why = f"it has no {', '.join(unknown)}" if unknown else "nothing would be left to train"
            raise ValueError(
                f"cannot freeze {', '.join(sorted(names))} of this network: {why}; name some of "
                f"its parts, not all: {', '.join(self.part_names)}"
            )
        frozen = copy.copy(self)
        frozen.frozen = self.frozen | frozenset(names)
        return frozen

    @property
    def part_names(self) -> tuple[str, ...]:
        """Top-level names of `init`'s trees."""
        return tuple(self._graphs)

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        """Returns the axis along which devices split the leaf at `path`; None: replicated."""
        return None

    def init_shapes(self) -> tuple[dict, dict]:
        """Returns `jax.eval_shape` of `init`, without a trace."""
        params, stats = (
            traverse_util.unflatten_dict(
                {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in leaves.items()}
            )
            for leaves in (self.shapes["params"], self.shapes["stats"])
        )
        return params, stats

    def init(self, key: Array) -> tuple[dict, dict]:
        """Draws (params, stats), float32 arrays distributed as the reference's."""
        with jax.enable_x64(False):  # x64 would change the drawn values
            parts = self.parts(key)
        params, stats = (
            {name: tree for name, module in parts.items() if (tree := plain(module, kind))}
            for kind in (nnx.Param, nnx.BatchStat)
        )
        return params, stats

    def apply(
        self,
        params: dict,
        stats: dict,
        images_BHWC: Array,
        *,
        train: bool = False,
        dropout_key: Array | None = None,
        example_ids_B: Array | None = None,
        shard: GroupShard = UNSHARDED,
        batch_axes: tuple[str, ...] = (),
        votes_G: Array | None = None,
        hook: Callable[[str, Array], None] | None = None,
    ) -> tuple[Array, dict]:
        """Computes the forward pass; only reverse mode (`jax.grad`, `jax.vjp`) differentiates it.

        Under `jax.jit` on the caller's mesh, its axes must be of type Auto.

        Args:
            train: use the batch's statistics and update them.
            dropout_key: a jax key for this step; None for no dropout.
            example_ids_B: int32 identity of each example: a mask is a function of (key, example,
                group). The default is the position in the batch.
            shard, batch_axes, votes_G, hook: see `ForwardContext`.

        Returns:
            Logits (B, K), at least float32, and the statistics after this batch.

        Raises:
            ValueError: images, trees or votes_G do not fit the network.
        """
        images_BHWC = jnp.asarray(images_BHWC)
        expected = (*self.config.image_size, self.config.image_channels)
        if images_BHWC.shape[1:] != expected or not images_BHWC.shape[0]:
            raise ValueError(
                f"images of shape {images_BHWC.shape} given to a network built for at least one "
                f"image of {expected} (rows, columns, channels)"
            )
        if not jnp.issubdtype(images_BHWC.dtype, jnp.floating):
            raise ValueError(
                f"images of {images_BHWC.dtype} given to a network for normalised ones: scale them "
                "to floating point as in training (see augment.normalise)"
            )
        if shard is UNSHARDED and not self.lost:  # a shard holds only a part of the parameters
            self._check(params, stats, votes_G)
        key_words = None
        if dropout_key is not None:
            bits = jax.random.bits(dropout_key, (2,), jnp.uint32)
            key_words = (bits[0], bits[1])
        if example_ids_B is None:
            example_ids_B = jnp.arange(images_BHWC.shape[0])
        params = {
            name: jax.lax.stop_gradient(part) if name in self.frozen else part
            for name, part in params.items()
        }
        # Images of double precision make a float32 network compute in it.
        dtype = moments_dtype(images_BHWC) if self.dtype == jnp.float32 else self.dtype
        context = ForwardContext(train, key_words, example_ids_B, batch_axes, shard, votes_G, hook)
        logits_BK, stats = self.forward(params, stats, images_BHWC.astype(dtype), context)
        return wide(logits_BK), stats

    def _check(self, params: dict, stats: dict, votes_G: Array | None) -> None:
        for kind, tree in (("params", params), ("stats", stats)):
            given, wanted = _shapes(tree), self.shapes[kind]
            for path in sorted({*given, *wanted}):
                found, expected = given.get(path, "missing"), wanted.get(path, "none")
                if found != expected:
                    where = ".".join(path)
                    raise ValueError(
                        f"{kind} of another network: {where} is {found}, where this one has "
                        f"{expected}"
                    )
        known = votes_G is not None and not isinstance(votes_G, jax.core.Tracer)
        wrong = votes_G is not None and np.shape(votes_G) != (self.voters,)
        if wrong or (known and not np.asarray(votes_G).sum() > 0):
            raise ValueError(
                f"votes_G needs a weight for each of {self.voters} voting groups, not all 0; got "
                f"{votes_G if known else np.shape(votes_G)}"
            )

    def views(self, params: dict, stats: dict, images_BHWC: Array) -> dict[str, list[Array]]:
        """Returns intermediate activations of an evaluation pass, float32.

        They are lists by name (`ForwardContext.call_hook`), in order of computation, and the
        'logits' (B, K).
        """
        seen: dict[str, list[Array]] = {}

        def hook(name: str, x: Array) -> None:
            seen.setdefault(name, []).append(x.astype(jnp.float32))

        hook("logits", self.apply(params, stats, images_BHWC, hook=hook)[0])
        return seen

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """Returns (tokens before the patches, rows, columns) of a sequence; None without a grid.

        The grid has the image's proportions and at most a CLS token before it. This leaves two
        numbers of patches, and only one of them can be a grid.
        """
        rows, columns = self.config.image_size
        unit = gcd(rows, columns)
        rows, columns = rows // unit, columns // unit
        for before in (0, 1):
            scale = isqrt(max(tokens - before, 0) // (rows * columns))
            if scale and scale * scale * rows * columns == tokens - before:
                return before, scale * rows, scale * columns
        return None

    def at_places(self, x_BTC: Array) -> Array | None:
        """Returns a sequence's patches as a map (B, rows, columns, C), or None without a grid."""
        grid = self.grid(x_BTC.shape[1])
        if grid is None:
            return None
        before, rows, columns = grid
        return x_BTC[:, before:].reshape(x_BTC.shape[0], rows, columns, x_BTC.shape[2])

    def bind(self, params: dict, stats: dict) -> "BoundModules":
        """Returns the network's modules with these parameters and statistics in them."""
        return BoundModules(self, params, stats)


class BoundModules:
    """A network's modules by name, each merged with its parameters and statistics on first use."""

    def __init__(self, network: Network, params: dict, stats: dict) -> None:
        self._network, self._params, self._stats = network, params, stats
        self._modules: dict[str, nnx.Module] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._modules:
            state = module_state(self._params.get(name, {}), self._stats.get(name, {}))
            self._modules[name] = nnx.merge(self._network._graphs[name], nnx.State(state))
        module, hook = self._modules[name], self._network.part_hook
        frozen = name in self._network.frozen

        def run(*args: Any, **how: Any) -> Any:
            if frozen:
                args = (*map(_evaluation, args),)
                how |= {"train": False} if "train" in how else {}
            output = module(*args, **how)
            return output if hook is None else hook(name, output)

        return run if frozen or hook is not None else module

    def through_stages(self, x: Array, context: ForwardContext) -> Array:
        """Passes a map or its tokens through the parts 'stage0', 'stage1', … in turn."""
        for i in range(sum(name.startswith("stage") for name in self._network._graphs)):
            x = self[f"stage{i}"](x, context)
        return x

    def trees(self, name: str) -> tuple[dict, dict]:
        """Returns the parameters and statistics of one part before the pass."""
        return self._params[name], self._stats.get(name, {})

    def stats(self) -> dict:
        """Returns the statistics after the pass; unused and frozen parts keep theirs."""
        used = self._modules.keys() - self._network.frozen
        return {
            name: plain(self._modules[name], nnx.BatchStat) if name in used else old
            for name, old in self._stats.items()
        }


def grid_of(maps: Iterable[tuple[int, int]], tokens: int) -> tuple[int, int, int] | None:
    """Returns the grid, as `Network.grid`: the first of these maps with as many places."""
    return next(((0, *size) for size in maps if size[0] * size[1] == tokens), None)


def _evaluation(arg: Any) -> Any:
    """Turns a context into that of an evaluation."""
    is_context = isinstance(arg, ForwardContext)
    return dataclasses.replace(arg, train=False, key_words=None) if is_context else arg


def _shapes(tree: dict) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in traverse_util.flatten_dict(tree).items()}


def plain(module: nnx.Module, kind: type) -> dict:
    """Returns one kind of a module's variables as nested dicts; positions in lists are strings."""
    leaves = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(module, kind)))
    return traverse_util.unflatten_dict({tuple(map(str, path)): x for path, x in leaves.items()})


def module_state(params: dict, stats: dict) -> dict:
    """Joins parameters and statistics in one tree, with positions in lists as integers."""
    leaves = traverse_util.flatten_dict(params) | traverse_util.flatten_dict(stats)
    return traverse_util.unflatten_dict(
        {tuple(int(k) if k.isdigit() else k for k in path): x for path, x in leaves.items()}
    )
