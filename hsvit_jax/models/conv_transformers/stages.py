"""Sizes of networks in stages, each of a width; stem and downsampling of two such networks."""

import dataclasses

import jax

from hsvit_jax.models import settings
from hsvit_jax.models.conv_layers import Chain, ConvNorm, normed_stem, size_out
from hsvit_jax.models.family import Sizes, scaled
from hsvit_jax.ops.activations import activation as by_name


class StageSizes(Sizes):
    """Sizes of stages, each of a width, with one ratio of hidden widths to those or one a stage."""

    @property
    def hidden_widths(self) -> tuple[int, ...]:
        """Width inside a feed-forward of each stage."""
        ratios = getattr(self, "mlp_ratios", None) or (self.mlp_ratio,) * len(self.widths)
        pairs = zip(self.widths, ratios, strict=True)
        return tuple(scaled(width, ratio) for width, ratio in pairs)


@dataclasses.dataclass(frozen=True)
class StagedConfig(StageSizes):
    """Sizes of stages behind a `conv_layers.normed_stem`, one depth and width per stage.

    A convolution always follows a stage where the width changes.
    """

    depths: tuple[int, ...] = settings.depths(dataclasses.MISSING)
    widths: tuple[int, ...] = settings.widths(dataclasses.MISSING)
    mlp_ratio: float = settings.mlp_ratio(4.0)
    downsamples: tuple[bool, ...] = settings.setting(
        (True, True, True), "downsampling after each stage"
    )
    down_kernel: int = settings.kernel(3, "kernel size of downsampling convolutions")
    down_stride: int = settings.stride(2, "stride of downsampling convolutions")
    down_padding: int = settings.kernel(1, "padding of downsampling convolutions", low=0)
    activation: str = settings.activation("gelu")
    layer_scale: float = settings.layer_scale(1e-5)
    dropout: float = settings.dropout(0.0)
    drop_path: float = settings.drop_path(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.downsamples) < len(self.depths) - 1:
            raise ValueError(
                f"downsamples={self.downsamples} are fewer than follow a stage: add some"
            )
        if self.widths[0] < 2:
            raise ValueError(
                f"widths[0]={self.widths[0]} must be at least 2, as the stem halves it"
            )
        by_name(self.activation)
        self.maps()  # raises for too small an image

    def follows(self, stage: int) -> bool:
        """Whether a convolution follows this stage."""
        if stage == len(self.depths) - 1:
            return False
        return self.downsamples[stage] or self.widths[stage] != self.widths[stage + 1]

    def maps(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns: of the stem's first convolution, then of every stage."""
        first = size_out(self.image_size, 3, 2)
        size, maps = size_out(first, 3, 2), [first]
        for stage in range(len(self.depths)):
            maps.append(size)
            if self.follows(stage):
                size = size_out(size, self.down_kernel, self.down_stride, self.down_padding)
        return tuple(maps)

    def stem(self, eps: float, key: jax.Array) -> Chain:
        """The two convolutions before the first stage."""
        widths = (self.image_channels, self.widths[0] // 2, self.widths[0])
        return normed_stem(widths, key, bias=True, eps=eps, init="normal")

    def down(self, stage: int, eps: float, key: jax.Array) -> ConvNorm | None:
        """The convolution from a stage to the next, if any."""
        if not self.follows(stage):
            return None
        size = (*self.widths[stage : stage + 2], self.down_kernel)
        around = {"stride": self.down_stride, "padding": self.down_padding}
        return ConvNorm(*size, key, **around, bias=True, eps=eps, init="normal")
