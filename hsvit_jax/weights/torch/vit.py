"""State dicts of ViT (the `transformers` library's) and of DeiT, HVT, DHVT, Swin (timm's names, of
Swin also its authors')."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hsvit_jax.models.family import Family
from hsvit_jax.weights.torch.base import (
    Placed,
    Sections,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    act,
    data_section,
    field,
    ints,
    known_sizes,
    only,
    pair,
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


def _vit_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    dim, heads = field(given, "hidden_size", 768), field(given, "num_attention_heads", 12)
    if heads < 1 or dim % heads:
        raise ValueError(f"num_attention_heads={heads} do not divide hidden_size={dim}")
    model = {
        "patch": field(given, "patch_size", 16),
        "heads": heads,
        "head_dim": dim // heads,
        "depth": field(given, "num_hidden_layers", 12),
        "mlp_dim": field(given, "intermediate_size", 3072),
        "qkv_bias": field(given, "qkv_bias", True),
        "eps": field(given, "layer_norm_eps", 1e-12),
        "activation": act(given, "hidden_act", "gelu"),
        "dropout": field(given, "hidden_dropout_prob", 0.0),
        "attention_dropout": field(given, "attention_probs_dropout_prob", 0.0),
        "drop_path": 0.0,
    }
    first = "vit.embeddings.patch_embeddings.projection.weight"
    return model, data_section(tensors, given, first, "classifier.weight")


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

_POOL_POSITION = re.compile(r"blocks\.(\d+)\.pos_embed$")
#: A pool that is a convolution has the only weight of a block with the window's axes on top.
_POOL_CONV = re.compile(r"blocks\.(\d+)\.(?!attn\.|mlp\.|norm)(.+)\.weight$")


#: Other names of a constructor's arguments.
_ALIASES = {"img_size": "image_size", "input_size": "image_size", "in_chans": "num_channels"}
_ALIASES |= {"num_blocks": "depth", "drop_path_rate": "drop_path"}
#: What no default stands in for, and the option that says it.
_NEEDED = {"image_size": "--image_size", "num_channels": "", "patch_size": "", "depth": ""}
_NEEDED |= {"embed_dim": "", "num_classes": "", "num_heads": "--heads"}


def _timm_settings(
    family: Family, shapes: Mapping[str, Shape], given: Mapping[str, Any], **inferred: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The sections `model`, with what HVT, DeiT and DHVT share, and `data`; and all that is known.

    inferred: sizes that the family's own tensors tell.
    """
    head, images = shapes.get("head.weight", ()), shapes.get("input", ())
    if len(head) == 2:
        inferred |= {"num_classes": head[0], "embed_dim": shapes.get("norm.weight", head[1:])[0]}
    if blocks := [int(k.split(".")[1]) for k in shapes if re.match(r"blocks\.\d+\.", k)]:
        inferred["depth"] = 1 + max(blocks)
    aliases = {_ALIASES[k]: k for k, v in given.items() if k in _ALIASES and v is not None}
    inferred |= {ours: given[theirs] for ours, theirs in aliases.items()}
    if len(images) == 4:
        inferred["image_size"] = images[2:]
    known = known_sizes(inferred, given, _NEEDED)
    only(given, "qk_scale", None)
    names = {k: k if given.get(k) is not None else aliases.get(k, k) for k in _NEEDED}
    one = {k: ints(names[k], known[k])[0] for k in _NEEDED if k != "image_size"}
    model = {
        "patch": one["patch_size"],
        "heads": one["num_heads"],
        "depth": one["depth"],
        "mlp_ratio": field({**known, **inferred}, "mlp_ratio", 4.0),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "drop_path": field(known, "drop_path", family.defaults["drop_path"]),
    }
    data = {"image_size": pair(known["image_size"]), "channels": one["num_channels"]}
    return model, {**data, "num_classes": one["num_classes"]}, {**known, **one}


def _hvt_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    """The pool, which no tensor tells apart from another, is read from the file's `variant`
    ('average' or 'avg', '2d'), or from `pool` and `pool_dims` in its constructor; a maximum
    otherwise. Without pools it is a DeiT."""
    shapes, cls = {k: v.shape for k, v in tensors.items()}, "cls_token" in tensors
    inferred: dict[str, Any] = {}
    patch, hidden = shapes.get("patch_embed.proj.weight", ()), shapes.get("blocks.0.mlp.fc1.weight")
    if len(patch) == 4:
        inferred |= {"embed_dim": patch[0], "num_channels": patch[1], "patch_size": patch[2]}
        if patch[0] % 64 == 0:
            inferred["num_heads"] = patch[0] // 64  # in every network of the papers
        positions = shapes.get("pos_embed", ())
        if len(positions) == 3:
            side = math.isqrt(positions[1] - cls)
            if side**2 == positions[1] - cls:
                inferred["image_size"] = side * patch[2]
    if hidden and len(hidden) == 2 and hidden[1]:
        inferred["mlp_ratio"] = hidden[0] / hidden[1]
    model, data, known = _timm_settings(family, shapes, given, **inferred)
    dim, heads = known["embed_dim"], known["num_heads"]
    if heads < 1 or dim % heads:
        raise ValueError(f"num_heads={heads} do not divide the width of a token, {dim}")
    model |= {"head_dim": dim // heads, "eps": field(known, "ln_eps", 1e-6)}
    if cls or not (pooled := sorted(int(m[1]) for m in map(_POOL_POSITION.match, shapes) if m)):
        only(given, "global_pool", "token" if cls else "avg")
        model |= {"family": "deit", "cls": cls, "retained": (), "flops_share": 1.0}
    else:
        model |= {"family": "hvt", **_pool(shapes, known, pooled)}
    return model, data


def _pool(
    shapes: Mapping[str, Shape], known: Mapping[str, Any], pooled: list[int]
) -> dict[str, Any]:
    """Kind, dimensions and window of the pools, which stand after the blocks `pooled`."""
    said = str(known.get("variant", "")).lower()
    conv = next((shapes[k] for k in shapes if _POOL_CONV.match(k) and len(shapes[k]) >= 3), None)
    average = "avg" in said or "average" in said
    pool = known.get("pool", "conv" if conv else "average" if average else "max")
    pool = "average" if pool == "avg" else pool
    flat = len(conv) == 3 if conv else not ("2d" in said or "2-d" in said)
    window = conv[-1] if conv else ints("pool_kernel_size", known.get("pool_kernel_size", 3))[0]
    between = pooled[1] - pooled[0] if len(pooled) > 1 else known["depth"]
    return {
        "stage_depth": ints("pool_block_width", known.get("pool_block_width", between))[0],
        "pool": pool,
        "pool_dims": ints("pool_dims", known.get("pool_dims", 1 if flat else 2))[0],
        "pool_window": window,
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


def _dhvt_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    shapes = {k: v.shape for k, v in tensors.items()}
    inferred: dict[str, Any] = {}
    convs = [k for k, v in shapes.items() if k.startswith("patch_embed.proj.") and len(v) == 4]
    if "patch_embed.proj.0.0.weight" in convs:
        inferred["num_channels"] = shapes["patch_embed.proj.0.0.weight"][1]
        inferred["patch_size"] = 2 ** len(convs)
    up, heads = shapes.get("blocks.0.mlp.conv1.weight"), shapes.get("blocks.0.attn.pos_embed")
    if up and len(up) == 4:
        inferred["mlp_ratio"] = up[0] / up[1]
    if heads and len(heads) == 3:
        inferred["num_heads"] = heads[1]
    model, data, known = _timm_settings(family, shapes, given, **inferred)
    model |= {
        "embed_dim": known["embed_dim"],
        "affine": "patch_embed.pre_affine.alpha" in tensors,
        "head_tokens": "blocks.0.attn.ht_proj.weight" in tensors,
        "positions": "pos_embed" in tensors,
        "representation": shapes.get("pre_logits.fc.weight", (0,))[0],
    }
    return {**family.defaults, **model}, data


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


def _swin_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    """Sizes follow from shapes, but for what rounding and small maps hide."""
    for name, usual in (("global_pool", "avg"), ("always_partition", False), ("qk_scale", None)):
        only(given, name, usual)
    shapes, block = {k: v.shape for k, v in tensors.items()}, "layers.{}.blocks.{}.{}"
    stages = range(sum(block.format(s, 0, "norm1.weight") in shapes for s in range(len(shapes))))

    def of_first(name: str) -> list[Shape]:
        return [shapes[block.format(s, 0, name)] for s in stages]

    tables = of_first("attn.relative_position_bias_table")
    shown = [(math.isqrt(n) + 1) // 2 for n, _ in tables]
    (hidden, width), *_ = of_first("mlp.fc1.weight")
    model = {
        "patch": shapes[f"{_SWIN_PATCHES}.weight"][2],
        "widths": tuple(width for (width,) in of_first("norm1.weight")),
        "depths": tuple(
            sum(k.startswith(f"layers.{s}.") and k.endswith("norm1.weight") for k in shapes)
            for s in stages
        ),
        "heads": tuple(heads for _, heads in tables),
        "windows": _windows(given.get("window_size") or shown, len(stages)),
        "mlp_ratio": field(given, "mlp_ratio", hidden / width),
        "qkv_bias": block.format(0, 0, "attn.qkv.bias") in shapes,
        "drop_path": field(given, "drop_path_rate", family.defaults["drop_path"]),
    }
    head, _ = _swin_names(tensors)
    return model, data_section(tensors, given, f"{_SWIN_PATCHES}.weight", f"{head}.weight")


def _windows(size: Any, stages: int) -> tuple[int, ...]:
    """The side of each stage's windows from timm's `window_size`.

    One or two integers, rows and columns, are for all stages; a longer list has an entry per stage.
    """
    of_all = isinstance(size, int) or (len(size) == 2 and isinstance(size[0], int))
    sides = [ints("window_size", one) for one in ([size] * stages if of_all else size)]
    if any(len({*side}) > 1 for side in sides):
        raise ValueError(f"window_size={size} has windows that are not square: not supported")
    return tuple(side[0] for side in sides)


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
