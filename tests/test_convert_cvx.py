"""CvX's state dicts: a golden, any constructor against the network in NumPy, named variants."""

import pytest
import vix_files

from hsvit_jax import convert, convert_cvx, models

GIVEN = {"heads": 3, "num_classes": 7, "m": 4}


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "cvx-cvl.npz", tmp_path / "out")
    assert report["parameters"] == 7954
    assert 0 < report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


@pytest.mark.parametrize(
    ("changes", "image", "given"),
    [
        ({"stage_strides": (2, 1)}, (2, 5, 7), {"dim_head": 4, "stride": 2}),
        ({"mixer": "performer", "stage_strides": (1, 2)}, (3, 4, 3), {"stem_strides": [1, 2]}),
        (
            {"mixer": "nystrom", "landmarks": 4, "residual_kernel": 5, "depths": (1, 1, 1)}
            | {"stage_strides": (2, 1, 1), "dropout": 0.1},
            (3, 6, 6),
            {"fmap": 3, "stride": 2, "dropout": 0.1},
        ),
    ],
    ids=["softmax", "performer", "nystrom"],
)
def test_any_constructor(changes, image, given, tmp_path):
    usual = {"projections": 64, "landmarks": 64, "residual_kernel": 33}
    settings = vix_files.small("cvx", **{**usual, **changes})
    vix_files.check_conversion(
        tmp_path / "any.npz",
        "CvX",
        convert_cvx,
        settings,
        image,
        {**GIVEN, **given},
        {"heads": 3, "landmarks": 4, "strides": settings["stage_strides"]},
        "cvx",
    )


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("cvx", convert_cvx, {"heads": 4, "image_size": 32})


def test_what_the_tensors_do_not_tell():
    settings = vix_files.small("cvx", stage_strides=(1, 1))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    tensors = vix_files.state(convert_cvx, model.config)
    with pytest.raises(ValueError, match="say --image_size"):
        convert_cvx.settings(tensors, {"heads": 3})
    with pytest.raises(ValueError, match="say --heads"):
        convert_cvx.settings(tensors, {"image_size": 4})
    _, data = convert_cvx.settings(tensors, {"heads": 3, "fmap": 4, "stride": 2})
    assert data["image_size"] == (8, 8)
