"""Sharding: the mesh, the sharding of each array, and the one `shard_map` with its one `psum`.

Axes: `data` splits the batch, `group` splits the attention groups (every leaf below a `groups` key
has a leading G axis). One device is the same code with a mesh of 1×1.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, GROUP = "data", "group"


def make(
    group: int,
    data: int,
    *,
    groups: int,
    batch: int | None = None,
    accumulate: int = 1,
    devices: list | None = None,
    parts: str = "groups",
    aggregate: str = "psum",
) -> Mesh:
    """Lays out a mesh of `data` × `group` devices.

    Args:
        group, data: sizes of the axes, −1 for the rest of the devices (one of them at most).
        groups: parts of the network that can be spread; 0 for none, so group must be 1 or −1.
        batch: examples per step, checked against `data` when given.
        accumulate: parts of a batch that are computed one after another.
        devices: defaults to all of jax's.
        parts: names the parts in messages.
        aggregate: see `spread`; of a network without parts 'psum'.

    Raises:
        ValueError: the sizes do not fit (the message names those that would), a process would have
            no device in the mesh, or there is nothing to aggregate.
    """
    if aggregate != "psum" and not groups:
        raise ValueError(
            f"mesh.aggregate={aggregate!r} says how attention groups are summed, and this network "
            "has none: leave it out"
        )
    devices = listed(devices)
    group, data = _fill(group, data, len(devices), groups)
    if groups % group if groups else group > 1:
        fitting = [d for d in range(1, groups + 1) if groups % d == 0] or [1]
        raise ValueError(
            f"{groups} {parts} cannot split over {group} devices: set mesh.group to one of "
            f"{fitting}"
        )
    if group * data > len(devices):
        raise ValueError(
            f"mesh.data={data} × mesh.group={group} needs {group * data} devices, but there are "
            f"{len(devices)}: lower one of them, or set one to -1 for the rest"
        )
    if batch is not None and batch // accumulate % data:
        times = f" in train.accumulate={accumulate} parts" if accumulate > 1 else ""
        raise ValueError(
            f"a batch of {batch}{times} cannot split over mesh.data={data} devices: choose a "
            f"multiple of {data * accumulate} for train.batch, or another mesh.data"
        )
    grid = np.asarray(devices[: group * data]).reshape(data, group)
    idle = {d.process_index for d in devices} - {d.process_index for d in grid.flat}
    if idle:
        raise ValueError(
            f"mesh.data={data} × mesh.group={group} uses {grid.size} of {len(devices)} devices, "
            f"but none of process {', '.join(map(str, sorted(idle)))}: start fewer processes, or "
            "set one of them to -1 for the rest"
        )
    return Mesh(grid, (DATA, GROUP), axis_types=(AxisType.Auto, AxisType.Auto))


def listed(devices: Any) -> list[jax.Device]:
    """Devices that a caller names: some of jax's, or one; all of them for None."""
    if devices is None:
        return jax.devices()
    return [*devices] if isinstance(devices, Iterable) else [devices]


