"""All sharding: the mesh, what lies where, and the one `shard_map` with its one `psum`.

Axes: `data` splits the batch, `group` splits the attention groups (every leaf below a `groups` key
has a leading G axis). One device is the same code with a mesh of 1×1.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, GROUP = "data", "group"


def make(
    group: int, data: int, *, groups: int, batch: int | None = None, devices: list | None = None
) -> Mesh:
    """A mesh of `data` × `group` devices.

    group, data: sizes of the axes, −1 for the rest of the devices (one of them at most). groups:
    attention groups of the network (0: none, so group must be 1 or −1). batch: examples per step,
    checked against `data` when given. Raises ValueError naming the divisors that would fit, or when
    a process would have no part in the mesh.
    """
    devices = list(jax.devices() if devices is None else devices)
    group, data = _fill(group, data, len(devices), groups)
    if groups % group if groups else group > 1:
        fitting = [d for d in range(1, groups + 1) if groups % d == 0] or [1]
        raise ValueError(
            f"{groups} groups cannot split over {group} devices: set mesh.group to one of {fitting}"
        )
    if group * data > len(devices):
        raise ValueError(
            f"mesh.data={data} × mesh.group={group} needs {group * data} devices, but there are "
            f"{len(devices)}: lower one of them, or set one to -1 for the rest"
        )
    if batch is not None and batch % data:
        raise ValueError(
            f"a batch of {batch} cannot split over mesh.data={data} devices: choose a multiple of "
            f"{data} for train.batch, or set mesh.data to one of "
            f"{[d for d in range(1, data + 1) if batch % d == 0]}"
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


def _fill(group: int, data: int, devices: int, groups: int) -> tuple[int, int]:
    """Replaces −1 by the rest of the devices."""
    for name, size in (("mesh.group", group), ("mesh.data", data)):
        if size != -1 and size < 1:
            raise ValueError(f"{name} must be positive, or -1 for the rest; got {size}")
    if group == data == -1:
        raise ValueError("only one of mesh.group and mesh.data can be -1")
    if group == -1:
        rest = max(devices // data, 1)
        return math.gcd(rest, groups) if groups else 1, data
    if data == -1:
        return group, max(devices // group, 1)
    return group, data


def spec_of(path: tuple[Any, ...], network: Any = None) -> P:
    """Where a leaf of a training state lies: split over `group` as its network says, else whole.

    The optimizer's and the average's copies of a parameter end in the parameter's own path. Without
    a network: what lies below `groups` or `towers` is split along its first axis.
    """
    names = tuple(str(k.key) for k in path if hasattr(k, "key"))
    if network is None:
        return P(GROUP) if {"groups", "towers"} & set(names) else P()
    for start, name in enumerate(names):
        if name in network.part_names:
            axis = network.spread_axis(names[start:])
            return P() if axis is None else P(*(None,) * axis, GROUP)
    return P()


def _specs(tree: Any, network: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: spec_of(path, network), tree)


def state_shardings(mesh: Mesh, state: Any, network: Any = None) -> Any:
    """A tree like `state` (arrays or shapes) of the NamedSharding of each leaf; see `spec_of`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), _specs(state, network))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis split over `data`."""
    return NamedSharding(mesh, P(DATA))


def put_batch(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """A host batch, the same on every process, as one global array split over `data`."""
    return put_rows(mesh, array[local_rows(mesh, len(array))], len(array))


def local_rows(mesh: Mesh, size: int) -> np.ndarray:
    """The rows of a batch of `size` that this process's devices hold, ascending."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for index in indices]))


def put_rows(mesh: Mesh, rows: np.ndarray, size: int) -> jax.Array:
    """This process's rows (see `local_rows`) of a batch of `size` as part of one global array."""
    here = local_rows(mesh, size)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = index[0].indices(size)
        return rows[np.searchsorted(here, first) : np.searchsorted(here, last)]

    return jax.make_array_from_callback((size, *rows.shape[1:]), batch_sharding(mesh), part)


def put_replicated(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """A host array, the same on every process, as one global array, whole on every device."""
    return jax.make_array_from_callback(array.shape, replicated(mesh), lambda index: array[index])


def is_spread(path: tuple[Any, ...], network: Any) -> bool:
    """Whether the leaf at `path` of a state is split over `group`; see `spec_of`."""
    return GROUP in spec_of(path, network)


def relabel(mesh: Mesh, state: dict, network: Any) -> dict:
    """A state after some devices are gone: what the devices of `mesh` hold, as arrays of `network`.

    mesh: 1 × the devices left, in the order they had. Nothing is copied or sent.
    """
    left = set(mesh.devices.flat)

    def leaf(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        spec = spec_of(path, network)
        parts = [s.data for s in array.addressable_shards if s.device in left]
        shape = [
            size * mesh.shape[GROUP] if axis < len(spec) and spec[axis] == GROUP else size
            for axis, size in enumerate(parts[0].shape)
        ]
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)

    return jax.tree_util.tree_map_with_path(leaf, state)


def fetch(mesh: Mesh, tree: Any) -> Any:
    """Whole NumPy copies, on every process, of arrays that are spread over `mesh`."""
    return jax.device_get(jax.jit(lambda x: x, out_shardings=replicated(mesh))(tree))


class _MeshShare:
    """A `models.network.Share` of one device of the `group` axis, inside the manual region."""

    def __init__(self, mesh: Mesh, aggregate: str) -> None:
        self.size, self.ordered = mesh.shape[GROUP], aggregate == "ordered"

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        here = x.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(GROUP) * here, here, axis)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        return lax.all_gather(x, GROUP, axis=axis, tiled=True)

    def total(self, x_GBD: jax.Array) -> jax.Array:
        if self.ordered:
            return lax.all_gather(x_GBD, GROUP, axis=0, tiled=True, to="invarying").sum(0)
        return lax.psum(x_GBD.sum(0), GROUP)


#: How CLS tokens meet: one all-reduce of each device's sum, or an all-gather of every group's token
#: and a sum in the order of the groups, which gives the same bits on any number of devices.
AGGREGATES = ("psum", "ordered")


def spread(network: Any, mesh: Mesh, aggregate: str = "psum") -> Callable[..., Any]:
    """A network's `apply`, run where its batch and its groups, kernels or towers live.

    The function returned takes (params, stats, images (B, H, W, C), train=, dropout_key=,
    example_ids_B=, votes_G=) and gives logits (B, K) split over `data`, and the new statistics. All
    of it is one region, manual over both axes, so the compiler adds no communication of its own:
    forward, one `psum` over `group`; in training also BatchNorm's moments over `data`.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"mesh.aggregate must be one of {AGGREGATES}; got {aggregate!r}")
    share = _MeshShare(mesh, aggregate)

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
            example_ids_B = jax.numpy.arange(images_BHWC.shape[0])

        def local(params, stats, images_BHWC, example_ids_B, dropout_key, votes_G):
            return network.apply(
                params,
                stats,
                images_BHWC,
                train=train,
                dropout_key=dropout_key,
                example_ids_B=example_ids_B,
                share=share,
                batch_axes=(DATA,),
                votes_G=votes_G,
            )

        param_specs, stat_specs = _specs(params, network), _specs(stats, network)
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(param_specs, stat_specs, P(DATA), P(DATA), P(), P()),
            out_specs=(P(DATA), stat_specs),
        )(params, stats, images_BHWC, example_ids_B, dropout_key, votes_G)

    return run
