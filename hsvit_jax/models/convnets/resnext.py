"""ResNeXt: a ResNet of bottlenecks whose 3×3 convolution is in groups.

Source: Xie et al., "Aggregated Residual Transformations for Deep Neural Networks", table 1; the
first scales as in timm, where the last BatchNorm of a block starts at 0.
"""

from functools import partial

from hsvit_jax.models import settings
from hsvit_jax.models.convnets import resnet
from hsvit_jax.models.convnets.convnet import ConvNet
from hsvit_jax.models.family import Family

_KEYS = settings.keys_of(resnet.ResNetConfig, groups=32, base_width=4)

FAMILY = Family(
    name="resnext",
    keys={n: _KEYS[n] for n in ("stem_channels", "channels", "depths", "groups", "base_width")},
    variants={"50-32x4d": {}, "101-32x8d": {"depths": (3, 4, 23, 3), "base_width": 8}},
    default_variant="50-32x4d",
    config=partial(resnet.ResNetConfig, zero_init=True),
    network=ConvNet,
    native_size=224,
    paper_recipe="dhvt",
    tiny=lambda settings: {**resnet.FAMILY.tiny(settings), "groups": 2, "base_width": 32},
)
