"""DHVT's state dict: its constructor, its keys, and where each tensor goes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hsvit_jax import convert_hvt
from hsvit_jax.convert_tensors import (
    Entry,
    Tensors,
    assemble,
    batch_norm,
    conv,
    ints,
    linear,
    norm,
    pair,
    pointwise,
)
from hsvit_jax.models.vit import dhvt


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration; one error for all that stays unknown."""
    shapes = {k: v.shape for k, v in tensors.items()}
    known = {**_from_shapes(shapes, given), **{k: v for k, v in given.items() if v is not None}}
    needed = {"image_size": "--image_size", "num_channels": "", "patch_size": "", "depth": ""}
    needed |= {"embed_dim": "", "num_heads": "--heads", "num_classes": ""}
    missing = [k for k in needed if k not in known]
    if missing:
        named = [f"{k} (say {needed[k]})" if needed[k] else k for k in missing]
        raise ValueError(f"the tensors' shapes do not tell {', '.join(named)}")
    one = {k: ints(k, known[k])[0] for k in needed if k != "image_size"}
    model = {
        **dhvt.DEFAULTS,
        "family": "dhvt",
        "patch": one["patch_size"],
        "heads": one["num_heads"],
        "embed_dim": one["embed_dim"],
        "depth": one["depth"],
        "mlp_ratio": float(known["mlp_ratio"]),
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "drop_path": float(known.get("drop_path_rate", dhvt.DEFAULTS["drop_path"])),
        "affine": "patch_embed.pre_affine.alpha" in tensors,
        "head_tokens": "blocks.0.attn.ht_proj.weight" in tensors,
        "positions": "pos_embed" in tensors,
    }
    model["variant"] = next(
        (
            name
            for name, changes in dhvt.VARIANTS.items()
            if all(model[k] == v for k, v in {**dhvt.DEFAULTS, **changes}.items())
        ),
        "custom",
    )
    data = {
        "image_size": pair(known["image_size"]),
        "channels": one["num_channels"],
        "num_classes": one["num_classes"],
    }
    return model, data


def _from_shapes(shapes: dict[str, tuple[int, ...]], given: dict[str, Any]) -> dict[str, Any]:
    """What the tensors' shapes tell."""
    found: dict[str, Any] = {"mlp_ratio": 4.0}
    convs = [k for k, v in shapes.items() if k.startswith("patch_embed.proj.") and len(v) == 4]
    if "patch_embed.proj.0.0.weight" in convs:
        found["num_channels"] = shapes["patch_embed.proj.0.0.weight"][1]
        found["patch_size"] = 2 ** len(convs)
    head, up = shapes.get("head.weight", ()), shapes.get("blocks.0.mlp.conv1.weight", ())
    if len(head) == 2:
        found |= {"num_classes": head[0], "embed_dim": head[1]}
    if len(up) == 4:
        found["mlp_ratio"] = up[0] / up[1]
    heads = shapes.get("blocks.0.attn.pos_embed", ())
    if len(heads) == 3:
        found["num_heads"] = heads[1]
    numbers = [int(k.split(".")[1]) for k in shapes if k.startswith("blocks.")]
    if numbers:
        found["depth"] = 1 + max(numbers)
    if given.get("img_size") is not None:
        found["image_size"] = given["img_size"]
    if given.get("in_chans") is not None:
        found["num_channels"] = given["in_chans"]
    if len(shapes.get("input", ())) == 4:
        found["image_size"] = shapes["input"][2:]
    return found


def params_from_torch(tensors: Tensors, config: dhvt.DHVTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: dhvt.DHVTConfig) -> Iterator[Entry]:
    """Every tensor the reference saves; it knows SOPE, DAFF and BatchNorm only."""
    d, hidden, c_in = c.embed_dim, c.hidden, c.image_channels
    sope = ("embedding", "sope")
    for i, c_out in enumerate(c.sope_channels):
        key = f"patch_embed.proj.{2 * i}"
        yield from conv(f"{key}.0", c_in, c_out, 3, (*sope, "convs", str(i)), bias=False)
        yield from batch_norm(f"{key}.1", c_out, (*sope, "norms", str(i), "norm"))
        c_in = c_out
    if c.affine:
        yield from _affine("patch_embed.pre_affine", c.image_channels, (*sope, "before"))
        yield from _affine("patch_embed.post_affine", d, (*sope, "after"))
    yield convert_hvt.rows("cls_token", (d,), ("embedding", "cls"))
    if c.positions:
        yield convert_hvt.rows("pos_embed", (c.tokens, d), ("embedding", "position"))
    for i in range(c.depth):
        key, block = f"blocks.{i}", ("encoder", "blocks", str(i))
        mixer, feed = (*block, "mixer"), (*block, "feed_forward")
        inner = (*mixer, "attention") if c.head_tokens else mixer
        yield from convert_hvt.attention_block(key, d, block, inner, qkv_bias=c.qkv_bias)
        if c.head_tokens:
            yield from linear(f"{key}.attn.ht_proj", d // c.heads, d, (*mixer, "project"))
            yield from norm(f"{key}.attn.ht_norm", d // c.heads, (*mixer, "norm"))
            yield convert_hvt.rows(f"{key}.attn.pos_embed", (c.heads, d), (*mixer, "embedding"))
        yield from pointwise(f"{key}.mlp.conv1", d, hidden, (*feed, "up"))
        yield from conv(f"{key}.mlp.conv2", hidden, hidden, 3, (*feed, "conv"), groups=hidden)
        yield from pointwise(f"{key}.mlp.conv3", hidden, d, (*feed, "down"))
        for number, name, width in ((1, "up", hidden), (2, "conv", hidden), (3, "down", d)):
            yield from batch_norm(f"{key}.mlp.bn{number}", width, (*feed, "norms", name, "norm"))
        yield from linear(f"{key}.mlp.compress", d, d // 4, (*feed, "gate", "squeeze"))
        yield from linear(f"{key}.mlp.excitation", d // 4, d, (*feed, "gate", "excite"))
    yield from norm("norm", d, ("head", "norm"))
    yield from linear("head", d, c.num_classes, ("head", "linear"))


def _affine(key: str, channels: int, path: tuple[str, ...]) -> Iterator[Entry]:
    for theirs, ours in (("alpha", "scale"), ("beta", "bias")):
        shape = (1, channels, 1, 1)
        yield Entry(f"{key}.{theirs}", shape, ("params", *path, ours), np.ravel)
