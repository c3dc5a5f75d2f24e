"""State dicts of ViT (in the `transformers` library's names) and of DeiT, HVT, DHVT and Swin.

The latter have timm's names, and Swin also its authors'.
"""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from hsvit_jax.weights.torch.base import (
    TIMM_BLOCK,
    Given,
    Placed,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    field,
    names,
    only,
    several,
)

_BLOCK = "encoder/blocks/{i}"


def _patches(name: str, patch: int) -> Table:
    """Names a convolution of the patch's size and stride, a linear map of each patch."""

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


def _vit_more(tensors: Tensors, given: Given, model: Given) -> Given:
    return {"head_dim": field(given, "hidden_size", 768) // model["heads"]}


def _vit(c: Any, keys: Collection[str]) -> Table:
    """Returns the names of version 5 of the library if a key is one of them, else of version 4."""
    block = "vit.encoder.layer.{i}"
    words = (
        "mixer/qkv=attention.attention.{query,key,value} mixer/out=attention.output.dense"
        " feed_forward/up=intermediate.dense feed_forward/down=output.dense"
    )
    if any(key.startswith("vit.layers.") for key in keys):
        block = "vit.layers.{i}"
        words = (
            "mixer/qkv=attention.{q_proj,k_proj,v_proj} mixer/out=attention.o_proj"
            " feed_forward/up=mlp.fc1 feed_forward/down=mlp.fc2"
        )
    return {
        **_patches("vit.embeddings.patch_embeddings.projection", c.patch),
        "embedding/cls": "vit.embeddings.cls_token[1,1,:]",
        "embedding/position": "vit.embeddings.position_embeddings[1,:,:]",
        **names(_BLOCK, block, f"norm1=layernorm_before norm2=layernorm_after {words}"),
        "head/norm": "vit.layernorm",
        "head/linear": "classifier",
    }


VIT = TorchWeights(
    ("vit.embeddings.cls_token",),
    "patch=patch_size heads=num_attention_heads depth=num_hidden_layers mlp_dim=intermediate_size"
    " qkv_bias eps=layer_norm_eps activation=hidden_act dropout=hidden_dropout_prob"
    " attention_dropout=attention_probs_dropout_prob",
    _vit,
    _vit_more,
    like="b-patch16",
)

# --- HVT and DeiT --------------------------------------------------------------------------------

#: A convolutional pool is the only block weight with spatial axes.
_POOL_CONV = re.compile(r"blocks\.(\d+)\.(?!attn\.|mlp\.|norm)(.+)\.weight$")
_FIELDS = (
    "patch=patch_size! heads=num_heads! depth=depth|num_blocks! mlp_ratio"
    " drop_path=drop_path|drop_path_rate"
)
#: timm's names of the blocks and the parts around them.
_TIMM: Table = {
    "embedding/cls": "cls_token[1,1,:]",
    "embedding/position": "pos_embed[1,:,:]",
    **names(_BLOCK, "blocks.{i}", TIMM_BLOCK),
    "head/norm": "norm",
    "head/linear": "head",
}


def _hvt_more(tensors: Tensors, given: Given, model: Given) -> Given:
    """Adds the pool, or returns a DeiT's settings if there are none.

    The kind of pool is in the file's `variant` ('average' or 'avg', '2d'), or in `pool` and
    `pool_dims` of its constructor. It defaults to a maximum.
    """
    cls = "cls_token" in tensors
    dim = given.get("head_dim") or given["embed_dim"] // model["heads"]
    if model["stage_depth"] is None:
        only(given, "global_pool", "token" if cls else "avg")
        return {"family": "deit", "cls": cls, "head_dim": dim}
    variant = str(given.get("variant", "")).lower()
    axes = next((x.ndim for k, x in tensors.items() if _POOL_CONV.match(k) and x.ndim >= 3), 0)
    pool = "average" if "avg" in variant or "average" in variant else "max"
    pool = given.get("pool", "conv" if axes else pool)
    square = axes == 4 if axes else "2d" in variant or "2-d" in variant
    return {
        "family": "hvt",
        "head_dim": dim,
        "pool": "average" if pool == "avg" else pool,
        "pool_dims": field(given, "pool_dims", 2 if square else 1),
    }


def _hvt(c: Any, keys: Collection[str]) -> Table:
    """Names a pool's convolution as the file's keys have it, 'downsample' without any."""
    pools = {m[1]: m[2] for m in map(_POOL_CONV.match, keys) if m}
    convs = {
        f"encoder/pools/after{i}/conv": f"blocks.{i}.{pools.get(str(i), 'downsample')}"
        for i in range(c.depth)
    }
    position = {"encoder/pools/after{i}/position": "blocks.{i}.pos_embed[1,:,:]"}
    return {**_TIMM, **_patches("patch_embed.proj", c.patch), **position, **convs}


HVT = TorchWeights(
    ("head.weight",),
    f"{_FIELDS} qkv_bias eps=ln_eps stage_depth=pool_block_width pool_window=pool_kernel_size",
    _hvt,
    _hvt_more,
    usual={"stage_depth": None, "pool_window": 3},
    only={"qk_scale": (None,)},
    known={"pool": ("max",), "pool_dims": (1,), "retained": ((),)},
)

# --- DHVT ----------------------------------------------------------------------------------------


def _dhvt_more(tensors: Tensors, given: Given, model: Given) -> Given:
    return {
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "affine": "patch_embed.pre_affine.alpha" in tensors,
        "head_tokens": "blocks.0.attn.ht_proj.weight" in tensors,
        "positions": "pos_embed" in tensors,
        "representation": len(tensors.get("pre_logits.fc.weight", ())),
    }


def _dhvt(c: Any, keys: Collection[str]) -> Table:
    """The reference knows SOPE, DAFF and BatchNorm only."""
    mixer = "mixer/attention" if c.head_tokens else "mixer"
    affine = "scale=alpha[1,:,1,1] bias=beta[1,:,1,1]"
    words = (
        f"{mixer}/qkv=attn.qkv {mixer}/out=attn.proj mixer/project=attn.ht_proj"
        " mixer/norm=attn.ht_norm mixer/embedding=attn.pos_embed[1,:,:]"
        " feed_forward/up=mlp.conv1[:,:,1,1] feed_forward/norms/up/norm=mlp.bn1"
        " feed_forward/conv=mlp.conv2 feed_forward/norms/conv/norm=mlp.bn2"
        " feed_forward/down=mlp.conv3[:,:,1,1] feed_forward/norms/down/norm=mlp.bn3"
        " feed_forward/gate/squeeze=mlp.compress feed_forward/gate/excite=mlp.excitation"
    )
    table = {
        **_TIMM,
        **names("embedding/sope", "patch_embed", "before=pre_affine after=post_affine", affine),
        **names(_BLOCK, "blocks.{i}", words),
        "head/represent": "pre_logits.fc",
    }
    for i in range(len(c.sope_channels)):
        words = f"convs/{i}=0 norms/{i}/norm=1"
        table |= names("embedding/sope", f"patch_embed.proj.{2 * i}", words)
    return table


DHVT = TorchWeights(
    ("head.weight",),
    f"{_FIELDS} embed_dim!",
    _dhvt,
    _dhvt_more,
    only={"qk_scale": (None,)},
    known={"feed_forward": ("daff",), "sope_norm": ("batch",), "daff_norm": ("batch",)},
)

# --- Swin ----------------------------------------------------------------------------------------


def _swin_more(tensors: Tensors, given: Given, model: Given) -> Given:
    """Adds widths and windows.

    One or two integers in timm's `window_size`, rows and columns, are for all stages; a longer list
    has an entry per stage.
    """
    stages, size = len(model["depths"]), given.get("window_size") or 7
    for_all = isinstance(size, int) or (len(size) == 2 and isinstance(size[0], int))
    windows = [size] * stages if for_all else size
    width = field(given, "embed_dim", 96)
    return {
        "widths": tuple(width * 2**stage for stage in range(stages)),
        "windows": tuple(several(one)[0] for one in windows),
    }


def _swin(c: Any, keys: Collection[str]) -> Table:
    """Returns the authors' names if a key is one of them, else timm's.

    timm moved a merging from the end of a stage, where the authors have it, to the beginning of the
    next.
    """
    authors = "head.weight" in keys or any(key.startswith("layers.0.downsample.") for key in keys)
    table = {
        **_patches("patch_embed.proj", c.patch),
        "embedding/norm": "patch_embed.norm",
        **names("stage{s}/blocks/{i}", "layers.{s}.blocks.{i}", TIMM_BLOCK),
        "stage{s}/blocks/{i}/mixer/offset_bias": (
            "layers.{s}.blocks.{i}.attn.relative_position_bias_table"
        ),
        "head/norm": "norm",
        "head/linear": "head" if authors else "head.fc",
    }
    for s in range(1, len(c.depths)):
        table |= names(f"stage{s}/merging", f"layers.{s - authors}.downsample", "norm reduction")
    return table


SWIN = TorchWeights(
    ("patch_embed.proj.weight",),
    "patch=patch_size depths heads=num_heads mlp_ratio qkv_bias drop_path=drop_path_rate",
    _swin,
    _swin_more,
    only={"global_pool": ("avg",), "always_partition": (False,), "qk_scale": (None,)},
    # Numbers that follow from the map's size.
    ignored=r".*\.(attn_mask|relative_position_index)$",
)
