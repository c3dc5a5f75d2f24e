"""The reference's state dicts of HSViT, with its own trunk or on a convolutional network.

On a backbone the file's constructor has HSViT's arguments and, under `backbone`, the fields of the
backbone's configuration; `model_type` there, or else the tensors' names, tells its family.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hsvit_jax.models.family import Family
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.models.hsvit.backbone import BACKBONES, BackboneHSViTConfig
from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.weights.torch.base import (
    Placed,
    Sections,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    field,
    ints,
    kernel,
    kernel_shape,
    known_sizes,
    pair,
)
from hsvit_jax.weights.torch.convnets import EXTRACTORS, image_section

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

#: The reference's constructor arguments, and the option that gives what a file does not say.
_ARGUMENTS = {
    "image_size": "--image_size",
    "num_channels": "--channels",
    "conv_kernel_nums": "",
    "conv_kernel_sizes": "",
    "pool_strides": "--strides",
    "attn_num": "",
    "attn_depth": "",
    "attn_embed_dim": "",
    "num_heads": "--heads",
    "num_classes": "",
}
_CONV = re.compile(r"model\.conv2d_layers\.(\d+)\.layer\.0\.convolution\.weight$")
_BLOCK = re.compile(r"model\.attn_encoders\.(\d+)\.(\d+)\.")


def _from_shapes(family: Family, tensors: Tensors, given: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments that the tensors' shapes (and `input`, if there) give away."""
    shapes = {k: v.shape for k, v in tensors.items()}
    inferred: dict[str, Any] = {"attn_num": 0, "attn_depth": 1}
    image = shapes.get("input", ())
    if len(image) == 4:
        inferred |= {"num_channels": image[1], "image_size": image[2:]}
    head = shapes.get(_HEAD, ())
    if len(head) == 2:
        inferred |= {"num_classes": head[0], "attn_embed_dim": head[1]}
    blocks = [m.groups() for m in map(_BLOCK.match, shapes) if m]
    if blocks:
        inferred["attn_num"] = 1 + max(int(group) for group, _ in blocks)
        inferred["attn_depth"] = 1 + max(int(block) for _, block in blocks)
    else:
        inferred["num_heads"] = 1
    convs = {int(m[1]): shapes[k] for k in shapes if (m := _CONV.match(k)) and len(shapes[k]) == 4}
    if convs:
        ordered = [convs[i] for i in sorted(convs)]
        inferred["num_channels"] = ordered[0][1]
        inferred["conv_kernel_nums"] = [s[0] for s in ordered]
        inferred["conv_kernel_sizes"] = [s[2] for s in ordered]
        embed = shapes.get("model.embed_projection.0.weight", ())
        known = known_sizes(inferred, given, ())
        inferred |= _map_sizes(family, known, embed[1]) if len(embed) == 2 else {}
    elif blocks:  # attention only: channel tokens per group × groups, an image of D pixels
        position = shapes.get("model.position_embeddings", ())
        if len(position) == 4:
            inferred["conv_kernel_nums"] = [(position[2] - 1) * inferred["attn_num"]]
            side = math.isqrt(position[3])
            if side**2 == position[3]:
                inferred.setdefault("image_size", side)
        inferred |= {"conv_kernel_sizes": [0], "pool_strides": [1]}
    return inferred


def _map_sizes(family: Family, known: dict[str, Any], pixels: int) -> dict[str, Any]:
    """Image size from strides, or strides from the image size, by the feature map's pixels."""
    strides, size = known.get("pool_strides"), known.get("image_size")
    nums = ints("conv_kernel_nums", known["conv_kernel_nums"])
    if strides is not None:
        side = math.isqrt(pixels)
        square = size is None and side**2 == pixels
        return {"image_size": side * math.prod(ints("pool_strides", strides))} if square else {}
    if size is None:
        return {}
    rows, columns = pair(size)
    ratio = math.isqrt(rows * columns // pixels)
    if ratio == 1 or len(nums) == 1:
        return {"pool_strides": [ratio] * len(nums)}
    for name in family.variants:
        settings = family.settings(name)
        if nums == settings["conv_channels"]:
            try:
                strides = family.automatic["pool_strides"](settings, (rows, columns))
            except ValueError:
                continue
            if math.prod(strides) == ratio:
                return {"pool_strides": strides}
    return {}


def _settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    """One error for all that stays unknown."""
    known = known_sizes(_from_shapes(family, tensors, given), given, _ARGUMENTS)
    one = {
        k: ints(k, known[k])[0]
        for k in ("attn_num", "attn_depth", "attn_embed_dim", "num_heads", "num_classes")
    }
    channels = ints("conv_kernel_nums", known["conv_kernel_nums"])
    kernels = ints("conv_kernel_sizes", known["conv_kernel_sizes"])
    if not one["attn_num"] and not kernels[-1]:
        raise ValueError("attn_num 0 and a last conv_kernel_size of 0 leave no network: not both")
    strides = ints("pool_strides", known["pool_strides"])
    if len({len(channels), len(kernels), len(strides)}) > 1:
        # The reference pairs them off; of attention alone it reads the last channels.
        layers = zip(channels, kernels, strides, strict=False)
        layers = layers if kernels[-1] else [(channels[-1], 0, 1)]
        channels, kernels, strides = zip(*layers, strict=True)
    ablation = "none" if one["attn_num"] else "conv_only"
    model = {
        **family.defaults,
        "ablation": ablation if kernels[-1] else "attention_only",
        "conv_channels": channels,
        "conv_kernels": kernels,
        "pool_strides": strides,
        "groups": one["attn_num"],
        "depth": one["attn_depth"],
        "embed_dim": one["attn_embed_dim"],
        "heads": one["num_heads"],
        "dropout": field(given, "dropout", family.defaults["dropout"]),
    }
    data = {
        "image_size": pair(known["image_size"]),
        "channels": ints("num_channels", known["num_channels"])[0],
        "num_classes": one["num_classes"],
    }
    return model, data


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


def _backbone_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    if not field(given, "enable_conv_layer", True):
        model, data = _settings(hsvit.FAMILY, tensors, given)
        return {**model, "family": hsvit.FAMILY.name}, data
    described = given.get("backbone")
    if not isinstance(described, dict):
        raise ValueError("the constructor has no `backbone` with its configuration's fields")
    backbone = _backbone_family(tensors, described)
    sizes, *_ = EXTRACTORS[backbone]
    backbone_settings = sizes(BACKBONES[backbone], described)
    variant = BACKBONES[backbone].variant_of(backbone_settings, (0, 0))
    separator = "" if backbone == "resnet" else "_"
    classes, dim = tensors[_HEAD].shape if _HEAD in tensors else (None, 0)
    model = {
        **family.defaults,
        "backbone": backbone if variant == "custom" else f"{backbone}{separator}{variant}",
        "backbone_settings": backbone_settings,
        "groups": field(given, "attn_num", family.defaults["groups"]),
        "depth": field(given, "attn_depth", family.defaults["depth"]),
        "embed_dim": field(given, "attn_embed_dim", dim),
        "heads": field(given, "num_heads", family.defaults["heads"]),
        "dropout": field(given, "dropout", family.defaults["dropout"]),
    }
    images = {
        "num_labels": given.get("num_classes"),
        "num_channels": described.get("num_channels"),
        "image_size": given.get("image_size") or described.get("image_size"),
    }
    if images["image_size"] is None and "input" not in tensors:
        raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
    return model, image_section(tensors, images, classes)


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
