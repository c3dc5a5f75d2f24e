"""Files of convolutional networks: goldens with their training steps, the way back, any
constructor, named networks, and fields that do not fit."""

import pytest
from support import hf_files, torch_files

from hsvit_jax import models

#: Family → fields of its configuration that name a variant, and the settings they are of.
NAMED_BY = {
    "resnet": {"layer_type": "block", "hidden_sizes": "channels", "depths": "depths"},
    "efficientnet": {
        **{"width_coefficient": "width", "depth_coefficient": "depth", "dropout_rate": "dropout"},
        "depthwise_padding": "symmetric_blocks",
    },
    "mobilenet_v2": {"depth_multiplier": "width", "classifier_dropout_prob": "dropout"},
}
RESNET = {
    **{"num_channels": 2, "embedding_size": 6, "hidden_sizes": [8, 12], "depths": [1, 2]},
    **{"layer_type": "basic", "num_labels": 5, "image_size": [21, 17]},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_type": "bottleneck", "downsample_in_bottleneck": True, "hidden_act": "gelu"},
        {"downsample_in_first_stage": True, "depths": [2, 1], "hidden_act": "tanh"},
    ],
    ids=str,
)
def test_any_constructor_of_a_resnet(changes):
    given = {**RESNET, **changes}
    network, _ = hf_files.check_every_tensor_has_its_place("resnet", given, image=(2, 21, 17))
    assert (network.config.image_channels, network.config.num_classes) == (2, 5)


@pytest.mark.parametrize("family", NAMED_BY)
def test_named_networks_are_recognised(family):
    """At their native size; the published ones of MobileNetV2 have a class more, the background."""
    record = models.FAMILIES[family]
    for variant in record.variants:
        own = record.settings(variant)
        given = {theirs: own[ours] for theirs, ours in NAMED_BY[family].items()}
        settings, data = torch_files.settings(family, {}, {**given, "num_labels": 1001})
        assert settings == own
        side = record.native_sizes.get(variant, 224)
        assert data == {"image_size": (side, side), "channels": 3, "num_classes": 1001}


@pytest.mark.parametrize(
    "changes",
    [
        *({"output_stride": 8}, {"global_pool": "max"}, {"act_layer": "gelu"}),
        {"replace_stride_with_dilation": [False, True, True]},
    ],
    ids=str,
)
def test_arguments_of_a_resnext_that_no_tensor_tells(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}=.* is not supported"):
        torch_files.settings("resnext", {}, changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("resnet", {"layer_type": "wide"}, "layer_type='wide' is not supported; expected 'bottle"),
        ("efficientnet", {"pooling_type": "none"}, "pooling_type='none' is not supported"),
        ("mobilenet_v2", {"image_size": 16}, "16×16 pixels is too small"),
    ],
)
def test_fields_that_do_not_fit_say_so(family, changes, message):
    given = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "num_labels": 7, **changes}
    with pytest.raises(ValueError, match=message):
        settings, data = torch_files.settings(family, {}, given)
        models.FAMILIES[family].sizes(settings, **data)
