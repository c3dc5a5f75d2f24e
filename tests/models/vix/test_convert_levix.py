"""LeViX's state dicts: a golden, named variants, and what a file does not say."""

import json

import numpy as np
import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.commands import convert


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "levix-levil.npz", tmp_path / "out")
    assert report["parameters"] == 9202
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("levix", {"heads": 4, "image_size": 32})


def test_what_the_tensors_do_not_tell(tmp_path):
    settings = vix_files.small("levix", stem_channels=(5,), stem_strides=(1, 1))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    tensors = vix_files.state("levix", model)
    np.savez(tmp_path / "bare.npz", **tensors, config=json.dumps({"family": "levix"}))
    with pytest.raises(ValueError, match="say --image_size"):
        convert.convert_file(tmp_path / "bare.npz")
    with pytest.raises(ValueError, match="say --heads"):
        convert.convert_file(tmp_path / "bare.npz", image_size=(4, 4))
    convert.convert_file(tmp_path / "bare.npz", image_size=(4, 4), heads=3)
