"""State dicts of ViX, LeViX, CCX, CvX, PiX, T2T-ViT: sizes by shapes, tensors' names.

ViX's MLP-Mixers are plain sequences, whose keys are numbers; the others have named parts.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from hsvit_jax.models.family import Family
from hsvit_jax.models.vix.mixer_config import KEYS, PINV_STEPS
from hsvit_jax.weights.torch.base import (
    Given,
    Placed,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    field,
    kernel_shape,
    needed,
    only,
    pair,
    read,
    several,
    timm_block,
)

#: Rotary tables, which are computed.
_IGNORED = r"(.*\.)?layer_pos_emb\."
_TOKEN_MLP = re.compile(r"(\d+)\.0\.fn\.0\.weight$")
#: The projection that makes queries: its name, and how many parts it makes.
_QUERIES = (("to_qkv", 3), ("qkv", 3), ("to_q", 1), ("to_q.0", 1), ("to_q.net.2", 1))

# --- Networks by their tensors' names ------------------------------------------------------------


def count(tensors: Tensors, key: str, start: int = 0) -> int:
    """How many numbers from `start` on, in place of '{}' in `key`, begin names of tensors."""
    number = start
    while any(k.startswith(key.format(number)) for k in tensors):
        number += 1
    return number - start


def find(tensors: Tensors, key: str, given: Given) -> dict[str, Any]:
    """Returns the settings of the mixer whose tensors' names begin with `key`.

    Nystrom's landmarks (`num_landmarks` or `m`) are 64 where the constructor has none. What is
    converted couples the batch as the reference does. Raises ValueError for another number of
    iterations of the pseudo-inverse than ours.
    """
    mixer: dict[str, Any] = {"dropout": field(given, "dropout", 0.0), "batch_coupling": True}
    mixer = {**{name: setting.default for name, setting in KEYS.items()}, **mixer}
    queries = ((f"{key}{name}.weight", parts) for name, parts in _QUERIES)
    query, parts = next((row for row in queries if row[0] in tensors), ("", 0))
    if not query:
        return {**mixer, "mixer": "fnet"}
    heads, inner = needed(given, "num_heads", "heads"), len(tensors[query]) // parts
    if (features := tensors.get(f"{key}fast_attention.projection_matrix")) is not None:
        mixer |= {"mixer": "performer", "features": len(features)}
    elif (sequence := tensors.get(f"{key}proj_k")) is not None:
        alone = len(tensors[f"{key}to_k.weight"]) != inner or (heads == 1 and not _rope(tensors))
        mixer |= {"mixer": "linformer", "projections": sequence.shape[1], "one_kv_head": alone}
    elif (convolution := tensors.get(f"{key}res_conv.weight")) is not None:
        only(given, "pinv_iterations", PINV_STEPS)
        names = (name for name in ("num_landmarks", "landmarks", "m") if given.get(name))
        mixer |= {"mixer": "nystrom", "landmarks": field(given, next(names, ""), 64)}
        mixer["residual_kernel"] = convolution.shape[2]
    return {**mixer, "heads": heads, "head_dim": inner // heads}


def _rope(tensors: Tensors) -> bool:
    return any(re.match(_IGNORED, key) for key in tensors)


def _embedding(tensors: Tensors, given: Given, key: str) -> dict[str, Any]:
    """Returns the settings of the patches or the stem whose tensors' names begin with `key`."""
    widths = _conv_widths(tensors, key)
    if not widths:
        patch = several(needed(given, "patch_size"))[0]
        return {"patch": patch, "stem_channels": (), "stem_strides": ()}
    return {"patch": 1, "stem_channels": widths[:-1], "stem_strides": _strides(given, len(widths))}


def _conv_widths(tensors: Tensors, key: str) -> tuple[int, ...]:
    """The widths of a stem's convolutions, whose tensors' names begin with `key`."""
    name = re.compile(re.escape(key) + r"(\d+)\.weight")
    found = {int(m[1]): len(x) for k, x in tensors.items() if x.ndim == 4 and (m := name.match(k))}
    return tuple(found[number] for number in sorted(found))


