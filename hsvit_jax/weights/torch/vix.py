"""State dicts of ViX, LeViX, CCX, CvX, PiX and T2T-ViT.

Their constructors omit many sizes; the tensors show them. ViX's MLP-Mixers are plain
sequences, whose keys are numbers; the others have named parts.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from hsvit_jax.models.vix.mixer_config import KEYS, PINV_STEPS
from hsvit_jax.weights.torch import base
from hsvit_jax.weights.torch.base import Given, Placed, Shape, Table, Tensors, TorchWeights, names

#: Rotary tables, which are computed.
_IGNORED = r"(.*\.)?layer_pos_emb\."
_TOKEN_MLP = re.compile(r"(\d+)\.0\.fn\.0\.weight$")
#: The projection that makes queries: its name, and how many parts it makes.
_QUERIES = (("to_qkv", 3), ("qkv", 3), ("to_q", 1), ("to_q.0", 1), ("to_q.net.2", 1))

# --- Sizes by the tensors' names -----------------------------------------------------------------


def _count(tensors: Tensors, key: str, start: int = 0) -> int:
    """Counts the numbers from `start` on that, as '{}' in `key`, begin names of tensors."""
    number = start
    while any(k.startswith(key.format(number)) for k in tensors):
        number += 1
    return number - start


def _mixer_settings(tensors: Tensors, key: str, given: Given) -> dict[str, Any]:
    """Returns the settings of the mixer whose tensors' names begin with `key`.

    A converted network couples the batch as the reference does.
    """
    mixer = {name: setting.default for name, setting in KEYS.items()} | {"batch_coupling": True}
    mixer["dropout"] = base.field(given, "dropout", 0.0)
    queries = ((f"{key}{name}.weight", parts) for name, parts in _QUERIES)
    query, parts = next((row for row in queries if row[0] in tensors), ("", 0))
    if not query:
        return {**mixer, "mixer": "fnet"}
    mixer |= base.read(given, "heads=num_heads|heads!", mixer)
    heads, inner = mixer["heads"], len(tensors[query]) // parts
    if (features := tensors.get(f"{key}fast_attention.projection_matrix")) is not None:
        mixer |= {"mixer": "performer", "features": len(features)}
    elif (sequence := tensors.get(f"{key}proj_k")) is not None:
        alone = len(tensors[f"{key}to_k.weight"]) != inner or (heads == 1 and not _rope(tensors))
        mixer |= {"mixer": "linformer", "projections": sequence.shape[1], "one_kv_head": alone}
    elif (convolution := tensors.get(f"{key}res_conv.weight")) is not None:
        base.only(given, "pinv_iterations", PINV_STEPS)
        mixer |= {"mixer": "nystrom", "residual_kernel": convolution.shape[2]}
        mixer |= base.read(given, "landmarks=num_landmarks|landmarks|m", mixer)
    return {**mixer, "head_dim": inner // heads}


def _rope(tensors: Tensors) -> bool:
    return any(re.match(_IGNORED, key) for key in tensors)


def _embedding(tensors: Tensors, given: Given, key: str) -> dict[str, Any]:
    """Returns the settings of the patches or the stem whose tensors' names begin with `key`."""
    name = re.compile(re.escape(key) + r"(\d+)\.weight")
    found = {int(m[1]): len(x) for k, x in tensors.items() if x.ndim == 4 and (m := name.match(k))}
    widths = tuple(found[number] for number in sorted(found))
    patch = 1 if widths else base.several(given["patch_size"])[0]
    return {
        "patch": patch,
        "stem_channels": widths[:-1],
        "stem_strides": _strides(given, len(widths)),
    }


def _strides(given: Given, convs: int) -> tuple[int, ...]:
    """Returns the strides of as many convolutions, 1 where the constructor has none."""
    strides = base.read(given, "strides=pool_strides|stem_strides|stride", {"strides": ()})
    return (*strides["strides"], *(1,) * convs)[:convs]


# --- Mixers and blocks ---------------------------------------------------------------------------


def _mixer(mixer: str, ours: str, theirs: str) -> Table:
    """Names every mixer but LeViX's and CvX's softmax attention, which is convolutional."""
    out = "to_out.0" if mixer in ("softmax", "nystrom") else "to_out"
    words = (
        f"out={out} features=fast_attention.projection_matrix query=to_q key=to_k value=to_v"
        " sequence_kernel=proj_k qkv=to_qkv residual_kernel=res_conv.weight[:,1,:,1]"
        " up=0[:,:,1] down=3[:,:,1]"
    )
    return names(ours, theirs, words)


