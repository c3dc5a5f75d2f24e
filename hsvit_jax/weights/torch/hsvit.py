"""The reference's state dicts of HSViT, with its own trunk or on a convolutional network.

On a backbone the file's constructor has HSViT's arguments and, under `backbone`, the fields of the
backbone's configuration. Its `model_type`, or else the tensors' names, shows its family.
"""

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.models.hsvit.backbone import BACKBONES, BackboneHSViTConfig
from hsvit_jax.models.hsvit.sizes import HSViTConfig
from hsvit_jax.weights.torch import base
from hsvit_jax.weights.torch.base import Given, Placed, Shape, Table, Tensors, TorchWeights
from hsvit_jax.weights.torch.convnets import EXTRACTORS

_HEAD = "classifier.mlp_head.1.weight"


def _attention(c: HSViTConfig | BackboneHSViTConfig) -> Table:
    """Names the attention groups and the head."""
    block = "groups/blocks/{i}"

    def flat(shape: Shape) -> Shape:
        return (math.prod(shape),)

    def reshaped(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        return tensor.reshape(shape)

    def of_groups(name: str, shape: Any = flat, ours: Any = reshaped) -> Placed:
        """Returns a tensor of each group; by default it has the array's numbers in a row."""
        key = "model.attn_encoders.{g}.{{i}}.attn_block.{name}"
        keys = tuple(key.format(g=g, name=name) for g in range(c.groups))
        return Placed(keys, shape, ours, stacked=True)

    def qkv_shape(shape: Shape) -> Shape:
        return (math.prod(shape[:-1]), shape[-1])

    def qkv(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        return tensor.reshape(shape).swapaxes(1, 2)

    out = of_groups("self_attn.out_proj.weight", base.kernel_shape, base.kernel)
    return {
        "trunk/embed": "model.embed_projection.0",
        "groups/cls": "model.cls_token_embeddings[:,1,1,:]",
        "groups/position": "model.position_embeddings[:,1,:,:]",
        f"{block}/norm_scale": of_groups("layer_norm.weight"),
        f"{block}/norm_bias": of_groups("layer_norm.bias"),
        f"{block}/qkv_kernel": of_groups("self_attn.in_proj_weight", qkv_shape, qkv),
        f"{block}/qkv_bias": of_groups("self_attn.in_proj_bias"),
        f"{block}/out_kernel": out,
        f"{block}/out_bias": of_groups("self_attn.out_proj.bias"),
        "head/norm_scale": "classifier.mlp_head.0.weight",
        "head/norm_bias": "classifier.mlp_head.0.bias",
        "head/linear": "classifier.mlp_head.1",
    }


# --- HSViT ---------------------------------------------------------------------------------------


def _more(tensors: Tensors, given: Given, model: Given) -> Given:
    layers = {name: model[name] for name in ("conv_channels", "conv_kernels", "pool_strides")}
    alone = not layers["conv_kernels"][-1]
    if alone and not model["groups"]:
        raise ValueError("attn_num 0 and a last conv_kernel_size of 0 leave no network: not both")
    if len(set(map(len, layers.values()))) > 1:
        # The reference zips these lists and, for attention only, uses the last channel count.
        zipped = zip(*layers.values(), strict=False)
        zipped = [(layers["conv_channels"][-1], 0, 1)] if alone else zipped
        layers = dict(zip(layers, zip(*zipped, strict=True), strict=True))
    ablation = "none" if model["groups"] else "conv_only"
    return {**layers, "ablation": "attention_only" if alone else ablation}


def _hsvit(c: HSViTConfig, keys: Collection[str]) -> Table:
    layer = "model.conv2d_layers.{i}.layer.{j}"
    weight = Placed((f"{layer}.convolution.weight",), base.kernel_shape, base.kernel)
    return {
        "trunk/blocks/{i}/kernels/{j}": weight,
        "trunk/blocks/{i}/norms/{j}": f"{layer}.normalization",
        **_attention(c),
    }


HSVIT = TorchWeights(
    (_HEAD,),
    "conv_channels=conv_kernel_nums! conv_kernels=conv_kernel_sizes! pool_strides! groups=attn_num!"
    " depth=attn_depth! embed_dim=attn_embed_dim! heads=num_heads! dropout",
    _hsvit,
    _more,
)

# --- On a backbone -------------------------------------------------------------------------------

_PREFIX = "model.conv2d_submodule."


def _below_prefix(backbone: str, key: str) -> str:
    """Returns a name of the backbone's own files as this network has it."""
    return _PREFIX + key.removeprefix(f"{backbone}.")


def _backbone_more(tensors: Tensors, given: Given, model: Given) -> Given:
    if not base.field(given, "enable_conv_layer", True):
        layer = {"conv_kernel_nums": given.get("conv_kernel_num"), "conv_kernel_sizes": 0}
        given = {**layer, "pool_strides": 1, **given}
        own = HSVIT.settings(hsvit.FAMILY, tensors, given)
        return {**own, "family": hsvit.FAMILY.name}
    described = given["backbone"]
    if not isinstance(described, dict):
        raise ValueError("the constructor's `backbone` is not a JSON object")
    kind = described.get("model_type")
    for name, table in EXTRACTORS.items():
        if kind == name or _below_prefix(name, table.markers[0]) in tensors:
            record = BACKBONES[name]
            settings = {**record.defaults, **table.settings(record, {}, described)}
            variant = record.variant_of(settings, (0, 0))
            own = f"{name}{'' if name == 'resnet' else '_'}{variant}"
            own = name if variant == "custom" else own
            return {"backbone": own, "backbone_settings": settings}
    known = ", ".join(EXTRACTORS)
    raise ValueError(f"the backbone's model_type={kind!r} is not supported; use one of {known}")


def _backbone(c: HSViTConfig | BackboneHSViTConfig, keys: Collection[str]) -> Table:
    if not hasattr(c, "backbone"):
        return _attention(c)
    name = next(name for name, f in BACKBONES.items() if isinstance(c.backbone, f.config))
    table = {
        path: _below_prefix(name, key)
        for path, key in EXTRACTORS[name].table(c.backbone, keys).items()
        if path.startswith("backbone/")
    }
    return table | _attention(c)


BACKBONE = TorchWeights(
    (_HEAD,),
    "groups=attn_num depth=attn_depth embed_dim=attn_embed_dim heads=num_heads dropout",
    _backbone,
    _backbone_more,
)
