"""Files of HSViT on a backbone: goldens, the frozen training step, and what is refused."""

import jax
import numpy as np
import pytest
from support import convnet_files, torch_files

from hsvit_jax import models
from hsvit_jax.commands import convert
from hsvit_jax.models.hsvit import backbone

FROZEN = "hsvithet-efficientnet-b0like.npz"
GIVEN = {
    "attn_num": 4,
    "attn_depth": 1,
    "attn_embed_dim": 12,
    "num_heads": 4,
    "num_classes": 7,
    "dropout": 0.0,
    "image_size": 32,
    "backbone": {"model_type": "resnet", "num_channels": 3},
}


def test_logits_of_a_golden(golden_dir, tmp_path):
    """Strides in other places, an image that is not square, and tokens of another width."""
    source = golden_dir / "hsvithet-resnet-bottleneck-ds.npz"
    report = convert.convert_file(source, tmp_path / "out")
    assert report["parameters"] == 7_614
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_the_training_step_of_a_golden_with_a_frozen_backbone(golden_dir):
    gradients, after, before = convnet_files.training_step_agrees(
        golden_dir / FROZEN, frozenset({"backbone"})
    )
    assert not any(np.any(x) for x in jax.tree.leaves(gradients["backbone"]))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_named_networks_are_recognised():
    described = {"model_type": "mobilenet_v2", "depth_multiplier": 1.4}
    described |= {"classifier_dropout_prob": 0.2, "image_size": 224}
    given = {"attn_embed_dim": 56, "num_classes": 1000, "backbone": described}
    settings, data = torch_files.settings("hsvit_backbone", {}, given)
    assert settings["variant"] == settings["backbone"] == "mobilenet_v2_1.4"
    assert settings["backbone_settings"] == backbone.backbone_settings("mobilenet_v2_1.4")
    assert (data["image_size"], data["num_classes"]) == ((224, 224), 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": None}, "the constructor has no `backbone`"),
        ({"backbone": {"model_type": "vgg"}}, "model_type='vgg' is not supported; known: resnet"),
        ({"enable_conv_layer": False}, "without its backbone is not supported"),
        ({"attn_num": 7}, r"2048 channel tokens of the backbone cannot split into groups=7"),
        ({"image_size": None}, "do not tell the image's size: say --image_size"),
        ({"num_heads": 5}, "embed_dim=12 is not divisible by heads=5"),
        ({"dropout": "no"}, "dropout must be of type float; got 'no'"),
    ],
)
def test_fields_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        settings, data = torch_files.settings("hsvit_backbone", {}, {**GIVEN, **changes})
        models.build({"dtype": "float32", **settings}, **data)
