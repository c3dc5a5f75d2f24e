"""MobileNetV2's files: a golden with its training step, named networks, fields that do not fit."""

import numpy as np
import pytest
from support import convnet_files, torch_files

from hsvit_jax import models
from hsvit_jax.commands import convert
from hsvit_jax.models.convnets import mobilenet_v2

GOLDEN = "hf-mobilenetv2-train.npz"


def test_logits_of_a_golden(golden_dir, tmp_path):
    """An output stride of 8, so with dilation; the images are not square, whatever the file says.

    A wrapper's prefix changes nothing.
    """
    with np.load(golden_dir / GOLDEN) as golden:
        kept = {k: golden[k] for k in golden.files if not k.startswith(("grad/", "after/"))}
    entries = ("input", "logits", "config")
    wrapped = {k if k in entries else f"module.{k}": v for k, v in kept.items()}
    wrapped = {k: v for k, v in wrapped.items() if k in entries or "." in k.removeprefix("module.")}
    np.savez(tmp_path / "wrapped.npz", **wrapped)
    report = convert.convert_file(tmp_path / "wrapped.npz")
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]
    assert report["parameters"] == 16_058


@pytest.mark.slow
def test_the_training_step_of_a_golden(golden_dir):
    convnet_files.training_step_agrees(golden_dir / GOLDEN)


def test_named_networks_are_recognised():
    """The published ones have a class more, the background."""
    for variant, width in (("1.0", 1.0), ("1.4", 1.4)):
        given = {"depth_multiplier": width, "classifier_dropout_prob": 0.2, "num_labels": 1001}
        settings, data = torch_files.settings("mobilenet_v2", {}, given)
        own = {**mobilenet_v2.FAMILY.defaults, **mobilenet_v2.VARIANTS[variant]}
        assert settings == {"family": "mobilenet_v2", "variant": variant, **own}
        assert data == {"image_size": (224, 224), "channels": 3, "num_classes": 1001}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth_multiplier": 0}, "must be positive; got MobileNetV2Config"),
        ({"depth_multiplier": True}, "depth_multiplier must be of type float; got True"),
        ({"output_stride": 7.5}, "output_stride must be of type int; got 7.5"),
        ({"tf_padding": "yes"}, "tf_padding must be of type bool; got 'yes'"),
        ({"hidden_act": "swiglu"}, "hidden_act: unknown activation 'swiglu'"),
        ({"image_size": 16}, "16×16 pixels is too small"),
    ],
)
def test_fields_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        settings, data = torch_files.settings("mobilenet_v2", {}, {"num_labels": 7, **changes})
        models.build({"dtype": "float32", **settings}, **data)
