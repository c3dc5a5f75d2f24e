"""DHVT's state dict: what a file does not say, and what does not fit."""

import json

import numpy as np
import pytest
from support import state_dicts, torch_files

from hsvit_jax import config as configs
from hsvit_jax import models
from hsvit_jax.commands import convert
from hsvit_jax.models.vit import dhvt

SMALL = state_dicts.CASES["dhvt"]["constructor"]


def test_what_the_tensors_do_not_tell(tmp_path):
    tensors = state_dicts.tensors("dhvt no affine, no head tokens")
    np.savez(tmp_path / "a.npz", **tensors, config=json.dumps({"family": "DHVT"}))
    with pytest.raises(ValueError, match=r"--image_size\), num_heads \(say --heads"):
        convert.convert_file(tmp_path / "a.npz")
    convert.convert_file(tmp_path / "a.npz", heads=3, image_size=(16,))
    config = configs.from_json((tmp_path / "a-jax" / "config.json").read_text())
    assert (config.model.patch, config.model.depth, config.model.heads) == (4, 2, 3)


def test_misfits_are_named(tmp_path):
    tensors = state_dicts.tensors("dhvt")
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
    settings = {
        **dhvt.FAMILY.defaults,
        **dhvt.VARIANTS["s-patch4"],
        "family": "dhvt",
        "dtype": "float32",
    }
    model = models.build(settings, image_size=(32, 32), channels=3, num_classes=7)
    entries = torch_files.listing("dhvt", model)
    tensors = {e.key: np.broadcast_to(np.float32(0), e.shape) for e in entries}
    found, data = torch_files.settings("dhvt", tensors, {"img_size": 32, "num_heads": 8})
    assert found["variant"] == "s-patch4" and data["image_size"] == (32, 32)
