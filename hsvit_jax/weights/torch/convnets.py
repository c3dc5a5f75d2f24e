"""State dicts and configurations of ResNet, EfficientNet and MobileNetV2.

All are those of the `transformers` library: keys after the family's name, and a configuration as
plain fields, of which only those that change the network are read.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hsvit_jax.models.convnets.efficientnet import EfficientNetConfig
from hsvit_jax.models.convnets.mobilenet_v2 import MobileNetV2Config
from hsvit_jax.models.convnets.resnet import ResNetConfig
from hsvit_jax.models.family import Family
from hsvit_jax.weights.torch.base import (
    Given,
    Table,
    Tensors,
    TorchWeights,
    field,
    needed,
    only,
    read,
)


def _activation(given: Given, default: str) -> str:
    """`hidden_act`, by our name."""
    word = field(given, "hidden_act", default)
    return {"swish": "silu", "gelu_python": "gelu"}.get(word, word)


def unit(ours: str, theirs: str, *names: str) -> Table:
    """A convolution with BatchNorm; names: of the two below `theirs`."""
    conv, norm = names or ("convolution", "normalization")
    return {ours: f"{theirs}.{conv}", f"{ours}/norm": f"{theirs}.{norm}"}


# --- ResNet --------------------------------------------------------------------------------------


def _resnet_sizes(family: Family, given: Given) -> dict[str, Any]:
    block = only(given, "layer_type", "bottleneck", "basic")
    in_conv = field(given, "downsample_in_bottleneck", False)
    names = {"stem_channels": "embedding_size", "channels": "hidden_sizes", "depths": "depths"}
    names |= {"stride_in_first_stage": "downsample_in_first_stage"}
    return {
        **read(given, names, family.defaults),
        "block": block,
        "activation": _activation(given, "relu"),
        "stride_in_first_conv": block == "bottleneck" and in_conv,
        "bn_momentum": 0.9,
    }


def _resnet(c: ResNetConfig, prefix: str) -> Table:
    table = unit("backbone/stem", f"{prefix}embedder.embedder")
    places = [(i, j) for i, depth in enumerate(c.depths) for j in range(depth)]
    for number, (i, j) in enumerate(places):
        block, theirs = f"backbone/blocks/{number}", f"{prefix}encoder.stages.{i}.layers.{j}"
        table |= unit(f"{block}/shortcut", f"{theirs}.shortcut")
        for k in range(3):
            table |= unit(f"{block}/convs/{k}", f"{theirs}.layer.{k}")
    return table


# --- ResNeXt, by timm's and torchvision's names --------------------------------------------------


#: Arguments of timm's and torchvision's networks that no tensor shows.
_RESNEXT_USUAL = {"output_stride": 32, "global_pool": "avg", "act_layer": "relu"}
_RESNEXT_USUAL |= {"replace_stride_with_dilation": (False, False, False)}


def _resnext_settings(family: Family, tensors: Tensors, given: Given) -> Given:
    for name, usual in _RESNEXT_USUAL.items():
        only(given, name, usual)
    names = {"depths": "layers", "groups": "cardinality", "base_width": "base_width"}
    model = read(given, names, {**family.defaults, "groups": 1, "base_width": 64})
    planes = field(given, "channels", (64, 128, 256, 512))
    stem = 64 if given.get("stem_width") is None else needed(given, "stem_width")
    return {**model, "stem_channels": stem, "channels": tuple(4 * n for n in planes)}


def _resnext(c: ResNetConfig, keys: Collection[str]) -> Table:
    table = {"backbone/stem": "conv1", "backbone/stem/norm": "bn1", "head/linear": "fc"}
    places = [(i, j) for i, depth in enumerate(c.depths, 1) for j in range(depth)]
    for number, (i, j) in enumerate(places):
        block, theirs = f"backbone/blocks/{number}", f"layer{i}.{j}"
        table |= unit(f"{block}/shortcut", theirs, "downsample.0", "downsample.1")
        for k in range(3):
            table |= unit(f"{block}/convs/{k}", theirs, f"conv{k + 1}", f"bn{k + 1}")
    return table


RESNEXT = TorchWeights(("layer1.0.conv3.weight",), _resnext_settings, _resnext)

# --- EfficientNet --------------------------------------------------------------------------------


def _efficientnet_sizes(family: Family, given: Given) -> dict[str, Any]:
    names = {key: key for key in ("in_channels", "out_channels", "strides")}
    names |= {
        "width": "width_coefficient",
        "depth": "depth_coefficient",
        "divisor": "depth_divisor",
    }
    names |= {"repeats": "num_block_repeats", "kernels": "kernel_sizes", "expand": "expand_ratios"}
    names |= {"squeeze": "squeeze_expansion_ratio", "symmetric_blocks": "depthwise_padding"}
    names |= {"dropout": "dropout_rate", "drop_rate": "drop_connect_rate"}
    names |= {"bn_eps": "batch_norm_eps"}
    model = {
        **read(given, names, {**family.defaults, "width": 2.0, "depth": 3.1, "dropout": 0.5}),
        "activation": _activation(given, "swish"),
        "padding": "native",
        "pooling": only(given, "pooling_type", "mean", "max"),
        "drop": "values",
        "bn_momentum": round(1 - field(given, "batch_norm_momentum", 0.99), 12),
        "expand_bn_momentum": 0.9,
    }
    return model


def _efficientnet(c: EfficientNetConfig, prefix: str) -> Table:
    table = unit("backbone/stem", f"{prefix}embeddings", "convolution", "batchnorm")
    table |= unit("backbone/top", f"{prefix}encoder", "top_conv", "top_bn")
    depthwise = ("depthwise_conv", "depthwise_norm")
    for i in range(len(c.places())):
        block, theirs = f"backbone/blocks/{i}", f"{prefix}encoder.blocks.{i}"
        table |= unit(f"{block}/expand", f"{theirs}.expansion", "expand_conv", "expand_bn")
        table |= unit(f"{block}/depthwise", f"{theirs}.depthwise_conv", *depthwise)
        table |= unit(f"{block}/project", f"{theirs}.projection", "project_conv", "project_bn")
        for part in ("reduce", "expand"):
            table[f"{block}/squeeze/{part}"] = f"{theirs}.squeeze_excite.{part} [:,:,1,1]"
    return table


# --- MobileNetV2 ---------------------------------------------------------------------------------


def _mobilenet_v2_sizes(family: Family, given: Given) -> dict[str, Any]:
    names = {"width": "depth_multiplier", "divisor": "depth_divisible_by"}
    names |= {"least_channels": "min_depth", "expand": "expand_ratio"}
    names |= {"output_stride": "output_stride", "full_top": "finegrained_output"}
    names |= {"dropout": "classifier_dropout_prob", "bn_eps": "layer_norm_eps"}
    return {
        **read(given, names, {**family.defaults, "dropout": 0.8}),
        "stem_expansion": not field(given, "first_layer_is_expansion", True),
        "activation": _activation(given, "relu6"),
        "padding": "same" if field(given, "tf_padding", True) else "symmetric",
        "bn_momentum": 0.003,
    }


def _mobilenet_v2(c: MobileNetV2Config, prefix: str) -> Table:
    table = unit("backbone/stem", f"{prefix}conv_stem.first_conv")
    table |= unit("backbone/top", f"{prefix}conv_1x1")
    for i in range(len(c.places())):
        block, theirs = f"backbone/blocks/{i}", prefix + (f"layer.{i - 1}" if i else "conv_stem")
        table |= unit(f"{block}/expand", f"{theirs}.expand_1x1")
        table |= unit(f"{block}/depthwise", f"{theirs}.conv_3x3")
        table |= unit(f"{block}/project", f"{theirs}.reduce_1x1")
    return table


# --- As classifiers and as backbones -------------------------------------------------------------

#: Family → (its settings, of a configuration's fields; the table of its feature extractor, of its
#: config and what its keys begin with; the first convolution's key).
EXTRACTORS: Mapping[str, tuple[Callable[..., dict], Callable[..., Table], str]] = {
    "resnet": (_resnet_sizes, _resnet, "embedder.embedder.convolution.weight"),
    "efficientnet": (_efficientnet_sizes, _efficientnet, "embeddings.convolution.weight"),
    "mobilenet_v2": (_mobilenet_v2_sizes, _mobilenet_v2, "conv_stem.first_conv.convolution.weight"),
}


def _classifier(name: str, head: str, **known: tuple) -> TorchWeights:
    """How the files of a family's classifier are read; head: the linear layer's key."""
    sizes, table, first = EXTRACTORS[name]
    return TorchWeights(
        (f"{name}.{first}",),
        lambda family, tensors, given: sizes(family, given),
        lambda config, keys: {**table(config, f"{name}."), "head/linear": head},
        known=known,
    )


RESNET = _classifier("resnet", "classifier.1")
EFFICIENTNET = _classifier("efficientnet", "classifier", padding=("native",))
MOBILENET_V2 = _classifier("mobilenet_v2", "classifier")
