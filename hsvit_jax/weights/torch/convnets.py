"""Tensors' names and constructors of ResNet, ResNeXt, EfficientNet and MobileNetV2.

ResNeXt has timm's and torchvision's names, the others those of the `transformers` library.
"""

from collections.abc import Collection

from hsvit_jax.models.convnets.efficientnet import EfficientNetConfig
from hsvit_jax.models.convnets.mobilenet_v2 import MobileNetV2Config
from hsvit_jax.models.convnets.resnet import ResNetConfig
from hsvit_jax.weights.torch.base import Given, Table, Tensors, TorchWeights, field, names

#: Names of a convolution and its BatchNorm in the `transformers` library.
_HF = "=convolution norm=normalization"


def _activation(model: Given) -> str:
    """Returns `hidden_act` by our name."""
    return {"swish": "silu", "gelu_python": "gelu"}.get(model["activation"], model["activation"])


# --- ResNet --------------------------------------------------------------------------------------


def _resnet_more(tensors: Tensors, given: Given, model: Given) -> Given:
    in_conv = field(given, "downsample_in_bottleneck", False)
    return {
        "activation": _activation(model),
        "stride_in_first_conv": model["block"] == "bottleneck" and in_conv,
    }


def _resnet(c: ResNetConfig, keys: Collection[str]) -> Table:
    table = names("backbone/stem", "resnet.embedder.embedder", "=", _HF)
    places = [(i, j) for i, depth in enumerate(c.depths) for j in range(depth)]
    for number, (i, j) in enumerate(places):
        block, theirs = f"backbone/blocks/{number}", f"resnet.encoder.stages.{i}.layers.{j}"
        convs = "shortcut convs/0=layer.0 convs/1=layer.1 convs/2=layer.2"
        table |= names(block, theirs, convs, _HF)
    return table | {"head/linear": "classifier.1"}


RESNET = TorchWeights(
    ("resnet.embedder.embedder.convolution.weight",),
    "stem_channels=embedding_size channels=hidden_sizes depths block=layer_type"
    " stride_in_first_stage=downsample_in_first_stage activation=hidden_act",
    _resnet,
    _resnet_more,
    only={"layer_type": ("bottleneck", "basic")},
)

# --- ResNeXt -------------------------------------------------------------------------------------


def _resnext_more(tensors: Tensors, given: Given, model: Given) -> Given:
    return {"channels": tuple(4 * planes for planes in model["channels"])}


def _resnext(c: ResNetConfig, keys: Collection[str]) -> Table:
    table = names("", "", "backbone/stem=conv1 backbone/stem/norm=bn1 head/linear=fc")
    places = [(i, j) for i, depth in enumerate(c.depths, 1) for j in range(depth)]
    for number, (i, j) in enumerate(places):
        block, theirs = f"backbone/blocks/{number}", f"layer{i}.{j}"
        table |= names(f"{block}/shortcut", f"{theirs}.downsample", "=0 norm=1")
        for k in range(3):
            table |= names(f"{block}/convs/{k}", theirs, f"=conv{k + 1} norm=bn{k + 1}")
    return table


RESNEXT = TorchWeights(
    ("layer1.0.conv3.weight",),
    "depths=layers groups=cardinality base_width stem_channels=stem_width channels",
    _resnext,
    _resnext_more,
    usual={"groups": 1, "base_width": 64, "channels": (64, 128, 256, 512)},
    only={
        "output_stride": (32,),
        "global_pool": ("avg",),
        "act_layer": ("relu",),
        "replace_stride_with_dilation": ((False, False, False),),
    },
)

# --- EfficientNet --------------------------------------------------------------------------------


def _efficientnet_more(tensors: Tensors, given: Given, model: Given) -> Given:
    momentum = round(1 - model["bn_momentum"], 12)  # PyTorch's is the weight of the new values
    return {"activation": _activation(model), "bn_momentum": momentum}


def _efficientnet(c: EfficientNetConfig, keys: Collection[str]) -> Table:
    table = names("backbone/stem", "efficientnet.embeddings", "=convolution norm=batchnorm")
    table |= names("backbone/top", "efficientnet.encoder", "=top_conv norm=top_bn")
    words = (
        "expand=expansion.expand_conv expand/norm=expansion.expand_bn"
        " depthwise=depthwise_conv.depthwise_conv depthwise/norm=depthwise_conv.depthwise_norm"
        " project=projection.project_conv project/norm=projection.project_bn"
        " squeeze/reduce=squeeze_excite.reduce[:,:,1,1]"
        " squeeze/expand=squeeze_excite.expand[:,:,1,1]"
    )
    for i in range(len(c.places())):
        table |= names(f"backbone/blocks/{i}", f"efficientnet.encoder.blocks.{i}", words)
    return table | {"head/linear": "classifier"}


EFFICIENTNET = TorchWeights(
    ("efficientnet.embeddings.convolution.weight",),
    "in_channels out_channels strides width=width_coefficient depth=depth_coefficient"
    " divisor=depth_divisor repeats=num_block_repeats kernels=kernel_sizes expand=expand_ratios"
    " squeeze=squeeze_expansion_ratio symmetric_blocks=depthwise_padding dropout=dropout_rate"
    " drop_rate=drop_connect_rate activation=hidden_act pooling=pooling_type bn_eps=batch_norm_eps"
    " bn_momentum=batch_norm_momentum",
    _efficientnet,
    _efficientnet_more,
    usual={"width": 2.0, "depth": 3.1, "dropout": 0.5, "bn_momentum": 0.99},
    only={"pooling_type": ("mean", "max")},
    known={"padding": ("native",)},
)

# --- MobileNetV2 ---------------------------------------------------------------------------------


def _mobilenet_v2_more(tensors: Tensors, given: Given, model: Given) -> Given:
    return {
        "stem_expansion": not field(given, "first_layer_is_expansion", True),
        "activation": _activation(model),
        "padding": "same" if field(given, "tf_padding", True) else "symmetric",
    }


def _mobilenet_v2(c: MobileNetV2Config, keys: Collection[str]) -> Table:
    ends = "stem=conv_stem.first_conv top=conv_1x1"
    table = names("backbone", "mobilenet_v2", ends, _HF) | {"head/linear": "classifier"}
    for i in range(len(c.places())):
        theirs = "mobilenet_v2." + (f"layer.{i - 1}" if i else "conv_stem")
        words = "expand=expand_1x1 depthwise=conv_3x3 project=reduce_1x1"
        table |= names(f"backbone/blocks/{i}", theirs, words, _HF)
    return table


MOBILENET_V2 = TorchWeights(
    ("mobilenet_v2.conv_stem.first_conv.convolution.weight",),
    "width=depth_multiplier divisor=depth_divisible_by least_channels=min_depth"
    " expand=expand_ratio output_stride full_top=finegrained_output activation=hidden_act"
    " dropout=classifier_dropout_prob bn_eps=layer_norm_eps",
    _mobilenet_v2,
    _mobilenet_v2_more,
    usual={"dropout": 0.8},
)

#: Families that can be HSViT's backbone.
EXTRACTORS = {"resnet": RESNET, "efficientnet": EFFICIENTNET, "mobilenet_v2": MOBILENET_V2}
