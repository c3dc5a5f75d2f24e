"""State dicts of HSViT on a convolutional network: the reference's keys around the backbone's own.

The file's constructor has HSViT's arguments and, under `backbone`, the fields of the backbone's
configuration; `model_type` there, or else the tensors' names, tells its family.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax import convert_efficientnet, convert_hsvit, convert_mobilenet_v2, convert_resnet
from hsvit_jax.convert_convnet import Fields, data_section
from hsvit_jax.convert_tensors import Entry, Tensors, assemble
from hsvit_jax.models.hsvit import backbone

PREFIX = "model.conv2d_submodule."
MARKER = "classifier.mlp_head.1.weight"

#: The backbones' converters by the family's name.
CONVERTERS: Mapping[str, Any] = {
    "resnet": convert_resnet,
    "efficientnet": convert_efficientnet,
    "mobilenet_v2": convert_mobilenet_v2,
}


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration; ValueError for what stays unknown."""
    described = given.get("backbone")
    if not isinstance(described, dict):
        raise ValueError("the constructor has no `backbone` with its configuration's fields")
    family = _family(tensors, described)
    fields, module = Fields(given), backbone.BACKBONES[family]
    if not fields.flag("enable_conv_layer", True):
        raise ValueError("enable_conv_layer=false: a network without its backbone is not supported")
    own = CONVERTERS[family].sizes(described)
    variant = module.variant_of(own, (0, 0))
    separator = "" if family == "resnet" else "_"
    name = family if variant == "custom" else f"{family}{separator}{variant}"
    shapes = {k: tensors[k].shape for k in tensors}
    head = shapes.get(MARKER, (None, None))
    dim = fields.whole("attn_embed_dim", head[1] or 0)
    model = {
        "family": "hsvit_backbone",
        "variant": name if name in backbone.VARIANTS else "custom",
        "backbone": name,
        "backbone_settings": own,
        "groups": fields.whole("attn_num", 64),
        "depth": fields.whole("attn_depth", 2),
        "embed_dim": dim,
        "heads": fields.whole("num_heads", 8),
        "dropout": fields.number("dropout", 0.2),
        "group_dropout": 0.0,
        "votes": "equal",
        "trunk": "replicated",
    }
    sizes = {"num_labels": given.get("num_classes"), "num_channels": described.get("num_channels")}
    sizes["image_size"] = given.get("image_size") or described.get("image_size")
    return model, data_section(tensors, sizes, head[0])


def _family(tensors: Tensors, described: Mapping[str, Any]) -> str:
    """Which converter has the first convolution's key."""
    for family, module in CONVERTERS.items():
        if f"{PREFIX}{module.MARKER}" in tensors or described.get("model_type") == family:
            return family
    raise ValueError(
        f"backbone of model_type={described.get('model_type')!r} is not supported; known: "
        f"{', '.join(CONVERTERS)}"
    )


def params_from_torch(tensors: Tensors, config: backbone.BackboneHSViTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(config: backbone.BackboneHSViTConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    for family, module in backbone.BACKBONES.items():
        if isinstance(config.backbone, module.config):
            yield from CONVERTERS[family].entries(config.backbone, PREFIX)
    yield from convert_hsvit.attention_entries(config)
