"""CvX's state dicts: a golden, named variants, and what a file does not say."""

import pytest
from support import torch_files, vix_files

from hsvit_jax import models
from hsvit_jax.commands import convert


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "cvx-cvl.npz", tmp_path / "out")
    assert report["parameters"] == 7954
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("cvx", {"heads": 4, "image_size": 32})


def test_what_the_tensors_do_not_tell():
    settings = vix_files.small("cvx", stage_strides=(1, 1))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    tensors = vix_files.state("cvx", model)
    with pytest.raises(ValueError, match="say --image_size"):
        torch_files.settings("cvx", tensors, {"heads": 3})
    with pytest.raises(ValueError, match="say --heads"):
        torch_files.settings("cvx", tensors, {"image_size": 4})
    _, data = torch_files.settings("cvx", tensors, {"heads": 3, "fmap": 4, "stride": 2})
    assert data["image_size"] == (8, 8)
