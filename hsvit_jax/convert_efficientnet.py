"""EfficientNet's state dicts and configurations, as the `transformers` library writes them."""

from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax.convert_convnet import Fields, conv_norm, data_section, variant_of
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, linear, pointwise
from hsvit_jax.models.convnets import efficientnet

PREFIX = "efficientnet."
MARKER = "embeddings.convolution.weight"
CLASSIFIER = "classifier"


def sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, keys as `efficientnet.DEFAULTS`, of a configuration's fields.

    Raises ValueError for a value that the network does not have, naming it.
    """
    fields, usual = Fields(given), efficientnet.DEFAULTS
    model = {
        "width": fields.number("width_coefficient", 2.0),
        "depth": fields.number("depth_coefficient", 3.1),
        "divisor": fields.whole("depth_divisor", 8),
        "in_channels": fields.wholes("in_channels", usual["in_channels"]),
        "out_channels": fields.wholes("out_channels", usual["out_channels"]),
        "repeats": fields.wholes("num_block_repeats", usual["repeats"]),
        "strides": fields.wholes("strides", usual["strides"]),
        "kernels": fields.wholes("kernel_sizes", usual["kernels"]),
        "expand": fields.wholes("expand_ratios", usual["expand"]),
        "squeeze": fields.number("squeeze_expansion_ratio", 0.25),
        "activation": fields.activation("swish"),
        "padding": "native",
        "symmetric_blocks": fields.wholes("depthwise_padding", ()),
        "pooling": fields.word("pooling_type", "mean", {"mean": 0, "max": 0}),
        "dropout": fields.number("dropout_rate", 0.5),
        "drop_rate": fields.number("drop_connect_rate", 0.2),
        "drop": "values",
        "bn_eps": fields.number("batch_norm_eps", 1e-3),
        "bn_momentum": round(1 - fields.number("batch_norm_momentum", 0.99), 12),
        "expand_bn_momentum": 0.9,
    }
    top = efficientnet.rounded(1280 * model["width"], model["divisor"])
    if fields.whole("hidden_dim", top) != top:
        raise ValueError(f"hidden_dim={given['hidden_dim']}, but the last convolution has {top}")
    return model


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, of a classifier's file."""
    model = {"family": "efficientnet", **sizes(given)}
    model["variant"] = variant_of(efficientnet, model)
    head = tensors.get(f"{CLASSIFIER}.weight")
    native = efficientnet.FAMILY.native_sizes.get(model["variant"], 224)
    return model, data_section(tensors, given, None if head is None else len(head), native)


def params_from_torch(
    tensors: Tensors, config: efficientnet.EfficientNetConfig
) -> tuple[dict, dict]:
    """A classifier's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(config: efficientnet.EfficientNetConfig) -> Iterator[Entry]:
    """Every tensor of a classifier."""
    yield from entries(config, PREFIX)
    yield from linear(CLASSIFIER, config.widths[-1], config.num_classes, ("head", "linear"))


def entries(config: efficientnet.EfficientNetConfig, prefix: str) -> Iterator[Entry]:
    """Every tensor of the feature extractor, whose keys begin with `prefix`."""

    def unit(key: str, names: tuple[str, str], spec: Any, *path: str) -> Iterator[Entry]:
        keys = (f"{prefix}{key}.{names[0]}", f"{prefix}{key}.{names[1]}")
        return conv_norm(keys, spec, ("backbone", *path))

    plan = config.plan()
    yield from unit("embeddings", ("convolution", "batchnorm"), plan.stem, "stem")
    for i, block in enumerate(plan.blocks):
        key, path = f"encoder.blocks.{i}", ("blocks", str(i))
        if block.expand is not None:
            names = ("expand_conv", "expand_bn")
            yield from unit(f"{key}.expansion", names, block.expand, *path, "expand")
        names = ("depthwise_conv", "depthwise_norm")
        yield from unit(f"{key}.depthwise_conv", names, block.depthwise, *path, "depthwise")
        width, inner = block.depthwise.c_out, block.squeeze
        for name, fan_in, fan_out in (("reduce", width, inner), ("expand", inner, width)):
            squeeze = ("backbone", *path, "squeeze", name)
            yield from pointwise(f"{prefix}{key}.squeeze_excite.{name}", fan_in, fan_out, squeeze)
        names = ("project_conv", "project_bn")
        yield from unit(f"{key}.projection", names, block.project, *path, "project")
    yield from unit("encoder", ("top_conv", "top_bn"), plan.top, "top")
