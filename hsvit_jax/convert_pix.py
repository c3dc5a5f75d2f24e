"""PiX's state dicts: their constructors, their keys, and where each tensor goes.

Stages and pools alternate in one list: stage i is its entry 2i, the pool after it 2i + 1.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hsvit_jax.convert_mixing import count, find, named, rate, shape
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, conv, linear, pointwise
from hsvit_jax.convert_vix import (
    block_entries,
    conv_count,
    embedding,
    head_entries,
    token_count,
    tokens_entries,
)
from hsvit_jax.models.vix import pix

_LINEAR = 2  # place of the patches' linear map, after unfolding and a transposition


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration. Raises ValueError for unknown sizes."""
    key = "to_patch_embedding."
    convs, tokens = conv_count(tensors, key), token_count(tensors, "")
    sizes, image_size, channels = embedding(tensors, given, key, convs, tokens, linear_at=_LINEAR)
    stages = -(-count(tensors, lambda i: f"layers.{i}.") // 2)
    model = {
        "family": "pix",
        **find(tensors, "layers.0.layers.0.0.fn.", given),
        "dropout": rate(given, "dropout"),
        "embed_dropout": rate(given, "emb_dropout"),
        **sizes,
        "embed_dim": shape(tensors, "cls_token", 3)[2],
        "depths": tuple(
            count(tensors, lambda i, s=s: f"layers.{2 * s}.layers.{i}.") for s in range(stages)
        ),
        "mlp_dim": shape(tensors, "layers.0.layers.0.1.fn.net.0.weight", 2)[0],
    }
    model["variant"] = named(model, pix)
    classes = shape(tensors, "mlp_head.1.weight", 2)[0]
    return model, {"image_size": image_size, "channels": channels, "num_classes": classes}


def params_from_torch(tensors: Tensors, config: pix.PiXConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: pix.PiXConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    for entry in tokens_entries(c, "to_patch_embedding.", _LINEAR):
        unfolded = entry.key == f"to_patch_embedding.{_LINEAR}.weight" and not c.stem_channels
        yield entry._replace(ours=lambda t: _by_pixel(t, c)) if unfolded else entry
    for i, stage in enumerate(c.stages):
        # A block sees its stage's width and tokens.
        sizes = dataclasses.replace(c, embed_dim=stage.dim)
        for j in range(stage.depth):
            path = ("encoder", "stages", str(i), str(j))
            key = f"layers.{2 * i}.layers.{j}."
            yield from block_entries(c.mixing, key, path, sizes, tokens=stage.tokens)
        if i + 1 < len(c.stages):
            key, path, d = f"layers.{2 * i + 1}.", ("encoder", "pools", str(i)), stage.dim
            yield from conv(f"{key}downsample.net.0", d, 2 * d, 3, (*path, "conv"), groups=d)
            yield from pointwise(f"{key}downsample.net.1", 2 * d, 2 * d, (*path, "mix"))
            yield from linear(f"{key}cls_ff", d, 2 * d, (*path, "cls"))
    last = dataclasses.replace(c, embed_dim=c.stages[-1].dim)
    yield from head_entries("mlp_head.0", "mlp_head.1", last)


def _by_pixel(weight: np.ndarray, c: pix.PiXConfig) -> np.ndarray:
    """Unfolding lists a patch channel by channel; ours pixel by pixel."""
    split = weight.reshape(-1, c.image_channels, c.patch, c.patch)
    return split.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])
