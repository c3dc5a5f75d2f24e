"""How the files of each family are recognised and read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hsvit_jax import (
    convert_backbone,
    convert_ccx,
    convert_cvt,
    convert_cvx,
    convert_dhvt,
    convert_efficientformer,
    convert_efficientnet,
    convert_hsvit,
    convert_hvt,
    convert_levix,
    convert_mobilenet_v2,
    convert_mobilevit,
    convert_pix,
    convert_resnet,
    convert_swiftformer,
    convert_vit,
    convert_vix,
)
from hsvit_jax.convert_tensors import Tensors


class Family(NamedTuple):
    """How one family's files are read; a further family adds an entry to `FAMILIES`."""

    markers: tuple[str, ...]  # every file has one of these keys, after an optional prefix
    settings: Callable[[Tensors, dict[str, Any]], tuple[dict, dict]]
    params: Callable[[Tensors, Any], tuple[dict, dict]]


def _family(module: Any, *markers: str) -> Family:
    return Family(markers, module.settings, module.params_from_torch)


_EFFICIENTFORMER = "efficientformer.patch_embed.convolution1"
_CVT = "cvt.encoder.stages.0.embedding.convolution_embeddings"

_CONVNETS: Mapping[str, Family] = {
    family: _family(module, f"{module.PREFIX}{module.MARKER}")
    for family, module in (
        ("resnet", convert_resnet),
        ("efficientnet", convert_efficientnet),
        ("mobilenet_v2", convert_mobilenet_v2),
    )
}

FAMILIES: Mapping[str, Family] = {
    "hsvit": _family(convert_hsvit, "classifier.mlp_head.1.weight"),
    "hvt": _family(convert_hvt, "head.weight"),
    "deit": _family(convert_hvt, "head.weight"),
    "dhvt": _family(convert_dhvt, "head.weight"),
    "vix": _family(convert_vix, "mlp_head.1.weight", "2.0.norm.weight", "4.0.norm.weight"),
    "levix": _family(convert_levix, "mlp_head.weight"),
    "cct": _family(convert_ccx, "classifier.fc.weight"),
    "ccx": _family(convert_ccx, "classifier.fc.weight"),
    "cvx": _family(convert_cvx, "layers.0.1.g"),
    "pix": _family(convert_pix, "mlp_head.1.weight"),
    "mobilevit": _family(convert_mobilevit, "mobilevit.conv_stem.convolution.weight"),
    "efficientformer": _family(convert_efficientformer, f"{_EFFICIENTFORMER}.weight"),
    "cvt": _family(convert_cvt, f"{_CVT}.projection.weight"),
    "vit": _family(convert_vit, "vit.embeddings.cls_token"),
    "swiftformer": _family(convert_swiftformer, "swiftformer.patch_embed.patch_embedding.0.weight"),
    **dict.fromkeys(
        ("hsvit-het", "hsvit_backbone"), _family(convert_backbone, convert_backbone.MARKER)
    ),
    **_CONVNETS,
}


def without_prefix(
    tensors: dict[str, np.ndarray], markers: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Drops what a wrapper (Lightning, DataParallel, compile) puts before every key."""
    for marker in markers:
        if marker in tensors:
            return tensors
        prefixes = [k.removesuffix(marker) for k in tensors if k.endswith("." + marker)]
        if len(prefixes) > 1:
            raise ValueError(f"several networks in one file, under {prefixes}: save one of them")
        if prefixes:
            return {k.removeprefix(prefixes[0]): v for k, v in tensors.items()}
    return tensors
