"""CCX's state dicts: a golden, any constructor against the network in NumPy, named variants."""

import pytest
import vix_files

from hsvit_jax import convert, convert_ccx, models

GIVEN = {"num_heads": 2, "num_classes": 7, "mlp_radio": 1.0, "positional_embedding": "learnable"}


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "cct-ccn.npz", tmp_path / "out")
    assert report["parameters"] == 6569
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


@pytest.mark.parametrize(
    ("changes", "image", "given", "sizes"),
    [
        (
            {"attention_dropout": 0.2, "drop_path": 0.3, "conv_strides": (2, 1)}
            | {"conv_kernel": 5, "pool_window": 5, "pool_stride": 2},
            (1, 17, 20),
            {"img_size": [17, 20], "stride": [2, 1], "pooling_kernel_size": 5, "padding": 2}
            | {"pooling_stride": 2, "attention_dropout": 0.2, "stochastic_depth": 0.3},
            {"pool": 5, "pool_stride": 2},
        ),
        (
            {"mixer": "performer", "conv_channels": (), "conv_strides": (1,), "dropout": 0.1},
            (3, 4, 3),
            {"img_size": [4, 3], "stride": 1, "dropout": 0.1},
            {},
        ),
        (
            {"mixer": "linformer", "projections": 5, "conv_strides": (1, 2)},
            (3, 5, 6),
            {"img_size": [5, 6], "stride": [1, 2]},
            {},
        ),
        (
            {"mixer": "nystrom", "landmarks": 4, "residual_kernel": 5}
            | {"conv_channels": (4, 7), "conv_strides": (1, 1, 1)},
            (3, 3, 3),
            {"img_size": 3, "num_landmarks": 4},
            {"landmarks": 4},
        ),
    ],
    ids=["softmax", "performer", "linformer", "nystrom"],
)
def test_any_constructor(changes, image, given, sizes, tmp_path):
    usual = {"projections": 64, "landmarks": 64, "residual_kernel": 33, "heads": 2}
    settings = vix_files.small("ccx", **{**usual, **changes})
    vix_files.check_conversion(
        tmp_path / "any.npz",
        "CCT",
        convert_ccx,
        settings,
        image,
        {**GIVEN, **given},
        {"heads": 2, "strides": settings["conv_strides"], **sizes},
        "ccx",
    )


def test_variants_are_recognised():
    given = {"num_heads": 4, "img_size": 32}
    vix_files.check_variants_are_recognised("ccx", convert_ccx, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "say --image_size"),
        ({"img_size": 8}, "say --heads"),
        ({"img_size": 8, "num_heads": 3}, r"heads=3.*do not divide the attention's 10"),
        ({"img_size": 8, "padding": 0}, "padding=0 does not fit a window of 3: 1"),
        ({"img_size": 8, "pooling_padding": 2}, "pooling_padding=2 does not fit a window of 3: 1"),
        ({"img_size": 8, "positional_embedding": "sine"}, "positional_embedding='sine'"),
        ({"img_size": 8, "num_heads": 2, "dropout": "0.1"}, "dropout must be a number; got '0.1'"),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    settings = vix_files.small("ccx", heads=2, conv_strides=(1, 1))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    tensors = vix_files.state(convert_ccx, model.config)
    with pytest.raises(ValueError, match=message):
        convert_ccx.settings(tensors, given)
