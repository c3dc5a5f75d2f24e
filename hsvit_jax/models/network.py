"""The interface of every family: a network as two pure functions over plain nested dicts.

A family lists its parts (Flax modules) and defines the forward pass through them. A
`ForwardContext` carries everything about a pass but parameters and images; a `GroupShard` names the
part of the network on this device.
"""

import abc
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

Array = jax.Array


#: False while only the shapes of parameters are asked for: draws of random numbers trace slowly.
_values_wanted = contextvars.ContextVar("values_wanted", default=True)


def draw(sample: Callable[..., Array], key: Array, shape: Iterable[int], *args: float) -> Array:
    """`sample(key, shape, float32, *args)`, a function of `jax.random`, for a parameter."""
    shape = tuple(shape)
    return sample(key, shape, jnp.float32, *args) if _values_wanted.get() else jnp.zeros(shape)


class GroupShard:
    """The part of a network on this device: here, all of it. A mesh supplies its own."""

    size = 1  # devices that share the network
    ordered = False  # add in the order of the groups, each computed by itself

    def slice(self, x: Array, axis: int) -> Array:
        """This device's part along `axis` of an array that every device has."""
        return x

    def all_gather(self, x: Array, axis: int) -> Array:
        """All devices' parts of x, concatenated in order along `axis`."""
        return x

    def sum(self, x_GBD: Array) -> Array:
        """The sum over the first axis and over all devices: (B, D)."""
        return x_GBD.sum(0)


