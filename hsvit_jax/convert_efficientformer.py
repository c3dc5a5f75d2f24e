"""EfficientFormer's state dicts of the `transformers` library (4.x), with a teacher's head."""

from collections.abc import Iterator
from typing import Any

from hsvit_jax import convert_hf as hf
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, conv_norm, linear, norm
from hsvit_jax.models.conv_transformers import efficientformer
from hsvit_jax.models.conv_transformers.efficientformer import EfficientFormerConfig

#: What the reference calls the two convolutions with BatchNorm of a stem or a pooling block.
_FIRST, _SECOND = ("convolution1", "batchnorm_before"), ("convolution2", "batchnorm_after")
#: Indices of the offsets' biases: numbers that follow from the map's size.
_INDICES = r".*\.attention_bias_idxs$"


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, from the fields of `EfficientFormerConfig`.

    The image's size is 32·resolution where neither an image nor an option tells it. Raises
    ValueError for a field of the wrong type, or a network we have not.
    """
    usual = efficientformer.DEFAULTS
    scaled = hf.field(given, "use_layer_scale", True)
    model = {
        "family": "efficientformer",
        "depths": hf.fields(given, "depths", usual["depths"]),
        "widths": hf.fields(given, "hidden_sizes", usual["widths"]),
        "attention_blocks": hf.field(given, "num_meta3d_blocks", 1),
        "heads": hf.field(given, "num_attention_heads", 8),
        "key_dim": hf.field(given, "key_dim", 32),
        "attention_ratio": hf.field(given, "attention_ratio", 4.0),
        "mlp_ratio": hf.field(given, "mlp_expansion_ratio", 4.0),
        "down_kernel": hf.field(given, "downsample_patch_size", 3),
        "down_stride": hf.field(given, "downsample_stride", 2),
        "down_padding": hf.field(given, "downsample_pad", 1),
        "pool_window": hf.field(given, "pool_size", 3),
        "activation": hf.act(given, "hidden_act", "gelu"),
        "layer_scale": hf.field(given, "layer_scale_init_value", 1e-5) if scaled else 0.0,
        "dropout": hf.field(given, "hidden_dropout_prob", 0.0),
        "eps": hf.field(given, "layer_norm_eps", 1e-12),
        "norm_eps": hf.field(given, "batch_norm_eps", 1e-5),
    }
    stages = len(model["depths"])
    model["downsamples"] = hf.fields(given, "downsamples", (True,) * stages)[: stages - 1]
    # The reference's rate is that of the second block; ours is that of the last.
    rate = hf.field(given, "drop_path_rate", 0.0)
    model["drop_path"] = rate * max(sum(model["depths"]) - 1, 1)
    if scaled and not model["layer_scale"]:
        raise ValueError("layer_scale_init_value=0 with use_layer_scale is not supported")
    for name in ("dim", "hidden_size"):
        hf.only({name: model["widths"][-1], **given}, name, model["widths"][-1])
    model["variant"] = hf.named(model, efficientformer)
    side = hf.field(given, "resolution", 7)
    data = hf.data(
        tensors,
        {"image_size": 32 * side, **given},
        "efficientformer.patch_embed.convolution1.weight",
        "classifier.weight",
    )
    config = EfficientFormerConfig(
        image_size=data["image_size"],
        image_channels=data["channels"],
        num_classes=data["num_classes"],
        **{k: model[k] for k in usual},
    )
    if config.attention_blocks and config.maps()[-1] != (side, side):
        rows, columns = config.maps()[-1]
        raise ValueError(
            f"resolution={side} needs a last map of {side}×{side}; an image of "
            f"{data['image_size'][0]}×{data['image_size'][1]} leaves {rows}×{columns}"
        )
    return model, data


def params_from_torch(tensors: Tensors, config: EfficientFormerConfig) -> tuple[dict, dict]:
    """The reference's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config), _INDICES)


def listing(c: EfficientFormerConfig) -> Iterator[Entry]:
    """Every tensor the reference saves for these sizes, but the indices."""
    half, at = c.widths[0] // 2, "efficientformer.patch_embed"
    channels = (c.image_channels, half, c.widths[0])
    for i, names in enumerate((_FIRST, _SECOND)):
        path = ("stem", "convs", str(i))
        yield from conv_norm(at, *channels[i : i + 2], 3, path, names=names, bias=True)
    place, encoder = 0, "efficientformer.encoder"
    for stage, depth in enumerate(c.depths):
        last, path = stage == len(c.depths) - 1, (f"stage{stage}",)
        key = f"{encoder}.last_stage" if last else f"{encoder}.intermediate_stages.{place}"
        pools = sum(not c.attends(stage, i) for i in range(depth))
        for i in range(pools):
            block = (*path, "pool_blocks", str(i))
            yield from _pool_block(c, stage, f"{key}.meta4D_layers.blocks.{i}", block)
        for i in range(depth - pools):
            block = (*path, "attention_blocks", str(i))
            yield from _attention_block(c, f"{key}.meta3D_layers.blocks.{i}", block)
        place += 1
        if c.follows(stage):
            key, sizes = f"{encoder}.intermediate_stages.{place}", c.widths[stage : stage + 2]
            place, names = place + 1, ("projection", "norm")
            down = (*path, "down")
            yield from conv_norm(key, *sizes, c.down_kernel, down, names=names, bias=True)
    width = c.widths[-1]
    yield from norm("efficientformer.layernorm", width, ("norm",))
    yield from linear("classifier", width, c.num_classes, ("head", "own"))
    yield from linear("distillation_classifier", width, c.num_classes, ("head", "teacher"))


def _scales(
    c: EfficientFormerConfig, key: str, width: int, path: tuple[str, ...]
) -> Iterator[Entry]:
    for number in range(2) if c.layer_scale else ():
        where = ("params", *path, "scales", "scales", str(number))
        yield Entry(f"{key}.layer_scale_{number + 1}", (width,), where)


def _pool_block(
    c: EfficientFormerConfig, stage: int, key: str, path: tuple[str, ...]
) -> Iterator[Entry]:
    width, hidden = c.widths[stage], c.hidden(stage)
    yield from _scales(c, key, width, path)
    sizes = {"up": (width, hidden), "down": (hidden, width)}
    for (ours, (c_in, c_out)), names in zip(sizes.items(), (_FIRST, _SECOND), strict=True):
        own = (*path, ours)
        yield from conv_norm(f"{key}.mlp", c_in, c_out, 1, own, names=names, bias=True)


def _attention_block(c: EfficientFormerConfig, key: str, path: tuple[str, ...]) -> Iterator[Entry]:
    width, hidden = c.widths[-1], c.hidden(len(c.depths) - 1)
    rows, columns = c.maps()[-1]
    mixer, theirs, feed = (*path, "attention"), f"{key}.token_mixer", (*path, "feed_forward")
    yield from _scales(c, key, width, path)
    bias = ("params", *mixer, "offset_bias")
    yield Entry(f"{theirs}.attention_biases", (c.heads, rows * columns), bias)
    inner = c.heads * (2 * c.key_dim + c.value_dim)
    yield from linear(f"{theirs}.qkv", width, inner, (*mixer, "qkv"))
    yield from linear(f"{theirs}.projection", c.heads * c.value_dim, width, (*mixer, "out"))
    for number in "12":
        yield from norm(f"{key}.layernorm{number}", width, (*path, f"norm{number}"))
    yield from linear(f"{key}.mlp.linear_in", width, hidden, (*feed, "up"))
    yield from linear(f"{key}.mlp.linear_out", hidden, width, (*feed, "down"))
