"""FLOPs, memory and traffic of one device in a step: formulas of the network's sizes alone.

FLOPs are two for each multiply-add of matrix products and convolutions, padding included. As in
`apply`, the last attention block runs for its CLS only. A training step is forward plus a gradient
with respect to the inputs and one with respect to the kernels of each (none for the images).
A transfer's bytes are those of the whole array on one device: what an all-reduce sums, what an
all-gather leaves, what a reduce-scatter starts from. Times follow a simple model, see `Machine`.
"""

import collections
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

CLS_TOKENS = "CLS tokens"  # sent for the smallest aggregate

_FLOAT = 4  # bytes of parameters, gradients, moments and statistics in any dtype


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its links.

    A ring over n devices sends 2·(n−1)/n of the bytes in an all-reduce, half of that in an
    all-gather or reduce-scatter; a collective starts in latency·log2 n. Nothing overlaps.
    """

    flops: float  # FLOP/s that the device sustains
    bandwidth: float  # B/s that it sends
    latency: float  # seconds of one stage of a collective

    def seconds(self, transfer: "Transfer") -> float:
        """Predicts the seconds of a transfer."""
        n = transfer.devices
        share = (2 if transfer.kind == "all-reduce" else 1) * (n - 1) / n
        wait = transfer.calls * self.latency * math.log2(n)
        return share * transfer.bytes / self.bandwidth + wait


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over an axis ('data', 'group' or 'data+group') of `devices` devices.

    bytes: bytes of the whole array on one device. calls: sequential starts; compilers merge
    independent ones.
    """

    axis: str
    kind: str
    devices: int
    bytes: int
    calls: int
    what: str


def by_axis_and_kind(transfers: Iterable[Transfer]) -> dict[tuple[str, str], int]:
    """Sums the bytes of transfers by (axis, kind)."""
    sums = collections.Counter()
    for t in transfers:
        sums[t.axis, t.kind] += t.bytes
    return dict(sums)