def _strides(given: Given, convs: int) -> tuple[int, ...]:
    """The strides of as many convolutions, 1 where the constructor has none."""
    names = ("pool_strides", "stem_strides", "stride")
    strides = next((several(given[name]) for name in names if given.get(name)), ())
    return (*strides, *(1,) * convs)[:convs]


# --- Mixers and blocks ---------------------------------------------------------------------------


def _mixer(mixer: str, ours: str, theirs: str) -> Table:
    """The names of every mixer but LeViX's and CvX's softmax attention, which is convolutional."""
    return {
        f"{ours}/out": f"{theirs}to_out" + (".0" if mixer in ("softmax", "nystrom") else ""),
        f"{ours}/features": f"{theirs}fast_attention.projection_matrix",
        f"{ours}/query": f"{theirs}to_q",
        f"{ours}/key": f"{theirs}to_k",
        f"{ours}/value": f"{theirs}to_v",
        f"{ours}/sequence_kernel": f"{theirs}proj_k",
        f"{ours}/qkv": f"{theirs}to_qkv",
        f"{ours}/residual_kernel": f"{theirs}res_conv.weight [:,1,:,1]",
        f"{ours}/up": f"{theirs}0 [:,:,1]",
        f"{ours}/down": f"{theirs}3 [:,:,1]",
    }


def _block(mixer: str, ours: str, theirs: str) -> Table:
    up, down = ("0", "3") if mixer == "mlp_mixer" else ("net.0", "net.3")
    return {
        f"{ours}/norm1": f"{theirs}0.norm",
        **_mixer(mixer, f"{ours}/mixer", f"{theirs}0.fn."),
        f"{ours}/norm2": f"{theirs}1.norm",
        f"{ours}/feed_forward/up": f"{theirs}1.fn.{up}",
        f"{ours}/feed_forward/down": f"{theirs}1.fn.{down}",
    }


# --- ViX -----------------------------------------------------------------------------------------


def _vix_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    first = [int(m[1]) for m in map(_TOKEN_MLP.match, tensors) if m]
    if first:
        start, key = min(first), ""
        depth = count(tensors, "{}.0.fn.", start)
        hidden, tokens, _ = tensors[f"{start}.0.fn.0.weight"].shape
        model = find(tensors, "", given) | {"mixer": "mlp_mixer", "expansion": hidden / tokens}
        model |= {"mlp_dim": 256, "positions": "learned", "head_pool": "cls"}
        dim = tensors[f"{start + depth + 2}.weight"].shape[1]
    else:
        key, depth = "to_patch_embedding.", count(tensors, "transformer.layers.{}.")
        model = find(tensors, "transformer.layers.0.0.fn.", given) | {"expansion": 1.0}
        model["mlp_dim"] = len(tensors["transformer.layers.0.1.fn.net.0.weight"])
        rope = _rope(tensors) or "pos_embedding" not in tensors
        model["positions"] = "rope" if rope else "learned"
        model["head_pool"] = only(given, "pool", "cls", "mean")
        dim = tensors["mlp_head.1.weight"].shape[1]
    model |= {**_embedding(tensors, given, key), "embed_dim": dim, "depth": depth}
    if "input" not in tensors and given["image_size"]:  # of the map that the stem leaves
        shrinks = math.prod(model["stem_strides"])
        model["image_size"] = tuple(side * shrinks for side in pair(given["image_size"]))
    return {**model, "embed_dropout": field(given, "emb_dropout", 0.0)}


def _vix(c: Any, keys: Collection[str]) -> Table:
    if c.mixer == "mlp_mixer":
        start = len(c.stem_widths) + 1 if c.stem_channels else 2
        table = {
            "patches/embed/convs/{i}": "{i}",
            "patches/embed/linear": "1",
            "head/norm": f"{start + c.depth}",
            "head/linear": f"{start + c.depth + 2}",
        }
        for i in range(c.depth):
            table |= _block("mlp_mixer", f"encoder/blocks/{i}", f"{start + i}.")
        return table
    return {
        "encoder/cls": "cls_token [1,1,:]",
        "encoder/position": "pos_embedding [1,:,:]",
        "patches/embed/convs/{i}": "to_patch_embedding.{i}",
        "patches/embed/linear": "to_patch_embedding.1",
        **_block(c.mixer, "encoder/blocks/{i}", "transformer.layers.{i}."),
        "head/norm": "mlp_head.0",
        "head/linear": "mlp_head.1",
    }


