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
from hsvit_jax.models.torch_weights import Tensors
from hsvit_jax.models.vit import deit, dhvt, hvt, swin, vit
from hsvit_jax.models.vix import ccx, cvx, levix, pix, t2t, vix
from hsvit_jax.text import few

__all__ = ["FAMILIES", "VARIANTS", "Family", "Network", "Sizes", "build", "register"]

_MODULES = (
    *(hsvit, vix, levix, ccx, cvx, pix),
    *(hvt, deit, dhvt, swin, t2t),
    *(vit, mobilevit, swiftformer, cvt, efficientformer, efficientvit, fastvit, smt),
    *(resnet, resnext, efficientnet, mobilenet_v2, backbone),
)

#: Family name → its record: those of this package, and those that `register` adds.
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
_BUILT_IN = frozenset(FAMILIES)


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


def family_of(description: Mapping[str, Any]) -> Family:
    """The family that a PyTorch file's description names; HSViT where it names none.

    It does by `model_type`, also in its `constructor`, or by `family`, one of our names.

    Raises:
        ValueError: the name is not known.
    """
    constructor = description.get("constructor", {})
    inner = constructor.get("model_type") if isinstance(constructor, Mapping) else None
    model_type = inner or description.get("model_type")
    if model_type is not None:
        known = {family.model_type: family for family in FAMILIES.values() if family.model_type}
        if model_type not in known:
            raise ValueError(f"unknown model_type {model_type!r}; known: {few(sorted(known))}")
        return known[model_type]
    name = str(description.get("family", "hsvit")).lower()
    names = {alias: f for f in FAMILIES.values() for alias in (f.name, *f.aliases)}
    if name not in names:
        raise ValueError(f"unknown family {name!r}; known: {few(names)}")
    return names[name]


def constructor(description: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a network's constructor that a weight file's description holds.

    Raises:
        ValueError: they are no JSON object.
    """
    given = description.get("constructor", description if "model_type" in description else {})
    if not isinstance(given, dict):
        raise ValueError("`constructor` in its `config` is not a JSON object")
    patched = description.get("patched_or_fixed")  # what the reference's source hard-codes
    patched = patched if isinstance(patched, dict) else {}
    return {"variant": description.get("variant", "")} | patched | given


def torch_settings(
    family: Family, tensors: Tensors, given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections `model` and `data` of the network that a PyTorch file holds.

    Args:
        family: of the network; the tensors may show that it is a sibling.
        given: its constructor's arguments.

    Raises:
        ValueError: a size that neither tells, or that no network of ours has.
    """
    try:
        model, data = family.torch_weights.settings(family, tensors, given)
    except KeyError as error:
        missing = error.args[0]
        raise ValueError(f"cannot read the network's sizes: {missing} is missing") from error
    family = FAMILIES[model.get("family", family.name)]
    variant = family.variant_of(model, data["image_size"])
    return {**model, "family": family.name, "variant": variant}, data
