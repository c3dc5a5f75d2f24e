"""What convolutional networks share: a convolution with BatchNorm, and a classifier on the maps.

A network is described by plain data, a `Conv` for each convolution. Its modules, its map's size
and the converters are made from that description, so that they cannot differ.

The channels of a map may be spread over devices: a module is then given this device's part of a
map, gathers it where all channels meet (every convolution but a depthwise one) and returns its part
of the channels out. `kernels` is the `GroupShard` that says which; `UNSHARDED` where nothing is
spread.
"""

import abc
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.conv_layers import Pads, convolve, pads
from hsvit_jax.models.network import UNSHARDED, ForwardContext, GroupShard, Network
from hsvit_jax.ops.activations import ACTIVATIONS

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution without bias, BatchNorm and an activation.

    padding: zeros (before, after) the map along both axes, or 'same': as many as leave
    ⌈side/stride⌉, the odd one after (what TensorFlow and XLA call SAME). depthwise: a kernel for
    each channel. momentum: BatchNorm's, see `layers.BatchNorm`. init: as `layers.init_kernel`, or
    'fan_out', N(0, 2/(size²·c_out)).
    """

    c_in: int
    c_out: int
    size: int
    stride: int = 1
    padding: str | tuple[int, int] = "same"
    dilation: int = 1
    depthwise: bool = False
    activation: str = ""
    eps: float = 1e-5
    momentum: float = 0.9
    init: str = "normal"

    def pads(self, size: tuple[int, int]) -> Pads:
        """Zeros (before, after) rows and columns of a map."""
        padding = self.padding if self.padding == "same" else (self.padding, self.padding)
        return pads(self.size, size, self.stride, padding, self.dilation)

    def map_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns after it."""
        reach = (self.size - 1) * self.dilation + 1
        rows, columns = (
            (n + sum(around) - reach) // self.stride + 1
            for n, around in zip(size, self.pads(size), strict=True)
        )
        return rows, columns


class ConvNorm(nnx.Module):
    """What a `Conv` describes. Parameters: kernel (size, size, c_in or 1, c_out), norm."""

    def __init__(self, spec: Conv, key: Array) -> None:
        self.spec = spec
        c_in = 1 if spec.depthwise else spec.c_in
        fan_in = spec.size**2 * c_in
        shape, init = (spec.size, spec.size, c_in, spec.c_out), spec.init
        if init == "fan_out":
            fan_in, init = spec.size**2 * spec.c_out, "kaiming"
        self.kernel = nnx.Param(layers.init_kernel(key, shape, fan_in, init))
        self.norm = layers.BatchNorm(spec.c_out, eps=spec.eps, momentum=spec.momentum)

    def __call__(
        self, x_BHWC: Array, context: ForwardContext, kernels: GroupShard = UNSHARDED
    ) -> Array:
        """(B, H, W, C) → (B, H', W', C'), the channels that are here."""
        if not self.spec.depthwise and x_BHWC.shape[3] != self.spec.c_in:
            x_BHWC = kernels.all_gather(x_BHWC, 3)
        spec, kernel = self.spec, self.kernel[...].astype(x_BHWC.dtype)
        y_BHWC = convolve(x_BHWC, kernel, spec.stride, spec.pads(x_BHWC.shape[1:3]), spec.dilation)
        y_BHWC = self.norm(y_BHWC, train=context.train, batch_axes=context.batch_axes)
        return ACTIVATIONS[spec.activation](y_BHWC)


# --- Sizes ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConvNetConfig(abc.ABC):
    """Sizes of a convolutional network; a family adds its own.

    image_size in pixels (H, W). num_classes: of the classifier, unused where only the last map is.
    Raises ValueError for sizes that do not fit, and for an image of which a stride finds one pixel.
    """

    image_size: tuple[int, int]
    image_channels: int
    num_classes: int

    def __post_init__(self) -> None:
        if min(*self.image_size, self.image_channels, self.num_classes) < 1:
            raise ValueError(f"sizes must be positive; got {self}")
        for conv in self.convs():
            if min(conv.c_in, conv.c_out, conv.size, conv.stride, conv.dilation) < 1:
                raise ValueError(f"sizes of a convolution must be positive; got {conv}")
            if conv.activation not in ACTIVATIONS:
                raise ValueError(
                    f"unknown activation {conv.activation!r}; choose one of {sorted(ACTIVATIONS)}"
                )
            if not 0 <= conv.momentum < 1 or conv.eps <= 0:
                raise ValueError(
                    "BatchNorm needs a momentum in [0, 1) and a positive eps; got "
                    f"{conv.momentum} and {conv.eps}"
                )
        last_map(self)

    @property
    @abc.abstractmethod
    def head(self) -> "HeadConfig":
        """What comes after the last map."""

    @abc.abstractmethod
    def features(self, key: Array) -> nnx.Module:
        """A fresh module: (images (B, H, W, C), context, kernels) → the last map (B, h, w, C')."""

    @abc.abstractmethod
    def convs(self) -> Iterator[Conv]:
        """Every convolution; the last one makes the last map."""

    def main_path(self) -> Iterator[Conv]:
        """The convolutions, and pools as such, from the image to the last map, no shortcuts."""
        return self.convs()

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels out of every convolution; the last ones are the map's."""
        return tuple(conv.c_out for conv in self.convs())

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the last map."""
        return last_map(self)


def check_rate(name: str, rate: float) -> None:
    """Raises ValueError for a probability of dropping that is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be in [0, 1); got {rate}")


def last_map(c: ConvNetConfig) -> tuple[int, int]:
    """Rows and columns after the last convolution.

    Raises ValueError where a stride has one pixel to skip.
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


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Pool ('mean' or 'max'), dropout, linear; init as `layers.init_kernel`."""

    channels: int
    num_classes: int
    dropout: float = 0.0
    pooling: str = "mean"
    init: str = "normal"

    def __post_init__(self) -> None:
        check_rate("dropout", self.dropout)
        if self.pooling not in ("mean", "max"):
            raise ValueError(f"pooling must be 'mean' or 'max'; got {self.pooling!r}")


class Head(nnx.Module):
    """A map's mean or maximum, dropout and a linear classifier."""

    def __init__(self, c: HeadConfig, key: Array) -> None:
        self.dropout, self.pooling = c.dropout, c.pooling
        self.linear = layers.Linear(c.channels, c.num_classes, key, init=c.init)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, h, w, C) → logits (B, K)."""
        x_BC = x_BHWC.mean((1, 2)) if self.pooling == "mean" else x_BHWC.max((1, 2))
        return self.linear(layers.dropout(x_BC, self.dropout, context, layers.EMBEDDING))


class ConvNet(Network):
    """A classifier. Parameters: {'backbone', 'head'}."""

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        backbone_key, head_key = jax.random.split(key)
        return {
            "backbone": self.config.features(backbone_key),
            "head": Head(self.config.head, head_key),
        }

    def forward(
        self, params: dict, stats: dict, images_BHWC: Array, context: ForwardContext
    ) -> tuple[Array, dict]:
        bound = self.bind(params, stats)
        x_BHWC = bound["backbone"](images_BHWC, context)
        context.call_hook("maps", lambda: x_BHWC)
        return bound["head"](x_BHWC, context), bound.stats()

    def features(self, params: dict, stats: dict, images_BHWC: Array) -> Array:
        """The last map (B, h, w, C) of normalised images (B, H, W, C), in inference mode."""
        context = ForwardContext(
            train=False, key_words=None, example_ids_B=jnp.arange(len(images_BHWC))
        )
        return self.bind(params, stats)["backbone"](images_BHWC, context)
