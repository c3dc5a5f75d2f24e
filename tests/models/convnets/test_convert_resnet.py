"""ResNet's files: a golden with its training step, any constructor, and fields that do not fit."""

import jax
import pytest
from support import convnet_files, state_dicts, torch_files

from hsvit_jax import models
from hsvit_jax.models.convnets import resnet

GIVEN = {
    "num_channels": 2,
    "embedding_size": 6,
    "hidden_sizes": [8, 12],
    "depths": [1, 2],
    "layer_type": "basic",
    "num_labels": 5,
    "image_size": [21, 17],
}


def test_logits_of_a_golden(golden_dir):
    convnet_files.logits_agree(golden_dir / "hf-resnet-basic.npz")


def test_the_training_step_of_a_golden(golden_dir):
    convnet_files.training_step_agrees(golden_dir / "hf-resnet-basic.npz")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_type": "bottleneck", "downsample_in_bottleneck": True, "hidden_act": "gelu"},
        {"downsample_in_first_stage": True, "depths": [2, 1], "hidden_act": "tanh"},
    ],
    ids=str,
)
def test_any_constructor(changes):
    given = {**GIVEN, **changes}
    settings, data = torch_files.settings("resnet", {}, given)
    assert data == {"image_size": (21, 17), "channels": 2, "num_classes": 5}
    network = models.build({"dtype": "float32", **settings}, **data)
    shapes = {entry.key: entry.shape for entry in torch_files.listing("resnet", network)}
    assert {"resnet.embedder.embedder.convolution.weight", "classifier.1.bias"} < set(shapes)
    params, stats = torch_files.load("resnet", state_dicts.drawn(shapes), network)
    expected = jax.eval_shape(network.init, jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, (params, stats)) == jax.tree.map(
        lambda x: x.shape, expected
    )


def test_named_networks_are_recognised():
    for variant in resnet.VARIANTS:
        own = {**resnet.DEFAULTS, **resnet.VARIANTS[variant]}
        given = {
            "layer_type": own["block"],
            "hidden_sizes": list(own["channels"]),
            "depths": list(own["depths"]),
            "num_labels": 7,
        }
        settings, data = torch_files.settings("resnet", {}, given)
        assert settings == {"family": "resnet", "variant": variant, **own}
        assert data["image_size"] == (224, 224)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_type": "wide"}, "layer_type='wide' is not supported; expected 'bottle"),
        ({"hidden_act": "prelu"}, "hidden_act: unknown activation 'prelu'; known: none, linear"),
        ({"downsample_in_first_stage": 1}, "downsample_in_first_stage must be of type bool; got 1"),
        ({"hidden_sizes": "8"}, "hidden_sizes must be a list of int; got '8'"),
        ({"depths": [1]}, r"channels=\(8, 12\) and depths=\(1,\)"),
        ({"num_labels": None}, "neither num_labels nor a classifier tells the number of classes"),
    ],
)
def test_fields_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        settings, data = torch_files.settings("resnet", {}, {**GIVEN, **changes})
        models.build({"dtype": "float32", **settings}, **data)
