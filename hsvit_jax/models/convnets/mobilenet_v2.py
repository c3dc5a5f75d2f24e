"""MobileNetV2: inverted residual blocks with linear bottlenecks, scaled in width.

As in the `transformers` library, which departs from the paper in BatchNorm's running statistics:
they are nearly the last batch's (a setting has the original, `bn_momentum`).

Source: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", table 2.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax.models.convnets import torch_weights
from hsvit_jax.models.convnets.convnet import Conv, ConvNet, HeadConfig
from hsvit_jax.models.convnets.inverted_residual import Inverted, InvertedConfig, Plan, rounded
from hsvit_jax.models.family import Family

#: Named networks by their width, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {"1.0": {}, "1.4": {"width": 1.4}}

# Channels before scaling: of the stem, of the first block and the others; and the others' strides.
_STEM, _TOP = 32, 1280
_CHANNELS = (16, *(24,) * 2, *(32,) * 3, *(64,) * 4, *(96,) * 3, *(160,) * 3, 320)
_STRIDES = (2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class MobileNetV2Config(InvertedConfig):
    """Sizes of a MobileNetV2."""

    width: float = 1.0
    divisor: int = 8  # of every width
    least_channels: int = 8
    expand: float = 6.0  # how much wider a block is inside
    output_stride: int = 32  # from here on, dilation in place of strides
    stem_expansion: bool = False  # a 1×1 convolution more in the first block
    full_top: bool = True  # 1280 channels at the end, however narrow the network
    activation: str = "relu6"
    padding: str = "same"  # or 'symmetric'
    dropout: float = 0.2
    bn_eps: float = 1e-3
    bn_momentum: float = 0.003  # 0.997 in the paper's code

    def __post_init__(self) -> None:
        least = min(self.width, self.divisor, self.least_channels, self.expand, self.output_stride)
        if least <= 0:
            raise ValueError(
                "width, divisor, least_channels, expand and output_stride must be positive; got "
                f"{self}"
            )
        self.check_choices(padding=("same", "symmetric"), output_stride=(2, 4, 8, 16, 32))
        super().__post_init__()

    def channels(self, base: int) -> int:
        """A scaled width of the unscaled network."""
        return self._rounded(base * self.width)

    def _rounded(self, value: float) -> int:
        return rounded(round(value), self.divisor, self.least_channels)

    @property
    def top_channels(self) -> int:
        """Channels of the last map."""
        return _TOP if self.full_top and self.width < 1 else self.channels(_TOP)

    @property
    def head(self) -> HeadConfig:
        return HeadConfig(self.top_channels, self.num_classes, self.dropout)

    def _conv(self, c_in: int, c_out: int, size: int, **more: Any) -> Conv:
        half = (size - 1) // 2 * more.get("dilation", 1)
        usual = {
            "padding": "same" if self.padding == "same" else (half, half),
            "activation": self.activation,
            "momentum": self.bn_momentum,
            "eps": self.bn_eps,
        }
        return Conv(c_in, c_out, size, **{**usual, **more})

    def plan(self) -> Plan:
        stem = self._conv(self.image_channels, self.channels(_STEM), 3, stride=2)
        last = self.channels(_CHANNELS[-1])
        return Plan(stem, tuple(self._blocks()), self._conv(last, self.top_channels, 1))

    def _blocks(self) -> Iterator[Inverted]:
        width, c_out = self.channels(_STEM), self.channels(_CHANNELS[0])
        yield Inverted(
            self._conv(width, width, 1) if self.stem_expansion else None,
            self._conv(width, width, 3, depthwise=True),
            self._conv(width, c_out, 1, activation=""),
        )
        running, dilation = 2, 1
        for c_in, c_out, nominal in zip(_CHANNELS[:-1], _CHANNELS[1:], _STRIDES, strict=True):
            c_in, c_out = self.channels(c_in), self.channels(c_out)
            inner = self._rounded(c_in * self.expand)
            stride, dilated = nominal, 1
            if running == self.output_stride:
                stride, dilated, dilation = 1, dilation, dilation * nominal
            else:
                running *= nominal
            yield Inverted(
                self._conv(c_in, inner, 1),
                self._conv(inner, inner, 3, stride=stride, dilation=dilated, depthwise=True),
                self._conv(inner, c_out, 1, activation=""),
                residual=stride == 1 and c_in == c_out,
            )


def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a smoke run: few channels."""
    widths = {"width": 0.08 * settings["width"], "divisor": 4, "least_channels": 4}
    return {**widths, "expand": 2.0, "full_top": False}


FAMILY = Family(
    name="mobilenet_v2",
    variants=VARIANTS,
    default_variant="1.0",
    config=MobileNetV2Config,
    network=ConvNet,
    native_size=224,
    paper_recipe="hsvit_convnet",
    tiny=tiny,
    model_type="mobilenet_v2",
    torch_weights=torch_weights.classifier("mobilenet_v2", "classifier"),
)
