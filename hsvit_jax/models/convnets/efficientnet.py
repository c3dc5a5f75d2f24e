"""EfficientNet: inverted residual blocks with squeeze-and-excitation, scaled in width and depth.

As in the `transformers` library, which departs from the paper in three places, each with a setting
for the original: the zero padding of stride-2 convolutions is that of the native image size
(`padding`), stochastic depth drops single values rather than an example's residual branch (`drop`),
and BatchNorm's running statistics are nearly the last batch's (`bn_momentum`).

Source: Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks",
table 1 (the network) and the authors' code (the scaled ones).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import jax

from hsvit_jax.models import settings
from hsvit_jax.models.conv_layers import Padding, rounded
from hsvit_jax.models.convnets.convnet import ConvNet, Head
from hsvit_jax.models.convnets.inverted_residual import Inverted, InvertedConfig, Plan
from hsvit_jax.models.family import Family

#: Named networks as they differ from the defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "b0": {},
    "b3": {"width": 1.2, "depth": 1.4, "dropout": 0.3, "symmetric_blocks": (5, 18)},
    "b4": {"width": 1.4, "depth": 1.8, "dropout": 0.4, "symmetric_blocks": (6,)},
    "b5": {"width": 1.6, "depth": 2.2, "dropout": 0.4, "symmetric_blocks": (13, 27)},
}
_STEM, _TOP = 32, 1280  # channels before scaling


@dataclasses.dataclass(frozen=True)
class EfficientNetConfig(InvertedConfig):
    """Sizes of an EfficientNet."""

    width: float = settings.ratio(1.0, "width multiplier")
    depth: float = settings.ratio(1.0, "depth multiplier")
    divisor: int = settings.setting(8, "divisor of every width", low=1, high=1024)
    in_channels: tuple[int, ...] = settings.width(
        (32, 16, 24, 40, 80, 112, 192), "channels into each stage, before scaling", per="repeats"
    )
    out_channels: tuple[int, ...] = settings.width(
        (16, 24, 40, 80, 112, 192, 320), "channels out of each stage, before scaling", per="repeats"
    )
    repeats: tuple[int, ...] = settings.depth(
        (1, 2, 2, 3, 3, 4, 1), "blocks of each stage, before scaling", per="repeats"
    )
    strides: tuple[int, ...] = settings.setting(
        (1, 2, 2, 2, 1, 2, 1), "stride of each stage", choices=(1, 2), per="repeats"
    )
    kernels: tuple[int, ...] = settings.kernel(
        (3, 3, 5, 3, 5, 5, 3), "kernel size of each stage", odd=True, per="repeats"
    )
    expand: tuple[int, ...] = settings.setting(
        (1, 6, 6, 6, 6, 6, 6),
        "expansion ratio of each stage's blocks",
        low=1,
        high=64,
        per="repeats",
    )
    squeeze: float = settings.setting(
        0.25, "squeeze-and-excitation ratio; 0: none", low=0.0, high=16.0
    )
    activation: str = settings.activation("silu")
    padding: str = settings.setting(
        "native",
        "padding of convolutions; same: right at any image size; symmetric: as torchvision's",
        choices=("native", "same", "symmetric"),
    )
    symmetric_blocks: tuple[int, ...] = settings.setting(
        (), "blocks with symmetric padding", low=0, high=10_000
    )
    pooling: str = settings.setting("mean", "pooling of the last map", choices=("mean", "max"))
    dropout: float = settings.dropout(0.2)
    drop_rate: float = settings.rate(0.2, "stochastic depth rate, growing with depth")
    drop: str = settings.setting(
        "values", "unit of dropping in a residual branch", choices=("values", "paths")
    )
    bn_eps: float = settings.epsilon(1e-3)
    bn_momentum: float = settings.momentum(0.01)  # 0.99 in the paper
    expand_bn_momentum: float = settings.momentum(  # 0.99 in the paper
        0.9, meaning="the same, of a block's expansion"
    )

    def __post_init__(self) -> None:
        settings.check(self)
        for before, after in zip((_STEM, *self.out_channels), self.in_channels, strict=False):
            if self.channels(before) != self.channels(after):
                raise ValueError(
                    f"a stage's in_channels must be what comes before it, {before}; got {after} of "
                    f"in_channels={self.in_channels}, out_channels={self.out_channels}"
                )
        super().__post_init__()

    def channels(self, base: int) -> int:
        """A scaled width of the unscaled network: a multiple of the divisor, at least 0.9 of it.

        Source: the authors' code (`round_filters`).
        """
        return rounded(base * self.width, self.divisor)

    def head(self, key: jax.Array) -> Head:
        options = {"dropout": self.dropout, "pooling": self.pooling}
        return Head(self.channels(_TOP), self.num_classes, key, **options)

    def places(self) -> list[tuple[int, int]]:
        counts = [ceil(self.depth * repeats) for repeats in self.repeats]
        return [(stage, j) for stage, count in enumerate(counts) for j in range(count)]

    def plan(self) -> Plan:
        stem, last, top = (self.channels(n) for n in (_STEM, self.out_channels[-1], _TOP))
        return Plan(
            self.conv(self.image_channels, stem, 3, stride=2, padding=self._padding(3, 2)),
            tuple(self._blocks()),
            self.conv(last, top, 1),
        )

    def _blocks(self) -> Iterator[Inverted]:
        places = self.places()
        for number, (stage, j) in enumerate(places):
            c_in, c_out = (self.channels(n[stage]) for n in (self.in_channels, self.out_channels))
            c_in, stride = (c_out, 1) if j else (c_in, self.strides[stage])
            inner, size = c_in * self.expand[stage], self.kernels[stage]
            wider = self.conv(c_in, inner, 1, momentum=self.expand_bn_momentum)
            around = {"stride": stride, "padding": self._padding(size, stride, number)}
            yield Inverted(
                wider if self.expand[stage] != 1 else None,
                self.conv(inner, inner, size, depthwise=True, **around),
                self.conv(inner, c_out, 1, activation=""),
                squeeze=max(1, int(c_in * self.squeeze)),
                residual=j > 0,
                rate=self.drop_rate * number / len(places),
                drop=self.drop,
            )

    def _padding(self, size: int, stride: int, block: int | None = None) -> Padding | None:
        if self.padding == "native" and stride == 2 and block not in self.symmetric_blocks:
            return ((size // 2 - 1, size // 2),) * 2
        return "same" if self.padding == "same" else None


FAMILY = Family(
    name="efficientnet",
    variants=VARIANTS,
    default_variant="b0",
    config=EfficientNetConfig,
    network=ConvNet,
    native_size=224,
    native_sizes={"b3": 300, "b4": 380, "b5": 456},
    paper_recipe="hsvit_convnet",
    tiny=lambda settings: {
        **{"width": 0.08 * settings["width"], "depth": 0.3 * settings["depth"], "divisor": 4},
        "expand": (1, 2, 2, 2, 2, 2, 2),
    },
)