def networks(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Builds the networks by `WAYS`, as far as the sizes allow them.

    'towers' has model.towers, or as many as its sizes allow if that is 1. The other ways have one
    tower, which sees the whole image.

    Raises:
        ValueError: a family other than hsvit.
    """
    settings = config.model.to_dict()
    if settings["family"] != models.DEFAULT.name:
        raise ValueError(
            f"hsvit plan spreads the groups of {models.DEFAULT.name}; for {settings['family']} use "
            "hsvit summary"
        )

    def build(**changes: Any) -> Any:
        return models.build(
            {**settings, "towers": 1, "tiles": (1, 1), "trunk": "replicated", **changes},
            image_size=tuple(config.data.image_size),
            channels=config.data.channels,
            num_classes=config.data.num_classes,
        )

    single = build()
    c = single.config
    by_way = {"data": single}
    if c.groups:
        by_way["replicated"] = single
    if c.groups and c.convolves:
        by_way["sharded"] = build(trunk="sharded")
        most = math.gcd(*c.conv_channels, c.groups)
        towers = settings["towers"] if settings["towers"] > 1 else most
        if towers > 1:
            by_way["towers"] = build(towers=towers, tiles=settings["tiles"])
    return by_way


def group_axis(way: str, network: Any, devices: int, group: int | None) -> int:
    """Returns the size of the group axis: as many of `devices` as divide the network's parts.

    Args:
        group: the largest size; None for no limit.

    Raises:
        ValueError: the network's groups (towers, kernels) do not divide into `group`.
    """
    if way == "data":
        return 1
    limit = network.group_axis_limit
    if limit % (group or 1):
        fitting = max(d for d in range(1, group) if limit % d == 0)
        raise ValueError(
            f"--group={group} does not divide the {limit} parts of the way {way!r}: set a divisor, "
            f"such as {fitting}"
        )
    return math.gcd(devices, group or limit)


class Cost:
    """Predicted FLOPs, bytes and transfers of one device in a step.

    Args:
        way, network: see `networks`.
        data, group: sizes of the mesh's axes.
        batch: images of the step on all devices, a multiple of `data`.
        aggregate, gradients: see `mesh.spread`.
        moments: values kept for each parameter by the optimizer and the moving average.

    Attributes:
        head_flops: the classifier's part of forward_flops.
        sum_flops: additions of the CLS tokens of the device's groups, not in forward_flops.
        depthwise_flops: (forward, step) parts of depthwise convolutions, without a matrix product
            in the CPU's program.
        memory_bytes: parameters, gradients, optimizer and averages, and activations.
        forward, step: transfers of an evaluation and of a training step.
    """

    def __init__(
        self,
        way: str,
        network: Any,
        *,
        data: int,
        group: int,
        batch: int,
        aggregate: str = "psum",
        gradients: str = "float32",
        moments: float = 2.0,
    ) -> None:
        self.way, self.data, self.group, self.devices = way, data, group, data * group
        self.images_per_device = images = batch // data
        c, share = network.config, _Share(network, group, images)
        head = c.embed_dim * c.num_classes
        macs = share.trunk_macs + share.group_macs + head
        self.forward_flops = 2 * images * macs
        self.step_flops = 2 * images * (3 * macs - share.first_macs - share.outer_macs)
        self.head_flops = 2 * images * head
        self.sum_flops = images * c.groups // group * c.embed_dim
        self.depthwise_flops = tuple(n * images * share.depthwise_macs for n in (2, 6))
        self.parameter_bytes = _FLOAT * (share.shared + share.split)
        self.optimizer_bytes = round(self.parameter_bytes * moments)
        self.activation_bytes = share.value * share.activations
        self.memory_bytes = 2 * self.parameter_bytes + self.optimizer_bytes + self.activation_bytes
        forward, backward = _forward(share, aggregate), _backward(share, data, gradients)
        self.forward = [t for t in forward if t.devices > 1]
        self.step = [t for t in (*forward, *backward) if t.devices > 1]


class _Layer(NamedTuple):
    """A convolution: input pixels, weights of its depthwise part and of the rest, channels, and
    pixels after a pool; 0 for no such part or pool."""

    pixels: int
    depthwise: int
    weights: int
    c_in: int
    c_out: int
    pooled: int


def _layers(c: HSViTConfig) -> list[_Layer]:
    layers, (rows, columns), c_in = [], c.image_size, c.image_channels
    for c_out, kernel, stride in zip(c.conv_channels, c.conv_kernels, c.pool_strides, strict=True):
        pixels = rows * columns
        rows, columns = -(-rows // stride), -(-columns // stride)
        for size, pooled in ((kernel, 0), (3, rows * columns if stride > 1 else 0)):
            window = size * size * c_in
            separable = c.separable and layers
            weights = (window, c_in * c_out) if separable else (0, window * c_out)
            layers.append(_Layer(pixels, *weights, c_in, c_out, pooled))
            c_in = c_out
    return layers if c.convolves else []


class _Share:
    """One device of `group`: its parameters, and each image's multiply-adds, maps and values."""

    def __init__(self, network: Any, group: int, images: int) -> None:
        c = network.config
        self.config, self.group, self.images = c, group, images
        #: Bytes of one value of each image.
        self.value = images * network.dtype.itemsize
        self.way = "towers" if c.towers > 1 else c.trunk
        self.towers = c.towers // group if c.towers > 1 else 1
        tower = c.tower if c.towers > 1 else c
        kernels = group if self.way == "sharded" else 1
        layers = _layers(tower)
        convolutions = [x.pixels * x.weights // kernels for x in layers]
        self.depthwise_macs = self.towers * sum(x.pixels * x.depthwise // kernels for x in layers)
        pixels = math.prod(tower.map_size) if layers else 0
        tokens = tower.conv_channels[-1] // kernels
        self.first_macs = self.towers * convolutions[0] if layers else 0
        self.trunk_macs = self.depthwise_macs + self.towers * (
            sum(convolutions) + tokens * pixels * c.embed_dim
        )
        self.group_macs = c.groups // group * _group_macs(c) if c.groups else 0
        # The last block has one query: its keys' and values' gradients are outer products.
        self.outer_macs = 2 * c.groups // group * c.tokens * c.embed_dim if c.groups else 0
        #: Values of the maps gathered before each convolution but the first.
        self.gathered = (
            [x.pixels * x.c_in for x in layers[1:]] if self.way == "sharded" and group > 1 else []
        )
        #: Channels of each BatchNorm on this device.
        self.norm_channels = [self.towers * x.c_out // kernels for x in layers]
        # The gradient needs each convolution's result, also normalised and rectified, a pool's
        # result, a pointwise kernel's input, gathered maps, tokens, and attention's operands.
        maps = sum(
            (2 * x.pixels + x.pooled) * x.c_out // kernels
            + (x.pixels * x.c_in // kernels if x.depthwise else 0)
            for x in layers
        )
        blocks = 7 * c.depth * c.groups // group * c.tokens * c.embed_dim if c.groups else 0
        embedded = self.towers * tokens * c.embed_dim
        self.activations = self.towers * maps + sum(self.gathered) + embedded + blocks
        #: Parameters shared over the group axis, `embed` (maps to tokens) of these, and split ones.
        self.shared = self.embed = self.split = 0
        params, _ = network.init_shapes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(str(k.key) for k in path)
            if network.spread_axis(names) is None:
                self.shared += leaf.size
                self.embed += leaf.size if names[:2] == ("trunk", "embed") else 0
            else:
                self.split += leaf.size // group


def _group_macs(c: HSViTConfig) -> int:
    """Multiply-adds of one attention group and image; CLS is the last block's only query."""
    t, d = c.tokens, c.embed_dim
    block = 4 * t * d * d + 2 * t * t * d
    last_block = 2 * t * d * d + 2 * d * d + 2 * t * d
    return (c.depth - 1) * block + last_block


def _forward(share: _Share, aggregate: str) -> list[Transfer]:
    """Maps gathered between sharded convolutions, then the CLS tokens: the smallest aggregate."""
    c, group, sent = share.config, share.group, _gathers(share, "all-gather", "feature maps")
    if c.groups and aggregate == "psum":  # in float32, whatever the computation's
        size = c.embed_dim * share.images * _FLOAT
        sent.append(Transfer("group", "all-reduce", group, size, 1, CLS_TOKENS))
    elif c.groups and aggregate == "ordered":
        size = c.groups * c.embed_dim * share.value
        sent.append(Transfer("group", "all-gather", group, size, 1, CLS_TOKENS))
    elif c.groups:
        sent += _compressed("group", group, share.images, 2 * c.embed_dim, CLS_TOKENS)
    return sent


def _gathers(share: _Share, kind: str, what: str) -> list[Transfer]:
    size, calls = share.value * sum(share.gathered), len(share.gathered)
    return [Transfer("group", kind, share.group, size, calls, what)] if calls else []


def _compressed(axis: str, devices: int, rows: int, row: int, what: str) -> list[Transfer]:
    """Transfers of `mesh._bf16_sum` for rows of `row` bytes, filled up to equal shares."""
    size = -(-rows // devices) * devices * row
    return [Transfer(axis, kind, devices, size, 1, what) for kind in ("all-to-all", "all-gather")]


def _backward(share: _Share, data: int, gradients: str) -> list[Transfer]:
    """Transfers that training adds: gradients over both axes, and BatchNorm over `data`."""
    c, group = share.config, share.group
    parameters, compressed = share.shared + share.split, gradients == "bf16" and data > 1
    # A narrow network casts its parameters, so their gradients over `data` are separate sums.
    apart = compressed or share.value < _FLOAT * share.images
    sent = _gathers(share, "reduce-scatter", "map gradients")
    if share.way == "replicated" and c.groups and c.convolves:
        size = c.conv_channels[-1] * c.embed_dim * share.value
        sent.append(Transfer("group", "all-reduce", group, size, 1, "token gradients"))
    if share.norm_channels:
        # Forward: mean, then variance. Backward: scale and shift, then the variance's to the mean.
        size, calls = 5 * _FLOAT * sum(share.norm_channels), 4 * len(share.norm_channels)
        sent.append(Transfer("data", "all-reduce", data, size, calls, "BatchNorm"))
        parameters -= 0 if apart else 2 * sum(share.norm_channels)
    if share.way == "sharded" and group > 1:
        # The gradient of the shared projection is one sum over both axes, unless `data` is apart.
        both = data > 1 and not apart
        axis, devices = ("data+group", data * group) if both else ("group", group)
        size = _FLOAT * share.embed
        sent.append(Transfer(axis, "all-reduce", devices, size, 1, "projection gradient"))
        parameters -= 0 if apart else share.embed
    if compressed:
        for numbers in filter(None, (share.shared, share.split)):
            sent += _compressed("data", data, numbers, 2, "gradients")
    else:
        sent.append(Transfer("data", "all-reduce", data, _FLOAT * parameters, 1, "gradients"))
    return sent
