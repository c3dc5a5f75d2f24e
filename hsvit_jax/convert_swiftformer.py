"""SwiftFormer's state dicts of the `transformers` library."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax import convert_hf as hf
from hsvit_jax.convert_tensors import (
    Entry,
    Tensors,
    assemble,
    batch_norm,
    conv_norm,
    linear,
    pointwise,
)
from hsvit_jax.models.conv_transformers import swiftformer
from hsvit_jax.models.conv_transformers.swiftformer import SwiftFormerConfig


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, from the fields of a `SwiftFormerConfig`.

    Raises ValueError for a field of the wrong type, or a network we have not.
    """
    usual = swiftformer.DEFAULTS
    stages = len(usual["depths"])
    downsamples = hf.fields(given, "downsamples", (True,) * stages)
    scaled = hf.field(given, "use_layer_scale", True)
    model = {
        "family": "swiftformer",
        "depths": hf.fields(given, "depths", usual["depths"]),
        "widths": hf.fields(given, "embed_dims", usual["widths"]),
        "mlp_ratio": hf.field(given, "mlp_ratio", 4.0),
        "down_kernel": hf.field(given, "down_patch_size", 3),
        "down_stride": hf.field(given, "down_stride", 2),
        "down_padding": hf.field(given, "down_pad", 1),
        "activation": hf.act(given, "hidden_act", "gelu"),
        "layer_scale": hf.field(given, "layer_scale_init_value", 1e-5) if scaled else 0.0,
        "queries": "equal",
        "drop_path": hf.field(given, "drop_path_rate", 0.0),
        "dropout": hf.field(given, "drop_mlp_rate", 0.0),
        "conv_drop_path": hf.field(given, "drop_conv_encoder_rate", 0.0),
        "eps": hf.field(given, "batch_norm_eps", 1e-5),
    }
    model["downsamples"] = downsamples[: len(model["depths"]) - 1]
    if scaled and not model["layer_scale"]:
        raise ValueError("layer_scale_init_value=0 with use_layer_scale is not supported")
    model["variant"] = hf.named(model, swiftformer)
    first = "swiftformer.patch_embed.patch_embedding.0.weight"
    return model, hf.data(tensors, given, first, "head.weight")


def params_from_torch(tensors: Tensors, config: SwiftFormerConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(c: SwiftFormerConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes."""
    width, at = c.widths[0], "swiftformer.patch_embed.patch_embedding"
    channels = (c.image_channels, width // 2, width)
    for i, names in enumerate((("0", "1"), ("3", "4"))):
        path = ("stem", "convs", str(i))
        yield from conv_norm(at, *channels[i : i + 2], 3, path, names=names, bias=True)
    place = 0
    for stage, depth in enumerate(c.depths):
        key, path = f"swiftformer.encoder.network.{place}", (f"stage{stage}",)
        width, hidden = c.widths[stage], c.hidden(stage)
        for i in range(depth - 1):
            block = (*path, "blocks", str(i))
            yield from _conv_block(f"{key}.blocks.{i}", width, hidden, block)
        block = (*path, "blocks", str(depth - 1))
        yield from _attention_block(c, f"{key}.blocks.{depth - 1}", width, hidden, block)
        place += 1
        if c.follows(stage):
            key, sizes = f"swiftformer.encoder.network.{place}", (width, c.widths[stage + 1])
            place, names = place + 1, ("proj", "norm")
            down = (*path, "down")
            yield from conv_norm(key, *sizes, c.down_kernel, down, names=names, bias=True)
    yield from batch_norm("norm", c.widths[-1], ("norm",))
    yield from linear("head", c.widths[-1], c.num_classes, ("head", "own"))
    yield from linear("dist_head", c.widths[-1], c.num_classes, ("head", "teacher"))


def _scale(key: str, width: int, path: tuple[str, ...]) -> Entry:
    return Entry(key, (width, 1, 1), ("params", *path), lambda t: t[:, 0, 0])


def _conv_block(key: str, width: int, hidden: int, path: tuple[str, ...]) -> Iterator[Entry]:
    names = ("depth_wise_conv", "norm")
    own = (*path, "depthwise")
    yield from conv_norm(key, width, width, 3, own, names=names, groups=width, bias=True)
    yield from pointwise(f"{key}.point_wise_conv1", width, hidden, (*path, "up"))
    yield from pointwise(f"{key}.point_wise_conv2", hidden, width, (*path, "down"))
    yield _scale(f"{key}.layer_scale", width, (*path, "scale"))


def _attention_block(
    c: SwiftFormerConfig, key: str, width: int, hidden: int, path: tuple[str, ...]
) -> Iterator[Entry]:
    yield from _conv_block(f"{key}.local_representation", width, width, (*path, "local"))
    attention, feed = (*path, "attention"), (*path, "feed_forward")
    score = ("params", *attention, "score")
    yield Entry(f"{key}.attn.w_g", (width, 1), score, lambda t: t[:, 0])
    for theirs, ours in (
        ("to_query", "query"),
        ("to_key", "key"),
        ("proj", "mix"),
        ("final", "out"),
    ):
        yield from linear(f"{key}.attn.{theirs}", width, width, (*attention, ours))
    yield from batch_norm(f"{key}.linear.norm1", width, (*path, "norm"))
    yield from pointwise(f"{key}.linear.fc1", width, hidden, (*feed, "up"))
    yield from pointwise(f"{key}.linear.fc2", hidden, width, (*feed, "down"))
    for number in range(2) if c.layer_scale else ():
        scale = (*path, "scales", "scales", str(number))
        yield _scale(f"{key}.layer_scale_{number + 1}", width, scale)
