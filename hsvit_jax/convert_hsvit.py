"""The reference's HSViT state dict: its constructor, its keys, and where each tensor goes.

`settings` turns constructor arguments (or what the tensors' shapes tell of them) into the sections
of a configuration; `params_from_torch` turns the tensors into parameters and statistics.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

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
    same,
)
from hsvit_jax.models.hsvit import hsvit

# --- Sizes ---------------------------------------------------------------------------------------

#: The reference's constructor arguments, and the option that gives what a file does not say.
_ARGUMENTS = {
    "image_size": "--image_size",
    "num_channels": "--channels",
    "conv_kernel_nums": "",
    "conv_kernel_sizes": "",
    "pool_strides": "--strides",
    "attn_num": "",
    "attn_depth": "",
    "attn_embed_dim": "",
    "num_heads": "--heads",
    "num_classes": "",
    "dropout": "",
}
_CONV = re.compile(r"model\.conv2d_layers\.(\d+)\.layer\.0\.convolution\.weight$")
_BLOCK = re.compile(r"model\.attn_encoders\.(\d+)\.(\d+)\.")


def _from_shapes(tensors: Tensors, given: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments that the tensors' shapes (and `input`, if there) give away."""
    shapes = {k: v.shape for k, v in tensors.items()}
    found: dict[str, Any] = {"dropout": 0.2, "attn_num": 0, "attn_depth": 1}
    image = shapes.get("input", ())
    if len(image) == 4:
        found |= {"num_channels": image[1], "image_size": image[2:]}
    head = shapes.get("classifier.mlp_head.1.weight", ())
    if len(head) == 2:
        found |= {"num_classes": head[0], "attn_embed_dim": head[1]}
    blocks = [m.groups() for m in map(_BLOCK.match, shapes) if m]
    if blocks:
        found["attn_num"] = 1 + max(int(group) for group, _ in blocks)
        found["attn_depth"] = 1 + max(int(block) for _, block in blocks)
    else:
        found["num_heads"] = 1
    convs = {int(m[1]): shapes[k] for k in shapes if (m := _CONV.match(k)) and len(shapes[k]) == 4}
    if convs:
        ordered = [convs[i] for i in sorted(convs)]
        found["num_channels"] = ordered[0][1]
        found["conv_kernel_nums"] = [s[0] for s in ordered]
        found["conv_kernel_sizes"] = [s[2] for s in ordered]
        embed = shapes.get("model.embed_projection.0.weight", ())
        known = {**found, **given}
        found |= _map_sizes(known, embed[1]) if len(embed) == 2 else {}
    elif blocks:  # attention only: channel tokens per group × groups, an image of D pixels
        position = shapes.get("model.position_embeddings", ())
        if len(position) == 4:
            found["conv_kernel_nums"] = [(position[2] - 1) * found["attn_num"]]
            side = math.isqrt(position[3])
            if side**2 == position[3]:
                found.setdefault("image_size", side)
        found |= {"conv_kernel_sizes": [0], "pool_strides": [1]}
    return found


