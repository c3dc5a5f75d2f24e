"""CCX's state dicts: a golden, named variants, and what a file does not say."""

import pytest
from support import torch_files, vix_files

from hsvit_jax import models
from hsvit_jax.commands import convert


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "cct-ccn.npz", tmp_path / "out")
    assert report["parameters"] == 6569
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_variants_are_recognised():
    given = {"num_heads": 4, "img_size": 32}
    vix_files.check_variants_are_recognised("ccx", given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "say --image_size"),
        ({"img_size": 8}, "say --heads"),
        ({"img_size": 8, "num_heads": 3}, r"heads=3.*do not divide the attention's 10"),
        ({"img_size": 8, "padding": 0}, "padding=0 does not fit a window of 3: 1"),
        ({"img_size": 8, "pooling_padding": 2}, "pooling_padding=2 does not fit a window of 3: 1"),
        ({"img_size": 8, "positional_embedding": "sine"}, "positional_embedding='sine'"),
        (
            {"img_size": 8, "num_heads": 2, "dropout": "0.1"},
            "dropout must be of type float; got '0.1'",
        ),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    settings = vix_files.small("ccx", heads=2, conv_strides=(1, 1))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    tensors = vix_files.state("ccx", model)
    with pytest.raises(ValueError, match=message):
        torch_files.settings("ccx", tensors, given)
