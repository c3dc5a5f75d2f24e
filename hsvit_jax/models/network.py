"""What every family shares: a network as two pure functions over plain nested dicts.

A family says what its parts are (Flax modules) and how an image goes through them. A `Call` carries
what a pass is told besides its input; a `Share` says which part of the network lives here.
"""

import abc
import copy
import dataclasses
from collections.abc import Callable, Collection
from math import gcd, isqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array


class Share:
    """The part of a network that this device has: here, all of it. A mesh supplies its own.

    `take` cuts an array that is whole everywhere to this device's part along an axis, `gather` puts
    the parts together again, `total` sums an array over its first axis and over all devices.
    """

    ordered = False  # add in the order of the groups, each computed by itself

    def take(self, x: Array, axis: int) -> Array:
        """This device's part of x along `axis`."""
        return x

    def gather(self, x: Array, axis: int) -> Array:
        """All devices' parts of x, in order, along `axis`."""
        return x

    def total(self, x_GBD: Array) -> Array:
        """The sum over the first axis, here and on all other devices: (B, D)."""
        return x_GBD.sum(0)


WHOLE = Share()


@dataclasses.dataclass(frozen=True)
class Call:
    """One pass through a network.

    train: use the batch's statistics and update them. dropout_words: two uint32 scalars that key
    this step's masks, or None for no dropout. example_ids_B: identity of each example, so that a
    mask does not depend on the place in the batch. batch_axes: mesh axes over which the batch is
    split by hand. share: the part of the network that lives here. votes_G: weight of each attention
    group's CLS in the average, 0 for a group that is lost; None: all count alike. look: is handed
    what a pass shows on its way, see `show`.
    """

    train: bool
    dropout_words: tuple[Array, ...] | None
    example_ids_B: Array
    batch_axes: tuple[str, ...] = ()
    share: Share = WHOLE
    votes_G: Array | None = None
    look: Callable[[str, Array], None] | None = None

    def show(self, kind: str, make: Callable[[], Array]) -> None:
        """Hands an intermediate array to who looks at this pass; if nobody does, makes none.

        kind: 'attention' (B, N, T, S), weights of a block's heads; 'tokens' (B, T, D), after a
        block; of an HSViT also 'maps' (B, H, W, C), the trunk's last, 'group attention'
        (G, B, N, T, S) and 'votes' (G, B, K), logits of each group's CLS alone.
        """
        if self.look is not None:
            self.look(kind, make())


