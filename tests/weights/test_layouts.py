"""Names of tensors in other libraries, as their own listings of parameters have them."""

import pytest
from support import hf_files

from hsvit_jax.weights.torch import layouts

#: Names in transformers, torchvision and timm, and the last word of all three.
_SAMPLES = {
    "resnet": """
resnet.embedder.embedder.normalization bn1 bn1 bias
resnet.encoder.stages.3.layers.1.layer.2.convolution layer4.1.conv3 layer4.1.conv3 weight
resnet.encoder.stages.1.layers.0.shortcut.normalization {0} {0} running_mean
classifier.1 fc fc weight
""".format("layer2.0.downsample.1"),
    "mobilenet_v2": """
mobilenet_v2.conv_stem.first_conv.convolution features.0.0 conv_stem weight
mobilenet_v2.conv_stem.reduce_1x1.normalization features.1.conv.2 blocks.0.0.bn2 bias
mobilenet_v2.layer.15.reduce_1x1.convolution features.17.conv.2 blocks.6.0.conv_pwl weight
mobilenet_v2.layer.1.conv_3x3.normalization features.3.conv.1.1 blocks.1.1.bn2 weight
mobilenet_v2.conv_1x1.convolution features.18.0 conv_head weight
classifier classifier.1 classifier bias
""",
    "efficientnet": """
efficientnet.embeddings.batchnorm features.0.1 bn1 bias
{0}.1.squeeze_excite.reduce features.1.1.block.1.fc1 blocks.0.1.se.conv_reduce weight
{0}.0.projection.project_conv features.1.0.block.2.0 blocks.0.0.conv_pw weight
{0}.2.expansion.expand_bn features.2.0.block.0.1 blocks.1.0.bn1 weight
{0}.11.depthwise_conv.depthwise_conv features.4.3.block.1.0 blocks.3.3.conv_dw weight
{0}.12.projection.project_bn features.5.0.block.3.1 blocks.4.0.bn3 bias
efficientnet.encoder.top_conv features.8.0 conv_head weight
classifier classifier.1 classifier weight
""".format("efficientnet.encoder.blocks"),
}
#: (family, the key of transformers, of torchvision, of timm).
SAMPLES = [
    (family, *(f"{name}.{last}" for name in names))
    for family, text in _SAMPLES.items()
    for *names, last in map(str.split, text.strip().splitlines())
]


def matched(family, wanted, keys):
    """The layout of a network's file; of EfficientNet-B1's, whose parameters are published."""
    changes = {"depth": 1.1} if family == "efficientnet" else {}
    return layouts.match(family, hf_files.network(family, **changes).config, wanted, keys)


@pytest.mark.parametrize(("place", "library"), [(2, "torchvision"), (3, "timm")])
@pytest.mark.parametrize("family", ["resnet", "mobilenet_v2", "efficientnet"])
@pytest.mark.parametrize("before", ["", "module.model."])
def test_names_and_the_layout_that_has_them(family, place, library, before):
    """Found by the names alone, also behind a wrapper's prefix."""
    keys = {s[1]: before + s[place] for s in SAMPLES if s[0] == family}
    match = matched(family, keys, {*keys.values(), before + "num_batches_tracked"})
    assert match.names == keys and match.count == len(keys)
    assert library in match.layout.library


@pytest.mark.parametrize("place", [1, 2], ids=["transformers", "torchvision"])
@pytest.mark.parametrize("family", ["resnet", "mobilenet_v2", "efficientnet"])
def test_a_bare_network_keeps_its_names(family, place):
    """The hub's models without a classifier have no prefix, and are known by their names."""
    keys = [s[place] for s in SAMPLES if s[0] == family and "classifier" not in s[place]]
    bare = {key.removeprefix(f"{family}.") for key in keys if not key.startswith("fc")}
    wanted = [s[1] for s in SAMPLES if s[0] == family and "classifier" not in s[1]]
    match = matched(family, wanted, bare)
    assert match.count == len(wanted) and set(match.names.values()) == bare
