"""State dicts of ViT (the `transformers` library's) and of DeiT, HVT, DHVT, Swin (timm's names, of
Swin also its authors')."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from hsvit_jax.models.family import Family
from hsvit_jax.weights.torch.base import (
    Given,
    Placed,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    field,
    needed,
    only,
    read,
    several,
    timm_block,
)

_BLOCK = "encoder/blocks/{i}"


def _patches(name: str, patch: int) -> Table:
    """A convolution of the patch's size and stride, which is a linear map of each patch."""

    def shape(kernel: Shape) -> Shape:
        return (kernel[1], kernel[0] // patch**2, patch, patch) if len(kernel) == 2 else kernel

    def ours(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        return tensor.transpose(2, 3, 1, 0).reshape(shape)

    path = "embedding/patches/linear"
    return {
        f"{path}/kernel": Placed((f"{name}.weight",), shape, ours),
        f"{path}/bias": f"{name}.bias",
    }


# --- ViT -----------------------------------------------------------------------------------------


def _vit_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    dim, heads = field(given, "hidden_size", 768), field(given, "num_attention_heads", 12)
    return {
        "patch": field(given, "patch_size", 16),
        "heads": heads,
        "head_dim": dim // heads,
        "depth": field(given, "num_hidden_layers", 12),
        "mlp_dim": field(given, "intermediate_size", 3072),
        "qkv_bias": field(given, "qkv_bias", True),
        "eps": field(given, "layer_norm_eps", 1e-12),
        "activation": field(given, "hidden_act", "gelu"),
        "dropout": field(given, "hidden_dropout_prob", 0.0),
        "attention_dropout": field(given, "attention_probs_dropout_prob", 0.0),
        "drop_path": 0.0,
    }


def _vit(c: Any, keys: Collection[str]) -> Table:
    """The names of version 5 of the library where a key is one of them, else of version 4."""
    if any(key.startswith("vit.layers.") for key in keys):
        block = "vit.layers.{i}"
        qkv = tuple(f"{block}.attention.{name}_proj" for name in "qkv")
        out, up, down = "attention.o_proj", "mlp.fc1", "mlp.fc2"
    else:
        block = "vit.encoder.layer.{i}"
        qkv = tuple(f"{block}.attention.attention.{name}" for name in ("query", "key", "value"))
        out, up, down = "attention.output.dense", "intermediate.dense", "output.dense"
    return {
        **_patches("vit.embeddings.patch_embeddings.projection", c.patch),
        "embedding/cls": "vit.embeddings.cls_token [1,1,:]",
        "embedding/position": "vit.embeddings.position_embeddings [1,:,:]",
        f"{_BLOCK}/norm1": f"{block}.layernorm_before",
        f"{_BLOCK}/norm2": f"{block}.layernorm_after",
        f"{_BLOCK}/mixer/qkv": qkv,
        f"{_BLOCK}/mixer/out": f"{block}.{out}",
        f"{_BLOCK}/feed_forward/up": f"{block}.{up}",
        f"{_BLOCK}/feed_forward/down": f"{block}.{down}",
        "head/norm": "vit.layernorm",
        "head/linear": "classifier",
    }


VIT = TorchWeights(("vit.embeddings.cls_token",), _vit_settings, _vit)

# --- HVT and DeiT --------------------------------------------------------------------------------

#: A pool that is a convolution has the only weight of a block with the window's axes on top.
_POOL_CONV = re.compile(r"blocks\.(\d+)\.(?!attn\.|mlp\.|norm)(.+)\.weight$")


def _timm_settings(family: Family, given: Given) -> dict[str, Any]:
    """Returns what HVT, DeiT and DHVT share."""
    only(given, "qk_scale", None)
    name = "drop_path_rate" if given.get("drop_path") is None else "drop_path"
    return {
        "patch": needed(given, "patch_size"),
        "heads": needed(given, "num_heads"),
        "depth": needed(given, "depth", "num_blocks"),
        "mlp_ratio": field(given, "mlp_ratio", 4.0),
        "drop_path": field(given, name, family.defaults["drop_path"]),
    }


def _hvt_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    """The pool, which no argument tells apart from another, is read from the file's `variant`
    ('average' or 'avg', '2d'), or from `pool` and `pool_dims` in its constructor; a maximum
    otherwise. Without pools it is a DeiT."""
    model, cls = _timm_settings(family, given), "cls_token" in tensors
    if given.get("head_dim") is None:
        given = {**given, "head_dim": needed(given, "embed_dim") // model["heads"]}
    model |= {"head_dim": needed(given, "head_dim"), "eps": field(given, "ln_eps", 1e-6)}
    model["qkv_bias"] = field(given, "qkv_bias", True)
    if given.get("pool_block_width") is None:
        only(given, "global_pool", "token" if cls else "avg")
        return {**model, "family": "deit", "cls": cls, "retained": (), "flops_share": 1.0}
    return {**model, "family": "hvt", **_pool(tensors, given)}


def _pool(tensors: Tensors, given: Given) -> dict[str, Any]:
    """Returns kind, places, dimensions and window of the pools."""
    said = str(given.get("variant", "")).lower()
    conv = next((x.shape for k, x in tensors.items() if _POOL_CONV.match(k) and x.ndim >= 3), None)
    average = "avg" in said or "average" in said
    pool = given.get("pool", "conv" if conv else "average" if average else "max")
    flat = len(conv) == 3 if conv else not ("2d" in said or "2-d" in said)
    return {
        "stage_depth": needed(given, "pool_block_width"),
        "pool": "average" if pool == "avg" else pool,
        "pool_dims": field(given, "pool_dims", 1 if flat else 2),
        "pool_window": field(given, "pool_kernel_size", 3),
    }


#: What timm calls the blocks and the parts around them.
_TIMM: Table = {
    "embedding/cls": "cls_token [1,1,:]",
    "embedding/position": "pos_embed [1,:,:]",
    **timm_block(_BLOCK, "blocks.{i}"),
    "head/norm": "norm",
    "head/linear": "head",
}


def _hvt(c: Any, keys: Collection[str]) -> Table:
    """A pool's convolution is called as the file's keys have it, 'downsample' without any."""
    pools = {m[1]: m[2] for m in map(_POOL_CONV.match, keys) if m}
    convs = {
        f"encoder/pools/after{i}/conv": f"blocks.{i}.{pools.get(str(i), 'downsample')}"
        for i in range(c.depth)
    }
    return {
        **_TIMM,
        **_patches("patch_embed.proj", c.patch),
        "encoder/pools/after{i}/position": "blocks.{i}.pos_embed [1,:,:]",
        **convs,
    }


HVT = TorchWeights(
    ("head.weight",),
    _hvt_settings,
    _hvt,
    known={"pool": ("max",), "pool_dims": (1,), "retained": ((),)},
)

# --- DHVT ----------------------------------------------------------------------------------------


def _dhvt_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    return {
        **family.defaults,
        **_timm_settings(family, given),
        "embed_dim": needed(given, "embed_dim"),
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "affine": "patch_embed.pre_affine.alpha" in tensors,
        "head_tokens": "blocks.0.attn.ht_proj.weight" in tensors,
        "positions": "pos_embed" in tensors,
        "representation": len(tensors.get("pre_logits.fc.weight", ())),
    }


def _affine(ours: str, theirs: str) -> Table:
    return {
        f"{ours}/scale": f"{theirs}.alpha [1,:,1,1]",
        f"{ours}/bias": f"{theirs}.beta [1,:,1,1]",
    }


def _dhvt(c: Any, keys: Collection[str]) -> Table:
    """The reference knows SOPE, DAFF and BatchNorm only."""
    mixer, feed = f"{_BLOCK}/mixer", f"{_BLOCK}/feed_forward"
    attention = f"{mixer}/attention" if c.head_tokens else mixer
    table = {
        **_TIMM,
        **_affine("embedding/sope/before", "patch_embed.pre_affine"),
        **_affine("embedding/sope/after", "patch_embed.post_affine"),
        f"{attention}/qkv": "blocks.{i}.attn.qkv",
        f"{attention}/out": "blocks.{i}.attn.proj",
        f"{mixer}/project": "blocks.{i}.attn.ht_proj",
        f"{mixer}/norm": "blocks.{i}.attn.ht_norm",
        f"{mixer}/embedding": "blocks.{i}.attn.pos_embed [1,:,:]",
        f"{feed}/up": "blocks.{i}.mlp.conv1 [:,:,1,1]",
        f"{feed}/conv": "blocks.{i}.mlp.conv2",
        f"{feed}/down": "blocks.{i}.mlp.conv3 [:,:,1,1]",
        f"{feed}/norms/up/norm": "blocks.{i}.mlp.bn1",
        f"{feed}/norms/conv/norm": "blocks.{i}.mlp.bn2",
        f"{feed}/norms/down/norm": "blocks.{i}.mlp.bn3",
        f"{feed}/gate/squeeze": "blocks.{i}.mlp.compress",
        f"{feed}/gate/excite": "blocks.{i}.mlp.excitation",
        "head/represent": "pre_logits.fc",
    }
    for i in range(len(c.sope_channels)):
        table[f"embedding/sope/convs/{i}"] = f"patch_embed.proj.{2 * i}.0"
        table[f"embedding/sope/norms/{i}/norm"] = f"patch_embed.proj.{2 * i}.1"
    return table


DHVT = TorchWeights(
    ("head.weight",),
    _dhvt_settings,
    _dhvt,
    known={"feed_forward": ("daff",), "sope_norm": ("batch",), "daff_norm": ("batch",)},
)

# --- Swin ----------------------------------------------------------------------------------------

_SWIN_PATCHES = "patch_embed.proj"


def _swin_names(keys: Collection[str]) -> tuple[str, int]:
    """The classifier, and by how much the number of a merging's stage is lower than ours: timm
    moved it from the end of a stage, where the authors have it, to the beginning of the next."""
    authors = "head.weight" in keys or any(key.startswith("layers.0.downsample.") for key in keys)
    return ("head", 1) if authors else ("head.fc", 0)


def _swin_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    """Of the arguments of timm's `SwinTransformer`, whose own defaults are those of Swin-T."""
    for name, usual in (("global_pool", "avg"), ("always_partition", False), ("qk_scale", None)):
        only(given, name, usual)
    names = {"patch": "patch_size", "depths": "depths", "heads": "num_heads"}
    names |= {"mlp_ratio": "mlp_ratio", "qkv_bias": "qkv_bias", "drop_path": "drop_path_rate"}
    model = read(given, names, family.settings("t"))
    width = field(given, "embed_dim", 96)
    stages = len(model["depths"])
    model["widths"] = tuple(width * 2**stage for stage in range(stages))
    return {**model, "windows": _windows(given.get("window_size") or 7, stages)}


def _windows(size: Any, stages: int) -> tuple[int, ...]:
    """The side of each stage's windows from timm's `window_size`.

    One or two integers, rows and columns, are for all stages; a longer list has an entry per stage.
    """
    of_all = isinstance(size, int) or (len(size) == 2 and isinstance(size[0], int))
    return tuple(several(one)[0] for one in ([size] * stages if of_all else size))


def _swin(c: Any, keys: Collection[str]) -> Table:
    """The authors' names where a key is one of them, else timm's."""
    block, theirs = "stage{s}/blocks/{i}", "layers.{s}.blocks.{i}"
    head, before = _swin_names(keys)
    merging = {
        f"stage{s}/merging/{name}": f"layers.{s - before}.downsample.{name}"
        for s in range(1, len(c.depths))
        for name in ("norm", "reduction")
    }
    return {
        **_patches(_SWIN_PATCHES, c.patch),
        "embedding/norm": "patch_embed.norm",
        **merging,
        **timm_block(block, theirs),
        f"{block}/mixer/offset_bias": f"{theirs}.attn.relative_position_bias_table",
        "head/norm": "norm",
        "head/linear": head,
    }


SWIN = TorchWeights(
    (f"{_SWIN_PATCHES}.weight",),
    _swin_settings,
    _swin,
    ignored=r".*\.(attn_mask|relative_position_index)$",  # numbers that follow from the map's size
)