VIX = TorchWeights(
    ("mlp_head.1.weight", "2.0.norm.weight", "4.0.norm.weight"), _vix_settings, _vix, _IGNORED
)

# --- LeViX ---------------------------------------------------------------------------------------

_LEVIX_FIRST = "backbone.0.layers.0."


def _levix_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    stem = _embedding(tensors, given, "conv_embedding.")
    return {
        **find(tensors, f"{_LEVIX_FIRST}0.", given),
        "stem_channels": stem["stem_channels"],
        "stem_strides": stem["stem_strides"],
        "embed_dim": tensors["mlp_head.weight"].shape[1],
        "depth": count(tensors, "backbone.0.layers.{}."),
        "mlp_dim": len(tensors[f"{_LEVIX_FIRST}1.net.0.weight"]),
    }


def _levix(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "encoder/blocks/{i}", "backbone.0.layers.{i}."
    table = {
        "stem/convs/{i}": "conv_embedding.{i}",
        **_mixer(c.mixer, f"{block}/mixer", f"{theirs}0."),
        f"{block}/feed_forward/up": f"{theirs}1.net.0 [:,:,1,1]",
        f"{block}/feed_forward/down": f"{theirs}1.net.3 [:,:,1,1]",
        "head": "mlp_head",
    }
    if c.mixer == "softmax":  # LeViT's: 1×1 convolutions, each with a BatchNorm
        places = {"query": ("to_q", 0), "key": ("to_k", 0), "value": ("to_v", 0)}
        for ours, (name, place) in (*places.items(), ("out", ("to_out", 1))):
            table[f"{block}/mixer/{ours}"] = f"{theirs}0.{name}.{place} [:,:,1,1]"
            table[f"{block}/mixer/{ours}_norm"] = f"{theirs}0.{name}.{place + 1}"
    return table


LEVIX = TorchWeights(("mlp_head.weight",), _levix_settings, _levix)

# --- CCX -----------------------------------------------------------------------------------------

_CCX_BLOCK = "classifier.blocks."


def _ccx_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    convs = count(tensors, "tokenizer.conv_layers.{}.0.")
    weights = [tensors[f"tokenizer.conv_layers.{i}.0.weight"] for i in range(convs)]
    kernel, d = weights[0].shape[2], len(weights[-1])
    strides = several(needed(given, "pool_strides", "stride"))
    window = field(given, "pooling_kernel_size", 3)
    paddings = (field(given, "padding", kernel // 2), field(given, "pooling_padding", window // 2))
    mixer = find(tensors, f"{_CCX_BLOCK}0.self_attn.", given)
    if mixer["heads"] * mixer["head_dim"] == d:
        mixer["head_dim"] = 0  # they share a token's width
    softmax = mixer["mixer"] == "softmax"
    return {
        **mixer,
        "conv_channels": tuple(map(len, weights[:-1])),
        "conv_strides": strides * convs if len(strides) == 1 else strides[:convs],
        "conv_kernel": kernel,
        "conv_padding": -1 if paddings[0] == kernel // 2 else paddings[0],
        "pool_window": window,
        "pool_stride": field(given, "pooling_stride", 1),
        "pool_padding": -1 if paddings[1] == window // 2 else paddings[1],
        "positions": given.get("positional_embedding") != "none",  # learned, or of sines
        "embed_dim": d,
        "depth": count(tensors, f"{_CCX_BLOCK}{{}}."),
        "mlp_dim": len(tensors[f"{_CCX_BLOCK}0.linear1.weight"]),
        "attention_dropout": field(given, "attention_dropout", 0.1) if softmax else 0.0,
        "drop_path": field(given, "stochastic_depth", 0.1),
    }


def _ccx(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "encoder/blocks/{i}", f"{_CCX_BLOCK}{{i}}"
    table = {
        "tokenizer/convs/{i}": "tokenizer.conv_layers.{i}.0",
        "encoder/position": "classifier.positional_emb [1,:,:]",
        f"{block}/norm1": f"{theirs}.pre_norm",
        f"{block}/norm2": f"{theirs}.norm1",
        **_mixer(c.mixer, f"{block}/mixer", f"{theirs}.self_attn."),
        f"{block}/feed_forward/up": f"{theirs}.linear1",
        f"{block}/feed_forward/down": f"{theirs}.linear2",
        "head/norm": "classifier.norm",
        "head/pool": "classifier.attention_pool",
        "head/linear": "classifier.fc",
    }
    if c.mixer == "softmax":
        table[f"{block}/mixer/qkv"] = f"{theirs}.self_attn.qkv"
        table[f"{block}/mixer/out"] = f"{theirs}.self_attn.proj"
    return table


CCX = TorchWeights(("classifier.fc.weight",), _ccx_settings, _ccx)

# --- CvX -----------------------------------------------------------------------------------------


def _cvx_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    """The constructor has no image's size but `fmap`, a side of the first stage's map."""
    stages = count(tensors, "layers.{}.0.")
    model = {
        **find(tensors, "layers.0.2.layers.0.0.fn.", given),
        "stage_strides": _strides(given, stages),
        "depths": tuple(count(tensors, f"layers.{s}.2.layers.{{}}.") for s in range(stages)),
        "embed_dim": len(tensors["layers.0.0.weight"]),
        "mlp_dim": len(tensors["layers.0.2.layers.0.1.fn.net.0.weight"]),
    }
    if not given["image_size"]:
        model["image_size"] = needed(given, "fmap") * model["stage_strides"][0]
    return model


def _channel_norm(ours: str, theirs: str) -> Table:
    return {f"{ours}/scale": f"{theirs}.g [1,:,1,1]", f"{ours}/bias": f"{theirs}.b [1,:,1,1]"}


def _cvx(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "stage{s}/blocks/{i}", "layers.{s}.2.layers.{i}."
    table = {
        "stage{s}/conv": "layers.{s}.0",
        **_channel_norm("stage{s}/norm", "layers.{s}.1"),
        **_channel_norm(f"{block}/norm1", f"{theirs}0.norm"),
        **_mixer(c.mixer, f"{block}/mixer", f"{theirs}0.fn."),
        **_channel_norm(f"{block}/norm2", f"{theirs}1.norm"),
        f"{block}/feed_forward/up": f"{theirs}1.fn.net.0 [:,:,1,1]",
        f"{block}/feed_forward/down": f"{theirs}1.fn.net.3 [:,:,1,1]",
        "head": f"layers.{len(c.depths) + 2}",
    }
    if c.mixer == "softmax":
        for ours, name, wide in (("q", "to_q", "query"), ("kv", "to_kv", "key_value")):
            net = f"{theirs}0.fn.{name}.net"
            table[f"{block}/mixer/{ours}_conv"] = f"{net}.0"
            table[f"{block}/mixer/{ours}_norm"] = f"{net}.1"
            table[f"{block}/mixer/{wide}"] = f"{net}.2 [:,:,1,1]"
        table[f"{block}/mixer/out"] += " [:,:,1,1]"
    return table


CVX = TorchWeights(("layers.0.1.g",), _cvx_settings, _cvx)

# --- PiX -----------------------------------------------------------------------------------------

_PIX_LINEAR = 2  # place of the patches' linear map, after unfolding and a transposition


def _pix_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    stages = -(-count(tensors, "layers.{}.") // 2)
    return {
        **find(tensors, "layers.0.layers.0.0.fn.", given),
        "embed_dropout": field(given, "emb_dropout", 0.0),
        **_embedding(tensors, given, "to_patch_embedding."),
        "embed_dim": tensors["cls_token"].shape[2],
        "depths": tuple(count(tensors, f"layers.{2 * s}.layers.{{}}.") for s in range(stages)),
        "mlp_dim": len(tensors["layers.0.layers.0.1.fn.net.0.weight"]),
    }


def _pix(c: Any, keys: Collection[str]) -> Table:
    """Stages and pools alternate in one list: stage i is its entry 2i, the pool after it 2i + 1."""

    def by_pixel(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Unfolding lists a patch channel by channel; ours pixel by pixel."""
        split = tensor.reshape(-1, c.image_channels, c.patch, c.patch)
        return split.transpose(2, 3, 1, 0).reshape(shape)

    linear = f"to_patch_embedding.{_PIX_LINEAR}"
    table: dict = {
        "encoder/cls": "cls_token [1,1,:]",
        "encoder/position": "pos_embedding [1,:,:]",
        "patches/embed/convs/{i}": "to_patch_embedding.{i}",
        "patches/embed/linear/kernel": Placed((f"{linear}.weight",), kernel_shape, by_pixel),
        "patches/embed/linear/bias": f"{linear}.bias",
        "head/norm": "mlp_head.0",
        "head/linear": "mlp_head.1",
    }
    for i in range(len(c.depths)):
        stage, theirs = f"encoder/stages/{i}/{{j}}", f"layers.{2 * i}.layers.{{j}}."
        table |= _block(c.mixer, stage, theirs)
        pool, theirs = f"encoder/pools/{i}", f"layers.{2 * i + 1}"
        table[f"{pool}/conv"] = f"{theirs}.downsample.net.0"
        table[f"{pool}/mix"] = f"{theirs}.downsample.net.1 [:,:,1,1]"
        table[f"{pool}/cls"] = f"{theirs}.cls_ff"
    return table


PIX = TorchWeights(("mlp_head.1.weight",), _pix_settings, _pix)

# --- T2T-ViT -------------------------------------------------------------------------------------

_T2T, _T2T_PROJECT = "tokens_to_token.attention{}", "tokens_to_token.project.weight"


def _t2t_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    """Of the arguments of the authors' `T2T_ViT`, with its own defaults."""
    usual = {**family.defaults, "embed_dim": 768, "depth": 12, "heads": 12, "mlp_ratio": 4.0}
    usual |= {"token_dim": 64, "qkv_bias": False, "qk_scale": 0.0}
    names = {"embed_dim": "embed_dim", "depth": "depth", "heads": "num_heads"}
    names |= {name: name for name in ("mlp_ratio", "token_dim", "qkv_bias", "qk_scale")}
    model = read(given, names | {"drop_path": "drop_path_rate"}, usual)
    kind = only(given, "tokens_type", "performer", "transformer")
    model["token_layer"] = "performer" if kind == "performer" else "softmax"
    return {**model, "token_dropout": usual["token_dropout"] if kind == "performer" else 0.0}


def _joined(name: str, size: int) -> Placed:
    """A tensor whose last axis runs over channels and then a window's pixels; ours pixels first."""

    def ours(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        apart = tensor.reshape(*tensor.shape[:-1], -1, size * size).swapaxes(-1, -2)
        return apart.reshape(tensor.shape).T

    return Placed((name,), lambda shape: shape[::-1], ours)


def _t2t(c: Any, keys: Collection[str]) -> Table:
    table = {
        "constants/position": "pos_embed [1,:,:]",
        "embedding/cls": "cls_token [1,1,:]",
        "embedding/project": _T2T_PROJECT.removesuffix(".weight"),
        "embedding/project/kernel": _joined(_T2T_PROJECT, 3),
        **timm_block("encoder/blocks/{i}", "blocks.{i}"),
        "head/norm": "norm",
        "head/linear": "head",
    }
    performer = c.token_layer == "performer"
    names = ("kqv", "proj", "mlp.0", "mlp.2")
    names = names if performer else ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    for i in range(2):
        ours, theirs = f"embedding/layers/{i}", _T2T.format(i + 1)
        table[f"{ours}/norm1"] = _joined(f"{theirs}.norm1", (7, 3)[i])
        table[f"{ours}/norm2"] = f"{theirs}.norm2"
        table[f"{ours}/qkv/kernel"] = _joined(f"{theirs}.{names[0]}.weight", (7, 3)[i])
        parts = ("qkv", "out", "feed_forward/up", "feed_forward/down")
        table |= {f"{ours}/{a}": f"{theirs}.{b}" for a, b in zip(parts, names, strict=True)}
        table[f"constants/features/{i}"] = f"{theirs}.w"
    return table


T2T = TorchWeights((_T2T_PROJECT,), _t2t_settings, _t2t)
