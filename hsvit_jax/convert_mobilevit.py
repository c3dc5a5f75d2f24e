"""MobileViT's state dicts of the `transformers` library."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax import convert_hf as hf
from hsvit_jax.convert_tensors import (
    Entry,
    Tensors,
    assemble,
    conv,
    conv_norm,
    linear,
    linears,
    norm,
)
from hsvit_jax.models.conv_transformers import mobilevit
from hsvit_jax.models.conv_transformers.mobilevit import DEPTHS, RESIDUALS, MobileViTConfig


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, from the fields of a `MobileViTConfig`.

    Raises ValueError for a field of the wrong type, or a network we have not.
    """
    usual = mobilevit.DEFAULTS
    model = {
        "family": "mobilevit",
        "channels": hf.fields(given, "neck_hidden_sizes", usual["channels"]),
        "widths": hf.fields(given, "hidden_sizes", usual["widths"]),
        "heads": hf.field(given, "num_attention_heads", 4),
        "mlp_ratio": hf.field(given, "mlp_ratio", 2.0),
        "expand_ratio": hf.field(given, "expand_ratio", 4.0),
        "kernel": hf.field(given, "conv_kernel_size", 3),
        "patch": hf.field(given, "patch_size", 2),
        "output_stride": hf.field(given, "output_stride", 32),
        "activation": hf.act(given, "hidden_act", "silu"),
        "qkv_bias": hf.field(given, "qkv_bias", True),
        "dropout": hf.field(given, "hidden_dropout_prob", 0.1),
        "attention_dropout": hf.field(given, "attention_probs_dropout_prob", 0.0),
        "head_dropout": hf.field(given, "classifier_dropout_prob", 0.1),
        "eps": hf.field(given, "layer_norm_eps", 1e-5),
    }
    model["variant"] = hf.named(model, mobilevit)
    first = "mobilevit.conv_stem.convolution.weight"
    return model, hf.data(tensors, given, first, "classifier.weight")


def params_from_torch(tensors: Tensors, config: MobileViTConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: MobileViTConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    encoder, channels = "mobilevit.encoder.layer", c.channels
    yield from conv_norm("mobilevit.conv_stem", c.image_channels, channels[0], 3, ("stem",))
    for layer, (count, _) in enumerate(RESIDUALS):
        for i in range(count):
            sizes = (channels[layer + bool(i)], channels[layer + 1])
            path = (f"layer{layer}", "blocks", str(i))
            yield from _residual(c, f"{encoder}.{layer}.layer.{i}", *sizes, path)
    for layer in range(3):
        yield from _layer(c, layer, f"{encoder}.{layer + 2}", (f"layer{layer + 2}",))
    yield from conv_norm("mobilevit.conv_1x1_exp", *channels[5:], 1, ("last",))
    yield from linear("classifier", channels[6], c.num_classes, ("head",))


def _residual(
    c: MobileViTConfig, key: str, c_in: int, c_out: int, path: tuple[str, ...]
) -> Iterator[Entry]:
    inner = c.expanded(c_in)
    yield from conv_norm(f"{key}.expand_1x1", c_in, inner, 1, (*path, "expand"))
    yield from conv_norm(f"{key}.conv_3x3", inner, inner, 3, (*path, "depthwise"), groups=inner)
    yield from conv_norm(f"{key}.reduce_1x1", inner, c_out, 1, (*path, "reduce"))


def _layer(c: MobileViTConfig, layer: int, key: str, path: tuple[str, ...]) -> Iterator[Entry]:
    c_in, channels = c.channels[2 + layer : 4 + layer]
    d, hidden, size = c.widths[layer], c.hidden(layer), c.kernel
    yield from _residual(c, f"{key}.downsampling_layer", c_in, channels, (*path, "down"))
    yield from conv_norm(f"{key}.conv_kxk", channels, channels, size, (*path, "local"))
    yield from conv(f"{key}.conv_1x1.convolution", channels, d, 1, (*path, "project"), bias=False)
    for i in range(DEPTHS[layer]):
        theirs, ours = f"{key}.transformer.layer.{i}", (*path, "blocks", str(i))
        mixer, feed = (*ours, "mixer"), (*ours, "feed_forward")
        attention = [f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value")]
        yield from norm(f"{theirs}.layernorm_before", d, (*ours, "norm1"))
        yield from linears(attention, d, d, (*mixer, "qkv"), bias=c.qkv_bias)
        yield from linear(f"{theirs}.attention.output.dense", d, d, (*mixer, "out"))
        yield from norm(f"{theirs}.layernorm_after", d, (*ours, "norm2"))
        yield from linear(f"{theirs}.intermediate.dense", d, hidden, (*feed, "up"))
        yield from linear(f"{theirs}.output.dense", hidden, d, (*feed, "down"))
    yield from norm(f"{key}.layernorm", d, (*path, "norm"))
    yield from conv_norm(f"{key}.conv_projection", d, channels, 1, (*path, "back"))
    yield from conv_norm(f"{key}.fusion", 2 * channels, channels, size, (*path, "fuse"))
