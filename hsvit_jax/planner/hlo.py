"""What a compiled program computes and sends, read from its optimised HLO.

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

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Program:
    """One device's part of a compiled program.

    flops: of matrix products and convolutions. transfers: (axis, kind) → bytes of the whole array,
    as `plan_costs.Transfer` counts them. temporary_bytes: what it holds besides its arguments and
    results.
    """

    flops: int
    transfers: dict[tuple[str, str], int]
    temporary_bytes: int


def cpu_devices(needed: int) -> list[jax.Device]:
    """The CPU devices of this process. Raises ValueError for fewer than needed."""
    devices = jax.devices("cpu")
    if len(devices) < needed:
        raise ValueError(
            f"--verify compiles for {needed} devices, but this process has {len(devices)}: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} in the environment"
        )
    return devices


def compile_network(
    network: Any,
    *,
    data: int,
    group: int,
    batch: int,
    aggregate: str = "psum",
    gradients: str = "float32",
) -> tuple[Program, Program]:
    """The forward pass of an evaluation and the gradient of a training step, spread and compiled.

    Dropout is left out: it has no matrix product and sends nothing. aggregate, gradients: see
    `mesh.spread`. The CPU devices of this process are used; raises ValueError where there are fewer
    than data × group.
    """
    devices = cpu_devices(data * group)
    mesh = mesh_lib.make(group, data, groups=network.group_axis_limit, batch=batch, devices=devices)
    apply = mesh_lib.spread(network, mesh, aggregate, gradients)
    params, stats = jax.eval_shape(network.init, jax.random.key(0))
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
    forward_program, step_program = (
        read(p.compile(compiler_options=options), group) for p in programs
    )
    return forward_program, step_program


def read(compiled: Any, group: int) -> Program:
    """FLOPs and transfers of a jax `Compiled` for a mesh whose last axis has `group` devices."""
    flops, transfers = count(compiled.as_text(), group)
    return Program(flops, transfers, int(compiled.memory_analysis().temp_size_in_bytes))


def count(text: str, group: int) -> tuple[int, dict[tuple[str, str], int]]:
    """FLOPs and transfers of an optimised HLO module as text. Raises ValueError for a loop around
    a product or collective whose number of turns is not written there."""
    return _count(*_computations(text), group)


def _count(computations: dict, name: str, group: int) -> tuple[int, dict[tuple[str, str], int]]:
    """What `count` finds in one computation and all that it calls."""
    flops, transfers = 0, collections.Counter()
    pending = [(name, 1)]
    while pending:
        name, times = pending.pop()
        lines = computations[name]
        shapes = {out: shape for out, shape, _, _ in lines}
        for _, shape, op, rest in lines:
            if op == "dot":
                flops += times * _dot_flops(shape, rest, shapes)
            elif op == "convolution":
                flops += times * _convolution_flops(shape, rest, shapes)
            elif re.fullmatch(f"({_COLLECTIVES})(-start)?", op):
                axis, kind, size = _transfer(op, shape, rest, group)
                if axis:
                    transfers[axis, kind] += times * size
                continue  # what it calls adds two numbers
            trips = _TRIPS.search(rest) if op == "while" else None
            for called in _CALLED.findall(rest):
                if op == "while" and trips is None and _counts(called, computations):
                    raise ValueError(f"a loop of unknown length in the compiled program: {called}")
                pending.append((called, times * int(trips[1]) if trips else times))
    return flops, dict(transfers)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A collective of a program, and the FLOPs that could run while it is under way: of
    instructions that neither need its result nor make what it sends."""

    axis: str
    kind: str
    bytes: int
    free_flops: int


