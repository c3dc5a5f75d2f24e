"""What one device computes, holds and sends in a step: formulas of the network's sizes alone.

FLOPs are two for each multiply-add of matrix products and convolutions, padding counted, the last
attention block for its CLS only, as `apply` computes it; a training step is forward plus a gradient
with respect to the inputs and one with respect to the kernels of each (none for the images).
A transfer's bytes are those of the whole array on one device: what an all-reduce sums, what an
all-gather leaves, what a reduce-scatter starts from. Times follow a simple model, see `Machine`.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import ml_collections

from hsvit_jax import models
from hsvit_jax.models.hsvit.sizes import HSViTConfig

#: Plain data parallelism, then the three ways to spread one network.
WAYS = ("data", "replicated", "sharded", "towers")

_FLOAT = 4  # bytes of parameters, gradients, moments and statistics, whatever the computation's


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its links. flops: FLOP/s that it sustains; bandwidth: B/s that it sends;
    latency: seconds that one stage of a collective takes.

    A ring over n devices sends 2·(n−1)/n of the bytes in an all-reduce, half of that in an
    all-gather or reduce-scatter; a collective starts in latency·log2 n. Nothing overlaps. Raises
    ValueError for numbers that are not positive (latency: negative).
    """

    flops: float
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for name, low in (("flops", 0), ("bandwidth", 0), ("latency", None)):
            value = getattr(self, name)
            fits = value >= 0 if low is None else value > 0
            if not (math.isfinite(value) and fits):
                kind = "positive (per second)" if low is not None else "at least 0 (seconds)"
                raise ValueError(f"--{name} must be finite and {kind}; got {value}")

    def seconds(self, transfer: "Transfer") -> float:
        """How long a transfer takes."""
        n = transfer.devices
        share = (2 if transfer.kind == "all-reduce" else 1) * (n - 1) / n
        wait = transfer.calls * self.latency * math.log2(n)
        return share * transfer.bytes / self.bandwidth + wait


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A kind of collective over an axis ('data', 'group' or 'data+group') of `devices` devices.

    calls: how often it must start; independent ones are counted as one, as compilers merge them.
    """

    axis: str
    kind: str
    devices: int
    bytes: int
    calls: int
    what: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """One device's share of a step of `batch` images in all, spread over data × group devices.

    FLOPs and bytes are per device; `forward` is an evaluation's, `step` a training step's. Of the
    forward FLOPs, head_flops are the classifier's; sum_flops, not among them, add up the CLS tokens
    of the groups that are here. depthwise_flops, (forward, step) and among them, are those of
    depthwise convolutions, which the CPU's program computes without a matrix product.
    """

    way: str
    data: int
    group: int
    batch: int
    forward_flops: int
    step_flops: int
    head_flops: int
    sum_flops: int
    depthwise_flops: tuple[int, int]
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    forward: tuple[Transfer, ...]
    step: tuple[Transfer, ...]

    @property
    def devices(self) -> int:
        return self.data * self.group

    @property
    def memory_bytes(self) -> int:
        """Parameters, their gradients, optimizer and averages, and activations."""
        return 2 * self.parameter_bytes + self.optimizer_bytes + self.activation_bytes


def by_axis_and_kind(transfers: Iterable[Transfer]) -> dict[tuple[str, str], int]:
    """Bytes of transfers, summed by (axis, kind)."""
    sums: dict[tuple[str, str], int] = {}
    for t in transfers:
        sums[t.axis, t.kind] = sums.get((t.axis, t.kind), 0) + t.bytes
    return sums


def networks(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The network of each way that the resolved configuration's network can take.

    'towers' has model.towers of them, or as many as its sizes allow where that is 1; the other ways
    are of the network with one, which sees the whole image. Raises ValueError for a family other
    than hsvit.
    """
    settings = config.model.to_dict()
    if settings["family"] != "hsvit":
        what = "has none, and only its batch can be split, by mesh.data"
        if settings["family"] == "hsvit_backbone":
            what = "has one, or two with model.trunk='sharded', by mesh.group"
        raise ValueError(
            f"--mode=plan compares the ways to spread hsvit's groups; {settings['family']} {what}: "
            "see --mode=summary for its costs"
        )

    def build(**changes: Any) -> Any:
        return models.build(
            {**settings, "towers": 1, "tiles": (1, 1), "trunk": "replicated", **changes},
            image_size=tuple(config.data.image_size),
            channels=config.data.channels,
            num_classes=config.data.num_classes,
        )

    whole = build()
    c = whole.config
    found = {"data": whole}
    if c.groups:
        found["replicated"] = whole
    if c.groups and c.convolution:
        found["sharded"] = build(trunk="sharded")
        most = math.gcd(*c.conv_channels, c.groups)
        towers = settings["towers"] if settings["towers"] > 1 else most
        if towers > 1:
            found["towers"] = build(towers=towers, tiles=settings["tiles"])
    return found


