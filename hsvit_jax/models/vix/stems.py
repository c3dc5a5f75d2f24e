"""Images to tokens: default patches and strides, and a stem of 3×3 convolutions.

The default patch and strides of the ViX paper's families leave a map of 32×32 tokens, or the
nearest smaller one, as the paper's do for CIFAR-10 and Tiny ImageNet.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import Any

import jax
from flax import nnx

from hsvit_jax.models import conv_layers, settings
from hsvit_jax.models.family import Sizes
from hsvit_jax.models.vix.mixer_config import Mixing

Array = jax.Array

_TOKENS = 32  # rows and columns of the paper's token map


@dataclasses.dataclass(frozen=True)
class StemSizes(Sizes):
    """Sizes of a network of equal blocks, whose tokens are the pixels that a stem leaves."""

    mixing: Mixing
    stem_channels: tuple[int, ...] = settings.width(
        (), "channels of the stem's convolutions but the last"
    )
    stem_strides: tuple[int, ...] = settings.stride(
        (), "stride of the stem's convolutions; empty: by the image size"
    )
    embed_dim: int = settings.width(128, "token width")
    depth: int = settings.depth(4, "blocks")
    mlp_dim: int = settings.mlp_dim(256)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mixing.check_tokens(self.tokens)

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Channels of every convolution of the stem."""
        return (*self.stem_channels, self.embed_dim)

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the tokens."""
        return conv_layers.map_size(self.image_size, self.stem_strides)

    @property
    def tokens(self) -> int:
        """Tokens of the sequence, a CLS token included."""
        return prod(self.map_size)


class ConvStem(nnx.Module):
    """3×3 convolutions with bias, without activations (ViX paper, hybrid models)."""

    def __init__(self, c: StemSizes, key: Array) -> None:
        widths = (c.image_channels, *c.stem_widths)
        self.convs = conv_layers.convs(widths, c.stem_strides, 3, key)

    def __call__(self, images_BHWC: Array) -> Array:
        """(B, H, W, C) → (B, H', W', D), each convolution dividing the sides by its stride."""
        for conv in self.convs:
            images_BHWC = conv(images_BHWC)
        return images_BHWC


def check_stem(widths: Sequence[int], strides: Sequence[int], key: str = "stem_strides") -> None:
    """Raises ValueError for unequal numbers of widths and strides."""
    if len(widths) != len(strides):
        raise ValueError(
            "a stem needs one width and stride per convolution; got widths "
            f"{tuple(widths)} (the last is model.embed_dim) and {key}={tuple(strides)}"
        )


def tokenizer_map(
    image_size: tuple[int, int],
    strides: Sequence[int],
    convolution: tuple[int, int],
    pool: tuple[int, int, int],
) -> tuple[int, int]:
    """Rows and columns after convolutions of these strides, each followed by a pool.

    convolution: kernel and padding; pool: window, stride and padding.
    """
    kernel, padding = convolution
    rows, columns = image_size
    for stride in strides:
        for size, step, pad in ((kernel, stride, padding), pool):
            rows, columns = ((n + 2 * pad - size) // step + 1 for n in (rows, columns))
    return rows, columns


def default_patch(image_size: tuple[int, int]) -> int:
    """The smallest patch that divides both sides and leaves no more than 32×32 tokens.

    Raises ValueError for sides, such as 37, for which that is nearly the whole image.
    """
    rows, columns = image_size
    common = gcd(rows, columns)
    patches = (p for p in range(1, common + 1) if common % p == 0)
    patch = next((p for p in patches if rows * columns <= (_TOKENS * p) ** 2), 0)
    if not patch or (patch > 1 and rows * columns < 49 * patch**2):
        raise ValueError(
            f"no patch divides {rows}×{columns} pixels into 7×7 to {_TOKENS}×{_TOKENS} tokens: "
            "set model.patch or another data.image_size"
        )
    return patch


def default_strides(image_size: tuple[int, int], convs: int) -> tuple[int, ...]:
    """As many strides of 2 as leave no more than 32×32 tokens, then strides of 1."""
    strides = [1] * convs
    for i in range(convs):
        rows, columns = conv_layers.map_size(image_size, strides)
        if rows * columns > _TOKENS**2:
            strides[i] = 2
    return tuple(strides)


def strides_for(key: str, more: int = 0) -> Callable[[Mapping[str, Any], tuple[int, int]], tuple]:
    """`default_strides` for as many convolutions as the setting `key` lists, and `more`."""
    return lambda settings, image_size: default_strides(image_size, len(settings[key]) + more)


#: What patches or a stem get by the image size, for `Family.automatic`.
AUTOMATIC: Mapping[str, Callable[[Mapping[str, Any], tuple[int, int]], Any]] = {
    "patch": lambda settings, size: 1 if settings["stem_channels"] else default_patch(size),
    "stem_strides": lambda settings, size: (
        default_strides(size, len(settings["stem_channels"]) + 1)
        if settings["stem_channels"]
        else ()
    ),
}
