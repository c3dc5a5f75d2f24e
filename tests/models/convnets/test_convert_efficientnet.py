"""EfficientNet's files: a golden with its training step, named networks, fields that do not fit."""

import pytest
from support import convnet_files, torch_files

from hsvit_jax import models
from hsvit_jax.commands import convert
from hsvit_jax.models.convnets import efficientnet

GOLDEN = "hf-efficientnet-train.npz"


def test_logits_of_a_golden(golden_dir, tmp_path):
    """By the command line's function, which finds family and sizes in the file."""
    report = convert.convert_file(golden_dir / GOLDEN, tmp_path / "out")
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]
    assert report["parameters"] == 16_837


@pytest.mark.slow
def test_the_training_step_of_a_golden(golden_dir):
    convnet_files.training_step_agrees(golden_dir / GOLDEN)


def test_named_networks_are_recognised():
    for variant in efficientnet.VARIANTS:
        own = {**efficientnet.FAMILY.defaults, **efficientnet.VARIANTS[variant]}
        given = {
            "width_coefficient": own["width"],
            "depth_coefficient": own["depth"],
            "hidden_dim": efficientnet.rounded(1280 * own["width"], 8),
            "depthwise_padding": list(own["symmetric_blocks"]),
            "dropout_rate": own["dropout"],
            "num_labels": 7,
        }
        settings, data = torch_files.settings("efficientnet", {}, given)
        assert settings == {"family": "efficientnet", "variant": variant, **own}
        native = {"b0": 224, "b3": 300, "b4": 380, "b5": 456}[variant]
        assert data["image_size"] == (native, native)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling_type": "none"}, "pooling_type='none' is not supported; expected 'mean'"),
        ({"hidden_dim": 1000}, "hidden_dim=1000, but the last convolution has 1280"),
        ({"strides": [1, 3, 2, 2, 1, 2, 1]}, r"strides must be 1 or 2.*\(1, 3, 2"),
        ({"kernel_sizes": [3, 3, 4, 3, 5, 5, 3]}, r"kernels odd; got .*\(3, 3, 4"),
        ({"in_channels": [32, 16, 24, 40, 80, 100, 192]}, "what comes before it, 112; got 100"),
        ({"num_block_repeats": [1, 1]}, "one entry for each stage"),
        ({"squeeze_expansion_ratio": "a"}, "squeeze_expansion_ratio must be of type float"),
        ({"hidden_act": "geglu"}, "hidden_act: unknown activation 'geglu'"),
        ({"batch_norm_momentum": 2.0}, r"momentum in \[0, 1\)"),
        ({"drop_connect_rate": 1.0}, r"drop_rate must be in \[0, 1\)"),
    ],
)
def test_fields_that_do_not_fit_say_so(changes, message):
    given = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "num_labels": 7, **changes}
    with pytest.raises(ValueError, match=message):
        settings, data = torch_files.settings("efficientnet", {}, given)
        models.build({"dtype": "float32", **settings}, **data)
