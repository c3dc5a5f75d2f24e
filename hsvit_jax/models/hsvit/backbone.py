"""HSViT on a convolutional network: each channel of its last map is a token.

The channels' maps are projected, split into attention groups, attended to, averaged and classified
as in HSViT. Only the trunk's convolutions are another network's, usually pretrained and frozen.

A sharded backbone costs one all-gather for each convolution that is neither the first nor
depthwise (a shortcut shares its block's) and one of the means for each squeeze-and-excitation; its
gradient has as many reduce-scatters.

Source: HSViT paper, section 4 and table 3; the authors' code for the embedding's width, which is
the map's size rounded up to a multiple of 8.
"""

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from flax import nnx

from hsvit_jax.models import settings
from hsvit_jax.models.convnets import efficientnet, mobilenet_v2, resnet
from hsvit_jax.models.convnets.convnet import ConvNet, ConvNetConfig
from hsvit_jax.models.family import Family, Sizes
from hsvit_jax.models.hsvit.hsvit import HSViT
from hsvit_jax.models.hsvit.sizes import GroupSizes
from hsvit_jax.models.hsvit.trunk import Projection
from hsvit_jax.models.network import BoundModules, ForwardContext, GroupShard, Network
from hsvit_jax.models.settings import Key

Array = jax.Array

#: Families that a backbone can be of.
BACKBONES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (resnet, efficientnet, mobilenet_v2)
}


def backbone_settings(name: str) -> dict[str, Any]:
    """Returns all settings of a backbone: a family's name with a variant's, such as 'resnet50'.

    A family's name alone means its defaults. Raises ValueError for another name.
    """
    family = _family(name)
    variant = name.removeprefix(family.name).removeprefix("_")
    if variant and variant not in family.variants:
        raise ValueError(
            f"unknown model.backbone {name!r}; {family.name} has {', '.join(family.variants)}"
        )
    return {**family.defaults, **family.variants.get(variant, {})}


def _family(name: str) -> Family:
    for family in BACKBONES.values():
        if name.startswith(family.name):
            return family
    raise ValueError(
        f"unknown model.backbone {name!r}; it begins with one of {', '.join(BACKBONES)}"
    )


#: Backbones by name, such as 'resnet50', 'efficientnet_b0' and 'mobilenet_v2_1.0'.
_NAMES: Mapping[str, tuple[Family, str]] = {
    f"{family.name}{'' if family.name == 'resnet' else '_'}{variant}": (family, variant)
    for family in BACKBONES.values()
    for variant in family.variants
}
#: Each with the settings of its own family as a section.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    name: {"backbone": name, "backbone_settings": backbone_settings(name)} for name in _NAMES
}