def _fill(group: int, data: int, devices: int, groups: int) -> tuple[int, int]:
    """Replaces −1 by the rest of the devices."""
    if group == data == -1:
        raise ValueError("only one of mesh.group and mesh.data can be -1")
    if group == -1:
        rest = max(devices // data, 1)
        return math.gcd(rest, groups) if groups else 1, data
    if data == -1:
        return group, max(devices // group, 1)
    return group, data


def spec_of(path: tuple[Any, ...], network: Any) -> P:
    """Partition of a leaf of a training state: over `group` as its network says, else none.

    The optimizer's and the average's copies of a parameter end in the parameter's own path.
    """
    names = tuple(str(k.key) for k in path if hasattr(k, "key"))
    for start, name in enumerate(names):
        if name in network.part_names:
            axis = network.spread_axis(names[start:])
            return P() if axis is None else P(*(None,) * axis, GROUP)
    return P()


def _specs(tree: Any, network: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: spec_of(path, network), tree)


def state_shardings(mesh: Mesh, state: Any, network: Any) -> Any:
    """Maps a tree of arrays or shapes to the NamedSharding of each leaf; see `spec_of`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), _specs(state, network))


def place(mesh: Mesh, tree: Any, network: Any) -> Any:
    """Puts host arrays, the same on every process, on the mesh, each by `spec_of`."""
    shardings = state_shardings(mesh, tree, network)
    tree = jax.tree.map(np.asarray, tree)
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]),
        tree,
        shardings,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that is whole on every device."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of an array whose leading axis is split over `data`."""
    return NamedSharding(mesh, P(DATA))


def put_batch(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Puts a host batch, the same on every process, on the mesh, split over `data`."""
    return put_rows(mesh, array[local_rows(mesh, len(array))], len(array))


def local_rows(mesh: Mesh, size: int) -> np.ndarray:
    """The rows of a batch of `size` that this process's devices hold, ascending, int (R,)."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for index in indices]))


def put_rows(mesh: Mesh, rows: np.ndarray, size: int) -> jax.Array:
    """Puts this process's rows (see `local_rows`) of a batch of `size` on the mesh, split over
    `data`, as part of one global array."""
    numbers = local_rows(mesh, size)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = index[0].indices(size)
        return rows[np.searchsorted(numbers, first) : np.searchsorted(numbers, last)]

    return jax.make_array_from_callback((size, *rows.shape[1:]), batch_sharding(mesh), part)


def put_replicated(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Puts a host array, the same on every process, on the mesh, whole on every device."""
    return jax.make_array_from_callback(array.shape, replicated(mesh), lambda index: array[index])


def from_lead(tree: Any) -> Any:
    """Process 0's host arrays on every process, whose own files or processors may differ."""
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


def is_spread(path: tuple[Any, ...], network: Any) -> bool:
    """Whether the leaf at `path` of a state is split over `group`; see `spec_of`."""
    return GROUP in spec_of(path, network)


def relabel(mesh: Mesh, state: dict, network: Any) -> dict:
    """Turns the shards that surviving devices hold into a state of a smaller network.

    Nothing is copied or sent.

    Args:
        mesh: 1 × the surviving devices, in the order they had.
        state: on these and other devices.
        network: with the parts that survive.
    """
    surviving = set(mesh.devices.flat)

    def leaf(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        spec = spec_of(path, network)
        parts = [s.data for s in array.addressable_shards if s.device in surviving]
        shape = [
            size * mesh.shape[GROUP] if axis < len(spec) and spec[axis] == GROUP else size
            for axis, size in enumerate(parts[0].shape)
        ]
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)

    return jax.tree_util.tree_map_with_path(leaf, state)


def compiler_options(mesh: Mesh | None = None, *, runs: bool = True) -> dict[str, Any]:
    """Returns XLA's options for `mesh` (default: the current back-end); empty unless it is a CPU.

    On jax 0.10 they choose the newer of two code generators, the only one from 0.11 on: the older
    one rounds a sum of products as it happens to be fused, so that the same step on another mesh
    would not give the same bits. Options that XLA_FLAGS names are left to it.

    Args:
        runs: the program runs often enough to be worth LLVM's optimiser, at level 2: level 3 takes
            a quarter longer for no gain that could be measured.
    """
    if (mesh.devices.flat[0].platform if mesh else jax.default_backend()) != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 2 if runs else 0}
    if jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = True
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def fetch(mesh: Mesh, tree: Any) -> Any:
    """Gathers arrays that are spread over `mesh` as NumPy arrays on every process."""
    return jax.device_get(_gather(mesh)(tree))


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))


def _to_bf16(x: jax.Array) -> jax.Array:
    """Bits of x rounded to bfloat16, uint16: some back ends would send bfloat16 as float32."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _from_bf16(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _bf16_sum(x: jax.Array, axis: str, size: int) -> jax.Array:
    """Sums x, float32 (R, …), over an axis of `size` devices, sent as bfloat16."""
    # The ring of an all-reduce with half the bytes; numbers are rounded before and after the sum.
    rows = -(-len(x) // size)
    padded = jnp.pad(x, [(0, rows * size - len(x))] + [(0, 0)] * (x.ndim - 1))
    parts = _from_bf16(lax.all_to_all(_to_bf16(padded), axis, 0, 0, tiled=True))
    sums = _to_bf16(parts.reshape(size, rows, *x.shape[1:]).sum(0))
    return _from_bf16(lax.all_gather(sums, axis, axis=0, tiled=True, to="invarying"))[: len(x)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _bf16_votes(x_BD: jax.Array, size: int) -> jax.Array:
    """`_bf16_sum` over `group`; its gradient passes straight through, as an all-reduce's does."""
    return _bf16_sum(x_BD, GROUP, size)


_bf16_votes.defvjp(
    lambda x_BD, size: (_bf16_votes(x_BD, size), None),
    lambda size, _, grad_BD: (lax.pcast(grad_BD, GROUP, to="varying"),),
)


class _MeshShard:
    """A `models.network.GroupShard` of one device of the `group` axis, inside the manual region."""

    def __init__(self, mesh: Mesh, aggregate: str) -> None:
        self.size, self.ordered = mesh.shape[GROUP], aggregate == "ordered"
        self.bf16 = aggregate == "bf16" and self.size > 1

    def slice(self, x: jax.Array, axis: int) -> jax.Array:
        part = x.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(GROUP) * part, part, axis)

    def all_gather(self, x: jax.Array, axis: int) -> jax.Array:
        return lax.all_gather(x, GROUP, axis=axis, tiled=True)

    def sum(self, x_GBD: jax.Array) -> jax.Array:
        if self.ordered:
            return lax.all_gather(x_GBD, GROUP, axis=0, tiled=True, to="invarying").sum(0)
        if self.bf16:
            total_BD = _bf16_votes(x_GBD.astype(jnp.float32).sum(0), self.size)
            return total_BD.astype(x_GBD.dtype)
        total_BD = x_GBD.astype(jnp.promote_types(x_GBD.dtype, jnp.float32)).sum(0)
        return lax.psum(total_BD, GROUP).astype(x_GBD.dtype)


