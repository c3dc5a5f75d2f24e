"""FLOPs, memory and traffic of one device in a step: formulas of the network's sizes alone.

FLOPs are two for each multiply-add of matrix products and convolutions, padding counted, the last
attention block for its CLS only, as `apply` computes it; a training step is forward plus a gradient
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

_FLOAT = 4  # bytes of parameters, gradients, moments and statistics, whatever the computation's


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its links.

    A ring over n devices sends 2·(n−1)/n of the bytes in an all-reduce, half of that in an
    all-gather or reduce-scatter; a collective starts in latency·log2 n. Nothing overlaps.
    """

    flops: float  # FLOP/s that the device sustains
    bandwidth: float  # B/s that it sends
    latency: float  # seconds of one stage of a collective

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                kind = f"positive (per second); got {getattr(self, name)}"
                raise ValueError(f"--{name} must be finite and {kind}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(
                f"--latency must be finite and at least 0 (seconds); got {self.latency}"
            )

    def seconds(self, transfer: "Transfer") -> float:
        """Predicted seconds of a transfer."""
        n = transfer.devices
        share = (2 if transfer.kind == "all-reduce" else 1) * (n - 1) / n
        wait = transfer.calls * self.latency * math.log2(n)
        return share * transfer.bytes / self.bandwidth + wait


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over an axis ('data', 'group' or 'data+group') of `devices` devices.

    bytes: of the whole array on one device. calls: how often one must start; independent ones count
    as one, as compilers merge them.
    """

    axis: str
    kind: str
    devices: int
    bytes: int
    calls: int
    what: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs, bytes and transfers of one device in a step of `batch` images on data × group devices.

    `forward` is an evaluation's, `step` a training step's. head_flops: the classifier's part of
    forward_flops. sum_flops: of adding up the CLS tokens of the device's groups, not among them.
    depthwise_flops: (forward, step) parts of depthwise convolutions, which the CPU's program
    computes without a matrix product.
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
        """Devices of the mesh."""
        return self.data * self.group

    @property
    def images_per_device(self) -> int:
        """Images of the step on one device."""
        return self.batch // self.data

    @property
    def memory_bytes(self) -> int:
        """Parameters, their gradients, optimizer and averages, and activations."""
        return 2 * self.parameter_bytes + self.optimizer_bytes + self.activation_bytes


def by_axis_and_kind(transfers: Iterable[Transfer]) -> dict[tuple[str, str], int]:
    """Sums the bytes of transfers by (axis, kind)."""
    sums = collections.Counter()
    for t in transfers:
        sums[t.axis, t.kind] += t.bytes
    return dict(sums)


def networks(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Builds the network for each way to spread it that its sizes allow.

    'towers' has model.towers of them, or as many as its sizes allow where that is 1; the other ways
    have one, which sees the whole image.

    Returns:
        networks by `WAYS`.

    Raises:
        ValueError: a family other than hsvit.
    """
    settings = config.model.to_dict()
    if settings["family"] != "hsvit":
        what = "has none, and only its batch can be split, by mesh.data"
        if settings["family"] == "hsvit_backbone":
            what = "has one, or two with model.trunk='sharded', by mesh.group"
        raise ValueError(
            f"hsvit plan compares the ways to spread hsvit's groups; {settings['family']} {what}: "
            "see hsvit summary for its costs"
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
    if c.groups and c.convolution:
        by_way["sharded"] = build(trunk="sharded")
        most = math.gcd(*c.conv_channels, c.groups)
        towers = settings["towers"] if settings["towers"] > 1 else most
        if towers > 1:
            by_way["towers"] = build(towers=towers, tiles=settings["tiles"])
    return by_way


def group_axis(way: str, network: Any, devices: int, group: int | None) -> int:
    """Size of the group axis: as many of `devices` as divide the network's parts.

    Args:
        group: the largest size; None for no limit.

    Raises:
        ValueError: devices or group is below 1, or the network's groups (towers, kernels) do not
            divide into `group`.
    """
    if devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}")
    if group is not None and group < 1:
        raise ValueError(f"--group must be at least 1; got {group}")
    if way == "data":
        return 1
    limit = network.group_axis_limit
    if group is not None and limit % group:
        fitting = max(d for d in range(1, group) if limit % d == 0)
        raise ValueError(
            f"--group={group} does not divide the {limit} parts that the way {way!r} can spread: "
            f"choose a divisor of it, such as {fitting}"
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
    moments: float = 2.0,
) -> Cost:
    """Predicts one device's share of a step.

    Args:
        data, group: sizes of the mesh's axes.
        batch: images of the step on all devices.
        aggregate, gradients: see `mesh.spread`.
        moments: values kept for each parameter: those of the optimizer, and the moving average.

    Raises:
        ValueError: the batch does not split over `data`.
    """
    if batch < 1 or batch % data:
        raise ValueError(
            f"a batch of {batch} does not split over {data} data-parallel devices: choose a "
            f"multiple of {data} for --batch"
        )
    c, images, item = network.config, batch // data, network.dtype.itemsize
    image = _ImageCosts(network, group)
    head = c.embed_dim * c.num_classes
    macs = image.trunk_macs + image.group_macs + head
    held = _Parameters(network, group)
    parameters = held.shared + held.split
    forward = _forward(image, images, item, aggregate)
    backward = _backward(image, images, item, data, held, gradients)
    return Cost(
        way=way,
        data=data,
        group=group,
        batch=batch,
        forward_flops=2 * images * macs,
        step_flops=2 * images * (3 * macs - image.first_macs - image.outer_macs),
        head_flops=2 * images * head,
        sum_flops=images * c.groups // group * c.embed_dim,
        depthwise_flops=(2 * images * image.depthwise_macs, 6 * images * image.depthwise_macs),
        parameter_bytes=_FLOAT * parameters,
        optimizer_bytes=round(_FLOAT * parameters * moments),
        activation_bytes=images * item * image.activations,
        forward=tuple(t for t in forward if t.devices > 1),
        step=tuple(t for t in (*forward, *backward) if t.devices > 1),
    )


