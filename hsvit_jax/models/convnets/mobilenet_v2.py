"""MobileNetV2: inverted residual blocks with linear bottlenecks, scaled in width.

As in the `transformers` library, which departs from the paper in BatchNorm's running statistics:
they are nearly the last batch's (a setting has the original, `bn_momentum`).

Source: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", table 2.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from hsvit_jax.models import settings
from hsvit_jax.models.conv_layers import rounded
from hsvit_jax.models.convnets.convnet import Conv, ConvNet, Head
from hsvit_jax.models.convnets.inverted_residual import Inverted, InvertedConfig, Plan
from hsvit_jax.models.family import Family

#: Named networks by their width, as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {"1.0": {}, "1.4": {"width": 1.4}}

_STEM, _TOP = 32, 1280  # channels before scaling
#: Of each stage: channels before scaling, blocks, the first block's stride.
_STAGES = ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))


@dataclasses.dataclass(frozen=True)
class MobileNetV2Config(InvertedConfig):
    """Sizes of a MobileNetV2."""

    width: float = settings.ratio(1.0, "width multiplier")
    divisor: int = settings.setting(8, "divisor of every width", low=1, high=1024)
    least_channels: int = settings.width(8, "smallest width")
    expand: float = settings.ratio(6.0, "expansion ratio of a block")
    output_stride: int = settings.setting(
        32,
        "stride of the last map; further strides become dilation",
        choices=(2, 4, 8, 16, 32),
    )
    stem_expansion: bool = settings.setting(False, "expansion in the first block")
    full_top: bool = settings.setting(True, "full width of the last convolution in narrow networks")
    activation: str = settings.activation("relu6")
    padding: str = settings.setting(
        "same", "padding of convolutions", choices=("same", "symmetric")
    )
    dropout: float = settings.dropout(0.2)
    bn_eps: float = settings.epsilon(1e-3)
    bn_momentum: float = settings.momentum(0.003)  # 0.997 in the paper's code

    def channels(self, base: float) -> int:
        """A scaled width of the unscaled network."""
        return self._rounded(base * self.width)

    def _rounded(self, value: float) -> int:
        return rounded(round(value), self.divisor, self.least_channels)

    @property
    def top_channels(self) -> int:
        """Channels of the last map."""
        return _TOP if self.full_top and self.width < 1 else self.channels(_TOP)

    def head(self, key: jax.Array) -> Head:
        return Head(self.top_channels, self.num_classes, key, dropout=self.dropout)

    def conv(self, c_in: int, c_out: int, size: int, **more: Any) -> Conv:
        padding = "same" if self.padding == "same" else None
        return super().conv(c_in, c_out, size, padding=padding, **more)

    def places(self) -> list[tuple[int, int]]:
        return [(stage, j) for stage, (_, count, _) in enumerate(_STAGES) for j in range(count)]

    def plan(self) -> Plan:
        stem, last = self.channels(_STEM), self.channels(_STAGES[-1][0])
        return Plan(
            self.conv(self.image_channels, stem, 3, stride=2),
            tuple(self._blocks()),
            self.conv(last, self.top_channels, 1),
        )

    def _blocks(self) -> Iterator[Inverted]:
        c_in, running, dilation = self.channels(_STEM), 2, 1
        for stage, j in self.places():
            base, _, nominal = _STAGES[stage]
            c_out, nominal = self.channels(base), 1 if j else nominal
            inner = self._rounded(c_in * self.expand) if stage else c_in
            stride, dilated = nominal, 1
            if running == self.output_stride:
                stride, dilated, dilation = 1, dilation, dilation * nominal
            else:
                running *= nominal
            yield Inverted(
                self.conv(c_in, inner, 1) if stage or self.stem_expansion else None,
                self.conv(inner, inner, 3, stride=stride, dilation=dilated, depthwise=True),
                self.conv(inner, c_out, 1, activation=""),
                residual=stage > 0 and stride == 1 and c_in == c_out,
            )
            c_in = c_out


FAMILY = Family(
    name="mobilenet_v2",
    variants=VARIANTS,
    default_variant="1.0",
    config=MobileNetV2Config,
    network=ConvNet,
    native_size=224,
    paper_recipe="hsvit_convnet",
    tiny=lambda settings: {
        **{"width": 0.08 * settings["width"], "divisor": 4, "least_channels": 4},
        **{"expand": 2.0, "full_top": False},
    },
)