def group_axis(way: str, network: Any, devices: int, group: int | None) -> int:
    """How many of `devices` the group axis takes: as many as divide, `group` at most.

    Raises ValueError for an unknown way, devices below 1, or a group that the network's groups
    (towers, kernels) do not divide into.
    """
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r}; choose one of {', '.join(WAYS)}")
    if devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}")
    if group is not None and group < 1:
        raise ValueError(f"--group must be at least 1; got {group}")
    if way == "data":
        return 1
    limit = network.group_axis_limit
    if group is not None and limit % group:
        fitting = [d for d in range(1, limit + 1) if limit % d == 0]
        raise ValueError(
            f"--group={group} does not divide the {limit} parts that the way {way!r} can spread: "
            f"choose one of {fitting}"
        )
    return math.gcd(devices, group or limit)


def predict(
    way: str,
    network: Any,
    *,
    data: int,
    group: int,
    batch: int,
    aggregate: str = "psum",
    gradients: str = "float32",
    ema: bool = False,
) -> Cost:
    """One device's share of a step of `batch` images over data × group devices.

    aggregate, gradients: see `mesh.spread`. Raises ValueError where the batch does not split over
    `data`.
    """
    if batch < 1 or batch % data:
        raise ValueError(
            f"a batch of {batch} does not split over {data} data-parallel devices: choose a "
            f"multiple of {data} for --batch"
        )
    c, images, item = network.config, batch // data, network.dtype.itemsize
    here = _Here(network, group)
    head = c.embed_dim * c.num_classes
    macs = here.trunk_macs + here.group_macs + head
    held = _Parameters(network, group)
    parameters = held.whole + held.split
    forward = _forward(here, images, item, aggregate)
    backward = _backward(here, images, item, data, held, gradients)
    return Cost(
        way=way,
        data=data,
        group=group,
        batch=batch,
        forward_flops=2 * images * macs,
        step_flops=2 * images * (3 * macs - here.first_macs - here.outer_macs),
        head_flops=2 * images * head,
        sum_flops=images * c.groups // group * c.embed_dim,
        depthwise_flops=(2 * images * here.depthwise_macs, 6 * images * here.depthwise_macs),
        parameter_bytes=_FLOAT * parameters,
        optimizer_bytes=_FLOAT * parameters * (3 if ema else 2),
        activation_bytes=images * item * here.activations,
        forward=tuple(t for t in forward if t.devices > 1),
        step=tuple(t for t in (*forward, *backward) if t.devices > 1),
    )


class _Layer(NamedTuple):
    """A convolution: weights of its depthwise part (0: none) and of the other, channels, pixels
    before it and after a pool (0: no pool)."""

    pixels: int
    depthwise: int
    weights: int
    c_in: int
    c_out: int
    pooled: int


def _layers(c: HSViTConfig) -> list[_Layer]:
    """The convolutions of a network; of one without, nothing."""
    out, (rows, columns), c_in = [], c.image_size, c.image_channels
    for c_out, kernel, stride in zip(c.conv_channels, c.conv_kernels, c.pool_strides, strict=True):
        pixels = rows * columns
        rows, columns = rows // stride, columns // stride
        for size, pooled in ((kernel, 0), (3, rows * columns if stride > 1 else 0)):
            window = size * size * c_in
            apart = c.separable and bool(out)
            weights = (window, c_in * c_out) if apart else (0, window * c_out)
            out.append(_Layer(pixels, *weights, c_in, c_out, pooled))
            c_in = c_out
    return out if c.convolution else []