class Network(abc.ABC):
    """A family's network: `init` and `apply` over {'part': {…}} trees of parameters and statistics.

    `config` has at least image_size (H, W), image_channels and num_classes; `groups` is the number
    of attention groups or towers that a mesh can spread, 0 when there is nothing to spread.
    `frozen` names parts (of `part_names`) that training leaves as they are: no gradient reaches
    their parameters, and a backbone's BatchNorm and dropout are in inference mode.
    """

    groups: int = 0
    #: Parts that training leaves as they are: they run as in evaluation, see `with_frozen`.
    frozen: frozenset[str] = frozenset()
    #: Sees what each part returns (name, output) and gives what goes on in its place.
    tap: Callable[[str, Any], Any] | None = None

    def __init__(self, config: Any, dtype: jnp.dtype = jnp.float32) -> None:
        """dtype: of the computation; parameters stay float32."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.lost: frozenset[int] = frozenset()
        parts = nnx.eval_shape(lambda: self.parts(jax.random.key(0)))
        self._graphs = {name: nnx.graphdef(module) for name, module in parts.items()}

    @abc.abstractmethod
    def parts(self, key: Array) -> dict[str, nnx.Module]:
        """Fresh modules by name; their variables make the trees of `init`."""

    @abc.abstractmethod
    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, call: Call
    ) -> tuple[Array, dict]:
        """Logits (B, K), and new statistics, of images already in the computation's dtype."""

    def saved_multiply_adds(self) -> dict[str, int]:
        """By module: multiply-adds that the literature counts and `forward` does without."""
        return {}

    def paper_flops(self, multiply_adds: int) -> tuple[int, str] | None:
        """FLOPs of one image as the family's paper counts them, and how; None: as 2·MAC.

        multiply_adds: of matrix products and convolutions (`costs.multiply_adds`).
        """
        return None

    def without(self, lost: Collection[int]) -> "Network":
        """This network without some of its attention groups or towers, which are numbered from 0.

        Its parameters are the same trees without the entries of those lost in the axis of groups or
        towers; those that are left keep their numbers, so their dropout masks too. Raises
        ValueError unless some are left and this is a network whose groups can be lost.
        """
        lost = self.lost | frozenset(lost)
        if not lost < frozenset(range(self.groups + len(self.lost))):
            raise ValueError(f"cannot lose {sorted(lost)} of {self.groups} groups or towers")
        smaller = copy.copy(self)
        smaller.groups, smaller.lost = self.groups + len(self.lost) - len(lost), lost
        return smaller

    def left(self) -> Array:
        """Numbers of the groups or towers that are there, int32 (self.groups,), ascending."""
        numbers = range(self.groups + len(self.lost))
        return jnp.array([i for i in numbers if i not in self.lost], jnp.int32)

    def resized(self, **sizes: Any) -> "Network":
        """This network with other num_classes, image_channels or image_size; nothing is frozen.

        Raises ValueError for sizes that do not fit it.
        """
        return type(self)(resized_config(self.config, **sizes), self.dtype)

    def feature_network(self) -> tuple[str, "Network"] | None:
        """(family, the classifier whose part 'backbone' is this network's), where there is one."""
        return None

    def with_frozen(self, names: Collection[str]) -> "Network":
        """This network with these parts frozen: in every pass BatchNorm normalises by its running
        statistics and leaves them as they are, and there is no dropout in them.

        What training does about their parameters is its own affair. Raises ValueError for a part
        that this network does not have, and when none would be left to train.
        """
        unknown = sorted(set(names) - set(self.part_names))
        if unknown or not set(names) < set(self.part_names):
            why = f"it has no {', '.join(unknown)}" if unknown else "nothing would be left to train"
            raise ValueError(
                f"cannot freeze {', '.join(sorted(names))} of this network: {why}; name some of "
                f"its parts, not all: {', '.join(self.part_names)}"
            )
        frozen = copy.copy(self)
        frozen.frozen = frozenset(names)
        return frozen

    @property
    def part_names(self) -> tuple[str, ...]:
        """Top-level names of the trees that `init` makes."""
        return tuple(self._graphs)

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        """Axis along which the leaf at `path` is split over devices; None: whole everywhere."""
        return None

    def init(self, key: Array) -> tuple[dict, dict]:
        """Fresh (params, stats) of float32 arrays, started as the reference starts them."""
        params, stats = {}, {}
        for name, module in self.parts(key).items():
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
        share: Share = WHOLE,
        batch_axes: tuple[str, ...] = (),
        votes_G: Array | None = None,
        look: Callable[[str, Array], None] | None = None,
    ) -> tuple[Array, dict]:
        """Logits (B, K), at least float32, and the statistics after this batch.

        images (B, H, W, C) float, normalised. train: use the batch's statistics and update them.
        dropout_key: a jax key for this step; None for no dropout. example_ids (B,) int32: identity
        of each example, so that a mask is a function of (key, example, group) alone; the position
        in the batch when left out. share, batch_axes, votes_G, look: see `Call`. Raises ValueError
        for images of another shape.
        """
        expected = (*self.config.image_size, self.config.image_channels)
        if images_BHWC.shape[1:] != expected:
            raise ValueError(
                f"images of shape {images_BHWC.shape[1:]} given to a network built for {expected} "
                "(rows, columns, channels)"
            )
        words = None
        if dropout_key is not None:
            bits = jax.random.bits(dropout_key, (2,), jnp.uint32)
            words = (bits[0], bits[1])
        if example_ids_B is None:
            example_ids_B = jnp.arange(images_BHWC.shape[0])
        params = {
            name: jax.lax.stop_gradient(part) if name in self.frozen else part
            for name, part in params.items()
        }
        # BatchNorm would write into a NumPy array: the caller's, or a constant of what jit traces.
        stats = jax.tree.map(jnp.asarray, stats)
        dtype = self.dtype if self.dtype != jnp.float32 else images_BHWC.dtype
        call = Call(train, words, example_ids_B, batch_axes, share, votes_G, look)
        logits_BK, stats = self.forward(params, stats, images_BHWC.astype(dtype), call)
        return logits_BK.astype(jnp.promote_types(logits_BK.dtype, jnp.float32)), stats

    def call_of(self, part: str, call: Call) -> Call:
        """The call as a part that may be frozen gets it."""
        if part not in self.frozen:
            return call
        return dataclasses.replace(call, train=False, dropout_words=None)

    def views(self, params: dict, stats: dict, images_BHWC: Array) -> dict[str, list[Array]]:
        """What an evaluation pass shows, by kind (`Call.show`) in order of computation, float32.

        images (B, H, W, C) float, normalised. The 'logits' (B, K) are there too.
        """
        seen: dict[str, list[Array]] = {}

        def look(kind: str, x: Array) -> None:
            seen.setdefault(kind, []).append(x.astype(jnp.float32))

        look("logits", self.apply(params, stats, images_BHWC, look=look)[0])
        return seen

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """(tokens before the patches, rows, columns) of a sequence; None: it is no picture.

        Patches have the image's proportions and at most a CLS before them; of the two numbers of
        tokens that leaves, only one can be a grid.
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
        """Values of a sequence's patches where these lie in the image: (B, rows, columns, C).

        A CLS is left out. None for a sequence whose places are not known.
        """
        grid = self.grid(x_BTC.shape[1])
        if grid is None:
            return None
        before, rows, columns = grid
        return x_BTC[:, before:].reshape(x_BTC.shape[0], rows, columns, x_BTC.shape[2])

    def bind(self, params: dict, stats: dict) -> "Bound":
        """The network's modules with these parameters and statistics in them."""
        return Bound(self._graphs, params, stats, self.frozen, self.tap)


