"""The registry of model families, and `build`, the one way from a configuration to a network."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from hsvit_jax.models.conv_transformers import cvt, efficientformer, mobilevit, swiftformer
from hsvit_jax.models.convnets import efficientnet, mobilenet_v2, resnet
from hsvit_jax.models.hsvit import backbone, hsvit
from hsvit_jax.models.vit import deit, dhvt, hvt, vit
from hsvit_jax.models.vix import ccx, cvx, levix, pix, vix

#: Family name → module with `VARIANTS`, `from_settings` and, but for hsvit, `DEFAULTS`.
FAMILIES: Mapping[str, Any] = {
    "hsvit": hsvit,
    "hvt": hvt,
    "deit": deit,
    "dhvt": dhvt,
    "vix": vix,
    "levix": levix,
    "ccx": ccx,
    "cvx": cvx,
    "pix": pix,
    "vit": vit,
    "mobilevit": mobilevit,
    "swiftformer": swiftformer,
    "cvt": cvt,
    "efficientformer": efficientformer,
    "resnet": resnet,
    "efficientnet": efficientnet,
    "mobilenet_v2": mobilenet_v2,
    "hsvit_backbone": backbone,
}

#: Family name → function from plain settings (a mapping), image size, channels and classes to a
#: network with `init` and `apply`.
MODELS: Mapping[str, Callable[..., Any]] = {k: v.from_settings for k, v in FAMILIES.items()}

#: Every named variant: (family, variant). Each has its exact parameter count in the tests.
VARIANTS: tuple[tuple[str, str], ...] = tuple(
    (family, name) for family, module in FAMILIES.items() for name in module.VARIANTS
)

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build(
    settings: Mapping[str, Any], *, image_size: tuple[int, int], channels: int, num_classes: int
) -> Any:
    """The network that `settings` describe, for images (H, W, channels) and `num_classes` logits.

    settings: a configuration's `model` section: `family`, `dtype` ('float32' or 'bfloat16', of the
    computation) and what the family needs. Raises ValueError for unknown names and unfit sizes.
    """
    family, dtype = settings["family"], settings["dtype"]
    if family not in MODELS:
        raise ValueError(f"unknown model.family {family!r}; choose one of {sorted(MODELS)}")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown model.dtype {dtype!r}; choose one of {sorted(_DTYPES)}")
    return MODELS[family](
        settings,
        image_size=tuple(image_size),
        channels=channels,
        num_classes=num_classes,
        dtype=_DTYPES[dtype],
    )
