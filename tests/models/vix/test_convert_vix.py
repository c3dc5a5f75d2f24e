"""ViX's state dicts: goldens, named variants, and what a file does not say."""

import json

import numpy as np
import pytest
from support import vix_files

from hsvit_jax import config as configs
from hsvit_jax import models
from hsvit_jax.commands import convert

GOLDENS = ("vix-viprope", "vix-mlpmixer", "vix-fnet")


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name, golden_dir, tmp_path):
    source = golden_dir / f"{name}.npz"
    report = convert.convert_file(source, tmp_path / "out")
    with np.load(source) as golden:
        assert report["parameters"] == json.loads(golden["config"].item())["n_params"]
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("vix", {"heads": 4, "image_size": 32})


def test_sizes_from_shapes_and_options(tmp_path):
    """Nothing but tensors: heads are asked for, a square image is taken from the positions."""
    settings = vix_files.small("vix", patch=2)
    model = models.build(settings, image_size=(6, 6), channels=3, num_classes=7)
    tensors = {f"module.{k}": v for k, v in vix_files.state("vix", model).items()}
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
    tensors = vix_files.state("vix", model)
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
