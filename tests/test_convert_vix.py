"""ViX's state dicts: goldens, a network in NumPy, any constructor, what a file does not say."""

import json

import numpy as np
import pytest
import vix_files
import vix_numpy

from hsvit_jax import config as configs
from hsvit_jax import convert, convert_vix, models

GOLDENS = ("vix-viprope", "vix-mlpmixer", "vix-fnet")
SIZES = {"num_classes": 7, "dim": 10, "depth": 2, "heads": 3, "mlp_dim": 14, "dim_head": 4}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name, golden_dir, tmp_path):
    source = golden_dir / f"{name}.npz"
    report = convert.convert_file(source, tmp_path / "out")
    with np.load(source) as golden:
        assert report["parameters"] == json.loads(golden["config"].item())["n_params"]
    assert 0 < report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


@pytest.mark.parametrize(
    ("name", "method", "sizes", "tolerance"),
    [
        ("vix-viprope", "vix", {"rope": True}, 3e-7),  # the reference's rotary table is float32
        ("vix-mlpmixer", "mlp_mixer", {}, 1e-12),
        ("vix-fnet", "vix", {"fnet": True}, 1e-12),
    ],
)
def test_numpy_network_agrees_with_the_goldens(name, method, sizes, tolerance, golden_dir):
    with np.load(golden_dir / f"{name}.npz") as golden:
        tensors = {k: golden[k] for k in golden.files if k != "config"}
    network = vix_numpy.Network(tensors, heads=4, patch=2, **sizes)
    logits = getattr(network, method)(tensors["input"].astype(np.float64))
    np.testing.assert_allclose(logits, tensors["logits_f64"], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("changes", "image", "given", "sizes"),
    [
        (
            {"patch": 2, "dropout": 0.1, "embed_dropout": 0.2},
            (2, 8, 12),
            {"image_size": [8, 12], "patch_size": 2, "dropout": 0.1, "emb_dropout": 0.2},
            {"patch": 2},
        ),
        (
            {"mixer": "performer", "stem_channels": (5,), "stem_strides": (2, 1)},
            (3, 9, 9),
            {"image_size": 5, "patch_size": 1},
            {"strides": (2, 1)},
        ),
        (
            {"mixer": "nystrom", "positions": "rope", "stem_channels": (5, 6)}
            | {"stem_strides": (1, 1, 1), "patch": 1},
            (3, 5, 5),
            {"image_size": 5, "patch_size": 1, "num_landmarks": 4},
            {"strides": (1, 1, 1), "landmarks": 4},
        ),
        (
            {"mixer": "linformer", "positions": "rope", "one_kv_head": False, "patch": 3},
            (1, 9, 6),
            {"image_size": [9, 6], "num_channels": 1},
            {"patch": 3},
        ),
        (
            {"mixer": "linformer", "heads": 1, "patch": 1, "depth": 1},
            (3, 3, 4),
            {"image_size": [3, 4], "heads": 1},
            {"patch": 1, "heads": 1},
        ),
        (
            {"mixer": "mlp_mixer", "stem_channels": (5, 6), "stem_strides": (2, 2, 1)}
            | {"expansion": 1.5, "dropout": 0.3},
            (3, 8, 16),
            {"stem_strides": [2, 2, 1], "dropout": 0.3},
            {"strides": (2, 2, 1)},
        ),
    ],
    ids=lambda x: str(x)[:50],
)
def test_any_constructor(changes, image, given, sizes, tmp_path):
    settings = vix_files.small("vix", **changes)
    if settings["stem_channels"]:
        settings["patch"] = 1
    if settings["mixer"] == "mlp_mixer":
        settings |= {"heads": 4, "head_dim": 32, "mlp_dim": 256, "landmarks": 64}
    method = "mlp_mixer" if settings["mixer"] == "mlp_mixer" else "vix"
    only = {"nystrom": ("landmarks", "residual_kernel"), "linformer": ("projections",)}
    usual = {"projections": 64, "landmarks": 64, "residual_kernel": 33}
    settings |= {k: v for k, v in usual.items() if k not in only.get(settings["mixer"], ())}
    vix_files.check_conversion(
        tmp_path / "any.npz",
        "ViX",
        convert_vix,
        settings,
        image,
        {**SIZES, **given},
        {"heads": settings["heads"], **sizes},
        method,
    )


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("vix", convert_vix, {"heads": 4, "image_size": 32})


def test_sizes_from_shapes_and_options(tmp_path):
    """Nothing but tensors: heads are asked for, a square image is taken from the positions."""
    settings = vix_files.small("vix", patch=2)
    model = models.build(settings, image_size=(6, 6), channels=3, num_classes=7)
    tensors = {f"module.{k}": v for k, v in vix_files.state(convert_vix, model.config).items()}
    np.savez(tmp_path / "bare.npz", **tensors, config=json.dumps({"family": "vix"}))
    with pytest.raises(ValueError, match="do not tell the number of heads: say --heads"):
        convert.convert_file(tmp_path / "bare.npz")
    with pytest.raises(ValueError, match=r"heads=5.*do not divide the attention's 12"):
        convert.convert_file(tmp_path / "bare.npz", heads=5)
    convert.convert_file(tmp_path / "bare.npz", heads=3)
    config = configs.from_json((tmp_path / "bare-jax" / "config.json").read_text())
    assert config.data.image_size == (6, 6) and config.data.channels == 3
    assert (config.model.patch, config.model.head_dim, config.model.depth) == (2, 4, 2)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("pos_embedding", lambda t: t[:, :-1], "misshapen pos_embedding"),
        ("mlp_head.0.bias", None, r"missing mlp_head.0.bias \(10,\)"),
        ("transformer.extra", lambda t: np.zeros(2, "f4"), r"extra transformer.extra \(2,\)"),
        ("mlp_head.1.weight", None, "cannot read the network's sizes: mlp_head.1.weight"),
        ("mlp_head.1.weight", lambda t: t[0], r"mlp_head.1.weight has the shape \(10,\)"),
    ],
)
def test_misfits_are_named(key, change, message, tmp_path):
    settings = vix_files.small("vix", patch=2)
    model = models.build(settings, image_size=(6, 6), channels=3, num_classes=7)
    tensors = vix_files.state(convert_vix, model.config)
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change(tensors.get(key))
    constructor = {"image_size": 6, "patch_size": 2, "heads": 3}
    description = json.dumps({"family": "ViX", "constructor": constructor})
    np.savez(tmp_path / "bad.npz", **tensors, config=description)
    with pytest.raises(ValueError, match=message):
        convert.convert_file(tmp_path / "bad.npz")
    assert not (tmp_path / "bad-jax").exists()
