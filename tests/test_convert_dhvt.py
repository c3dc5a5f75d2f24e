"""DHVT's state dict: any constructor, and what a file does not say."""

import json

import hvt_numpy
import numpy as np
import pytest

from hsvit_jax import config as configs
from hsvit_jax import convert

SMALL = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
    "mlp_ratio": 2.0,
}


def written(path, constructor, described=True):
    """A state dict of this constructor, and what it makes of two images, as a golden is written."""
    tensors = hvt_numpy.random_state(hvt_numpy.dhvt_shapes(constructor))
    size = (2, constructor.get("in_chans", 3), *np.broadcast_to(constructor["img_size"], 2))
    images = np.random.default_rng(1).normal(size=size).astype(np.float32)
    logits = hvt_numpy.dhvt(tensors, constructor, images).astype(np.float32)
    description = {"family": "DHVT", "constructor": constructor if described else {}}
    counters = {k.replace("running_mean", "num_batches_tracked"): np.array(3) for k in tensors}
    counters = {k: v for k, v in counters.items() if k not in tensors}
    entries = {"input": images, "logits": logits, "config": json.dumps(description)}
    np.savez(path, **tensors, **counters, **entries)
    return tensors


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({}, True),
        ({"patch_size": 2, "img_size": [6, 10], "mlp_ratio": 4.0, "in_chans": 1}, False),
        ({"patch_size": 16, "img_size": 32, "embed_dim": 20, "num_heads": 5, "depth": 1}, True),
        ({"affine": False, "head_tokens": False}, True),
    ],
    ids=str,
)
def test_any_constructor(changes, described, tmp_path):
    constructor = {**SMALL, **changes}
    tensors = written(tmp_path / "any.npz", constructor, described)
    report = convert.convert_file(tmp_path / "any.npz")
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]
    parameters = (t.size for k, t in tensors.items() if "running" not in k)
    assert report["parameters"] == sum(parameters)
    config = configs.from_json((tmp_path / "any-jax" / "config.json").read_text())
    assert config.model.head_tokens == constructor.get("head_tokens", True)
    assert config.model.affine == constructor.get("affine", True)
    assert config.model.mlp_ratio == constructor["mlp_ratio"]


def test_what_the_tensors_do_not_tell(tmp_path):
    tensors = hvt_numpy.random_state(hvt_numpy.dhvt_shapes({**SMALL, "head_tokens": False}))
    np.savez(tmp_path / "a.npz", **tensors, config=json.dumps({"family": "DHVT"}))
    with pytest.raises(ValueError, match=r"--image_size\), num_heads \(say --heads"):
        convert.convert_file(tmp_path / "a.npz")
    convert.convert_file(tmp_path / "a.npz", heads=3, image_size=(16,))
    config = configs.from_json((tmp_path / "a-jax" / "config.json").read_text())
    assert (config.model.patch, config.model.depth, config.model.heads) == (4, 2, 3)


def test_misfits_are_named(tmp_path):
    tensors = hvt_numpy.random_state(hvt_numpy.dhvt_shapes(SMALL))
    tensors["blocks.1.mlp.bn3.running_var"][0] = np.nan
    del tensors["patch_embed.post_affine.beta"]
    tensors["blocks.0.mlp.bn4.weight"] = np.ones(3, np.float32)
    description = json.dumps({"family": "DHVT", "constructor": SMALL})
    np.savez(tmp_path / "a.npz", **tensors, config=description)
    with pytest.raises(ValueError, match="3 tensors do not fit") as error:
        convert.convert_file(tmp_path / "a.npz")
    for line in ("not finite", "missing patch_embed.post_affine.beta", "extra blocks.0.mlp.bn4"):
        assert line in str(error.value)


def test_a_named_variant_is_recognised():
    constructor = {**SMALL, "img_size": 32, "embed_dim": 384, "depth": 12, "num_heads": 8}
    constructor["mlp_ratio"] = 4.0
    shapes = hvt_numpy.dhvt_shapes(constructor)
    tensors = {k: np.broadcast_to(np.float32(0), s) for k, s in shapes.items()}
    model, data = convert.FAMILIES["dhvt"].settings(tensors, constructor)
    assert model["variant"] == "s-patch4" and data["image_size"] == (32, 32)