class _Here:
    """What of one image lives on one of `group` devices: multiply-adds, gathered maps, values."""

    def __init__(self, network: Any, group: int) -> None:
        c = network.config
        self.config, self.group = c, group
        self.way = "towers" if c.towers > 1 else c.trunk
        self.towers = c.towers // group if c.towers > 1 else 1
        own = c.tower if c.towers > 1 else c
        kernels = group if self.way == "sharded" else 1
        layers = _layers(own)
        convolutions = [x.pixels * x.weights // kernels for x in layers]
        self.depthwise_macs = self.towers * sum(x.pixels * x.depthwise // kernels for x in layers)
        pixels = math.prod(own.map_size) if layers else 0
        tokens = own.conv_channels[-1] // kernels
        self.first_macs = self.towers * convolutions[0] if layers else 0
        self.trunk_macs = self.depthwise_macs + self.towers * (
            sum(convolutions) + tokens * pixels * c.embed_dim
        )
        self.group_macs = c.groups // group * _group_macs(c) if c.groups else 0
        # The last block has one query, so its keys' and values' gradients are outer products: sums
        # of one term, which are no matrix products.
        self.outer_macs = 2 * c.groups // group * c.tokens * c.embed_dim if c.groups else 0
        #: Values of the maps gathered before each convolution but the first.
        self.gathered = (
            [x.pixels * x.c_in for x in layers[1:]] if self.way == "sharded" and group > 1 else []
        )
        #: Channels of each BatchNorm here.
        self.norm_channels = [self.towers * x.c_out // kernels for x in layers]
        # Kept for the gradient: each convolution's result, what it is normalised and cut to (which
        # the gradient makes again where nothing is gathered, and then holds), a pool's result, what
        # a pointwise kernel takes, maps gathered, tokens, and what an attention block's products
        # take.
        maps = sum(
            (2 * x.pixels + x.pooled) * x.c_out // kernels
            + (x.pixels * x.c_in // kernels if x.depthwise else 0)
            for x in layers
        )
        tokens_here = self.towers * tokens * c.embed_dim
        blocks = 7 * c.depth * c.groups // group * c.tokens * c.embed_dim if c.groups else 0
        self.activations = self.towers * maps + sum(self.gathered) + tokens_here + blocks


def _group_macs(c: HSViTConfig) -> int:
    """Multiply-adds of one attention group and image; the last block asks for CLS alone."""
    t, d = c.tokens, c.embed_dim
    whole = 4 * t * d * d + 2 * t * t * d
    last = 2 * t * d * d + 2 * d * d + 2 * t * d
    return (c.depth - 1) * whole + last


class _Parameters:
    """Trained values on one device: those that are whole on each of the group axis, those of them
    that project maps to tokens, and those that are split over it."""

    def __init__(self, network: Any, group: int) -> None:
        params, _ = jax.eval_shape(network.init, jax.random.key(0))
        self.whole = self.embed = self.split = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(str(k.key) for k in path)
            if network.spread_axis(names) is None:
                self.whole += leaf.size
                self.embed += leaf.size if names[:2] == ("trunk", "embed") else 0
            else:
                self.split += leaf.size // group


def _forward(here: _Here, images: int, item: int, aggregate: str) -> list[Transfer]:
    """Maps gathered between sharded convolutions, then the CLS tokens: the smallest aggregate."""
    c, out = here.config, []
    if here.gathered:
        size = images * item * sum(here.gathered)
        out.append(
            Transfer("group", "all-gather", here.group, size, len(here.gathered), "feature maps")
        )
    if c.groups and aggregate in ("psum", "ordered"):
        size = images * c.embed_dim * item
        kind = "all-reduce" if aggregate == "psum" else "all-gather"
        copies = 1 if aggregate == "psum" else c.groups
        out.append(Transfer("group", kind, here.group, copies * size, 1, "CLS tokens"))
    elif c.groups:
        out += _compressed("group", here.group, images, 2 * c.embed_dim, "CLS tokens")
    return out


def _compressed(axis: str, devices: int, rows: int, row: int, what: str) -> list[Transfer]:
    """Transfers of `mesh._bf16_sum` for rows of `row` bytes, filled up to equal shares."""
    size = -(-rows // devices) * devices * row
    return [Transfer(axis, kind, devices, size, 1, what) for kind in ("all-to-all", "all-gather")]


def _backward(
    here: _Here, images: int, item: int, data: int, held: _Parameters, gradients: str
) -> list[Transfer]:
    """What training adds: the gradients of what was shared over `group`, and over `data` the
    moments of BatchNorm with their gradients and the parameters'."""
    c, group, out = here.config, here.group, []
    parameters, compressed = held.whole + held.split, gradients == "bf16" and data > 1
    if here.gathered:
        size = images * item * sum(here.gathered)
        calls = len(here.gathered)
        out.append(Transfer("group", "reduce-scatter", group, size, calls, "map gradients"))
    if here.way == "replicated" and c.groups and c.convolution:
        size = images * c.conv_channels[-1] * c.embed_dim * item
        out.append(Transfer("group", "all-reduce", group, size, 1, "token gradients"))
    if here.norm_channels:
        # Forward: mean, then variance. Backward: scale and shift at once, then the variance's way
        # back to the mean; the parameters' own gradients are made of those sums, or compressed.
        size, calls = 5 * _FLOAT * sum(here.norm_channels), 4 * len(here.norm_channels)
        out.append(Transfer("data", "all-reduce", data, size, calls, "BatchNorm"))
        parameters -= 2 * sum(here.norm_channels)
    if here.way == "sharded" and group > 1:
        # One projection for all devices' tokens: its gradient is a sum over both axes, at once
        # unless what goes over `data` is compressed.
        both = data > 1 and not compressed
        axis, devices = ("data+group", data * group) if both else ("group", group)
        size = _FLOAT * held.embed
        out.append(Transfer(axis, "all-reduce", devices, size, 1, "projection gradient"))
        parameters -= held.embed
    if compressed:
        for numbers in filter(None, (held.whole, held.split)):
            out += _compressed("data", data, numbers, 2, "gradients")
    else:
        out.append(Transfer("data", "all-reduce", data, _FLOAT * parameters, 1, "gradients"))
    return out
