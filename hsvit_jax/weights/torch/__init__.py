"""PyTorch's files by family: the names of their tensors, and the settings that they hold."""

from collections.abc import Mapping
from typing import Any

from hsvit_jax.models import FAMILIES
from hsvit_jax.models.family import Family
from hsvit_jax.text import few
from hsvit_jax.weights.torch import conv_transformers, convnets, hsvit, vit, vix
from hsvit_jax.weights.torch.base import Tensors, TorchWeights, pair, read

#: Family → how its files are read.
TABLES: Mapping[str, TorchWeights] = {
    "hsvit": hsvit.HSVIT,
    "hsvit_backbone": hsvit.BACKBONE,
    "vix": vix.VIX,
    "levix": vix.LEVIX,
    "ccx": vix.CCX,
    "cvx": vix.CVX,
    "pix": vix.PIX,
    "t2t": vix.T2T,
    "vit": vit.VIT,
    "hvt": vit.HVT,
    "deit": vit.HVT,
    "dhvt": vit.DHVT,
    "swin": vit.SWIN,
    "mobilevit": conv_transformers.MOBILEVIT,
    "swiftformer": conv_transformers.SWIFTFORMER,
    "cvt": conv_transformers.CVT,
    "efficientformer": conv_transformers.EFFICIENTFORMER,
    "efficientvit": conv_transformers.EFFICIENTVIT,
    "fastvit": conv_transformers.FASTVIT,
    "smt": conv_transformers.SMT,
    "resnet": convnets.RESNET,
    "resnext": convnets.RESNEXT,
    "efficientnet": convnets.EFFICIENTNET,
    "mobilenet_v2": convnets.MOBILENET_V2,
}
#: Families that the `transformers` library has, by the `model_type` of its configurations.
_OF_TRANSFORMERS = (
    *("cvt", "efficientformer", "efficientnet", "mobilenet_v2", "mobilevit"),
    *("resnet", "swiftformer", "vit"),
)
#: Other names of families in the descriptions of files.
_ALIASES = {"cct": "ccx", "hsvit-het": "hsvit_backbone"}
_ALIASES |= {f"timm {name}": name for name in ("resnext", "efficientvit", "fastvit", "swin")}


def table(family: str) -> TorchWeights:
    """Returns how the files of a family are read.

    Raises:
        ValueError: nobody has written down what PyTorch calls its tensors.
    """
    if family not in TABLES:
        raise ValueError(f"the family {family!r} has no table of PyTorch's names")
    return TABLES[family]


def family_of(description: Mapping[str, Any]) -> Family:
    """Returns the family that a PyTorch file's description names; defaults to HSViT.

    The name is `model_type`, also in its `constructor`, or `family`, one of our names.

    Raises:
        ValueError: the name is not known.
    """
    constructor = description.get("constructor", {})
    inner = constructor.get("model_type") if isinstance(constructor, Mapping) else None
    model_type = inner or description.get("model_type")
    if model_type is not None:
        if model_type not in _OF_TRANSFORMERS:
            known = few(_OF_TRANSFORMERS)
            raise ValueError(f"unknown model_type {model_type!r}; known: {known}")
        return FAMILIES[model_type]
    name = str(description.get("family", "hsvit")).lower()
    name = _ALIASES.get(name, name)
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known: {few(FAMILIES)}")
    return FAMILIES[name]


def constructor(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a network's constructor that a weight file's description holds.

    Raises:
        ValueError: they are no JSON object.
    """
    given = description.get("constructor", description if "model_type" in description else {})
    if not isinstance(given, dict):
        raise ValueError("`constructor` in its `config` is not a JSON object")
    patched = description.get("patched_or_fixed")  # what the reference's source hard-codes
    patched = patched if isinstance(patched, dict) else {}
    return {"variant": description.get("variant", "")} | patched | given


def sections(
    family: Family, tensors: Tensors, given: dict[str, Any], like: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sections `model` and `data` of the network that a file's description names.

    The file's images override the described size and channels. Classes default to 10, until the
    tensors show their number.

    Args:
        family: the network's; the tensors may show that it is a sibling.
        given: its constructor's arguments.
        like: the config of a network with the image size that the description omits.

    Raises:
        ValueError: the description lacks a setting, or has one that no network of ours has.
    """
    images = tensors["input"].shape if "input" in tensors else ()
    images = images if len(images) == 4 else ()
    inner = given.get("backbone")
    words = "size=image_size|img_size|input_size channels=num_channels|in_chans|channels"
    words += " classes=num_classes|num_labels"
    usual = {"size": getattr(like, "image_size", None), "channels": 3}
    usual["channels"] = getattr(like, "image_channels", 3)
    usual["classes"] = len(given.get("id2label") or ()) or 10
    found = read({**(inner if isinstance(inner, dict) else {}), **given}, words, usual)
    size, channels = (images[2:], images[1]) if images else (found["size"], found["channels"])
    try:
        own = table(family.name).settings(family, tensors, {**given, "image_size": size})
    except KeyError as error:
        missing = error.args[0]
        raise ValueError(f"cannot read the network's sizes: {missing} is missing") from error
    family = FAMILIES[own.get("family", family.name)]
    model = {name: own.get(name, default) for name, default in family.defaults.items()}
    model["family"] = family.name
    size = own.get("image_size", size)
    if not size:
        variant = family.variant_of(model, (0, 0))
        size = family.native_sizes.get(variant, family.native_size)
    data = {"image_size": pair(size), "channels": channels, "num_classes": found["classes"]}
    return {**model, "variant": family.variant_of(model, data["image_size"])}, data
