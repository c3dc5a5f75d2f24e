"""The ViX authors' token mixers in a state dict: what they are, and where their tensors go.

Shared by the converters of ViX, LeViX, CCX, CvX and PiX.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hsvit_jax.convert_tensors import Entry, Tensors, ints, linear
from hsvit_jax.models.vix.mixer_config import DEFAULTS, Mixing

#: Rotary tables, which are computed.
IGNORED = r"(.*\.)?layer_pos_emb\."


def argument(given: Mapping[str, Any], *names: str) -> int | None:
    """The first of these constructor arguments that is there, one integer, or None."""
    values = [ints(name, given[name])[0] for name in names if given.get(name) is not None]
    return values[0] if values else None


def rate(given: Mapping[str, Any], name: str) -> float:
    """A dropout rate among the constructor arguments, 0 without it."""
    value = given.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"constructor argument {name} must be a number; got {value!r}")
    return float(value)


def shape(tensors: Tensors, key: str, rank: int) -> tuple[int, ...]:
    """The shape of a tensor that sizes are read from. Raises ValueError where it is not there."""
    if key not in tensors:
        raise ValueError(f"cannot read the network's sizes: {key} is missing")
    found = tensors[key].shape
    if len(found) != rank or min(found) < 1:
        raise ValueError(f"cannot read the network's sizes: {key} has the shape {found}")
    return found


def count(tensors: Tensors, key: Callable[[int], str]) -> int:
    """How many of key(0), key(1), … begin names of tensors, without a gap."""
    number = 0
    while any(k.startswith(key(number)) for k in tensors):
        number += 1
    return number


def find(tensors: Tensors, key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the mixer whose tensors' names begin with `key`, such as 'layers.0.fn.'.

    Heads that no shape tells come from the constructor, and so do nystrom's landmarks
    (`num_landmarks` or `m`; 64 without either). What is converted couples the batch as the
    reference does. Raises ValueError for heads that stay unknown or do not fit.
    """
    found: dict[str, Any] = {**DEFAULTS, "batch_coupling": True}
    table = next((t for k, t in tensors.items() if k.endswith("layer_pos_emb.emb")), None)
    width = table.shape[-1] if table is not None and table.ndim == 2 else None
    heads = argument(given, "num_heads", "heads")
    if f"{key}fast_attention.projection_matrix" in tensors:
        found["mixer"] = "performer"
        found["features"], width = shape(tensors, f"{key}fast_attention.projection_matrix", 2)
        inner = shape(tensors, f"{key}to_q.weight", 2)[0]
    elif f"{key}proj_k" in tensors:
        found["mixer"] = "linformer"
        found["projections"] = shape(tensors, f"{key}proj_k", 2)[1]
        inner = shape(tensors, f"{key}to_q.weight", 2)[0]
        keys = shape(tensors, f"{key}to_k.weight", 2)[0]
        found["one_kv_head"] = keys != inner or (heads == 1 and table is None)
        width = keys if found["one_kv_head"] else width
    elif f"{key}res_conv.weight" in tensors:
        found["mixer"] = "nystrom"
        heads, _, found["residual_kernel"], _ = shape(tensors, f"{key}res_conv.weight", 4)
        found["landmarks"] = argument(given, "num_landmarks", "landmarks", "m") or 64
        inner = shape(tensors, f"{key}to_qkv.weight", 2)[0] // 3
    elif f"{key}to_qkv.weight" in tensors or f"{key}qkv.weight" in tensors:
        name = "to_qkv" if f"{key}to_qkv.weight" in tensors else "qkv"
        inner = shape(tensors, f"{key}{name}.weight", 2)[0] // 3
    else:
        found["mixer"] = "fnet"
        return found
    found["heads"], found["head_dim"] = split(inner, heads, width)
    return found


def split(inner: int, heads: int | None, width: int | None) -> tuple[int, int]:
    """Heads and their width, of which the tensors tell the product and perhaps one."""
    if width is None and heads is None:
        raise ValueError("the tensors' shapes do not tell the number of heads: say --heads")
    heads = inner // width if width else heads
    if heads < 1 or inner % heads or (width and heads * width != inner):
        raise ValueError(f"heads={heads} (width {width}) do not divide the attention's {inner}")
    return heads, inner // heads


def named(model: dict[str, Any], family: Any) -> str:
    """The family's variant with these settings, dropout and image size aside, or 'custom'."""
    free = ("family", "variant", "batch_coupling", "features", "drop_path", "patch")
    free += ("dropout", "embed_dropout", "attention_dropout")
    free += ("stem_strides", "stage_strides", "conv_strides")
    fixed = {k: v for k, v in model.items() if k not in free}
    for variant, changes in family.VARIANTS.items():
        if all({**family.DEFAULTS, **changes}[k] == v for k, v in fixed.items()):
            return variant
    return "custom"


def entries(m: Mixing, key: str, path: tuple[str, ...], tokens: int, dim: int) -> Iterator[Entry]:
    """Every tensor of a mixer whose names begin with `key`, for `tokens` of width `dim`."""
    inner = m.inner
    if m.name == "performer":
        features = ("stats", *path, "features")
        shape = (m.feature_count, m.head_dim)
        yield Entry(f"{key}fast_attention.projection_matrix", shape, features)
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from linear(f"{key}to_{theirs}", dim, inner, (*path, ours))
    elif m.name == "linformer":
        kernel = ("params", *path, "sequence_kernel")
        yield Entry(f"{key}proj_k", (tokens, m.projections), kernel)
        yield from linear(f"{key}to_q", dim, inner, (*path, "query"), bias=False)
        yield from linear(f"{key}to_k", dim, m.kv_inner, (*path, "key"), bias=False)
    elif m.name in ("softmax", "nystrom"):
        yield from linear(f"{key}to_qkv", dim, 3 * inner, (*path, "qkv"), bias=False)
    elif m.name == "mlp_mixer":
        yield from tokens_linear(f"{key}0", tokens, m.hidden(tokens), (*path, "up"))
        yield from tokens_linear(f"{key}3", m.hidden(tokens), tokens, (*path, "down"))
    if m.name == "nystrom":
        kernel = ("params", *path, "residual_kernel")
        shape = (m.heads, 1, m.residual_kernel, 1)
        yield Entry(f"{key}res_conv.weight", shape, kernel, lambda t: t[:, 0, :, 0])
    if m.name in ("softmax", "nystrom"):
        yield from linear(f"{key}to_out.0", inner, dim, (*path, "out"))
    elif m.name in ("performer", "linformer"):
        yield from linear(f"{key}to_out", inner, dim, (*path, "out"))


def tokens_linear(key: str, fan_in: int, fan_out: int, path: tuple[str, ...]) -> Iterator[Entry]:
    """A convolution of size 1 over tokens as channels: weight (fan_out, fan_in, 1)."""
    weight, bias = linear(key, fan_in, fan_out, path)
    yield weight._replace(shape=(fan_out, fan_in, 1), ours=lambda t: np.transpose(t[..., 0]))
    yield bias
