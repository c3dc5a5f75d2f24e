"""CCX's state dicts: their constructors, their keys, and where each tensor goes."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax.convert_mixing import argument, count, entries, find, named, rate, shape
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, conv, ints, linear, norm, pair
from hsvit_jax.models.vix import ccx

_BLOCK = "classifier.blocks."


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration.

    Raises ValueError for unknown sizes, and for a constructor that asks for what no CCX of the
    paper has: other positions than learned ones, other padding than half a window.
    """
    convs = count(tensors, lambda i: f"tokenizer.conv_layers.{i}.0.") or 1
    weights = [shape(tensors, f"tokenizer.conv_layers.{i}.0.weight", 4) for i in range(convs)]
    images = tensors["input"].shape if "input" in tensors else ()
    kernel, d = weights[0][2], weights[-1][0]
    window = argument(given, "pooling_kernel_size") or 3
    for name, size in (("padding", kernel), ("pooling_padding", window)):
        if argument(given, name) not in (None, size // 2):
            raise ValueError(f"{name}={given[name]} does not fit a window of {size}: {size // 2}")
    if given.get("positional_embedding", "learnable") != "learnable":
        raise ValueError(
            f"positional_embedding={given['positional_embedding']!r} is not known; only 'learnable'"
        )
    size = given.get("img_size", given.get("image_size", images[2:] or None))
    if size is None:
        raise ValueError("the tensors' shapes do not tell the image's size: say --image_size")
    strides = ints("stride", given.get("pool_strides", given.get("stride", 1)))
    strides = strides * convs if len(strides) == 1 else strides
    mixer = find(tensors, f"{_BLOCK}0.self_attn.", given)
    heads, width = mixer["heads"], mixer.pop("head_dim")
    if heads * width != d:
        raise ValueError(f"heads={heads} of width {width} do not make up the tokens' width {d}")
    softmax = mixer["mixer"] == "softmax"
    model = {
        "family": "ccx",
        **mixer,
        "dropout": rate(given, "dropout"),
        "conv_channels": tuple(w[0] for w in weights[:-1]),
        "conv_strides": strides,
        "conv_kernel": kernel,
        "pool_window": window,
        "pool_stride": argument(given, "pooling_stride") or 1,
        "embed_dim": d,
        "depth": count(tensors, lambda i: f"{_BLOCK}{i}."),
        "mlp_dim": shape(tensors, f"{_BLOCK}0.linear1.weight", 2)[0],
        "attention_dropout": rate({"attention_dropout": 0.1, **given}, "attention_dropout")
        if softmax
        else 0.0,
        "drop_path": rate({"stochastic_depth": 0.1, **given}, "stochastic_depth"),
    }
    model["variant"] = named(model, ccx)
    classes = shape(tensors, "classifier.fc.weight", 2)[0]
    return model, {"image_size": pair(size), "channels": weights[0][1], "num_classes": classes}


def params_from_torch(tensors: Tensors, config: ccx.CCXConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: ccx.CCXConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    d, c_in = c.embed_dim, c.image_channels
    for i, width in enumerate(c.conv_widths):
        key, path = f"tokenizer.conv_layers.{i}.0", ("tokenizer", "convs", str(i))
        yield from conv(key, c_in, width, c.conv_kernel, path, bias=False)
        c_in = width
    position = ("params", "encoder", "position")
    yield Entry("classifier.positional_emb", (1, c.tokens, d), position, lambda t: t[0])
    for i in range(c.depth):
        key, path = f"{_BLOCK}{i}.", ("encoder", "blocks", str(i))
        yield from norm(f"{key}pre_norm", d, (*path, "norm1"))
        yield from norm(f"{key}norm1", d, (*path, "norm2"))
        mixer = (*path, "mixer")
        if c.mixing.name == "softmax":
            yield from linear(f"{key}self_attn.qkv", d, 3 * d, (*mixer, "qkv"), bias=False)
            yield from linear(f"{key}self_attn.proj", d, d, (*mixer, "out"))
        else:
            yield from entries(c.mixing, f"{key}self_attn.", mixer, c.tokens, d)
        yield from linear(f"{key}linear1", d, c.mlp_dim, (*path, "feed_forward", "up"))
        yield from linear(f"{key}linear2", c.mlp_dim, d, (*path, "feed_forward", "down"))
    yield from norm("classifier.norm", d, ("head", "norm"))
    yield from linear("classifier.attention_pool", d, 1, ("head", "pool"))
    yield from linear("classifier.fc", d, c.num_classes, ("head", "linear"))
