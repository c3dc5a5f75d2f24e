"""Convolutions with any padding, and convolution, BatchNorm and activation as one layer."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hsvit_jax.models import layers
from hsvit_jax.models.layers import add_bias, init_bias, init_kernel
from hsvit_jax.models.network import UNSHARDED, ForwardContext, GroupShard
from hsvit_jax.ops import conv
from hsvit_jax.ops.activations import activation as by_name
from hsvit_jax.ops.conv_depthwise import depthwise_conv2d
from hsvit_jax.ops.conv_direct import Pads, conv2d_xla

Array = jax.Array
#: Zeros on every side, or (before, after) of rows and of columns; 'same': as XLA, for ⌈n/stride⌉.
Padding = int | Pads | str


def pads(
    size: int,
    image_size: tuple[int, int],
    stride: int = 1,
    padding: Padding | None = None,
    dilation: int = 1,
) -> Pads:
    """Zeros (before, after) rows and columns of an image; size//2·dilation without `padding`."""
    if padding is None:
        padding = size // 2 * dilation
    if isinstance(padding, int):
        return ((padding, padding), (padding, padding))
    if padding != "same":
        return padding
    both_axes = []
    for n in image_size:
        total = max((-(-n // stride) - 1) * stride + (size - 1) * dilation + 1 - n, 0)
        both_axes.append((total // 2, total - total // 2))
    return (both_axes[0], both_axes[1])


def size_out(
    image_size: tuple[int, int],
    size: int,
    stride: int = 1,
    padding: Padding | None = None,
    dilation: int = 1,
) -> tuple[int, int]:
    """Rows and columns after a convolution or pool of `size`.

    Raises:
        ValueError: the image is too small for it.
    """
    around, reach = pads(size, image_size, stride, padding, dilation), (size - 1) * dilation + 1
    rows, columns = (
        (n + sum(pad) - reach) // stride + 1 for n, pad in zip(image_size, around, strict=True)
    )
    if min(rows, columns) < 1 or max(image_size) == 1 < stride:
        raise ValueError(
            f"a map of {image_size[0]}×{image_size[1]} is too small for a convolution of size "
            f"{size} and stride {stride}: use a larger data.image_size"
        )
    return rows, columns


def convolve(
    x_BHWC: Array, kernel_HWIO: Array, stride: int, around: Pads, dilation: int = 1
) -> Array:
    """A convolution without bias, by the fastest formula on this back end.

    Args:
        kernel_HWIO: (k, k, C/groups, C'); its third axis gives the number of groups.
        around: zeros (before, after) rows and columns.

    Returns:
        (B, H', W', C'), in x's dtype.
    """
    size, _, per_group, c_out = kernel_HWIO.shape
    groups = x_BHWC.shape[3] // per_group
    usual = around == ((size // 2, size // 2),) * 2 and size % 2 and stride == 1
    # A strided slice before a matrix product makes XLA's compiler for GPUs abort the process.
    sliced = stride == 1 or conv.use_cpu_formulas()
    if size == 1 and sliced and not any(map(any, around)) and (groups == 1 or per_group > 1):
        x_BHWC = x_BHWC[:, ::stride, ::stride]
        if groups == 1:
            return x_BHWC @ kernel_HWIO[0, 0]
        x = x_BHWC.reshape(*x_BHWC.shape[:3], groups, per_group)
        kernel = kernel_HWIO.reshape(per_group, groups, c_out // groups)
        return jnp.einsum("bhwgi,igo->bhwgo", x, kernel).reshape(*x.shape[:3], c_out)
    if per_group == 1 and (c_out == groups or groups > 1):
        return depthwise_conv2d(x_BHWC, kernel_HWIO, stride, around, dilation)
    if usual and groups == 1 and dilation == 1:
        return conv.conv2d(x_BHWC, kernel_HWIO)
    return conv2d_xla(x_BHWC, kernel_HWIO, stride, around, dilation)


class Conv(nnx.Module):
    """Convolution; kernel (size, size, c_in/groups, c_out).

    padding: see `Padding`; defaults to symmetric, size//2·dilation. init: as
    `layers.init_kernel`, or 'kaiming_out', N(0, 2·groups/(size²·c_out)).
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        size: int,
        key: Array,
        *,
        stride: int = 1,
        padding: Padding | None = None,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        init: str = "torch",
    ) -> None:
        self.stride, self.padding, self.dilation = stride, padding, dilation
        k_key, b_key = jax.random.split(key)
        fan_in, shape = size * size * c_in // groups, (size, size, c_in // groups, c_out)
        if init == "kaiming_out":
            fan, init = size * size * c_out // groups, "kaiming"
        else:
            fan = fan_in
        self.kernel = nnx.Param(init_kernel(k_key, shape, fan, init))
        self.bias = nnx.Param(init_bias(b_key, c_out, fan_in, init)) if bias else None

    def __call__(self, x_BHWC: Array) -> Array:
        """(B, H, W, c_in) → (B, H', W', c_out), see `size_out`; ⌈H/stride⌉ for an odd size."""
        kernel = self.kernel[...].astype(x_BHWC.dtype)
        image_size = (x_BHWC.shape[1], x_BHWC.shape[2])
        around = pads(len(kernel), image_size, self.stride, self.padding, self.dilation)
        y = convolve(x_BHWC, kernel, self.stride, around, self.dilation)
        return y if self.bias is None else add_bias(y, self.bias[...])


def convs(
    widths: Sequence[int], strides: Sequence[int], size: int, key: Array, **others: Any
) -> nnx.List:
    """Convolutions from each width to the next, the first the image's; others: of `Conv`."""
    keys = jax.random.split(key, len(strides))
    shapes = zip(pairwise(widths), strides, keys, strict=True)
    return nnx.List(Conv(*ends, size, k, stride=stride, **others) for ends, stride, k in shapes)


class ConvNorm(nnx.Module):
    """Convolution, BatchNorm, activation: {'conv', 'norm'}.

    activation: a name of `activations.ACTIVATIONS`; momentum in Flax's sense, see
    `layers.BatchNorm`; others: of `Conv`.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        size: int,
        key: Array,
        *,
        bias: bool = False,
        activation: str = "none",
        eps: float = 1e-5,
        momentum: float = 0.9,
        **others: Any,
    ) -> None:
        self.conv = Conv(c_in, c_out, size, key, bias=bias, **others)
        self.norm = layers.BatchNorm(c_out, eps=eps, momentum=momentum)
        self.activate = by_name(activation)

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, c_in) → (B, H', W', c_out)."""
        y = self.norm(self.conv(x_BHWC), train=context.train, batch_axes=context.batch_axes)
        return self.activate(y)


class SqueezeExcite(nnx.Module):
    """Squeeze-and-excitation: weights channels by a gate, computed from all channels' means."""

    def __init__(
        self, channels: int, inner: int, activation: str, key: Array, *, init: str = "normal"
    ) -> None:
        self.activate = by_name(activation)
        reduce_key, expand_key = jax.random.split(key)
        self.reduce = layers.Linear(channels, inner, reduce_key, init=init)
        self.expand = layers.Linear(inner, channels, expand_key, init=init)

    def __call__(self, x_BHWC: Array, kernels: GroupShard = UNSHARDED) -> Array:
        """(B, H, W, C) → same; of sharded channels the means (B, C) are all-gathered."""
        mean_BC = kernels.all_gather(x_BHWC.mean((1, 2)), 1)
        weight_BC = jax.nn.sigmoid(self.expand(self.activate(self.reduce(mean_BC))))
        return x_BHWC * weight_BC[:, None, None]


class Chain(nnx.Module):
    """Modules in a row, each from (x, context) to x; of a list each in turn, of None nothing."""

    def __init__(self, **modules: nnx.Module | None) -> None:
        self.order = tuple(name for name, module in modules.items() if module is not None)
        for name in self.order:
            setattr(self, name, modules[name])

    def __call__(self, x_BHWC: Array, context: ForwardContext) -> Array:
        """(B, H, W, C) → (B, H', W', C')."""
        for name in self.order:
            part = getattr(self, name)
            for module in part if isinstance(part, nnx.List) else (part,):
                x_BHWC = module(x_BHWC, context)
        return x_BHWC


def normed_stem(widths: Sequence[int], key: Array, *, linear: bool = False, **others: Any) -> Chain:
    """3×3 convolutions of stride 2, each with BatchNorm and ReLU: {'convs'}.

    Args:
        widths: the image's channels, then of every convolution.
        linear: without the last one's ReLU.
        others: of `ConvNorm`.
    """
    activations = ["relu"] * (len(widths) - 2) + ["none" if linear else "relu"]
    keys = jax.random.split(key, len(activations))
    layers = [
        ConvNorm(*ends, 3, k, stride=2, activation=activation, **others)
        for ends, activation, k in zip(pairwise(widths), activations, keys, strict=True)
    ]
    return Chain(convs=nnx.List(layers))


def flatten(x_BHWD: Array) -> Array:
    """A map's pixels as tokens, row by row: (B, H·W, D)."""
    batch, rows, columns, dim = x_BHWD.shape
    return x_BHWD.reshape(batch, rows * columns, dim)


def map_size(image_size: tuple[int, int], strides: Sequence[int]) -> tuple[int, int]:
    """Rows and columns after convolutions or pools with padding k//2 and these strides."""
    rows, columns = image_size
    for stride in strides:
        rows, columns = -(-rows // stride), -(-columns // stride)
    return rows, columns


def rounded(value: float, divisor: int, least: int | None = None) -> int:
    """The multiple of divisor nearest to value, not below 0.9 of it or `least` (the divisor).

    Source: the MobileNet authors' code (`_make_divisible`).
    """
    nearest = max(least or divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest
