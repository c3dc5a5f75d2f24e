"""The reference's state dicts of HSViT, with its own trunk or on a convolutional network.

On a backbone the file's constructor has HSViT's arguments and, under `backbone`, the fields of the
backbone's configuration; `model_type` there, or else the tensors' names, tells its family.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hsvit_jax.models.family import Family
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.models.hsvit.backbone import BACKBONES, BackboneHSViTConfig
from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.weights.torch.base import (
    Given,
    Placed,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    field,
    kernel,
    kernel_shape,
    needed,
    read,
    several,
)
from hsvit_jax.weights.torch.convnets import EXTRACTORS

_HEAD = "classifier.mlp_head.1.weight"

# --- Attention groups and head -------------------------------------------------------------------


def _attention(c: HSViTConfig | BackboneHSViTConfig) -> Table:
    block = "groups/blocks/{i}"

    def flat(shape: Shape) -> Shape:
        return (math.prod(shape),)

    def reshaped(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        return tensor.reshape(shape)

    def of_groups(name: str, shape: Any = flat, ours: Any = reshaped) -> Placed:
        """A tensor of each group; by default it has the array's numbers in a row."""
        key = "model.attn_encoders.{g}.{{i}}.attn_block.{name}"
        keys = tuple(key.format(g=g, name=name) for g in range(c.groups))
        return Placed(keys, shape, ours, stacked=True)

    def qkv_shape(shape: Shape) -> Shape:
        return (math.prod(shape[:-1]), shape[-1])

    def qkv(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        return tensor.reshape(shape).swapaxes(1, 2)

    return {
        "trunk/embed": "model.embed_projection.0",
        "groups/cls": "model.cls_token_embeddings [:,1,1,:]",
        "groups/position": "model.position_embeddings [:,1,:,:]",
        f"{block}/norm_scale": of_groups("layer_norm.weight"),
        f"{block}/norm_bias": of_groups("layer_norm.bias"),
        f"{block}/qkv_kernel": of_groups("self_attn.in_proj_weight", qkv_shape, qkv),
        f"{block}/qkv_bias": of_groups("self_attn.in_proj_bias"),
        f"{block}/out_kernel": of_groups("self_attn.out_proj.weight", kernel_shape, kernel),
        f"{block}/out_bias": of_groups("self_attn.out_proj.bias"),
        "head/norm_scale": "classifier.mlp_head.0.weight",
        "head/norm_bias": "classifier.mlp_head.0.bias",
        "head/linear": "classifier.mlp_head.1",
    }


# --- HSViT ---------------------------------------------------------------------------------------


def _settings(family: Family, tensors: Tensors, given: Given) -> Given:
    groups = needed(given, "attn_num")
    names = ("conv_kernel_nums", "conv_kernel_sizes", "pool_strides")
    channels, kernels, strides = (several(needed(given, name)) for name in names)
    if not groups and not kernels[-1]:
        raise ValueError("attn_num 0 and a last conv_kernel_size of 0 leave no network: not both")
    if len({len(channels), len(kernels), len(strides)}) > 1:
        # The reference pairs them off; of attention alone it reads the last channels.
        layers = zip(channels, kernels, strides, strict=False)
        layers = layers if kernels[-1] else [(channels[-1], 0, 1)]
        channels, kernels, strides = zip(*layers, strict=True)
    ablation = "none" if groups else "conv_only"
    return {
        "ablation": ablation if kernels[-1] else "attention_only",
        "conv_channels": channels,
        "conv_kernels": kernels,
        "pool_strides": strides,
        "groups": groups,
        "depth": needed(given, "attn_depth"),
        "embed_dim": needed(given, "attn_embed_dim"),
        "heads": needed(given, "num_heads"),
        "dropout": field(given, "dropout", family.defaults["dropout"]),
    }


def _hsvit(c: HSViTConfig, keys: Collection[str]) -> Table:
    layer = "model.conv2d_layers.{i}.layer.{j}"
    weight = Placed((f"{layer}.convolution.weight",), kernel_shape, kernel)
    return {
        "trunk/blocks/{i}/kernels/{j}": weight,
        "trunk/blocks/{i}/norms/{j}": f"{layer}.normalization",
        **_attention(c),
    }


HSVIT = TorchWeights((_HEAD,), _settings, _hsvit)

# --- On a backbone -------------------------------------------------------------------------------

_PREFIX = "model.conv2d_submodule."


def _backbone_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    if not field(given, "enable_conv_layer", True):
        layer = {"conv_kernel_nums": given.get("conv_kernel_num"), "conv_kernel_sizes": 0}
        given = {**layer, "pool_strides": 1, **given}
        return {**_settings(hsvit.FAMILY, tensors, given), "family": hsvit.FAMILY.name}
    described = given.get("backbone")
    if not isinstance(described, dict):
        raise ValueError("the constructor has no `backbone` with its configuration's fields")
    backbone = _backbone_family(tensors, described)
    sizes, *_ = EXTRACTORS[backbone]
    settings = sizes(BACKBONES[backbone], described)
    variant = BACKBONES[backbone].variant_of(settings, (0, 0))
    separator = "" if backbone == "resnet" else "_"
    names = {"groups": "attn_num", "depth": "attn_depth", "embed_dim": "attn_embed_dim"}
    names |= {"heads": "num_heads", "dropout": "dropout"}
    return {
        **read(given, names, family.defaults),
        "backbone": backbone if variant == "custom" else f"{backbone}{separator}{variant}",
        "backbone_settings": settings,
    }


def _backbone_table(c: HSViTConfig | BackboneHSViTConfig, keys: Collection[str]) -> Table:
    if not hasattr(c, "backbone"):
        return _attention(c)
    backbone = next(name for name, f in BACKBONES.items() if isinstance(c.backbone, f.config))
    return {**EXTRACTORS[backbone][1](c.backbone, _PREFIX), **_attention(c)}


def _backbone_family(tensors: Tensors, described: Mapping[str, Any]) -> str:
    """The family of `model_type`, or whose first convolution's key is there."""
    for family, (*_, first) in EXTRACTORS.items():
        if f"{_PREFIX}{first}" in tensors or described.get("model_type") == family:
            return family
    raise ValueError(
        f"backbone of model_type={described.get('model_type')!r} is not supported; known: "
        f"{', '.join(EXTRACTORS)}"
    )


BACKBONE = TorchWeights((_HEAD,), _backbone_settings, _backbone_table)
