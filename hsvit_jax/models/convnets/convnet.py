"""Shared parts of the convolutional networks: a convolution with BatchNorm, and a classifier.

A network is described by plain data, a `Conv` for each convolution. Its modules, the size of its
last map and its converter derive from that description, so that they cannot differ.

The channels of a map can be sharded over devices: a module then takes this device's channels,
all-gathers them where all channels are combined (every convolution but a depthwise one) and returns
its part of the output channels. `kernels` is the `GroupShard` of the output channels.
"""

import abc
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.conv_layers import Padding, Pads, convolve, pads, size_out
from hsvit_jax.models.family import Sizes
from hsvit_jax.models.network import UNSHARDED, BoundModules, ForwardContext, GroupShard, Network
from hsvit_jax.ops.activations import activation as by_name

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Conv:
    """The description of a convolution without bias, its BatchNorm and activation.

    Attributes:
        size: rows and columns of a kernel.
        padding: see `conv_layers.Padding`; None: symmetric, size//2·dilation.
        groups: of channels, each convolved to its part of the output.
        activation: a name of `activations.ACTIVATIONS`.
        eps: BatchNorm's.
        momentum: BatchNorm's, see `layers.BatchNorm`.
        init: see `layers.init_kernel`, or 'fan_out', N(0, 2/(size²·c_out)).
    """

    c_in: int
    c_out: int
    size: int
    stride: int = 1
    padding: Padding | None = "same"
    dilation: int = 1
    depthwise: bool = False
    groups: int = 1
    activation: str = ""
    eps: float = 1e-5
    momentum: float = 0.9
    init: str = "normal"

    def pads(self, size: tuple[int, int]) -> Pads:
        """Zeros (before, after) rows and columns of a map."""
        return pads(self.size, size, self.stride, self.padding, self.dilation)

    def map_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the output for a map of this size."""
        return size_out(size, self.size, self.stride, self.pads(size), self.dilation)


class ConvNorm(nnx.Module):
    """The module of a `Conv`. Parameters: kernel (size, size, c_in or 1, c_out), norm."""

    def __init__(self, spec: Conv, key: Array) -> None:
        self.spec = spec
        c_in = 1 if spec.depthwise else spec.c_in // spec.groups
        fan_in = spec.size**2 * c_in
        shape, init = (spec.size, spec.size, c_in, spec.c_out), spec.init
        if init == "fan_out":
            fan_in, init = spec.size**2 * spec.c_out, "kaiming"
        self.kernel = nnx.Param(layers.init_kernel(key, shape, fan_in, init))
        self.norm = layers.BatchNorm(spec.c_out, eps=spec.eps, momentum=spec.momentum)

    def __call__(
        self, x_BHWC: Array, context: ForwardContext, kernels: GroupShard = UNSHARDED
    ) -> Array:
        """(B, H, W, C) → (B, H', W', C'), this device's channels."""
        if not self.spec.depthwise and x_BHWC.shape[3] != self.spec.c_in:
            x_BHWC = kernels.all_gather(x_BHWC, 3)
        spec, kernel = self.spec, self.kernel[...].astype(x_BHWC.dtype)
        y_BHWC = convolve(x_BHWC, kernel, spec.stride, spec.pads(x_BHWC.shape[1:3]), spec.dilation)
        y_BHWC = self.norm(y_BHWC, train=context.train, batch_axes=context.batch_axes)
        return by_name(spec.activation)(y_BHWC)


# --- Sizes ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConvNetConfig(Sizes, abc.ABC):
    """Sizes of a convolutional network; each family adds to them.

    Raises:
        ValueError: the sizes do not fit each other, or the image is too small for a stride.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for conv in self.convs():
            if min(conv.c_in, conv.c_out, conv.size, conv.stride, conv.dilation) < 1:
                raise ValueError(
                    f"a convolution of size {conv.size}, stride {conv.stride} and dilation "
                    f"{conv.dilation} would have {conv.c_in} channels in and {conv.c_out} out; all "
                    "must be positive: make the network wider"
                )
            by_name(conv.activation)
        last_map(self)

    @abc.abstractmethod
    def head(self, key: Array) -> "Head":
        """The classifier on the last map."""

    @abc.abstractmethod
    def features(self, key: Array) -> nnx.Module:
        """The backbone, a module: (images_BHWC, context, kernels) → the last map (B, h, w, C')."""

    @abc.abstractmethod
    def convs(self) -> Iterator[Conv]:
        """Every convolution; the last one makes the last map."""

    def main_path(self) -> Iterator[Conv]:
        """The convolutions from the image to the last map, pools among them, without shortcuts."""
        return self.convs()

    @property
    def widths(self) -> tuple[int, ...]:
        """Output channels of every convolution; the last map's come last."""
        return tuple(conv.c_out for conv in self.convs())

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the last map."""
        return last_map(self)


def last_map(c: ConvNetConfig) -> tuple[int, int]:
    """Rows and columns after the last convolution.

    Raises:
        ValueError: a map of one pixel is left before a stride.
    """
    size = c.image_size
    for conv in c.main_path():
        if conv.stride > 1 and min(size) < 2:
            raise ValueError(
                f"an image of {c.image_size[0]}×{c.image_size[1]} pixels is too small for this "
                f"network: only {size[0]}×{size[1]} are left before its last stride of "
                f"{conv.stride}; enlarge data.image_size, or stride less"
            )
        size = conv.map_size(size)
    return size


# --- The classifier ------------------------------------------------------------------------------


class Head(nnx.Module):
    """Global average or max pooling, dropout and a linear classifier.

    pooling: 'mean' or 'max'; init: see `layers.init_kernel`.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        key: Array,
        *,
        dropout: float = 0.0,
        pooling: str = "mean",
        init: str = "normal",
    ) -> None:
        self.dropout, self.pooling = dropout, pooling
        self.linear = layers.Linear(channels, classes, key, init=init)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, h, w, C) → logits (B, K)."""
        x_BC = x_BHWC.mean((1, 2)) if self.pooling == "mean" else largest(x_BHWC)
        return self.linear(layers.dropout(x_BC, self.dropout, context, layers.EMBEDDING))


def largest(x_BHWC: Array) -> Array:
    """Each channel's maximum (B, C), whose gradient goes to the first such pixel, as in PyTorch.

    The gradient of `max` looks for the pixels equal to it, among values that XLA may have computed
    again with other rounding: it can find none.
    """
    x_BTC = x_BHWC.reshape(x_BHWC.shape[0], -1, x_BHWC.shape[3])
    return jnp.take_along_axis(x_BTC, x_BTC.argmax(1, keepdims=True), axis=1)[:, 0]


class ConvNet(Network):
    """A convolutional classifier. Parameters: {'backbone', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        backbone_key, head_key = jax.random.split(key)
        return {
            "backbone": self.config.features(backbone_key),
            "head": self.config.head(head_key),
        }

    def logits(self, bound: BoundModules, images_BHWC: Array, context: ForwardContext) -> Array:
        x_BHWC = bound["backbone"](images_BHWC, context)
        x_BHWC = context.tap("maps", x_BHWC)
        return bound["head"](x_BHWC, context)