class _Layer(NamedTuple):
    """A convolution: input pixels, weights of its depthwise part (0: none) and of the other,
    channels, pixels after a pool (0: no pool)."""

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
    return layers if c.convolution else []


class _ImageCosts:
    """Costs of one image on one of `group` devices: multiply-adds, gathered maps, values kept."""

    def __init__(self, network: Any, group: int) -> None:
        c = network.config
        self.config, self.group = c, group
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
        # The last block has one query, so its keys' and values' gradients are outer products: sums
        # of one term, which are no matrix products.
        self.outer_macs = 2 * c.groups // group * c.tokens * c.embed_dim if c.groups else 0
        #: Values of the maps gathered before each convolution but the first.
        self.gathered = (
            [x.pixels * x.c_in for x in layers[1:]] if self.way == "sharded" and group > 1 else []
        )
        #: Channels of each BatchNorm on this device.
        self.norm_channels = [self.towers * x.c_out // kernels for x in layers]
        # Kept for the gradient: each convolution's result, the same normalised and rectified (which
        # the gradient computes again where nothing is gathered, and then holds), a pool's result, a
        # pointwise kernel's input, gathered maps, tokens, and the operands of an attention block.
        maps = sum(
            (2 * x.pixels + x.pooled) * x.c_out // kernels
            + (x.pixels * x.c_in // kernels if x.depthwise else 0)
            for x in layers
        )
        blocks = 7 * c.depth * c.groups // group * c.tokens * c.embed_dim if c.groups else 0
        embedded = self.towers * tokens * c.embed_dim
        self.activations = self.towers * maps + sum(self.gathered) + embedded + blocks


def _group_macs(c: HSViTConfig) -> int:
    """Multiply-adds of one attention group and image; the last block has CLS as its one query."""
    t, d = c.tokens, c.embed_dim
    block = 4 * t * d * d + 2 * t * t * d
    last_block = 2 * t * d * d + 2 * d * d + 2 * t * d
    return (c.depth - 1) * block + last_block


class _Parameters:
    """Parameters on one device: `shared` by all of the group axis, of these `embed`, which project
    maps to tokens, and `split` over the axis."""

    def __init__(self, network: Any, group: int) -> None:
        params, _ = jax.eval_shape(network.init, jax.random.key(0))
        self.shared = self.embed = self.split = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(str(k.key) for k in path)
            if network.spread_axis(names) is None:
                self.shared += leaf.size
                self.embed += leaf.size if names[:2] == ("trunk", "embed") else 0
            else:
                self.split += leaf.size // group


def _forward(image: _ImageCosts, images: int, item: int, aggregate: str) -> list[Transfer]:
    """Maps gathered between sharded convolutions, then the CLS tokens: the smallest aggregate."""
    c, group, sent = image.config, image.group, []
    if image.gathered:
        size, calls = images * item * sum(image.gathered), len(image.gathered)
        sent.append(Transfer("group", "all-gather", group, size, calls, "feature maps"))
    size = images * c.embed_dim * item
    if c.groups and aggregate == "psum":
        sent.append(Transfer("group", "all-reduce", group, size, 1, "CLS tokens"))
    elif c.groups and aggregate == "ordered":
        sent.append(Transfer("group", "all-gather", group, c.groups * size, 1, "CLS tokens"))
    elif c.groups:
        sent += _compressed("group", group, images, 2 * c.embed_dim, "CLS tokens")
    return sent


def _compressed(axis: str, devices: int, rows: int, row: int, what: str) -> list[Transfer]:
    """Transfers of `mesh._bf16_sum` for rows of `row` bytes, filled up to equal shares."""
    size = -(-rows // devices) * devices * row
    return [Transfer(axis, kind, devices, size, 1, what) for kind in ("all-to-all", "all-gather")]


def _backward(
    image: _ImageCosts, images: int, item: int, data: int, held: _Parameters, gradients: str
) -> list[Transfer]:
    """Transfers that training adds: gradients of arrays shared over `group`, and over `data` the
    moments of BatchNorm with their gradients and the parameters'."""
    c, group, sent = image.config, image.group, []
    parameters, compressed = held.shared + held.split, gradients == "bf16" and data > 1
    if image.gathered:
        size, calls = images * item * sum(image.gathered), len(image.gathered)
        sent.append(Transfer("group", "reduce-scatter", group, size, calls, "map gradients"))
    if image.way == "replicated" and c.groups and c.convolution:
        size = images * c.conv_channels[-1] * c.embed_dim * item
        sent.append(Transfer("group", "all-reduce", group, size, 1, "token gradients"))
    if image.norm_channels:
        # Forward: mean, then variance. Backward: scale and shift at once, then the variance's way
        # back to the mean; the gradients of scale and shift are those sums, or compressed.
        size, calls = 5 * _FLOAT * sum(image.norm_channels), 4 * len(image.norm_channels)
        sent.append(Transfer("data", "all-reduce", data, size, calls, "BatchNorm"))
        parameters -= 2 * sum(image.norm_channels)
    if image.way == "sharded" and group > 1:
        # One projection for all devices' tokens: its gradient is a sum over both axes, at once
        # unless the sum over `data` is compressed.
        both = data > 1 and not compressed
        axis, devices = ("data+group", data * group) if both else ("group", group)
        size = _FLOAT * held.embed
        sent.append(Transfer(axis, "all-reduce", devices, size, 1, "projection gradient"))
        parameters -= held.embed
    if compressed:
        for numbers in filter(None, (held.shared, held.split)):
            sent += _compressed("data", data, numbers, 2, "gradients")
    else:
        sent.append(Transfer("data", "all-reduce", data, _FLOAT * parameters, 1, "gradients"))
    return sent
