"""State dicts of ViX, LeViX, CCX, CvX, PiX, T2T-ViT: sizes by shapes, tensors' names.

ViX's MLP-Mixers are plain sequences, whose keys are numbers; the others have named parts.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hsvit_jax.models import conv_layers
from hsvit_jax.models.family import Family
from hsvit_jax.models.vix import stems
from hsvit_jax.models.vix.mixer_config import KEYS, PINV_STEPS
from hsvit_jax.weights.torch.base import (
    Placed,
    Sections,
    Shape,
    Table,
    Tensors,
    TorchWeights,
    field,
    input_shape,
    ints,
    kernel_shape,
    only,
    pair,
    timm_block,
)

#: Rotary tables, which are computed.
_IGNORED = r"(.*\.)?layer_pos_emb\."
_TOKEN_MLP = re.compile(r"(\d+)\.0\.fn\.0\.weight$")
#: The projection that makes queries: its name, its tensor's rank, and what it makes beside them.
_QUERIES = (("to_qkv", 2, 3), ("qkv", 2, 3), ("to_q.0", 4, 1), ("to_q.net.2", 4, 1))

# --- What the tensors' shapes tell ---------------------------------------------------------------


def argument(given: Mapping[str, Any], *names: str) -> int | None:
    """The first of these constructor arguments that is there, one integer, or None."""
    values = [ints(name, given[name])[0] for name in names if given.get(name) is not None]
    return values[0] if values else None


def shape(tensors: Tensors, key: str, rank: int) -> tuple[int, ...]:
    """The shape of a tensor that sizes are read from; raises ValueError for another rank."""
    sizes = tensors[key].shape
    if len(sizes) != rank or min(sizes) < 1:
        raise ValueError(f"cannot read the network's sizes: {key} has the shape {sizes}")
    return sizes


def _image_size(given: Mapping[str, Any], otherwise: Shape = ()) -> Shape:
    """Rows and columns by option or constructor; raises ValueError for other than one or two."""
    size = given.get("image_size", given.get("img_size"))
    return otherwise if size is None else pair(size)


def _side(tokens: int | None) -> int:
    """Of a square map. Raises ValueError where the tokens are unknown or make none."""
    side = math.isqrt(tokens or 0)
    if not tokens or side * side != tokens:
        raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
    return side


def count(tensors: Tensors, key: str, start: int = 0) -> int:
    """How many numbers from `start` on, in place of '{}' in `key`, begin names of tensors."""
    number = start
    while any(k.startswith(key.format(number)) for k in tensors):
        number += 1
    return number - start


def find(tensors: Tensors, key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the mixer whose tensors' names begin with `key`, such as 'layers.0.fn.'.

    Heads that no shape tells come from the constructor, and so do nystrom's landmarks
    (`num_landmarks` or `m`; 64 without either) and the dropout. What is converted couples the batch
    as the reference does. Raises ValueError for heads that stay unknown or do not fit, and for
    another number of iterations of the pseudo-inverse than ours.
    """
    inferred: dict[str, Any] = {name: key.default for name, key in KEYS.items()}
    inferred["batch_coupling"] = True
    inferred["dropout"] = field(given, "dropout", 0.0)
    table = next((t for k, t in tensors.items() if k.endswith("layer_pos_emb.emb")), None)
    width = table.shape[-1] if table is not None and table.ndim == 2 else None
    heads = argument(given, "num_heads", "heads")
    queries = next((row for row in _QUERIES if f"{key}{row[0]}.weight" in tensors), None)
    if f"{key}fast_attention.projection_matrix" in tensors:
        inferred["mixer"] = "performer"
        inferred["features"], width = shape(tensors, f"{key}fast_attention.projection_matrix", 2)
        inner = shape(tensors, f"{key}to_q.weight", 2)[0]
    elif f"{key}proj_k" in tensors:
        inferred["mixer"] = "linformer"
        inferred["projections"] = shape(tensors, f"{key}proj_k", 2)[1]
        inner = shape(tensors, f"{key}to_q.weight", 2)[0]
        keys = shape(tensors, f"{key}to_k.weight", 2)[0]
        inferred["one_kv_head"] = keys != inner or (heads == 1 and table is None)
        width = keys if inferred["one_kv_head"] else width
    elif queries:
        name, rank, parts = queries
        inner = shape(tensors, f"{key}{name}.weight", rank)[0] // parts
        if f"{key}res_conv.weight" in tensors:
            inferred["mixer"] = "nystrom"
            only(given, "pinv_iterations", PINV_STEPS)
            heads, _, inferred["residual_kernel"], _ = shape(tensors, f"{key}res_conv.weight", 4)
            inferred["landmarks"] = argument(given, "num_landmarks", "landmarks", "m") or 64
        elif not heads:
            width = width or argument(given, "dim_head")
    elif key and (other := next((name for name in tensors if name.startswith(key)), "")):
        raise ValueError(
            f"cannot read the network's sizes: beside {other}, {key}{_QUERIES[0][0]}.weight or "
            "another projection to queries is missing"
        )
    else:
        return {**inferred, "mixer": "fnet"}
    if width is None and heads is None:
        raise ValueError("the tensors' shapes do not tell the number of heads: say --heads")
    heads = inner // width if width else heads
    if heads < 1 or inner % heads or (width and heads * width != inner):
        raise ValueError(f"heads={heads} (width {width}) do not divide the attention's {inner}")
    return {**inferred, "heads": heads, "head_dim": inner // heads}


def conv_weights(tensors: Tensors, key: str) -> list[tuple[int, ...]]:
    """Shapes of a stem's convolutions, whose tensors' names begin with `key`; [] for none."""
    names = [
        re.match(re.escape(key) + r"(\d+)\.weight$", k) for k, t in tensors.items() if t.ndim == 4
    ]
    return [shape(tensors, f"{key}{i}.weight", 4) for i in range(sum(map(bool, names)))]


def token_count(tensors: Tensors, mixer: str, cls: int = 0) -> int | None:
    """Tokens without CLS, where positions or a projection along the sequence tell."""
    for key, rank in (("pos_embedding", 3), (f"{mixer}proj_k", 2)):
        if key in tensors:
            return shape(tensors, key, rank)[rank - 2] - cls
    return None


def _rotary_tokens(tensors: Tensors, given: Mapping[str, Any], landmarks: int) -> int | None:
    """Tokens without CLS by the rotary table, which may be of nystrom's padded sequence.

    landmarks: nystrom's; 0 for the other mixers.
    """
    rows = next((t.shape[0] for k, t in tensors.items() if k.endswith("layer_pos_emb.emb")), 0)
    if not landmarks:
        return rows - 1 if rows else None
    pixels = math.prod(_image_size(given) or (0,))
    return pixels if pixels and 0 <= rows - 1 - pixels < landmarks else None


def embedding(
    tensors: Tensors, given: Mapping[str, Any], key: str, tokens: int | None, *, linear_at: int
) -> Sections:
    """Settings of patches or stem, and of the section `data` all but the classes.

    key: what the tensors' names begin with; linear_at: number of the linear map of patches.
    """
    images, weights = input_shape(tensors), conv_weights(tensors, key)
    if weights:
        image_size, strides = stem_sizes(given, images[2:], len(weights), tokens)
        widths = tuple(w[0] for w in weights[:-1])
        sizes = {"patch": 1, "stem_channels": widths, "stem_strides": strides}
        return sizes, {"image_size": image_size, "channels": weights[0][1]}
    pixels = shape(tensors, f"{key}{linear_at}.weight", 2)[1]
    channels = argument(given, "num_channels", "channels") or (images[1] if images else 3)
    if len({*ints("patch_size", given.get("patch_size") or 1)}) > 1:
        raise ValueError(f"patch_size={given['patch_size']}: patches must be square")
    patch = argument(given, "patch_size") or math.isqrt(pixels // channels)
    if patch * patch * channels != pixels:
        raise ValueError(
            f"{key}{linear_at}.weight is for patches of {pixels} values, which are not "
            f"{patch}×{patch} pixels of {channels} channels: say --channels"
        )
    size = _image_size(given, images[2:]) or (_side(tokens) * patch,) * 2
    data = {"image_size": size, "channels": channels}
    return {"patch": patch, "stem_channels": (), "stem_strides": ()}, data


def stem_sizes(
    given: Mapping[str, Any], image: Shape, convs: int, tokens: int | None
) -> tuple[Shape, Shape]:
    """Image size and strides of a stem, from what is known of both and of the map's tokens.

    image: rows and columns of the file's images, or (). The reference calls `image_size` what its
    stem leaves, where the stem has strides; a size that has `tokens` pixels is read so. Strides
    that nothing tells are the paper's for images of that size.
    """
    strides = next(
        (ints(k, given[k]) for k in ("pool_strides", "stem_strides", "stride") if given.get(k)), ()
    )
    strides = (*strides, *(1,) * (convs - len(strides))) if strides else ()
    size, shrinks = _image_size(given), math.prod(strides)
    if image:
        if size and not tokens and not strides:
            tokens = math.prod(size)
        size = image
    elif not size:
        size = (_side(tokens) * shrinks,) * 2
    elif tokens == math.prod(size):
        size = (size[0] * shrinks, size[1] * shrinks)
    if not strides:
        ways = [
            *((2,) * n + (1,) * (convs - n) for n in range(convs + 1)),
            (4, *(1,) * (convs - 1)),
        ]
        maps = (math.prod(conv_layers.map_size(size, way)) for way in ways)
        usual = stems.default_strides(size, convs) if tokens is None else ways[0]
        strides = next((w for w, n in zip(ways, maps, strict=True) if n == tokens), usual)
    return size, strides


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


def _vix_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    first = [int(m[1]) for m in map(_TOKEN_MLP.match, tensors) if m]
    if first:
        start, key = min(first), ""
        depth = count(tensors, "{}.0.fn.", start)
        head = f"{start + depth + 2}.weight"
        hidden, tokens, _ = shape(tensors, f"{start}.0.fn.0.weight", 3)
        model = find(tensors, "", given) | {"mixer": "mlp_mixer", "expansion": hidden / tokens}
        model |= {"mlp_dim": 256, "positions": "learned", "head_pool": "cls"}
    else:
        mixer = "transformer.layers.0.0.fn."
        key, head = "to_patch_embedding.", "mlp_head.1.weight"
        depth = count(tensors, "transformer.layers.{}.")
        tokens = token_count(tensors, mixer, cls=1)
        model = find(tensors, mixer, given) | {"expansion": 1.0}
        if tokens is None:
            landmarks = model["landmarks"] if model["mixer"] == "nystrom" else 0
            tokens = _rotary_tokens(tensors, given, landmarks)
        model["mlp_dim"] = shape(tensors, "transformer.layers.0.1.fn.net.0.weight", 2)[0]
        rope = any(re.match(_IGNORED, k) for k in tensors) or "pos_embedding" not in tensors
        model["positions"] = "rope" if rope else "learned"
        model["head_pool"] = only(given, "pool", "cls", "mean")
    classes, dim = shape(tensors, head, 2)
    sizes, data = embedding(tensors, given, key, tokens, linear_at=1)
    model |= {**sizes, "embed_dim": dim, "depth": depth}
    model["embed_dropout"] = field(given, "emb_dropout", 0.0)
    return model, {**data, "num_classes": classes}


def _vix(c: Any, keys: Collection[str]) -> Table:
    if c.mixing.mixer == "mlp_mixer":
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
        **_block(c.mixing.mixer, "encoder/blocks/{i}", "transformer.layers.{i}."),
        "head/norm": "mlp_head.0",
        "head/linear": "mlp_head.1",
    }


VIX = TorchWeights(
    ("mlp_head.1.weight", "2.0.norm.weight", "4.0.norm.weight"), _vix_settings, _vix, _IGNORED
)

# --- LeViX ---------------------------------------------------------------------------------------

_LEVIX_FIRST = "backbone.0.layers.0."


def _levix_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    tokens = token_count(tensors, f"{_LEVIX_FIRST}0.")
    sizes, data = embedding(tensors, given, "conv_embedding.", tokens, linear_at=0)
    classes, dim = shape(tensors, "mlp_head.weight", 2)
    model = {
        **find(tensors, f"{_LEVIX_FIRST}0.", given),
        "stem_channels": sizes["stem_channels"],
        "stem_strides": sizes["stem_strides"],
        "embed_dim": dim,
        "depth": count(tensors, "backbone.0.layers.{}."),
        "mlp_dim": shape(tensors, f"{_LEVIX_FIRST}1.net.0.weight", 4)[0],
    }
    return model, {**data, "num_classes": classes}


def _levix(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "encoder/blocks/{i}", "backbone.0.layers.{i}."
    table = {
        "stem/convs/{i}": "conv_embedding.{i}",
        **_mixer(c.mixing.mixer, f"{block}/mixer", f"{theirs}0."),
        f"{block}/feed_forward/up": f"{theirs}1.net.0 [:,:,1,1]",
        f"{block}/feed_forward/down": f"{theirs}1.net.3 [:,:,1,1]",
        "head": "mlp_head",
    }
    if c.mixing.mixer == "softmax":  # LeViT's: 1×1 convolutions, each with a BatchNorm
        places = {"query": ("to_q", 0), "key": ("to_k", 0), "value": ("to_v", 0)}
        for ours, (name, place) in (*places.items(), ("out", ("to_out", 1))):
            table[f"{block}/mixer/{ours}"] = f"{theirs}0.{name}.{place} [:,:,1,1]"
            table[f"{block}/mixer/{ours}_norm"] = f"{theirs}0.{name}.{place + 1}"
    return table


LEVIX = TorchWeights(("mlp_head.weight",), _levix_settings, _levix)

# --- CCX -----------------------------------------------------------------------------------------

_CCX_BLOCK = "classifier.blocks."


def _ccx_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    """Strides that nothing tells are those that leave as many tokens as there are positions."""
    convs = count(tensors, "tokenizer.conv_layers.{}.0.") or 1
    weights = [shape(tensors, f"tokenizer.conv_layers.{i}.0.weight", 4) for i in range(convs)]
    kernel, d = weights[0][2], weights[-1][0]
    window = argument(given, "pooling_kernel_size") or 3
    paddings = [
        size // 2 if (padding := argument(given, name)) is None else padding
        for name, size in (("padding", kernel), ("pooling_padding", window))
    ]
    image_size = _image_size(given, input_shape(tensors)[2:]) or (_side(None),) * 2
    said = given.get("pool_strides", given.get("stride"))
    usual = (1, (2, *(1,) * (convs - 1))) if said is None else (said,)
    pool = argument(given, "pooling_stride")
    ways = [
        (strides * convs if len(strides) == 1 else strides[:convs], pool_stride)
        for pool_stride in ((1, 2) if pool is None else (pool,))
        for strides in (ints("stride", one) for one in usual)
    ]

    def tokens(way: tuple[Shape, int]) -> int:
        convolution, pool = (kernel, paddings[0]), (window, way[1], paddings[1])
        return math.prod(stems.tokenizer_map(image_size, way[0], convolution, pool))

    has_positions = given.get("positional_embedding") != "none"  # learned, or of sines
    positions = shape(tensors, "classifier.positional_emb", 3)[1] if has_positions else 0
    strides, pool_stride = next((way for way in ways if tokens(way) == positions), ways[0])
    mixer = find(tensors, f"{_CCX_BLOCK}0.self_attn.", given)
    if mixer["heads"] * mixer["head_dim"] == d:
        mixer["head_dim"] = 0  # they share a token's width
    softmax = mixer["mixer"] == "softmax"
    model = {
        **mixer,
        "conv_channels": tuple(w[0] for w in weights[:-1]),
        "conv_strides": strides,
        "conv_kernel": kernel,
        "conv_padding": -1 if paddings[0] == kernel // 2 else paddings[0],
        "pool_window": window,
        "pool_stride": pool_stride,
        "pool_padding": -1 if paddings[1] == window // 2 else paddings[1],
        "positions": has_positions,
        "embed_dim": d,
        "depth": count(tensors, f"{_CCX_BLOCK}{{}}."),
        "mlp_dim": shape(tensors, f"{_CCX_BLOCK}0.linear1.weight", 2)[0],
        "attention_dropout": field(given, "attention_dropout", 0.1) if softmax else 0.0,
        "drop_path": field(given, "stochastic_depth", 0.1),
    }
    classes = shape(tensors, "classifier.fc.weight", 2)[0]
    return model, {"image_size": image_size, "channels": weights[0][1], "num_classes": classes}


def _ccx(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "encoder/blocks/{i}", f"{_CCX_BLOCK}{{i}}"
    table = {
        "tokenizer/convs/{i}": "tokenizer.conv_layers.{i}.0",
        "encoder/position": "classifier.positional_emb [1,:,:]",
        f"{block}/norm1": f"{theirs}.pre_norm",
        f"{block}/norm2": f"{theirs}.norm1",
        **_mixer(c.mixing.mixer, f"{block}/mixer", f"{theirs}.self_attn."),
        f"{block}/feed_forward/up": f"{theirs}.linear1",
        f"{block}/feed_forward/down": f"{theirs}.linear2",
        "head/norm": "classifier.norm",
        "head/pool": "classifier.attention_pool",
        "head/linear": "classifier.fc",
    }
    if c.mixing.mixer == "softmax":
        table[f"{block}/mixer/qkv"] = f"{theirs}.self_attn.qkv"
        table[f"{block}/mixer/out"] = f"{theirs}.self_attn.proj"
    return table


CCX = TorchWeights(("classifier.fc.weight",), _ccx_settings, _ccx)

# --- CvX -----------------------------------------------------------------------------------------


def _cvx_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    """The image's size, which no parameter tells but Linformer's, comes from the file's `input`, an
    option, or `fmap` (a side of the first stage's map) and `stride` in its constructor.
    """
    stages = count(tensors, "layers.{}.0.")
    d, channels, *_ = shape(tensors, "layers.0.0.weight", 4)
    attention = "layers.0.2.layers.0.0.fn."
    fmap, stride = argument(given, "fmap"), argument(given, "stride") or 1
    if fmap and "image_size" not in given:
        given = {**given, "image_size": fmap * stride}
    tokens = token_count(tensors, attention)
    image_size, strides = stem_sizes(given, input_shape(tensors)[2:], stages, tokens)
    model = {
        **find(tensors, attention, given),
        "stage_strides": strides,
        "depths": tuple(count(tensors, f"layers.{s}.2.layers.{{}}.") for s in range(stages)),
        "embed_dim": d,
        "mlp_dim": shape(tensors, "layers.0.2.layers.0.1.fn.net.0.weight", 4)[0],
    }
    classes = shape(tensors, f"layers.{stages + 2}.weight", 2)[0]
    return model, {"image_size": image_size, "channels": channels, "num_classes": classes}


def _channel_norm(ours: str, theirs: str) -> Table:
    return {f"{ours}/scale": f"{theirs}.g [1,:,1,1]", f"{ours}/bias": f"{theirs}.b [1,:,1,1]"}


def _cvx(c: Any, keys: Collection[str]) -> Table:
    block, theirs = "stage{s}/blocks/{i}", "layers.{s}.2.layers.{i}."
    table = {
        "stage{s}/conv": "layers.{s}.0",
        **_channel_norm("stage{s}/norm", "layers.{s}.1"),
        **_channel_norm(f"{block}/norm1", f"{theirs}0.norm"),
        **_mixer(c.mixing.mixer, f"{block}/mixer", f"{theirs}0.fn."),
        **_channel_norm(f"{block}/norm2", f"{theirs}1.norm"),
        f"{block}/feed_forward/up": f"{theirs}1.fn.net.0 [:,:,1,1]",
        f"{block}/feed_forward/down": f"{theirs}1.fn.net.3 [:,:,1,1]",
        "head": f"layers.{len(c.depths) + 2}",
    }
    if c.mixing.mixer == "softmax":
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


def _pix_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    tokens = token_count(tensors, "", cls=1)
    sizes, data = embedding(tensors, given, "to_patch_embedding.", tokens, linear_at=_PIX_LINEAR)
    stages = -(-count(tensors, "layers.{}.") // 2)
    model = {
        **find(tensors, "layers.0.layers.0.0.fn.", given),
        "embed_dropout": field(given, "emb_dropout", 0.0),
        **sizes,
        "embed_dim": shape(tensors, "cls_token", 3)[2],
        "depths": tuple(count(tensors, f"layers.{2 * s}.layers.{{}}.") for s in range(stages)),
        "mlp_dim": shape(tensors, "layers.0.layers.0.1.fn.net.0.weight", 2)[0],
    }
    return model, {**data, "num_classes": shape(tensors, "mlp_head.1.weight", 2)[0]}


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
        table |= _block(c.mixing.mixer, stage, theirs)
        pool, theirs = f"encoder/pools/{i}", f"layers.{2 * i + 1}"
        table[f"{pool}/conv"] = f"{theirs}.downsample.net.0"
        table[f"{pool}/mix"] = f"{theirs}.downsample.net.1 [:,:,1,1]"
        table[f"{pool}/cls"] = f"{theirs}.cls_ff"
    return table


PIX = TorchWeights(("mlp_head.1.weight",), _pix_settings, _pix)

# --- T2T-ViT -------------------------------------------------------------------------------------

_T2T, _T2T_PROJECT = "tokens_to_token.attention{}", "tokens_to_token.project.weight"


def _t2t_settings(family: Family, tensors: Tensors, given: dict[str, Any]) -> Sections:
    """Sizes follow from shapes, but for the heads (of width 64 in all published networks) and what
    rounding hides of the image's."""
    performer = f"{_T2T.format(1)}.w" in tensors
    first = "kqv" if performer else "attn.qkv"
    dim = shape(tensors, _T2T_PROJECT, 2)[0]
    inner, pixels = shape(tensors, f"{_T2T.format(1)}.{first}.weight", 2)
    usual, heads = family.defaults, argument(given, "num_heads")
    if heads is None and dim % 64:
        raise ValueError("the tensors' shapes do not tell the number of heads: say --heads")
    model = {
        "token_layer": "performer" if performer else "softmax",
        "token_dim": inner // 3,
        "token_dropout": usual["token_dropout"] if performer else 0.0,
        "embed_dim": dim,
        "depth": count(tensors, "blocks.{}.norm1.weight"),
        "heads": dim // 64 if heads is None else heads,
        "mlp_ratio": shape(tensors, "blocks.0.mlp.fc1.weight", 2)[0] / dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "qk_scale": field(given, "qk_scale", 0.0),
        "drop_path": field(given, "drop_path_rate", usual["drop_path"]),
    }
    side = 16 * math.isqrt(shape(tensors, "pos_embed", 3)[1] - 1)
    data = {
        "image_size": input_shape(tensors)[2:] or _image_size(given, (side, side)),
        "channels": pixels // 49,
        "num_classes": shape(tensors, "head.weight", 2)[0],
    }
    return model, data


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
