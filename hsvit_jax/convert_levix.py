"""LeViX's state dicts: their constructors, their keys, and where each tensor goes."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax.convert_mixing import argument, count, entries, find, named, rate, shape, split
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, batch_norm, linear, pointwise
from hsvit_jax.convert_vix import conv_count, stem_entries, stem_sizes
from hsvit_jax.models.vix import levix

_FIRST = "backbone.0.layers.0."


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration. Raises ValueError for unknown sizes."""
    convs = conv_count(tensors, "conv_embedding.")
    weights = [shape(tensors, f"conv_embedding.{i}.weight", 4) for i in range(convs or 1)]
    images = tensors["input"].shape if "input" in tensors else ()
    tokens = None
    if f"{_FIRST}0.proj_k" in tensors:
        tokens = shape(tensors, f"{_FIRST}0.proj_k", 2)[0]
    image_size, strides = stem_sizes(given, images[2:], len(weights), tokens)
    model = {
        "family": "levix",
        **find(tensors, f"{_FIRST}0.", given),
        "dropout": rate(given, "dropout"),
        "stem_channels": tuple(w[0] for w in weights[:-1]),
        "stem_strides": strides,
        "embed_dim": weights[-1][0],
        "depth": count(tensors, lambda i: f"backbone.0.layers.{i}."),
        "mlp_dim": shape(tensors, f"{_FIRST}1.net.0.weight", 4)[0],
    }
    if f"{_FIRST}0.to_q.0.weight" in tensors:  # LeViT's attention, of convolutions
        inner = shape(tensors, f"{_FIRST}0.to_q.0.weight", 4)[0]
        heads = argument(given, "num_heads", "heads")
        heads, width = split(inner, heads, None if heads else argument(given, "dim_head"))
        model |= {"mixer": "softmax", "heads": heads, "head_dim": width}
    model["variant"] = named(model, levix)
    classes = shape(tensors, "mlp_head.weight", 2)[0]
    return model, {"image_size": image_size, "channels": weights[0][1], "num_classes": classes}


def params_from_torch(tensors: Tensors, config: levix.LeViXConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: levix.LeViXConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    d = c.embed_dim
    yield from stem_entries(c.image_channels, c.stem_widths, "conv_embedding.", ("stem",))
    for i in range(c.depth):
        key, path = f"backbone.0.layers.{i}.", ("encoder", "blocks", str(i))
        if c.mixing.name == "softmax":
            yield from _attention(c, f"{key}0.", (*path, "mixer"))
        else:
            yield from entries(c.mixing, f"{key}0.", (*path, "mixer"), c.tokens, d)
        for theirs, ours, ins, outs in (("0", "up", d, c.mlp_dim), ("3", "down", c.mlp_dim, d)):
            yield from pointwise(f"{key}1.net.{theirs}", ins, outs, (*path, "feed_forward", ours))
    yield from linear("mlp_head", d, c.num_classes, ("head",))


def _attention(c: levix.LeViXConfig, key: str, path: tuple[str, ...]) -> Iterator[Entry]:
    """LeViT's: 1×1 convolutions, each with a BatchNorm."""
    d, inner = c.embed_dim, c.mixing.inner
    for theirs, ours in (("to_q", "query"), ("to_k", "key"), ("to_v", "value")):
        yield from pointwise(f"{key}{theirs}.0", d, inner, (*path, ours), bias=False)
        yield from batch_norm(f"{key}{theirs}.1", inner, (*path, f"{ours}_norm"))
    yield from pointwise(f"{key}to_out.1", inner, d, (*path, "out"))
    yield from batch_norm(f"{key}to_out.2", d, (*path, "out_norm"))