class Bound:
    """A network's modules with given parameters and statistics in them, by name, made on use.

    frozen: names of those that run as in evaluation. tap: see `Network.tap`.
    """

    def __init__(
        self,
        graphs: dict[str, Any],
        params: dict,
        stats: dict,
        frozen: frozenset[str] = frozenset(),
        tap: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self._graphs, self._params, self._stats = graphs, params, stats
        self._frozen, self._tap = frozen, tap
        self._modules: dict[str, nnx.Module] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._modules:
            state = module_state(self._params.get(name, {}), self._stats.get(name, {}))
            self._modules[name] = nnx.merge(self._graphs[name], nnx.State(state))
        module, frozen, tap = self._modules[name], name in self._frozen, self._tap
        if not frozen and tap is None:
            return module

        def run(*given: Any) -> Any:
            output = module(*map(_as_in_evaluation, given)) if frozen else module(*given)
            return output if tap is None else tap(name, output)

        return run

    def params(self, name: str) -> dict:
        """The parameters of one part, as given."""
        return self._params[name]

    def stats(self) -> dict:
        """The statistics after the pass: those of parts not used are as they were."""
        used = {
            name: plain(module, nnx.BatchStat)
            for name, module in self._modules.items()
            if name not in self._frozen
        }
        return {name: used.get(name, old) for name, old in self._stats.items()}


def resized_config(config: Any, **sizes: Any) -> Any:
    """A network's config with other num_classes, image_channels or image_size.

    One that is built on a `backbone` has these from it. Raises ValueError for what does not fit.
    """
    if set(sizes) <= {field.name for field in dataclasses.fields(config)}:
        return dataclasses.replace(config, **sizes)
    return dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, **sizes))


def _as_in_evaluation(given: Any) -> Any:
    """A frozen part's arguments: what it is told of the pass says evaluation."""
    if isinstance(given, Call):
        return dataclasses.replace(given, train=False, dropout_words=None)
    return given


def without_empty(tree: dict) -> dict:
    """Drops parts that hold nothing, so that a tree has one shape however it was made."""
    return {k: v for k, v in tree.items() if v}


def plain(module: nnx.Module, kind: type) -> dict:
    """One kind of a module's variables as nested dicts; list positions become '0', '1', …"""

    def named(tree: dict) -> dict:
        return {str(k): named(v) if isinstance(v, dict) else v for k, v in tree.items()}

    return named(nnx.to_pure_dict(nnx.state(module, kind)))


def module_state(params: dict, stats: dict) -> dict:
    """The way back: parameters and statistics in one tree, list positions as integers again."""
    out = {}
    for key in (*params, *(k for k in stats if k not in params)):
        child, stat = params.get(key, {}), stats.get(key, {})
        leaf = (
            child if not isinstance(child, dict) else stat if not isinstance(stat, dict) else None
        )
        place = int(key) if key.isdigit() else key
        out[place] = module_state(child, stat) if leaf is None else leaf
    return out
