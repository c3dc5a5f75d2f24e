"""The registry of model families, and `build`, the one way from a configuration to a network."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from hsvit_jax.models.conv_transformers import (
    cvt,
    efficientformer,
    efficientvit,
    fastvit,
    mobilevit,
    smt,
    swiftformer,
)
from hsvit_jax.models.convnets import efficientnet, mobilenet_v2, resnet, resnext
from hsvit_jax.models.family import Family, Sizes
from hsvit_jax.models.hsvit import backbone, hsvit
from hsvit_jax.models.network import Network
from hsvit_jax.models.vit import deit, dhvt, hvt, swin, vit
from hsvit_jax.models.vix import ccx, cvx, levix, pix, t2t, vix
from hsvit_jax.text import few

__all__ = ["DEFAULT", "FAMILIES", "VARIANTS", "Family", "Network", "Sizes", "build", "register"]

_MODULES = (
    *(hsvit, vix, levix, ccx, cvx, pix),
    *(hvt, deit, dhvt, swin, t2t),
    *(vit, mobilevit, swiftformer, cvt, efficientformer, efficientvit, fastvit, smt),
    *(resnet, resnext, efficientnet, mobilenet_v2, backbone),
)

#: Family name → its record: those of this package, and those that `register` adds.
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
_BUILT_IN = frozenset(FAMILIES)
#: The family where none is named.
DEFAULT = hsvit.FAMILY


def register(family: Family) -> Family:
    """Adds a family of networks; one of the same name from outside the package is replaced.

    Returns:
        The family, so that a module may keep it.

    Raises:
        ValueError: the name is that of a family of this package.
    """
    if family.name in _BUILT_IN:
        raise ValueError(
            f"the family {family.name!r} is one of hsvit_jax: register yours by another name"
        )
    FAMILIES[family.name] = family
    return family


def is_built_in(name: str) -> bool:
    """Whether a family is this package's own rather than a registered one."""
    return name in _BUILT_IN


class UnknownFamily(ValueError):
    """A family of networks that nothing has registered."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"unknown model.family {name!r}: add --config=FILE.py, the file that registers it, or "
            f"import that file before hsvit_jax.load; known: {few(FAMILIES)}"
        )


#: Every named variant: (family, variant). Each has its exact parameter count in the tests.
VARIANTS: tuple[tuple[str, str], ...] = tuple(
    (name, variant) for name, family in FAMILIES.items() for variant in family.variants
)

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build(
    settings: Mapping[str, Any], *, image_size: tuple[int, int], channels: int, num_classes: int
) -> Network:
    """The network that `settings` describe, for images (H, W, channels) and `num_classes` logits.

    Args:
        settings: a configuration's `model` section: `family`, `dtype` ('float32' or 'bfloat16', of
            the computation) and the keys of the family's `defaults`.

    Raises:
        ValueError: unknown names, and sizes that do not fit.
    """
    family, dtype = settings["family"], settings["dtype"]
    if family not in FAMILIES:
        raise UnknownFamily(family)
    if dtype not in _DTYPES:
        raise ValueError(f"unknown model.dtype {dtype!r}; choose one of {sorted(_DTYPES)}")
    return FAMILIES[family].build(
        settings,
        image_size=tuple(image_size),
        channels=channels,
        num_classes=num_classes,
        dtype=_DTYPES[dtype],
    )