def overlaps(text: str, group: int) -> list[Overlap]:
    """Each collective of an optimised HLO module's main computation, in the order of its schedule.

    What a program's data flow allows, whatever its back end does: CPUs run a collective in place.
    """
    computations, entry = _computations(text)
    lines = computations[entry]
    place = {name: i for i, (name, *_) in enumerate(lines)}
    needs: list[int] = []  # of each instruction, all that it waits for and itself: a bit for each
    flops, found = [], []
    for i, (_, _, _, rest) in enumerate(lines):
        names = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
        operands = [place[name] for name in names if name in place]
        needs.append(functools.reduce(operator.or_, (needs[j] for j in operands), 1 << i))
        inputs = [(*lines[j][:2], "parameter", "") for j in operands]
        flops.append(_count({**computations, "": [*inputs, lines[i]]}, "", group)[0])
    for i, (_, shape, op, rest) in enumerate(lines):
        if not re.fullmatch(f"({_COLLECTIVES})(-start)?", op):
            continue
        axis, kind, size = _transfer(op, shape, rest, group)
        if axis:
            free = (j for j, own in enumerate(needs) if not (own >> i | needs[i] >> j) & 1)
            found.append(Overlap(axis, kind, size, sum(flops[j] for j in free)))
    return found


def _counts(name: str, computations: dict) -> bool:
    """Whether a computation, or one it calls, has anything to count."""
    return any(
        op in ("dot", "convolution")
        or re.match(_COLLECTIVES, op)
        or any(_counts(called, computations) for called in _CALLED.findall(rest))
        for _, _, op, rest in computations[name]
    )


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], str]:
    """Name → lines as (result, shape, operation, the rest), and the entry's name."""
    found, entry, lines = {}, "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = found[header[2]] = []
            entry = header[2] if header[1] else entry
        elif parts := _LINE.match(line):
            lines.append((parts[1], parts[2], parts[3], parts[4]))
    return found, entry


def _sizes(shape: str) -> list[int]:
    return [int(n) for n in _SHAPE.search(shape)[2].split(",") if n]


def _operands(rest: str, shapes: dict[str, str]) -> list[list[int]]:
    names = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
    return [_sizes(shapes[name]) for name in names]


def _dot_flops(shape: str, rest: str, shapes: dict[str, str]) -> int:
    """Two for each element of the result and each contracted one."""
    left = _operands(rest, shapes)[0]
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1]
    contracted = math.prod(left[int(a)] for a in axes.split(",") if a)
    return 2 * math.prod(_sizes(shape)) * contracted


def _convolution_flops(shape: str, rest: str, shapes: dict[str, str]) -> int:
    """Two for each element of the result and each of a kernel's weights, padding or not."""
    kernel = _operands(rest, shapes)[1]
    order = re.search(r"dim_labels=\w+_(\w+)->", rest)[1]
    weights = math.prod(n for n, axis in zip(kernel, order, strict=True) if axis != "o")
    return 2 * math.prod(_sizes(shape)) * weights


def _transfer(op: str, shape: str, rest: str, group: int) -> tuple[str, str, int]:
    """(axis, kind, bytes); the axis is '' where a device speaks to itself."""
    devices = _first_group(rest)
    kind = op.removesuffix("-start")
    axes = [
        name
        for name, places in (
            ("data", {d // group for d in devices}),
            ("group", {d % group for d in devices}),
        )
        if len(places) > 1
    ]
    arrays = _SHAPE.findall(shape)
    if op == "all-gather-start":  # its result holds the operands too
        arrays = arrays[len(arrays) // 2 :]
    size = sum(
        _BYTES[kind_] * math.prod(map(int, filter(None, n.split(",")))) for kind_, n in arrays
    )
    return "+".join(axes), kind, size * (len(devices) if kind == "reduce-scatter" else 1)


def _first_group(rest: str) -> list[int]:
    """The devices of a collective's first group: lists {{0,1},{2,3}}, iota [2,2]<=[4], or axes of a
    named grid mesh['a'=2,'b'=2] {'b'}."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[2])
        grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        return grid[tuple(slice(None) if n in over else 0 for n in sizes)].reshape(-1).tolist()
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return [int(d) for d in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota is None:
        raise ValueError(f"cannot read the devices of a collective: {rest[:200]}")
    shape, dims = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
    ids = np.arange(math.prod(dims)).reshape(dims)
    if iota[3]:
        ids = ids.transpose([int(n) for n in iota[3].split(",")])
    return ids.reshape(shape)[0].tolist()
