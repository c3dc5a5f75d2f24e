"""CvX's state dicts: their constructors, their keys, and where each tensor goes."""

import math
from collections.abc import Iterator
from typing import Any

from hsvit_jax.convert_mixing import argument, count, entries, find, named, rate, shape, split
from hsvit_jax.convert_tensors import (
    Entry,
    Tensors,
    assemble,
    batch_norm,
    conv,
    linear,
    pointwise,
)
from hsvit_jax.convert_vix import stem_sizes
from hsvit_jax.models.vix import cvx


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration. Raises ValueError for unknown sizes.

    The image's size, which no parameter tells but Linformer's, comes from the file's `input`, an
    option, or `fmap` (a side of the first stage's map) and `stride` in its constructor.
    """
    stages = count(tensors, lambda i: f"layers.{i}.0.")
    d, channels, *_ = shape(tensors, "layers.0.0.weight", 4)
    attention = "layers.0.2.layers.0.0.fn."
    images = tensors["input"].shape if "input" in tensors else ()
    tokens = None
    if f"{attention}proj_k" in tensors:
        tokens = shape(tensors, f"{attention}proj_k", 2)[0]
    fmap, stride = argument(given, "fmap"), argument(given, "stride") or 1
    if fmap and "image_size" not in given:
        given = {**given, "image_size": fmap * stride}
    if "image_size" not in given and not images and tokens is None:
        raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
    image_size, strides = stem_sizes(given, images[2:], stages, tokens)
    model = {
        "family": "cvx",
        **find(tensors, attention, given),
        "dropout": rate(given, "dropout"),
        "stage_strides": strides,
        "depths": tuple(
            count(tensors, lambda i, s=s: f"layers.{s}.2.layers.{i}.") for s in range(stages)
        ),
        "embed_dim": d,
        "mlp_dim": shape(tensors, "layers.0.2.layers.0.1.fn.net.0.weight", 4)[0],
    }
    if f"{attention}to_kv.net.2.weight" in tensors:
        inner = shape(tensors, f"{attention}to_q.net.2.weight", 4)[0]
        heads = argument(given, "num_heads", "heads")
        heads, width = split(inner, heads, None if heads else argument(given, "dim_head"))
        model |= {"mixer": "softmax", "heads": heads, "head_dim": width}
    model["variant"] = named(model, cvx)
    classes = shape(tensors, f"layers.{stages + 2}.weight", 2)[0]
    return model, {"image_size": image_size, "channels": channels, "num_classes": classes}


def params_from_torch(tensors: Tensors, config: cvx.CvXConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: cvx.CvXConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    d, channels = c.embed_dim, c.image_channels
    for stage, depth in enumerate(c.depths):
        key, path = f"layers.{stage}.", (f"stage{stage}",)
        yield from conv(f"{key}0", channels, d, 3, (*path, "conv"))
        yield from _norm(f"{key}1", d, (*path, "norm"))
        for i in range(depth):
            yield from _block(c, stage, f"{key}2.layers.{i}.", (*path, "blocks", str(i)))
        channels = d
    yield from linear(f"layers.{len(c.depths) + 2}", d, c.num_classes, ("head",))


def _norm(key: str, features: int, path: tuple[str, ...]) -> Iterator[Entry]:
    """A norm over channels: g and b, (1, C, 1, 1)."""
    for theirs, ours in (("g", "scale"), ("b", "bias")):
        where = ("params", *path, ours)
        yield Entry(f"{key}.{theirs}", (1, features, 1, 1), where, lambda t: t[0, :, 0, 0])


def _block(c: cvx.CvXConfig, stage: int, key: str, path: tuple[str, ...]) -> Iterator[Entry]:
    d, m = c.embed_dim, c.mixing
    yield from _norm(f"{key}0.norm", d, (*path, "norm1"))
    mixer, to = (*path, "mixer"), f"{key}0.fn."
    if m.name == "softmax":
        for theirs, ours, linear_name, times in (
            ("to_q", "q", "query", 1),
            ("to_kv", "kv", "key_value", 2),
        ):
            net = f"{to}{theirs}.net."
            yield from conv(f"{net}0", d, d, 3, (*mixer, f"{ours}_conv"), groups=d, bias=False)
            yield from batch_norm(f"{net}1", d, (*mixer, f"{ours}_norm"))
            yield from pointwise(f"{net}2", d, times * m.inner, (*mixer, linear_name), bias=False)
        yield from pointwise(f"{to}to_out.0", m.inner, d, (*mixer, "out"))
    else:
        tokens = math.prod(c.map_sizes[stage])
        yield from entries(m, to, mixer, tokens, d)
    yield from _norm(f"{key}1.norm", d, (*path, "norm2"))
    up = (*path, "feed_forward", "up")
    yield from pointwise(f"{key}1.fn.net.0", d, c.mlp_dim, up)
    yield from pointwise(f"{key}1.fn.net.3", c.mlp_dim, d, (*path, "feed_forward", "down"))
