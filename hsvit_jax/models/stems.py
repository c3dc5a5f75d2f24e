"""From images to tokens or maps: patches, or a stem of 3×3 convolutions.

Without a wish, patch and strides of the ViX paper's families are those that leave a map of 32×32
tokens or the nearest below, as the paper does for CIFAR-10 and Tiny ImageNet.
"""

from collections.abc import Iterator, Sequence

import jax
from flax import nnx

from hsvit_jax.models import blocks
from hsvit_jax.models.blocks import Row
from hsvit_jax.models.conv import Conv, ConvNorm, conv_norm_rows
from hsvit_jax.models.network import Call

Array = jax.Array

_TOKENS = 32  # rows and columns of the paper's token map


class ConvStem(nnx.Module):
    """3×3 convolutions with bias, and nothing between them (ViX paper, hybrid models)."""

    def __init__(
        self, channels: int, widths: Sequence[int], strides: Sequence[int], key: Array
    ) -> None:
        self.convs, c_in = nnx.List(), channels
        keys = jax.random.split(key, len(widths))
        for conv_key, c_out, stride in zip(keys, widths, strides, strict=True):
            self.convs.append(Conv(c_in, c_out, 3, conv_key, stride=stride))
            c_in = c_out

    def __call__(self, images_BHWC: Array) -> Array:
        """(B, H, W, C) → (B, H', W', D), each convolution dividing the sides by its stride."""
        for conv in self.convs:
            images_BHWC = conv(images_BHWC)
        return images_BHWC


class NormedStem(nnx.Module):
    """Two stride-2 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, channels: int, width: int, eps: float, key: Array) -> None:
        self.convs, sizes = nnx.List(), (channels, width // 2, width)
        for i, conv_key in enumerate(jax.random.split(key, 2)):
            self.convs.append(
                ConvNorm(
                    *(sizes[i], sizes[i + 1], 3, conv_key),
                    stride=2,
                    bias=True,
                    activation="relu",
                    eps=eps,
                    init="normal",
                )
            )

    def __call__(self, images_BHWC: Array, call: Call) -> Array:
        """(B, H, W, C) → (B, ⌈H/4⌉, ⌈W/4⌉, D)."""
        for conv in self.convs:
            images_BHWC = conv(images_BHWC, call)
        return images_BHWC


def flatten(x_BHWD: Array) -> Array:
    """A map as tokens, row by row: (B, H·W, D)."""
    batch, rows, columns, dim = x_BHWD.shape
    return x_BHWD.reshape(batch, rows * columns, dim)


def map_size(image_size: tuple[int, int], strides: Sequence[int]) -> tuple[int, int]:
    """Rows and columns after convolutions or pools with padding k//2 and these strides."""
    rows, columns = image_size
    for stride in strides:
        rows, columns = -(-rows // stride), -(-columns // stride)
    return rows, columns


def check_stem(widths: Sequence[int], strides: Sequence[int], key: str = "stem_strides") -> None:
    """Raises ValueError for convolutions whose widths and strides do not pair up, naming both."""
    if not widths or len(widths) != len(strides) or min(*widths, *strides) < 1:
        raise ValueError(
            "a stem needs one positive width and stride per convolution; got widths "
            f"{tuple(widths)} (the last is model.embed_dim) and {key}={tuple(strides)}"
        )


def default_patch(image_size: tuple[int, int]) -> int:
    """The smallest patch that divides both sides and leaves no more than 32×32 tokens."""
    rows, columns = image_size
    for patch in range(1, min(rows, columns) + 1):
        fits = rows % patch == 0 and columns % patch == 0
        if fits and rows * columns <= (_TOKENS * patch) ** 2:
            return patch
    return min(rows, columns)


def default_strides(image_size: tuple[int, int], convs: int) -> tuple[int, ...]:
    """Strides of 2 first, as many as it takes to leave no more than 32×32 tokens, then of 1."""
    strides = [1] * convs
    for i in range(convs):
        rows, columns = map_size(image_size, strides)
        if rows * columns > _TOKENS**2:
            strides[i] = 2
    return tuple(strides)


def stem_rows(
    image_size: tuple[int, int], channels: int, widths: Sequence[int], strides: Sequence[int]
) -> Iterator[Row]:
    """The rows of a `ConvStem` in a layer table."""
    for i, (width, stride) in enumerate(zip(widths, strides, strict=True)):
        image_size = map_size(image_size, (stride,))
        yield blocks.conv_row(f"stem: 3×3 convolution {i}", image_size, channels, width, 3)
        channels = width


def normed_stem_rows(
    sizes: tuple[tuple[int, int], ...], channels: int, width: int
) -> Iterator[Row]:
    """The rows of a `NormedStem` in a layer table; sizes: of its two maps."""
    yield from conv_norm_rows("stem, 0", sizes[0], channels, width // 2, 3, bias=True)
    yield from conv_norm_rows("stem, 1", sizes[1], width // 2, width, 3, bias=True)
