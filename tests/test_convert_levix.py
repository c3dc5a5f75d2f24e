"""LeViX's state dicts: a golden, any constructor against the network in NumPy, named variants."""

import json

import numpy as np
import pytest
import vix_files

from hsvit_jax import convert, convert_levix, models

GIVEN = {"heads": 3, "dim_head": 4, "num_classes": 7, "m": 4}


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "levix-levil.npz", tmp_path / "out")
    assert report["parameters"] == 9202
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


@pytest.mark.parametrize(
    ("changes", "image", "given"),
    [
        ({"stem_channels": (5, 6), "stem_strides": (2, 1, 1)}, (3, 7, 9), {"stride": 2}),
        (
            {"mixer": "performer", "stem_channels": (5,), "stem_strides": (1, 1)},
            (1, 4, 5),
            {"image_size": [4, 5]},
        ),
        (
            {"mixer": "nystrom", "landmarks": 4, "residual_kernel": 5, "dropout": 0.2}
            | {"stem_channels": (5, 6), "stem_strides": (2, 1, 1)},
            (3, 8, 8),
            {"stride": 2, "dropout": 0.2},
        ),
        (
            {"mixer": "linformer", "projections": 5, "one_kv_head": False}
            | {"stem_channels": (5, 6), "stem_strides": (2, 2, 1)},
            (3, 12, 8),
            {},
        ),
    ],
    ids=["softmax", "performer", "nystrom", "linformer"],
)
def test_any_constructor(changes, image, given, tmp_path):
    usual = {"projections": 64, "landmarks": 64, "residual_kernel": 33}
    settings = vix_files.small("levix", **{**usual, **changes})
    vix_files.check_conversion(
        tmp_path / "any.npz",
        "LeViX",
        convert_levix,
        settings,
        image,
        {**GIVEN, **given},
        {"heads": 3, "landmarks": 4, "strides": settings["stem_strides"]},
        "levix",
    )


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("levix", convert_levix, {"heads": 4, "image_size": 32})


def test_what_the_tensors_do_not_tell(tmp_path):
    settings = vix_files.small("levix", stem_channels=(5,), stem_strides=(1, 1))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    tensors = vix_files.state(convert_levix, model.config)
    np.savez(tmp_path / "bare.npz", **tensors, config=json.dumps({"family": "levix"}))
    with pytest.raises(ValueError, match="say --image_size"):
        convert.convert_file(tmp_path / "bare.npz")
    with pytest.raises(ValueError, match="say --heads"):
        convert.convert_file(tmp_path / "bare.npz", image_size=(4, 4))
    convert.convert_file(tmp_path / "bare.npz", image_size=(4, 4), heads=3)
