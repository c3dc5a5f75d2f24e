"""Images to tokens: default patches and strides, and a stem of 3×3 convolutions.

The default patch and strides of the ViX paper's families leave a map of 32×32 tokens, or the
nearest smaller one, as the paper's do for CIFAR-10 and Tiny ImageNet.
"""

import dataclasses
from collections.abc import Callable, Mapping
from math import gcd, prod
from typing import Any

import jax
from flax import nnx

from hsvit_jax.models import conv_layers, settings
from hsvit_jax.models.vix.mixer_config import Mixing

Array = jax.Array

_TOKENS = 32  # rows and columns of the paper's token map


@dataclasses.dataclass(frozen=True)
class StemSizes(Mixing):
    """Sizes of a network of equal blocks; its tokens are the pixels that a stem leaves."""

    stem_channels: tuple[int, ...] = settings.width(
        (), "channels of the stem's convolutions but the last"
    )
    stem_strides: tuple[int, ...] = settings.stride(
        (), "stride of the stem's convolutions; empty: by the image size", per="stem_widths"
    )
    embed_dim: int = settings.width(128, "token width")
    depth: int = settings.depth(4, "blocks")
    mlp_dim: int = settings.mlp_dim(256)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_tokens(self.tokens)

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


def default_patch(image_size: tuple[int, int]) -> int:
    """Returns the smallest patch that divides both sides and leaves at most 32×32 tokens.

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
    """Returns as many strides of 2 as leave at most 32×32 tokens, then strides of 1."""
    strides = [1] * convs
    for i in range(convs):
        if prod(conv_layers.map_size(image_size, strides)) > _TOKENS**2:
            strides[i] = 2
    return tuple(strides)


def strides_for(key: str, more: int = 0) -> Callable[[Mapping[str, Any], tuple[int, int]], tuple]:
    """Returns `default_strides` for as many convolutions as the setting `key` lists, and `more`."""
    return lambda settings, image_size: default_strides(image_size, len(settings[key]) + more)


#: What patches or a stem get by the image size, for `Family.automatic`.
AUTOMATIC: Mapping[str, Callable[[Mapping[str, Any], tuple[int, int]], Any]] = {
    "patch": lambda settings, size: 1 if settings["stem_channels"] else default_patch(size),
    "stem_strides": lambda settings, size: (
        strides_for("stem_channels", 1)(settings, size) if settings["stem_channels"] else ()
    ),
}