def _map_sizes(known: dict[str, Any], pixels: int) -> dict[str, Any]:
    """Image size from strides, or strides from the image size, by the feature map's pixels."""
    nums, strides, size = (known.get(k) for k in ("conv_kernel_nums", "pool_strides", "image_size"))
    if strides is not None:
        side = math.isqrt(pixels)
        square = size is None and side**2 == pixels
        return {"image_size": side * math.prod(ints("pool_strides", strides))} if square else {}
    if size is None:
        return {}
    rows, columns = pair(size)
    ratio = math.isqrt(rows * columns // pixels)
    if ratio == 1 or len(nums) == 1:
        return {"pool_strides": [ratio] * len(nums)}
    for name, variant in hsvit.VARIANTS.items():
        if tuple(nums) == variant.get("conv_channels", (64, 128)):
            try:
                strides = hsvit.default_strides(name, (rows, columns))
            except ValueError:
                continue
            if math.prod(strides) == ratio:
                return {"pool_strides": strides}
    return {}


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration; one error for all that stays unknown."""
    known = {**_from_shapes(tensors, given), **given}
    missing = [k for k in _ARGUMENTS if k not in known]
    if missing:
        named = [f"{k} (say {_ARGUMENTS[k]})" if _ARGUMENTS[k] else k for k in missing]
        raise ValueError(
            "the tensors' shapes do not tell "
            + ", ".join(named)
            + ("" if all(_ARGUMENTS[k] for k in missing) else "; are weights missing?")
        )
    one = {
        k: ints(k, known[k])[0]
        for k in ("attn_num", "attn_depth", "attn_embed_dim", "num_heads", "num_classes")
    }
    channels = ints("conv_kernel_nums", known["conv_kernel_nums"])
    kernels = ints("conv_kernel_sizes", known["conv_kernel_sizes"])
    if not one["attn_num"] and not kernels[-1]:
        raise ValueError("attn_num 0 and a last conv_kernel_size of 0 leave no network: not both")
    ablation = "none" if one["attn_num"] else "conv_only"
    model = {
        "family": "hsvit",
        "ablation": ablation if kernels[-1] else "attention_only",
        "conv_channels": channels,
        "conv_kernels": kernels,
        "pool_strides": ints("pool_strides", known["pool_strides"]),
        "groups": one["attn_num"],
        "depth": one["attn_depth"],
        "embed_dim": one["attn_embed_dim"],
        "heads": one["num_heads"],
        "dropout": float(known["dropout"]),
    }
    model["variant"] = next(
        (
            name
            for name, v in hsvit.VARIANTS.items()
            if channels == v.get("conv_channels", hsvit.FAMILY.defaults["conv_channels"])
            and model["depth"] == v.get("depth", 2)
        ),
        "custom",
    )
    data = {
        "image_size": pair(known["image_size"]),
        "channels": ints("num_channels", known["num_channels"])[0],
        "num_classes": one["num_classes"],
    }
    return model, data


# --- Tensors -------------------------------------------------------------------------------------


def params_from_torch(tensors: Tensors, config: hsvit.HSViTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, _entries(config))


def _entries(c: hsvit.HSViTConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    if c.convolution:
        c_in = c.image_channels
        for i, (c_out, kernel) in enumerate(zip(c.conv_channels, c.conv_kernels, strict=True)):
            for j, size in enumerate((kernel, 3)):
                key, block = f"model.conv2d_layers.{i}.layer.{j}", ("trunk", "blocks", str(i))
                (weight,) = conv(f"{key}.convolution", c_in, c_out, size, (), bias=False)
                yield weight._replace(path=("params", *block, "kernels", str(j)))
                yield from batch_norm(f"{key}.normalization", c_out, (*block, "norms", str(j)))
                c_in = c_out
    yield from attention_entries(c)


def attention_entries(c: Any) -> Iterator[Entry]:
    """Projection, groups and head; c: sizes named as `HSViTConfig`'s."""
    d = c.embed_dim
    if c.convolution:
        yield from linear("model.embed_projection.0", math.prod(c.map_size), d, ("trunk", "embed"))
    groups = ("params", "groups")
    if c.groups:
        for key, tokens, name in (("cls_token", 1, "cls"), ("position", c.tokens, "position")):
            final = (c.groups, d) if name == "cls" else (c.groups, tokens, d)
            yield Entry(
                f"model.{key}_embeddings",
                (c.groups, 1, tokens, d),
                (*groups, name),
                lambda t, final=final: t.reshape(final),
            )
    for g in range(c.groups):
        for i in range(c.depth):
            key = f"model.attn_encoders.{g}.{i}.attn_block"
            block = (*groups, "blocks", str(i))
            for theirs, shape, ours, change in (
                ("layer_norm.weight", (d,), "norm_scale", same),
                ("layer_norm.bias", (d,), "norm_bias", same),
                (
                    "self_attn.in_proj_weight",
                    (3 * d, d),
                    "qkv_kernel",
                    lambda t: t.reshape(3, d, d).swapaxes(1, 2),
                ),
                ("self_attn.in_proj_bias", (3 * d,), "qkv_bias", lambda t: t.reshape(3, d)),
                ("self_attn.out_proj.weight", (d, d), "out_kernel", np.transpose),
                ("self_attn.out_proj.bias", (d,), "out_bias", same),
            ):
                yield Entry(f"{key}.{theirs}", shape, (*block, ours), change, g, c.groups)
    for entry, ours in zip(
        norm("classifier.mlp_head.0", d, ()), ("norm_scale", "norm_bias"), strict=True
    ):
        yield entry._replace(path=("params", "head", ours))
    yield from linear("classifier.mlp_head.1", d, c.num_classes, ("head", "linear"))
