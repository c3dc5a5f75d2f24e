"""HVT's and DeiT's state dicts: goldens, and what a file does not say."""

import json
import sys
import types

import numpy as np
import pytest
from support import state_dicts, torch_files

from hsvit_jax import config as configs
from hsvit_jax import main, models
from hsvit_jax.commands import convert
from hsvit_jax.models.vit import hvt

GOLDENS = ("hvt-m2-max-everyblock", "hvt-m2-avg", "hvt-m0-deit-nocls")
SMALL = state_dicts.CASES["hvt"]["constructor"]


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name, golden_dir, tmp_path):
    source = golden_dir / f"{name}.npz"
    report = convert.convert_file(source, tmp_path / "out")
    with np.load(source) as golden:
        assert report["parameters"] == json.loads(golden["config"].item())["n_params"]
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_sizes_from_shapes_and_options(tmp_path):
    """Nothing but tensors: heads are asked for; widths of 64 and a square image are the custom."""
    description = json.dumps({"family": "hvt"})
    np.savez(tmp_path / "bare.npz", **state_dicts.tensors("hvt"), config=description)
    with pytest.raises(ValueError, match="do not tell num_heads \\(say --heads\\)"):
        convert.convert_file(tmp_path / "bare.npz")
    convert.convert_file(tmp_path / "bare.npz", heads=3)
    config = configs.from_json((tmp_path / "bare-jax" / "config.json").read_text())
    assert config.data.image_size == (20, 20) and config.data.num_classes == 7
    assert config.model.stage_depth == 1 and config.model.pool == "max"
    model = models.build(config.model, image_size=(20, 20), channels=3, num_classes=7)
    assert model.config.tokens == 25


def test_a_named_variant_is_recognised():
    settings = {**hvt.DEFAULTS, **hvt.VARIANTS["ti-1"], "family": "hvt", "dtype": "float32"}
    model = models.build(settings, image_size=(224, 224), channels=3, num_classes=2)
    entries = torch_files.listing("hvt", model)
    tensors = {e.key: np.broadcast_to(np.float32(0), e.shape) for e in entries}
    given = {"num_heads": 3, "head_dim": 64, "input_size": 224, "variant": ""}
    found, data = torch_files.settings("hvt", tensors, given)
    assert (found["family"], found["variant"]) == ("hvt", "ti-1")
    assert data == {"image_size": (224, 224), "channels": 3, "num_classes": 2}


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("blocks.1.pos_embed", lambda t: t[:, :-1], r"misshapen blocks.1.pos_embed: \(1, 4, 6\)"),
        ("norm.bias", None, r"missing norm.bias \(6,\)"),
        ("blocks.0.attn.extra", lambda t: np.zeros(2, "f4"), "extra blocks.0.attn.extra"),
    ],
)
def test_misfits_are_named(key, change, message, tmp_path):
    tensors = state_dicts.tensors("hvt")
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change(tensors.get(key))
    description = json.dumps({"family": "HVT", "constructor": SMALL})
    np.savez(tmp_path / "bad.npz", **tensors, config=description)
    with pytest.raises(ValueError, match=message):
        convert.convert_file(tmp_path / "bad.npz")
    assert not (tmp_path / "bad-jax").exists()


def test_heads_that_do_not_divide_the_width(tmp_path):
    source = state_dicts.write(tmp_path / "a.npz", "hvt")
    with pytest.raises(ValueError, match="num_heads=4 do not divide the width of a token, 6"):
        convert.convert_file(source, heads=4)


def test_a_published_checkpoint_s_form(tmp_path, monkeypatch):
    """The trainers of this family save {'model': …} and say nothing of sizes."""
    tensors = {k: FakeTensor(v) for k, v in state_dicts.tensors("deit published").items()}

    def load(path, **options):
        return {"model": tensors, "epoch": 3}

    fake = types.SimpleNamespace(load=load, Tensor=FakeTensor)
    monkeypatch.setitem(sys.modules, "torch", fake)
    (tmp_path / "deit.pth").write_bytes(b"x")
    assert main.main(["hsvit", "convert", str(tmp_path / "deit.pth"), "--family=deit"]) == 0
    config = configs.from_json((tmp_path / "deit-jax" / "config.json").read_text())
    assert (config.model.family, config.model.cls, config.model.heads) == ("deit", True, 1)
    assert config.data.image_size == (20, 20)


class FakeTensor:
    """As much of a torch tensor as a state dict's reader touches."""

    def __init__(self, array):
        self.array = array

    def is_floating_point(self):
        return True

    def float(self):
        return self

    def detach(self):
        return self

    def numpy(self):
        return self.array
