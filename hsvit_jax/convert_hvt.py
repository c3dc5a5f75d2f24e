"""HVT's and DeiT's state dicts: their constructors, their keys, and where each tensor goes.

DeiT's keys are timm's; HVT's are the same, and `pos_embed` in every block that a pool follows.
"""

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from hsvit_jax.convert_tensors import Entry, Tensors, assemble, ints, linear, norm, pair
from hsvit_jax.models.vit import deit, hvt

#: A pool that is a convolution has the only weight of a block with the window's axes on top.
_POOL_CONV = re.compile(r"blocks\.(\d+)\.(?!attn\.|mlp\.|norm)(.+)\.weight$")


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration; one error for all that stays unknown.

    The pool, which no tensor tells apart from another, is read from the file's `variant` ('average'
    or 'avg', '2d'), or from `pool` and `pool_dims` in its constructor; a maximum otherwise.
    """
    shapes = {k: v.shape for k, v in tensors.items()}
    known = {**_from_shapes(shapes, given), **{k: v for k, v in given.items() if v is not None}}
    needed = {"image_size": "--image_size", "num_channels": "", "patch_size": ""}
    needed |= {"num_blocks": "", "embed_dim": "", "num_classes": "", "num_heads": "--heads"}
    missing = [k for k in needed if k not in known]
    if missing:
        named = [f"{k} (say {needed[k]})" if needed[k] else k for k in missing]
        raise ValueError(f"the tensors' shapes do not tell {', '.join(named)}")
    one = {k: ints(k, known[k])[0] for k in needed if k != "image_size"}
    dim, heads = one["embed_dim"], one["num_heads"]
    if heads < 1 or dim % heads:
        raise ValueError(f"num_heads={heads} do not divide the width of a token, {dim}")
    cls = "cls_token" in tensors
    pooled = sorted(
        int(m[1]) for m in (re.match(r"blocks\.(\d+)\.pos_embed$", k) for k in shapes) if m
    )
    model = {
        "family": "deit" if cls or not pooled else "hvt",
        "patch": one["patch_size"],
        "heads": heads,
        "head_dim": dim // heads,
        "depth": one["num_blocks"],
        "mlp_ratio": float(known["mlp_ratio"]),
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "drop_path": float(known.get("drop_path", known.get("drop_path_rate", 0.1))),
        "eps": float(known.get("ln_eps", 1e-6)),
    }
    if model["family"] == "deit":
        model |= {"cls": cls, "retained": (), "flops_share": 1.0}
    else:
        model |= _pool(shapes, known, pooled, one["num_blocks"])
    model["variant"] = _variant(model, pair(known["image_size"]))
    data = {
        "image_size": pair(known["image_size"]),
        "channels": one["num_channels"],
        "num_classes": one["num_classes"],
    }
    return model, data


def _from_shapes(shapes: dict[str, tuple[int, ...]], given: dict[str, Any]) -> dict[str, Any]:
    """What the tensors' shapes, and the papers' custom, tell."""
    found: dict[str, Any] = {}
    for names in (
        ("input_size", "image_size"),
        ("img_size", "image_size"),
        ("depth", "num_blocks"),
    ):
        if given.get(names[0]) is not None:
            found[names[1]] = given[names[0]]
    patch, head = shapes.get("patch_embed.proj.weight", ()), shapes.get("head.weight", ())
    if len(patch) == 4:
        found |= {"embed_dim": patch[0], "num_channels": patch[1], "patch_size": patch[2]}
        if patch[0] % 64 == 0:
            found["num_heads"] = patch[0] // 64  # in every network of the papers
        positions = shapes.get("pos_embed", ())
        if len(positions) == 3 and "image_size" not in found:
            side = math.isqrt(positions[1] - ("cls_token" in shapes))
            if side**2 == positions[1] - ("cls_token" in shapes):
                found["image_size"] = side * patch[2]
    if len(head) == 2:
        found["num_classes"] = head[0]
    numbers = [int(m[1]) for m in (re.match(r"blocks\.(\d+)\.", k) for k in shapes) if m]
    if numbers:
        found["num_blocks"] = 1 + max(numbers)
    hidden = shapes.get("blocks.0.mlp.fc1.weight", ())
    found["mlp_ratio"] = 4.0
    if len(hidden) == 2 and hidden[1]:
        found["mlp_ratio"] = hidden[0] / hidden[1]
    if "input" in shapes and len(shapes["input"]) == 4:
        found["image_size"] = shapes["input"][2:]
    return found


def _pool(
    shapes: dict[str, tuple[int, ...]], known: dict[str, Any], pooled: list[int], depth: int
) -> dict[str, Any]:
    """Kind, dimensions and window of the pools, which stand after the blocks `pooled`."""
    said = str(known.get("variant", "")).lower()
    conv = next((shapes[k] for k in shapes if _POOL_CONV.match(k) and len(shapes[k]) >= 3), None)
    average = "avg" in said or "average" in said
    pool = known.get("pool", "conv" if conv else "average" if average else "max")
    flat = len(conv) == 3 if conv else not ("2d" in said or "2-d" in said)
    window = conv[-1] if conv else ints("pool_kernel_size", known.get("pool_kernel_size", 3))[0]
    stage_depth = known.get("pool_block_width")
    if stage_depth is None:
        stage_depth = pooled[1] - pooled[0] if len(pooled) > 1 else depth
    return {
        "stage_depth": ints("pool_block_width", stage_depth)[0],
        "pool": pool,
        "pool_dims": ints("pool_dims", known.get("pool_dims", 1 if flat else 2))[0],
        "pool_window": window,
    }


def _variant(model: dict, image_size: tuple[int, int]) -> str:
    """The name of these sizes for such images, where they have one."""
    family = hvt if model["family"] == "hvt" else deit
    for name, changes in family.VARIANTS.items():
        sizes = {**family.DEFAULTS, **changes}
        sizes["patch"] = sizes["patch"] or hvt.default_patch(image_size)
        if all(model[k] == v for k, v in sizes.items()):
            return name
    return "custom"


# --- Tensors -------------------------------------------------------------------------------------


def params_from_torch(tensors: Tensors, config: hvt.HVTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    names = {int(m[1]): m[2] for m in map(_POOL_CONV.match, tensors) if m}
    return assemble(tensors, listing(config, names))


def patches(key: str, patch: int, channels: int, dim: int) -> Iterator[Entry]:
    """A convolution of the patch's size and stride, which is a linear map of each patch."""
    path = ("params", "embedding", "patches", "linear")
    shape, flat = (dim, channels, patch, patch), (patch * patch * channels, dim)
    yield Entry(
        f"{key}.weight", shape, (*path, "kernel"), lambda t: t.transpose(2, 3, 1, 0).reshape(flat)
    )
    yield Entry(f"{key}.bias", (dim,), (*path, "bias"))