def _block(mixer: str, ours: str, theirs: str) -> Table:
    net = "" if mixer == "mlp_mixer" else "net."
    feed = f"feed_forward/up=1.fn.{net}0 feed_forward/down=1.fn.{net}3"
    table = names(ours, theirs, f"norm1=0.norm norm2=1.norm {feed}")
    return table | _mixer(mixer, f"{ours}/mixer", f"{theirs}.0.fn")


# --- ViX -----------------------------------------------------------------------------------------


def _vix_more(tensors: Tensors, given: Given, _: Given) -> Given:
    first = [int(m[1]) for m in map(_TOKEN_MLP.match, tensors) if m]
    if first:
        start, key = min(first), ""
        depth = _count(tensors, "{}.0.fn.", start)
        hidden, tokens, _ = tensors[f"{start}.0.fn.0.weight"].shape
        model = _mixer_settings(tensors, "", given)
        model |= {"mixer": "mlp_mixer", "expansion": hidden / tokens, "mlp_dim": 256}
        model |= {"positions": "learned", "head_pool": "cls"}
        dim = tensors[f"{start + depth + 2}.weight"].shape[1]
    else:
        key, depth = "to_patch_embedding.", _count(tensors, "transformer.layers.{}.")
        model = _mixer_settings(tensors, "transformer.layers.0.0.fn.", given) | {"expansion": 1.0}
        model["mlp_dim"] = len(tensors["transformer.layers.0.1.fn.net.0.weight"])
        rope = _rope(tensors) or "pos_embedding" not in tensors
        model["positions"] = "rope" if rope else "learned"
        model["head_pool"] = given.get("pool") or "cls"
        dim = tensors["mlp_head.1.weight"].shape[1]
    model |= {**_embedding(tensors, given, key), "embed_dim": dim, "depth": depth}
    if "input" not in tensors and given["image_size"]:  # the map's that the stem leaves
        shrinks = math.prod(model["stem_strides"])
        model["image_size"] = tuple(side * shrinks for side in base.pair(given["image_size"]))
    return model


def _vix(c: Any, keys: Collection[str]) -> Table:
    if c.mixer == "mlp_mixer":
        start = len(c.stem_widths) + 1 if c.stem_channels else 2
        end = start + c.depth
        words = "patches/embed/convs/{i}={i} patches/embed/linear=1"
        table = names("", "", f"{words} head/norm={end} head/linear={end + 2}")
        for i in range(c.depth):
            table |= _block("mlp_mixer", f"encoder/blocks/{i}", f"{start + i}")
        return table
    return {
        **names("encoder", "", "cls=cls_token[1,1,:] position=pos_embedding[1,:,:]"),
        **names("patches/embed", "to_patch_embedding", "convs/{i}={i} linear=1"),
        **_block(c.mixer, "encoder/blocks/{i}", "transformer.layers.{i}"),
        **names("head", "mlp_head", "norm=0 linear=1"),
    }


VIX = TorchWeights(
    ("mlp_head.1.weight", "2.0.norm.weight", "4.0.norm.weight"),
    "embed_dropout=emb_dropout",
    _vix,
    _vix_more,
    only={"pool": ("cls", "mean")},
    ignored=_IGNORED,
)

# --- LeViX ---------------------------------------------------------------------------------------


def _levix_more(tensors: Tensors, given: Given, _: Given) -> Given:
    first = "backbone.0.layers.0."
    stem = _embedding(tensors, given, "conv_embedding.")
    return {
        **_mixer_settings(tensors, f"{first}0.", given),
        "stem_channels": stem["stem_channels"],
        "stem_strides": stem["stem_strides"],
        "embed_dim": tensors["mlp_head.weight"].shape[1],
        "depth": _count(tensors, "backbone.0.layers.{}."),
        "mlp_dim": len(tensors[f"{first}1.net.0.weight"]),
    }


