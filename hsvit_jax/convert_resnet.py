"""ResNet's state dicts and configurations, as the `transformers` library writes them."""

from collections.abc import Iterator, Mapping
from typing import Any

from hsvit_jax.convert_convnet import Fields, conv_norm, data_section, variant_of
from hsvit_jax.convert_tensors import Entry, Tensors, assemble, linear
from hsvit_jax.models.convnets import resnet

PREFIX = "resnet."
MARKER = "embedder.embedder.convolution.weight"
CLASSIFIER = "classifier.1"


def sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, keys as `resnet.DEFAULTS`, of a configuration's fields."""
    fields = Fields(given)
    block = fields.word("layer_type", "bottleneck", {"basic": 0, "bottleneck": 0})
    return {
        "block": block,
        "stem_channels": fields.whole("embedding_size", 64),
        "channels": fields.wholes("hidden_sizes", (256, 512, 1024, 2048)),
        "depths": fields.wholes("depths", (3, 4, 6, 3)),
        "activation": fields.activation("relu"),
        "stride_in_first_stage": fields.flag("downsample_in_first_stage", False),
        "stride_in_first_conv": block == "bottleneck"
        and fields.flag("downsample_in_bottleneck", False),
        "bn_momentum": 0.9,
    }


def settings(tensors: Tensors, given: dict[str, Any]) -> tuple[dict, dict]:
    """Sections `model` and `data` of a configuration, of a classifier's file."""
    model = {"family": "resnet", **sizes(given)}
    model["variant"] = variant_of(resnet, model)
    head = tensors.get(f"{CLASSIFIER}.weight")
    return model, data_section(tensors, given, None if head is None else len(head))


def params_from_torch(tensors: Tensors, config: resnet.ResNetConfig) -> tuple[dict, dict]:
    """A classifier's state dict as (params, stats); see `convert_tensors.assemble`."""
    return assemble(tensors, listing(config))


def listing(config: resnet.ResNetConfig) -> Iterator[Entry]:
    """Every tensor of a classifier."""
    yield from entries(config, PREFIX)
    yield from linear(CLASSIFIER, config.widths[-1], config.num_classes, ("head", "linear"))


def entries(config: resnet.ResNetConfig, prefix: str) -> Iterator[Entry]:
    """Every tensor of the feature extractor, whose keys begin with `prefix`."""

    def unit(key: str, spec: Any, *path: str) -> Iterator[Entry]:
        keys = (f"{prefix}{key}.convolution", f"{prefix}{key}.normalization")
        return conv_norm(keys, spec, ("backbone", *path))

    yield from unit("embedder.embedder", config.stem, "stem")
    number = 0
    for i, stage in enumerate(config.stages()):
        for j, block in enumerate(stage):
            key, path = f"encoder.stages.{i}.layers.{j}", ("blocks", str(number))
            if block.shortcut is not None:
                yield from unit(f"{key}.shortcut", block.shortcut, *path, "shortcut")
            for k, spec in enumerate(block.convs):
                yield from unit(f"{key}.layer.{k}", spec, *path, "convs", str(k))
            number += 1