def rows(key: str, shape: tuple[int, ...], path: tuple[str, ...]) -> Entry:
    """Learned tokens, which the reference keeps as a batch of one: (D,) or (T, D)."""
    theirs = (1,) * (3 - len(shape)) + shape
    return Entry(key, theirs, ("params", *path), lambda t: t.reshape(shape))


def attention_block(
    key: str, dim: int, path: tuple[str, ...], attention: tuple[str, ...], *, qkv_bias: bool = True
) -> Iterator[Entry]:
    """timm's names of the norms of a block at `path`, and of its attention."""
    for number in "12":
        yield from norm(f"{key}.norm{number}", dim, (*path, f"norm{number}"))
    yield from linear(f"{key}.attn.qkv", dim, 3 * dim, (*attention, "qkv"), bias=qkv_bias)
    yield from linear(f"{key}.attn.proj", dim, dim, (*attention, "out"))


def listing(
    c: hvt.HVTConfig, pool_names: Mapping[int, str] = MappingProxyType({})
) -> Iterator[Entry]:
    """Every tensor the reference saves; pool_names: what it calls each block's convolution."""
    d, feed = c.dim, "feed_forward"
    yield from patches("patch_embed.proj", c.patch, c.image_channels, d)
    if c.cls:
        yield rows("cls_token", (d,), ("embedding", "cls"))
    yield rows("pos_embed", (c.tokens, d), ("embedding", "position"))
    lengths = c.lengths()
    for i in range(c.depth):
        block = ("encoder", "blocks", str(i))
        yield from attention_block(f"blocks.{i}", d, block, (*block, "mixer"), qkv_bias=c.qkv_bias)
        yield from linear(f"blocks.{i}.mlp.fc1", d, c.hidden, (*block, feed, "up"))
        yield from linear(f"blocks.{i}.mlp.fc2", c.hidden, d, (*block, feed, "down"))
        if not c.pools_after(i):
            continue
        pool = ("encoder", "pools", f"after{i}")
        shape = (math.prod(lengths[i + 1]), d)
        yield rows(f"blocks.{i}.pos_embed", shape, (*pool, "position"))
        if c.pool == "conv":
            key = f"blocks.{i}.{pool_names.get(i, 'downsample')}"
            shape = (d, d) + (c.pool_window,) * c.pool_dims
            axes = (*range(2, 2 + c.pool_dims), 1, 0)
            path = ("params", *pool, "conv")
            yield Entry(f"{key}.weight", shape, (*path, "kernel"), lambda t, a=axes: t.transpose(a))
            yield Entry(f"{key}.bias", (d,), (*path, "bias"))
    yield from norm("norm", d, ("head", "norm"))
    yield from linear("head", d, c.num_classes, ("head", "linear"))