@dataclasses.dataclass(frozen=True)
class BackboneHSViTConfig(GroupSizes):
    """Sizes of attention groups, and of the backbone whose last map they read."""

    backbone: ConvNetConfig = dataclasses.field(kw_only=True)
    groups: int = settings.width(64, "attention groups; 0: none", low=0)
    embed_dim: int = settings.width(
        0, "token width; 0: the pixels of the backbone's last map, up to a multiple of 8", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(Sizes)}
        object.__setattr__(self, "backbone", dataclasses.replace(self.backbone, **sizes))
        if self.embed_dim == 0:
            object.__setattr__(self, "embed_dim", -(-prod(self.map_size) // 8) * 8)
        self.check_groups()

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the feature map that becomes a token."""
        return self.backbone.map_size

    @property
    def conv_channels(self) -> tuple[int, ...]:
        """Channels out of every convolution; the last ones are tokens."""
        return self.backbone.widths


#: The settings of a `model` section, beside the section of the backbone's own.
KEYS: Mapping[str, Key] = {
    "backbone": Key("convolutional backbone", kind=str, default="resnet50"),
    **settings.keys_of(BackboneHSViTConfig),
}


class BackboneHSViT(HSViT):
    """Parameters: {'backbone', 'trunk' (the projection), 'groups' (leading G axis), 'head'}."""

    config: BackboneHSViTConfig
    trunk_module = Projection
    whitens = False

    def parts(self, key: Array) -> dict[str, nnx.Module]:
        backbone_key, trunk_key, groups_key, head_key = jax.random.split(key, 4)
        parts = {
            "backbone": self.config.backbone.features(backbone_key),
            "trunk": self.trunk_module(self.config, trunk_key),
            "head": self.head_module(self.config, head_key),
        }
        if self.config.groups:
            parts["groups"] = self.groups_module(self.config, groups_key)
        return parts

    def spread_axis(self, path: tuple[str, ...]) -> int | None:
        """Returns the axis of groups, or of the output channels of a sharded backbone."""
        if path[0] == "groups":
            return 0
        if self.config.trunk != "sharded" or path[0] != "backbone":
            return None
        if "squeeze" in path:
            return {"reduce": None, "expand": int(path[-1] == "kernel")}[path[-2]]
        return 3 if path[-1] == "kernel" else 0

    def channel_tokens(
        self,
        bound: BoundModules,
        images_BHWC: Array,
        context: ForwardContext,
        kernels: GroupShard,
        first_token: Array | int,
    ) -> Array:
        x_BHWC = bound["backbone"](images_BHWC, context, kernels)
        return bound["trunk"](x_BHWC, context, first_token)

    def feature_network(self) -> tuple[str, Network]:
        """Returns the backbone's family, and its classifier of the same sizes."""
        backbone = self.config.backbone
        family = next(f for f in BACKBONES.values() if isinstance(backbone, f.config))
        return family.name, ConvNet(backbone, self.dtype)


def _config(
    *,
    backbone: str,
    backbone_settings: Mapping[str, Any],
    image_size: tuple[int, int],
    image_channels: int,
    num_classes: int,
    **settings: Any,
) -> BackboneHSViTConfig:
    """Returns the sizes; `backbone` names the family of `backbone_settings`."""
    family = _family(backbone)
    other = sorted(set(backbone_settings) ^ set(family.defaults))
    if other:
        raise ValueError(
            f"model.backbone={backbone!r} and the keys of model.backbone_settings differ in "
            f"{', '.join(other)}: set both to one family"
        )
    sizes = {"image_size": image_size, "num_classes": num_classes}
    backbone_config = family.sizes(backbone_settings, channels=image_channels, **sizes)
    return BackboneHSViTConfig(
        image_channels=image_channels, backbone=backbone_config, **sizes, **settings
    )


def _backbone_keys(settings: Mapping[str, Any]) -> Mapping[str, Key]:
    """Returns the backbone's settings; nothing reads those of its classifier."""
    keys = dict(_family(settings["backbone"]).keys)
    for name in keys.keys() & {"dropout", "pooling"}:
        keys[name] = dataclasses.replace(keys[name], when=[{"model.backbone": ()}])
    return keys


def _tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a smoke run: the backbone's, and few groups."""
    changes = _family(settings["backbone"]).tiny(settings["backbone_settings"])
    return {f"backbone_settings.{k}": v for k, v in changes.items()} | {"groups": 4, "heads": 2}


FAMILY = Family(
    name="hsvit_backbone",
    keys=KEYS,
    sections={"backbone_settings": _backbone_keys},
    defaults={**{name: key.default for name, key in KEYS.items()}, **VARIANTS["resnet50"]},
    variants=VARIANTS,
    default_variant="resnet50",
    config=_config,
    network=BackboneHSViT,
    named_by=("backbone",),
    config_file="backbone",
    native_size=224,
    native_sizes={
        name: family.native_sizes[variant]
        for name, (family, variant) in _NAMES.items()
        if variant in family.native_sizes
    },
    paper_recipe="hsvit_backbone",
    tiny=_tiny,
)