def _levix(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "encoder/blocks/{i}", "backbone.0.layers.{i}"
    table = {
        "stem/convs/{i}": "conv_embedding.{i}",
        **_mixer(c.mixer, f"{block}/mixer", f"{theirs}.0"),
        **names(f"{block}/feed_forward", f"{theirs}.1.net", "up=0[:,:,1,1] down=3[:,:,1,1]"),
        "head": "mlp_head",
    }
    if c.mixer == "softmax":  # LeViT's: 1×1 convolutions, each with a BatchNorm
        words = (
            "query=to_q.0[:,:,1,1] query_norm=to_q.1 key=to_k.0[:,:,1,1] key_norm=to_k.1"
            " value=to_v.0[:,:,1,1] value_norm=to_v.1 out=to_out.1[:,:,1,1] out_norm=to_out.2"
        )
        table |= names(f"{block}/mixer", f"{theirs}.0", words)
    return table


LEVIX = TorchWeights(("mlp_head.weight",), "", _levix, _levix_more)

# --- CCX -----------------------------------------------------------------------------------------


def _ccx_more(tensors: Tensors, given: Given, _: Given) -> Given:
    convs = _count(tensors, "tokenizer.conv_layers.{}.0.")
    weights = [tensors[f"tokenizer.conv_layers.{i}.0.weight"] for i in range(convs)]
    kernel, d = weights[0].shape[2], len(weights[-1])
    block = "classifier.blocks.0."
    mixer = _mixer_settings(tensors, f"{block}self_attn.", given)
    if mixer["heads"] * mixer["head_dim"] == d:
        mixer["head_dim"] = 0  # they share a token's width
    softmax = mixer["mixer"] == "softmax"
    words = "conv_strides=pool_strides|stride! conv_padding=padding pool_padding=pooling_padding"
    words += " pool_window=pooling_kernel_size pool_stride=pooling_stride"
    words += " drop_path=stochastic_depth attention_dropout"
    usual = {"pool_window": 3, "pool_stride": 1, "drop_path": 0.1, "attention_dropout": 0.1}
    model = base.read(given, words, {**usual, "conv_padding": -1, "pool_padding": -1})
    strides = base.several(model["conv_strides"])
    # A padding of half a window is ours of -1.
    for name, size in (("conv_padding", kernel), ("pool_padding", model["pool_window"])):
        model[name] = -1 if model[name] == size // 2 else model[name]
    return {
        **mixer,
        **model,
        "conv_channels": tuple(map(len, weights[:-1])),
        "conv_strides": strides * convs if len(strides) == 1 else strides[:convs],
        "conv_kernel": kernel,
        "positions": given.get("positional_embedding") != "none",  # learned, or of sines
        "embed_dim": d,
        "depth": _count(tensors, "classifier.blocks.{}."),
        "mlp_dim": len(tensors[f"{block}linear1.weight"]),
        "attention_dropout": model["attention_dropout"] if softmax else 0.0,
    }


def _ccx(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "encoder/blocks/{i}", "classifier.blocks.{i}"
    words = "norm1=pre_norm norm2=norm1 feed_forward/up=linear1 feed_forward/down=linear2"
    table = {
        "tokenizer/convs/{i}": "tokenizer.conv_layers.{i}.0",
        "encoder/position": "classifier.positional_emb[1,:,:]",
        **names(block, theirs, words),
        **_mixer(c.mixer, f"{block}/mixer", f"{theirs}.self_attn"),
        **names("head", "classifier", "norm pool=attention_pool linear=fc"),
    }
    if c.mixer == "softmax":
        table |= names(f"{block}/mixer", f"{theirs}.self_attn", "qkv out=proj")
    return table


CCX = TorchWeights(("classifier.fc.weight",), "", _ccx, _ccx_more)

# --- CvX -----------------------------------------------------------------------------------------


def _cvx_more(tensors: Tensors, given: Given, _: Given) -> Given:
    """The constructor has no image's size but `fmap`, a side of the first stage's map."""
    stages = _count(tensors, "layers.{}.0.")
    model = {
        **_mixer_settings(tensors, "layers.0.2.layers.0.0.fn.", given),
        "stage_strides": _strides(given, stages),
        "depths": tuple(_count(tensors, f"layers.{s}.2.layers.{{}}.") for s in range(stages)),
        "embed_dim": len(tensors["layers.0.0.weight"]),
        "mlp_dim": len(tensors["layers.0.2.layers.0.1.fn.net.0.weight"]),
    }
    if not given["image_size"]:
        model["image_size"] = given["fmap"] * model["stage_strides"][0]
    return model


def _cvx(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "stage{s}/blocks/{i}", "layers.{s}.2.layers.{i}"
    norm = "scale=g[1,:,1,1] bias=b[1,:,1,1]"
    table = {
        **names("stage{s}", "layers.{s}", "conv=0"),
        **names("stage{s}", "layers.{s}", "norm=1", norm),
        **names(block, theirs, "norm1=0.norm norm2=1.norm", norm),
        **_mixer(c.mixer, f"{block}/mixer", f"{theirs}.0.fn"),
        **names(f"{block}/feed_forward", f"{theirs}.1.fn.net", "up=0[:,:,1,1] down=3[:,:,1,1]"),
        "head": f"layers.{len(c.depths) + 2}",
    }
    if c.mixer == "softmax":
        words = (
            "q_conv=to_q.net.0 q_norm=to_q.net.1 query=to_q.net.2[:,:,1,1]"
            " kv_conv=to_kv.net.0 kv_norm=to_kv.net.1 key_value=to_kv.net.2[:,:,1,1]"
            " out=to_out.0[:,:,1,1]"
        )
        table |= names(f"{block}/mixer", f"{theirs}.0.fn", words)
    return table


CVX = TorchWeights(("layers.0.1.g",), "", _cvx, _cvx_more)

# --- PiX -----------------------------------------------------------------------------------------


def _pix_more(tensors: Tensors, given: Given, _: Given) -> Given:
    stages = -(-_count(tensors, "layers.{}.") // 2)
    return {
        **_mixer_settings(tensors, "layers.0.layers.0.0.fn.", given),
        **_embedding(tensors, given, "to_patch_embedding."),
        "embed_dim": tensors["cls_token"].shape[2],
        "depths": tuple(_count(tensors, f"layers.{2 * s}.layers.{{}}.") for s in range(stages)),
        "mlp_dim": len(tensors["layers.0.layers.0.1.fn.net.0.weight"]),
    }


def _pix(c: Any, keys: Collection[str]) -> Table:
    """Stages and pools alternate in one list: stage i is its entry 2i, the pool after it 2i + 1."""

    def by_pixel(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Unfolding lists a patch channel by channel; ours is pixel by pixel."""
        split = tensor.reshape(-1, c.image_channels, c.patch, c.patch)
        return split.transpose(2, 3, 1, 0).reshape(shape)

    # The patches' linear map comes after unfolding and a transposition.
    weight = Placed(("to_patch_embedding.2.weight",), base.kernel_shape, by_pixel)
    table: dict = {
        **names("encoder", "", "cls=cls_token[1,1,:] position=pos_embedding[1,:,:]"),
        **names("patches/embed", "to_patch_embedding", "convs/{i}={i} linear/bias=2.bias"),
        "patches/embed/linear/kernel": weight,
        **names("head", "mlp_head", "norm=0 linear=1"),
    }
    for i in range(len(c.depths)):
        stage, theirs = f"encoder/stages/{i}/{{j}}", f"layers.{2 * i}.layers.{{j}}"
        table |= _block(c.mixer, stage, theirs)
        words = "conv=downsample.net.0 mix=downsample.net.1[:,:,1,1] cls=cls_ff"
        table |= names(f"encoder/pools/{i}", f"layers.{2 * i + 1}", words)
    return table


PIX = TorchWeights(("mlp_head.1.weight",), "embed_dropout=emb_dropout", _pix, _pix_more)

# --- T2T-ViT -------------------------------------------------------------------------------------

_T2T_PROJECT = "tokens_to_token.project"


def _t2t_more(tensors: Tensors, given: Given, _: Given) -> Given:
    performer = given.get("tokens_type", "performer") == "performer"
    return {
        "token_layer": "performer" if performer else "softmax",
        "token_dropout": 0.1 if performer else 0.0,
    }


def _joined(name: str, size: int) -> Placed:
    """Returns a tensor whose last axis runs over channels and then a window's pixels."""

    def ours(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        apart = tensor.reshape(*tensor.shape[:-1], -1, size * size).swapaxes(-1, -2)
        return apart.reshape(tensor.shape).T

    return Placed((name,), lambda shape: shape[::-1], ours)


def _t2t(c: Any, keys: Collection[str]) -> Table:
    table = {
        "constants/position": "pos_embed[1,:,:]",
        "embedding/cls": "cls_token[1,1,:]",
        "embedding/project": _T2T_PROJECT,
        "embedding/project/kernel": _joined(f"{_T2T_PROJECT}.weight", 3),
        **names("encoder/blocks/{i}", "blocks.{i}", base.TIMM_BLOCK),
        **names("head", "", "norm linear=head"),
    }
    qkv = "kqv" if c.token_layer == "performer" else "attn.qkv"
    words = f"norm2 qkv={qkv} out=attn.proj feed_forward/up=mlp.fc1 feed_forward/down=mlp.fc2"
    if c.token_layer == "performer":
        words = "norm2 qkv=kqv out=proj feed_forward/up=mlp.0 feed_forward/down=mlp.2"
    for i, size in enumerate((7, 3)):
        ours, theirs = f"embedding/layers/{i}", f"tokens_to_token.attention{i + 1}"
        table |= names(ours, theirs, words)
        table[f"{ours}/norm1"] = _joined(f"{theirs}.norm1", size)
        table[f"{ours}/qkv/kernel"] = _joined(f"{theirs}.{qkv}.weight", size)
        table[f"constants/features/{i}"] = f"{theirs}.w"
    return table


T2T = TorchWeights(
    (f"{_T2T_PROJECT}.weight",),
    "embed_dim depth heads=num_heads mlp_ratio token_dim qkv_bias qk_scale"
    " drop_path=drop_path_rate",
    _t2t,
    _t2t_more,
    usual={"embed_dim": 768, "depth": 12, "heads": 12, "mlp_ratio": 4.0},
    only={"tokens_type": ("performer", "transformer")},
)
