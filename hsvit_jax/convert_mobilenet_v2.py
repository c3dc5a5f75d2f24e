"""MobileNetV2's state dicts and configurations, as the `transformers` library writes them."""

from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax.convert_convnet import Fields, conv_norm, data_section, variant_of
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, linear
from hsvit_jax.models.convnets import mobilenet_v2

PREFIX = "mobilenet_v2."
MARKER = "conv_stem.first_conv.convolution.weight"
CLASSIFIER = "classifier"


def sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, keys as `mobilenet_v2.DEFAULTS`, of a configuration's fields."""
    fields = Fields(given)
    return {
        "width": fields.number("depth_multiplier", 1.0),
        "divisor": fields.whole("depth_divisible_by", 8),
        "least_channels": fields.whole("min_depth", 8),
        "expand": fields.number("expand_ratio", 6.0),
        "output_stride": fields.whole("output_stride", 32),
        "stem_expansion": not fields.flag("first_layer_is_expansion", True),
        "full_top": fields.flag("finegrained_output", True),
        "activation": fields.activation("relu6"),
        "padding": "same" if fields.flag("tf_padding", True) else "symmetric",
        "dropout": fields.number("classifier_dropout_prob", 0.8),
        "bn_eps": fields.number("layer_norm_eps", 1e-3),
        "bn_momentum": 0.003,
    }


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, of a classifier's file."""
    model = {"family": "mobilenet_v2", **sizes(given)}
    model["variant"] = variant_of(mobilenet_v2, model)
    head = tensors.get(f"{CLASSIFIER}.weight")
    return model, data_section(tensors, given, None if head is None else len(head))


def params_from_torch(
    tensors: Tensors, config: mobilenet_v2.MobileNetV2Config
) -> tuple[dict, dict]:
    """A classifier's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(config: mobilenet_v2.MobileNetV2Config) -> Iterator[Entry]:
    """Every tensor of a classifier."""
    yield from entries(config, PREFIX)
    yield from linear(CLASSIFIER, config.widths[-1], config.num_classes, ("head", "linear"))


def entries(config: mobilenet_v2.MobileNetV2Config, prefix: str) -> Iterator[Entry]:
    """Every tensor of the feature extractor, whose keys begin with `prefix`."""

    def unit(key: str, spec: Any, *path: str) -> Iterator[Entry]:
        keys = (f"{prefix}{key}.convolution", f"{prefix}{key}.normalization")
        return conv_norm(keys, spec, ("backbone", *path))

    plan = config.plan()
    yield from unit("conv_stem.first_conv", plan.stem, "stem")
    for i, block in enumerate(plan.blocks):
        key, path = f"layer.{i - 1}" if i else "conv_stem", ("blocks", str(i))
        if block.expand is not None:
            yield from unit(f"{key}.expand_1x1", block.expand, *path, "expand")
        yield from unit(f"{key}.conv_3x3", block.depthwise, *path, "depthwise")
        yield from unit(f"{key}.reduce_1x1", block.project, *path, "project")
    yield from unit("conv_1x1", plan.top, "top")