UNSHARDED = GroupShard()


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """One forward pass: its mode, its randomness, and where it runs.

    Attributes:
        train: use the batch's statistics and update the running ones.
        key_words: two uint32 scalars that key this step's dropout masks; None for no dropout.
        example_ids_B: identity of each example, so that a mask does not depend on the position in
            the batch.
        batch_axes: mesh axes over which the batch is split.
        shard: the part of the network on this device.
        votes_G: weight of each attention group's CLS token in the average, 0 for a lost group;
            None: all weigh the same.
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
        """Passes an intermediate activation to the hook; computes nothing without one.

        Args:
            name: 'attention' (B, N, T, S), weights of a block's heads; 'tokens' (B, T, D), after a
                block; 'maps' (B, H, W, C), the last feature map; of an HSViT also 'group attention'
                (G, B, N, T, S) and 'votes' (G, B, K), logits of each group's CLS token alone.
        """
        if self.hook is not None:
            self.hook(name, compute())


class Network(abc.ABC):
    """A family's network: `init` and `apply` over {'part': {…}} trees of parameters and statistics.

    Attributes:
        config: at least image_size (H, W), image_channels and num_classes.
        dtype: of the computation; parameters stay float32.
        splits: what a device of the mesh's group axis computes its share of: attention 'groups',
            'towers', or None.
        group_axis_limit: the size that the mesh's group axis must divide: attention groups, towers,
            or their common divisor with the kernels; 0 when nothing can be spread.
        voters: attention groups that need nothing of each other but the vote, so that any of them
            can be lost, computed alone or cut off; 0 for none.
        units: groups, or towers of them, that are lost as one; 0 for none.
        whitens: whether `init.whiten` can start the first convolution.
        shapes: of the leaves of 'params' and of 'stats', by path.
        lost: numbers of the groups or towers that this network does without, see `without`.
        frozen: names of parts that run as in evaluation and get no gradient, see `with_frozen`.
        part_hook: receives (name, output) of each part; its result replaces the output.
    """

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
        before = _values_wanted.set(False)
        try:
            parts = nnx.eval_shape(lambda: self.parts(jax.random.key(0)))
        finally:
            _values_wanted.reset(before)
        self._graphs = {name: nnx.graphdef(module) for name, module in parts.items()}
        self.shapes = {
            kind: _shapes({name: plain(module, of) for name, module in parts.items()})
            for kind, of in (("params", nnx.Param), ("stats", nnx.BatchStat))
        }

    @classmethod
    def of(cls, config: Any, dtype: jnp.dtype = jnp.float32) -> "Network":
        """The network of a config; a family of several classes chooses one."""
        return cls(config, dtype)

    @staticmethod
    def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Changes of the settings in a `model` section for a smoke run of seconds."""
        return {}

    def body(self, tree: dict) -> dict:
        """The modules of a tree of `init` but the head, which may lie in a section."""
        return tree

    @abc.abstractmethod
    def parts(self, key: Array) -> dict[str, nnx.Module]:
        """Freshly initialised modules by name; their variables make the trees of `init`."""

    def logits(self, bound: "BoundModules", images_BHWC: Array, context: ForwardContext) -> Array:
        """Logits (B, K) of images in the computation's dtype; a family defines it, or `forward`."""
        raise NotImplementedError

    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        """`logits`, and the statistics after the pass."""
        bound = self.bind(params, stats)
        return self.logits(bound, images_BHWC, context), bound.stats()

    def saved_multiply_adds(self) -> dict[str, int]:
        """Returns multiply-adds by module that the literature counts and `forward` omits."""
        return {}

    def paper_flops(self, multiply_adds: int) -> tuple[int, str] | None:
        """FLOPs of one image as the family's paper counts them, and how; None: as 2·MAC.

        multiply_adds: of matrix products and convolutions (`costs.multiply_adds`).
        """
        return None

    def without(self, lost: Collection[int]) -> "Network":
        """This network without some of its attention groups or towers.

        Its parameters are the same trees without the lost entries of the axis of groups or towers.
        The surviving ones keep their numbers, and with them their dropout masks.

        Args:
            lost: their numbers, from 0.

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
        """Ascending numbers of the groups or towers that are not lost, int32."""
        numbers = range(self.group_axis_limit + len(self.lost))
        return jnp.array([i for i in numbers if i not in self.lost], jnp.int32)

    def grown(self, params: dict, stats: dict, old: "Network", key: Array) -> tuple[dict, dict]:
        """Returns (params, stats) of this network, continued from the weights of `old`.

        Args:
            key: draws the leaves that `old` does not have.
        """
        return params, stats

    def resized(self, **sizes: Any) -> "Network":
        """This network with other num_classes, image_channels or image_size; nothing is frozen.

        Raises:
            ValueError: the sizes do not fit it.
        """
        return type(self)(dataclasses.replace(self.config, **sizes), self.dtype)

    def feature_network(self) -> tuple[str, "Network"] | None:
        """(family, the classifier whose part 'backbone' is this network's), where there is one."""
        return None

    def fused(self, params: dict, stats: dict) -> tuple["Network", dict, dict]:
        """A network for inference that computes the same with fewer operations, and its trees.

        Raises:
            ValueError: this network has nothing to fuse.
        """
        raise ValueError(
            "this network has no sums of branches to fuse; of the families FastViT has"
        )

    def with_frozen(self, names: Collection[str]) -> "Network":
        """This network with these parts frozen.

        In every pass their BatchNorm normalises by its running statistics and leaves them as they
        are, they drop nothing, and no gradient reaches their parameters.

        Args:
            names: some of `part_names`.

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
        """Top-level names of the trees that `init` makes."""
        return tuple(self._graphs)

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        """Axis along which the leaf at `path` is split over devices; None: it is replicated."""
        return None

    def init_shapes(self) -> tuple[dict, dict]:
        """`jax.eval_shape` of `init`, but nothing is traced."""
        trees = (
            {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
            for shapes in (self.shapes["params"], self.shapes["stats"])
        )
        params, stats = map(traverse_util.unflatten_dict, trees)
        return params, stats

    def init(self, key: Array) -> tuple[dict, dict]:
        """Freshly initialised (params, stats) of float32 arrays, distributed as the reference's."""
        params, stats = {}, {}
        with jax.enable_x64(False):  # which draws other numbers where a program has it on
            parts = self.parts(key)
        for name, module in parts.items():
            params[name] = plain(module, nnx.Param)
            stats[name] = plain(module, nnx.BatchStat)
        return without_empty(params), without_empty(stats)

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
        """The forward pass, to be differentiated in reverse mode (`jax.grad`, `jax.vjp`) alone.

        Under `jax.jit` on a mesh of the caller's own, its axes must be of type Auto.

        Args:
            train: use the batch's statistics and update them.
            dropout_key: a jax key for this step; None for no dropout.
            example_ids_B: int32 identity of each example, so that a mask is a function of (key,
                example, group) alone; defaults to the position in the batch.
            shard: see `ForwardContext`, as for batch_axes, votes_G and hook.

        Returns:
            Logits (B, K), at least float32, and the statistics after this batch.

        Raises:
            ValueError: the images have another shape than the network's, or hold integers; or there
                are none. params and stats are another network's, or votes_G fits no groups.
        """
        images_BHWC = jnp.asarray(images_BHWC)
        if not images_BHWC.shape[0]:
            raise ValueError("a network needs an image at least; got a batch of 0")
        expected = (*self.config.image_size, self.config.image_channels)
        if images_BHWC.shape[1:] != expected:
            raise ValueError(
                f"images of shape {images_BHWC.shape[1:]} given to a network built for {expected} "
                "(rows, columns, channels)"
            )
        if not jnp.issubdtype(images_BHWC.dtype, jnp.floating):
            raise ValueError(
                f"images of {images_BHWC.dtype} given to a network, which takes normalised ones: "
                "scale them to floating point as in training (see augment.normalise)"
            )
        if shard is UNSHARDED and not self.lost:  # else these are a part of it
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
        wide = jnp.promote_types(images_BHWC.dtype, jnp.float32)
        dtype = self.dtype if self.dtype != jnp.float32 else wide
        context = ForwardContext(train, key_words, example_ids_B, batch_axes, shard, votes_G, hook)
        logits_BK, stats = self.forward(params, stats, images_BHWC.astype(dtype), context)
        return logits_BK.astype(jnp.promote_types(logits_BK.dtype, jnp.float32)), stats

    def _check(self, params: dict, stats: dict, votes_G: Array | None) -> None:
        for kind, tree in (("params", params), ("stats", stats)):
            given, wanted = _shapes(tree), self.shapes[kind]
            for path in sorted({*given, *wanted}):
                found, expected = given.get(path, "missing"), wanted.get(path, "none")
                if found != expected:
                    raise ValueError(
                        f"{kind} of another network: {'.'.join(path)} is {found}, where this one "
                        f"has {expected}"
                    )
        if votes_G is None:
            return
        known = not isinstance(votes_G, jax.core.Tracer)
        if np.shape(votes_G) != (self.voters,) or (known and not np.asarray(votes_G).sum() > 0):
            raise ValueError(
                f"votes_G needs a weight for each of {self.voters} voting groups, not all 0; got "
                f"{votes_G if known else np.shape(votes_G)}"
            )

    def views(self, params: dict, stats: dict, images_BHWC: Array) -> dict[str, list[Array]]:
        """Intermediate activations of an evaluation pass, float32.

        Returns:
            Arrays by name (`ForwardContext.call_hook`) in order of computation, and the 'logits'
            (B, K).
        """
        seen: dict[str, list[Array]] = {}

        def hook(name: str, x: Array) -> None:
            seen.setdefault(name, []).append(x.astype(jnp.float32))

        hook("logits", self.apply(params, stats, images_BHWC, hook=hook)[0])
        return seen

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """(tokens before the patches, rows, columns) of a sequence; None where it has no grid.

        The grid has the image's proportions and at most a CLS token before it; of the two numbers
        of patches that this leaves, only one can be a grid.
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
        """Returns a sequence's patches, without a CLS token, as a map (B, rows, columns, C).

        None for a sequence without a grid.
        """
        grid = self.grid(x_BTC.shape[1])
        if grid is None:
            return None
        before, rows, columns = grid
        return x_BTC[:, before:].reshape(x_BTC.shape[0], rows, columns, x_BTC.shape[2])

    def bind(self, params: dict, stats: dict) -> "BoundModules":
        """The network's modules with these parameters and statistics in them."""
        return BoundModules(self._graphs, params, stats, self.frozen, self.part_hook)


class BoundModules:
    """A network's modules by name, each merged with its parameters and statistics on first use.

    Parts named in `frozen` run as in evaluation; part_hook: see `Network`.
    """

    def __init__(
        self,
        graphs: dict[str, Any],
        params: dict,
        stats: dict,
        frozen: frozenset[str] = frozenset(),
        part_hook: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self._graphs, self._params, self._stats = graphs, params, stats
        self._frozen, self._part_hook = frozen, part_hook
        self._modules: dict[str, nnx.Module] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._modules:
            state = module_state(self._params.get(name, {}), self._stats.get(name, {}))
            self._modules[name] = nnx.merge(self._graphs[name], nnx.State(state))
        module, frozen, part_hook = self._modules[name], name in self._frozen, self._part_hook
        if not frozen and part_hook is None:
            return module

        def run(*args: Any) -> Any:
            output = module(*map(_evaluation, args)) if frozen else module(*args)
            return output if part_hook is None else part_hook(name, output)

        return run

    def through_stages(self, x: Array, context: ForwardContext) -> Array:
        """A map or its tokens through the parts 'stage0', 'stage1', … in turn."""
        for i in range(sum(name.startswith("stage") for name in self._graphs)):
            x = self[f"stage{i}"](x, context)
        return x

    def trees(self, name: str) -> tuple[dict, dict]:
        """The parameters and statistics of one part, as they were before the pass."""
        return self._params[name], self._stats.get(name, {})

    def stats(self) -> dict:
        """The statistics after the pass; unused and frozen parts keep theirs."""
        used = {
            name: plain(module, nnx.BatchStat)
            for name, module in self._modules.items()
            if name not in self._frozen
        }
        return {name: used.get(name, old) for name, old in self._stats.items()}


def grid_of(maps: Iterable[tuple[int, int]], tokens: int) -> tuple[int, int, int] | None:
    """Returns the first of these maps (rows, columns) with as many places, for `Network.grid`."""
    return next(((0, *size) for size in maps if size[0] * size[1] == tokens), None)


def _evaluation(arg: Any) -> Any:
    """A frozen part's argument: of a context, evaluation's."""
    if isinstance(arg, ForwardContext):
        return dataclasses.replace(arg, train=False, key_words=None)
    return arg


def _shapes(tree: dict) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in traverse_util.flatten_dict(tree).items()}


def without_empty(tree: dict) -> dict:
    """The tree without empty parts, so that its structure does not depend on how it was made."""
    return {k: v for k, v in tree.items() if v}


def plain(module: nnx.Module, kind: type) -> dict:
    """One kind of a module's variables as nested dicts; list positions become '0', '1', …"""

    def named(tree: dict) -> dict:
        return {str(k): named(v) if isinstance(v, dict) else v for k, v in tree.items()}

    return named(nnx.to_pure_dict(nnx.state(module, kind)))


def module_state(params: dict, stats: dict) -> dict:
    """Inverse of `plain`: parameters and statistics in one tree, list positions as integers."""
    leaves = traverse_util.flatten_dict(params) | traverse_util.flatten_dict(stats)
    return traverse_util.unflatten_dict(
        {tuple(int(k) if k.isdigit() else k for k in path): x for path, x in leaves.items()}
    )
