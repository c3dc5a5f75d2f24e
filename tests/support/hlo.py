"""FLOPs and traffic of a compiled program, read from its optimised HLO.

XLA's own cost analysis also counts elementwise work, and the body of a loop once. Here only matrix
products and convolutions count, two FLOPs for each multiply-add, each as often as its loop turns;
so the count stays comparable with formulas, however the back end formulates a layer.
"""

import collections
import dataclasses
import functools
import math
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hsvit_jax import mesh as mesh_lib
from hsvit_jax.ops import conv
from hsvit_jax.planner import costs

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BELOW = re.compile(r"[^,]+, %?([\w.\-]+)\), direction=LT")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Program:
    """One device's part of a compiled program."""

    flops: int  # of matrix products and convolutions
    transfers: dict[tuple[str, str], int]  # (axis, kind) → bytes, as `costs.Transfer` counts them
    temporary_bytes: int  # besides arguments and results


def compile_network(
    network: Any,
    *,
    data: int,
    group: int,
    batch: int,
    aggregate: str = "psum",
    gradients: str = "float32",
) -> tuple[Program, Program]:
    """Compiles the forward pass of an evaluation and the gradient of a training step for a mesh.

    Dropout is left out: it has no matrix product and sends nothing.

    Args:
        data, group: sizes of the mesh's axes, of this process's CPU devices.
        batch: images of the step on all devices.
        aggregate, gradients: see `mesh.spread`.

    Returns:
        both programs.

    Raises:
        ValueError: there are fewer than data × group devices.
    """
    devices = jax.devices("cpu")
    mesh = mesh_lib.make(group, data, groups=network.group_axis_limit, batch=batch, devices=devices)
    apply = mesh_lib.spread(network, mesh, aggregate, gradients)
    params, stats = network.init_shapes()
    where = [mesh_lib.state_shardings(mesh, tree, network) for tree in (params, stats)]
    split = mesh_lib.batch_sharding(mesh)
    c = network.config
    images = jax.ShapeDtypeStruct((batch, *c.image_size, c.image_channels), jnp.float32)
    labels = ids = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def forward(params: dict, stats: dict, images: jax.Array) -> jax.Array:
        return apply(params, stats, images)[0]

    def loss(params: dict, stats: dict, images: jax.Array, labels, ids):
        logits, stats = apply(params, stats, images, train=True, example_ids_B=ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats

    # XLA for CPU makes dense convolutions of a depthwise one's gradients.
    with conv.as_on_accelerators(("dense",)):
        programs = (
            jax.jit(forward, in_shardings=(*where, split), out_shardings=split).lower(
                params, stats, images
            ),
            jax.jit(
                jax.grad(loss, has_aux=True),
                in_shardings=(*where, split, split, split),
                out_shardings=tuple(where),
            ).lower(params, stats, images, labels, ids),
        )
    # Machine code is not run, so it need not be fast; the program is optimised all the same.
    options = {"xla_backend_optimization_level": 0}
    return tuple(read(p.compile(compiler_options=options), group) for p in programs)


def read(compiled: Any, group: int) -> Program:
    """Reads a jax `Compiled` for a mesh whose last axis has `group` devices."""
    flops, transfers = count(compiled.as_text(), group)
    return Program(flops, transfers, int(compiled.memory_analysis().temp_size_in_bytes))


def count(text: str, group: int) -> tuple[int, dict[tuple[str, str], int]]:
    """Counts FLOPs and transfers, by (axis, kind), of an optimised HLO module as text.

    Raises:
        ValueError: the text does not say how often a loop around a product or collective turns.
    """
    return _count(*_computations(text), group)


def _count(computations: dict, name: str, group: int) -> tuple[int, dict[tuple[str, str], int]]:
    """As `count`, for one computation and all that it calls."""
    flops, transfers = 0, collections.Counter()
    pending = [(name, 1)]
    while pending:
        name, times = pending.pop()
        lines = computations[name]
        shapes = {out: shape for out, shape, _, _ in lines}
        for _, shape, op, rest in lines:
            collective = re.fullmatch(f"({_COLLECTIVES})(-start)?", op)
            if not times and (collective or op in ("dot", "convolution")):
                raise ValueError(f"a loop of unknown length in the compiled program: {name}")
            if op == "dot":
                flops += times * _dot_flops(shape, rest, shapes)
            elif op == "convolution":
                flops += times * _convolution_flops(shape, rest, shapes)
            elif collective:
                axis, kind, size = _transfer(op, shape, rest, group)
                if axis:
                    transfers[axis, kind] += times * size
                continue  # the computation it calls adds two numbers
            turns = _turns(rest, computations) if op == "while" else 1
            pending += [(called, times * turns) for called in _CALLED.findall(rest)]
    return flops, dict(transfers)


def cycles(text: str) -> int:
    """Adds up the compiler's estimates of cycles in an optimised HLO module for a TPU; a loop of
    unknown length counts once."""
    computations, entry = _computations(text)
    total, pending = 0, [(entry, 1)]
    while pending:
        name, times = pending.pop()
        for _, _, op, rest in computations[name]:
            estimate = _CYCLES.search(rest)
            total += times * int(estimate[1]) if estimate else 0
            if op in ("while", "call", "conditional"):
                turns = _turns(rest, computations) if op == "while" else 1
                pending += [(called, times * (turns or 1)) for called in _CALLED.findall(rest)]
    return total


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A collective of a program, and the FLOPs that could run while it is under way: of
    instructions that neither need its result nor feed its operands."""

    axis: str
    kind: str
    bytes: int
    free_flops: int


def overlaps(text: str, group: int) -> list[Overlap]:
    """Lists the collectives of an optimised HLO module's main computation, in scheduled order.

    The data flow decides, whatever a back end does: CPUs run a collective in place.
    """
    computations, entry = _computations(text)
    lines = computations[entry]
    place = {name: i for i, (name, *_) in enumerate(lines)}
    needs: list[int] = []  # of each instruction, itself and those it waits for: a bit for each
    flops, collectives = [], []
    for i, (_, _, _, rest) in enumerate(lines):
        operands = [place[name] for name in _operands(rest) if name in place]
        needs.append(functools.reduce(operator.or_, (needs[j] for j in operands), 1 << i))
        inputs = [(*lines[j][:2], "parameter", "") for j in operands]
        flops.append(_count({**computations, "": [*inputs, lines[i]]}, "", group)[0])
    for i, (_, shape, op, rest) in enumerate(lines):
        if not re.fullmatch(f"({_COLLECTIVES})(-start)?", op):
            continue
        axis, kind, size = _transfer(op, shape, rest, group)
        if axis:
            free = (j for j, waits in enumerate(needs) if not (waits >> i | needs[i] >> j) & 1)
            collectives.append(Overlap(axis, kind, size, sum(flops[j] for j in free)))
    return collectives


def _turns(rest: str, computations: dict) -> int:
    """How often a loop turns, 0 where the text does not say."""
    if known := _TRIPS.search(rest):
        return int(known[1])
    # Else up to the limit that its condition compares with, since jax's loops count from 0.
    condition = computations[_CONDITION.search(rest)[1]]
    limits = {out: number for out, _, op, number in condition if op == "constant"}
    for _, _, op, compared in condition:
        if op == "compare" and (limit := _BELOW.match(compared)) and limit[1] in limits:
            return int(limits[limit[1]].partition(")")[0])
    return 0


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], str]:
    """Parses name → lines as (result, shape, operation, rest), and the entry's name."""
    computations, entry, lines = {}, "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif parts := _LINE.match(line):
            lines.append(parts.groups())
    return computations, entry


def _sizes(shape: str) -> list[int]:
    return _integers(_SHAPE.search(shape)[2])


def _integers(text: str) -> list[int]:
    """Parses '2,3'; an empty text is no number."""
    return [int(n) for n in text.split(",") if n]


def _operands(rest: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])


