"""PiX's state dicts: a golden, any constructor against the network in NumPy, named variants."""

import pytest
import vix_files

from hsvit_jax import convert, convert_pix

GIVEN = {"heads": 3, "num_classes": 7, "m": 4}


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "pix-pit.npz", tmp_path / "out")
    assert report["parameters"] == 9146
    assert 0 < report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


@pytest.mark.parametrize(
    ("changes", "image", "given", "sizes"),
    [
        (
            {"patch": 2, "embed_dropout": 0.1},  # the reference's patches list channels first
            (2, 6, 10),
            {"patch_size": 2, "image_size": [6, 10], "emb_dropout": 0.1},
            {"patch": 2},
        ),
        (
            {"mixer": "nystrom", "landmarks": 4, "residual_kernel": 5, "depths": (1, 1, 1)}
            | {"stem_channels": (5,), "stem_strides": (2, 1), "patch": 1},
            (3, 9, 10),
            {},
            {"strides": (2, 1)},
        ),
    ],
    ids=["softmax", "nystrom"],
)
def test_any_constructor(changes, image, given, sizes, tmp_path):
    usual = {"projections": 64, "landmarks": 64, "residual_kernel": 33}
    vix_files.check_conversion(
        tmp_path / "any.npz",
        "PiX",
        convert_pix,
        vix_files.small("pix", **{**usual, **changes}),
        image,
        {**GIVEN, **given},
        {"heads": 3, "landmarks": 4, **sizes},
        "pix",
    )


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("pix", convert_pix, {"heads": 4, "image_size": 32})