def _compress_gradients(params: Any, specs: Any, mesh: Mesh) -> Any:
    """Identity on the parameters whose gradients are summed over `data` in bfloat16."""
    # A parameter that is the same on all `data` devices has a gradient that `shard_map` sums in
    # float32 wherever it is used. Cast to 'varying', it leaves the sum to this one place: one
    # message for all parameters (two: those that are also split over `group` make their own).
    size = mesh.shape[DATA]

    def total(grads: list[jax.Array]) -> list[jax.Array]:
        flat = jnp.concatenate([g.reshape(-1) for g in grads])
        ends = np.cumsum([g.size for g in grads])[:-1]
        parts = jnp.split(_bf16_sum(flat, DATA, size), ends)
        return [part.reshape(g.shape) for part, g in zip(parts, grads, strict=True)]

    def backward(_: None, grads: Any) -> tuple[Any]:
        leaves, tree = jax.tree.flatten(grads)
        split = [GROUP in spec for spec in jax.tree.leaves(specs)]
        summed = {
            kind: iter(total([g for g, s in zip(leaves, split, strict=True) if s == kind]))
            for kind in set(split)
        }
        return (tree.unflatten(next(summed[kind]) for kind in split),)

    def enter(params: Any) -> Any:
        return jax.tree.map(lambda x: lax.pcast(x, DATA, to="varying"), params)

    identity = jax.custom_vjp(enter)
    identity.defvjp(lambda params: (enter(params), None), backward)
    return identity(params)


def spread(
    network: Any, mesh: Mesh, aggregate: str = "psum", gradients: str = "float32"
) -> Callable[..., Any]:
    """Spreads a network's `apply` over a mesh: the batch over `data`, its parts over `group`.

    It is one region, manual over both axes, so the compiler adds no communication of its own:
    forward, one `psum` over `group`; in training also BatchNorm's moments over `data`.

    Args:
        network: with groups, kernels or towers to spread, or none.
        aggregate: how the groups' CLS tokens are reduced over the `group` axis. 'psum': one
            all-reduce of each device's sum. 'ordered': an all-gather of every group's token and a
            sum in the order of the groups, which gives the same bits on any number of devices, as
            does the gradients' norm then (`ordered_norm`). 'bf16': an all-to-all and an all-gather
            of each device's sum, 2 bytes a number instead of the all-reduce's 4.
        gradients: how they are summed over `data`: as 'float32', or sent as 'bf16', where a sum's
            error is at most 2^-8 of itself and of the sizes of its terms.

    Returns:
        `run(params, stats, images (B, H, W, C), *, train, dropout_key, example_ids_B, votes_G)`,
        which returns logits (B, K) split over `data`, and the new statistics.
    """

    def run(
        params,
        stats,
        images_BHWC,
        *,
        train=False,
        dropout_key=None,
        example_ids_B=None,
        votes_G=None,
    ):
        if example_ids_B is None:
            example_ids_B = jnp.arange(images_BHWC.shape[0])
        param_specs, stat_specs = _specs(params, network), _specs(stats, network)

        def local(params, stats, images_BHWC, example_ids_B, dropout_key, votes_G):
            if train and mesh.shape[DATA] > 1:
                trained = {k: v for k, v in params.items() if k not in network.frozen}
                if gradients == "bf16":
                    specs = {k: param_specs[k] for k in trained}
                    trained = _compress_gradients(trained, specs, mesh)
                elif getattr(network, "dtype", jnp.float32) != jnp.float32:
                    # Before they are narrowed, so that their gradients are summed in float32.
                    trained = jax.tree.map(lambda x: lax.pcast(x, DATA, to="varying"), trained)
                params = {**params, **trained}
            return network.apply(
                params,
                stats,
                images_BHWC,
                train=train,
                dropout_key=dropout_key,
                example_ids_B=example_ids_B,
                shard=_MeshShard(mesh, aggregate),
                batch_axes=(DATA,),
                votes_G=votes_G,
            )

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(param_specs, stat_specs, P(DATA), P(DATA), P(), P()),
            out_specs=(P(DATA), stat_specs),
        )(params, stats, images_BHWC, example_ids_B, dropout_key, votes_G)

    return run


def ordered_norm(mesh: Mesh, grads: dict, network: Any) -> jax.Array:
    """Global norm of gradients with the same bits on any number of `group` devices.

    A sum over devices is added in an order of its own; here each group's (or tower's) squares are
    summed by themselves, gathered, and added in the order of the groups.
    """
    shared, by_group_G = jnp.zeros(()), jnp.zeros(network.group_axis_limit)
    specs = jax.tree.leaves(_specs(grads, network))
    for spec, leaf in zip(specs, jax.tree.leaves(grads), strict=True):
        squares = jnp.square(leaf.astype(jnp.float32))
        if GROUP in spec:
            squares = jnp.moveaxis(squares, spec.index(GROUP), 0)
            by_group_G += squares.reshape(network.group_axis_limit, -1).sum(1)
        else:
            shared += squares.sum()
    by_group_G = lax.with_sharding_constraint(by_group_G, replicated(mesh))
    return jnp.sqrt(sum(by_group_G, shared))