def _dot_flops(shape: str, rest: str, shapes: dict[str, str]) -> int:
    """Two for each element of the result and each contracted one."""
    left = _sizes(shapes[_operands(rest)[0]])
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1]
    contracted = math.prod(left[axis] for axis in _integers(axes))
    return 2 * math.prod(_sizes(shape)) * contracted


def _convolution_flops(shape: str, rest: str, shapes: dict[str, str]) -> int:
    """Two for each element of the result and each of a kernel's weights, padding or not."""
    kernel = _sizes(shapes[_operands(rest)[1]])
    order = re.search(r"dim_labels=\w+_(\w+)->", rest)[1]
    weights = math.prod(n for n, axis in zip(kernel, order, strict=True) if axis != "o")
    return 2 * math.prod(_sizes(shape)) * weights


def _transfer(op: str, shape: str, rest: str, group: int) -> tuple[str, str, int]:
    """(axis, kind, bytes) of a collective; the axis is '' where a device sends to itself."""
    devices, kind = _first_group(rest), op.removesuffix("-start")
    places = {"data": {d // group for d in devices}, "group": {d % group for d in devices}}
    axes = [name for name, along in places.items() if len(along) > 1]
    arrays = _SHAPE.findall(shape)
    if op == "all-gather-start":  # its result holds the operands too
        arrays = arrays[len(arrays) // 2 :]
    if op == "collective-permute-start":  # and so does its, with two numbers beside
        arrays = arrays[1:2]
    size = sum(_item_bytes(dtype) * math.prod(_integers(sizes)) for dtype, sizes in arrays)
    return "+".join(axes), kind, size * (len(devices) if kind == "reduce-scatter" else 1)


def _item_bytes(dtype: str) -> int:
    """Bytes of a number: 4 for f32, 2 for bf16, 1 for pred."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) // 8 if bits else 1


def _first_group(rest: str) -> list[int]:
    """The devices of a collective's first group, or a permutation's first pair: lists
    {{0,1},{2,3}}, iota [2,2]<=[4], or axes of a named grid mesh['a'=2,'b'=2] {'b'}, whose devices
    may be listed in an order of their own, device_ids=([2,2]T(1,0))."""
    if named := re.search(
        r"replica_groups=mesh\[([^\]]*)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
        rest,
    ):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[4])
        dims = _integers(named[2]) if named[2] else list(sizes.values())
        grid = _iota(dims, named[3]).reshape(list(sizes.values()))
        return grid[tuple(slice(None) if n in over else 0 for n in sizes)].reshape(-1).tolist()
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", rest):
        return _integers(listed[1])
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota is None:
        raise ValueError(f"cannot read the devices of a collective: {rest[:200]}")
    return _iota(_integers(iota[2]), iota[3]).reshape(_integers(iota[1]))[0].tolist()


def _iota(dims: list[int], order: str | None) -> np.ndarray:
    """Devices in the order of their numbers, as a grid of `dims` with its axes in this order."""
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_integers(order)) if order else ids


def compare(
    way: str,
    network: Any,
    devices: int,
    *,
    group: int | None = None,
    aggregate: str = "psum",
    gradients: str = "float32",
) -> list[dict[str, Any]]:
    """Compares one way's prediction with its compiled programs on `devices` fake devices.

    Returns:
        a dict for each program and quantity, with its `predicted` and `compiled` figure.
    """
    axis = costs.group_axis(way, network, devices, group)
    layout = {"data": devices // axis, "group": axis, "batch": 16}
    settings = {**layout, "aggregate": aggregate, "gradients": gradients}
    cost = costs.Cost(way, network, **settings)
    forward, step = compile_network(network, **settings)
    rows = []
    for name, flops, depthwise, transfers, program in (
        ("forward", cost.forward_flops, cost.depthwise_flops[0], cost.forward, forward),
        ("step", cost.step_flops, cost.depthwise_flops[1], cost.step, step),
    ):
        counted = "FLOPs, depthwise left out" if depthwise else "FLOPs"
        pairs = {counted: (flops - depthwise, program.flops)}
        sent = costs.by_axis_and_kind(transfers)
        for key in sorted({*sent, *program.transfers}):
            pairs[": ".join(key)] = (sent.get(key, 0), program.transfers.get(key, 0))
        if name == "step":
            pairs["activations (estimate)"] = (cost.activation_bytes, program.temporary_bytes)
        place = {"way": way, "data": layout["data"], "group": axis, "program": name}
        rows += [
            {**place, "quantity": quantity, "predicted": predicted, "compiled": compiled}
            for quantity, (predicted, compiled) in pairs.items()
        ]
    return rows
