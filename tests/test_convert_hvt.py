"""HVT's and DeiT's state dicts: goldens, any constructor, and what a file does not say."""

import json
import sys
import types

import hvt_numpy
import numpy as np
import pytest

from hsvit_jax import config as configs
from hsvit_jax import convert, models

GOLDENS = ("hvt-m2-max-everyblock", "hvt-m2-avg", "hvt-m0-deit-nocls")
SMALL = {
    "num_heads": 3,
    "num_blocks": 2,
    "pool_block_width": 1,
    "input_size": 20,
    "patch_size": 4,
    "head_dim": 2,
    "num_classes": 7,
    "pool_kernel_size": 3,
    "pool_stride": 2,
    "mlp_ratio": 4,
    "qkv_bias": True,
    "ln_eps": 1e-6,
}


def written(path, constructor, family="HVT", variant="", describe=True, **own):
    """A state dict of this constructor, and what it makes of two images, as a golden is written."""
    full = {"size": (constructor["input_size"],) * 2, **constructor, **own}
    tensors = hvt_numpy.random_state(hvt_numpy.hvt_shapes(full))
    size = (2, full.get("in_chans", 3), *full["size"])
    images = np.random.default_rng(1).normal(size=size).astype(np.float32)
    logits = hvt_numpy.hvt(tensors, full, images).astype(np.float32)
    description = {"family": family, "variant": variant}
    if describe:
        description["constructor"] = constructor
    np.savez(path, **tensors, input=images, logits=logits, config=json.dumps(description))
    return tensors, path


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name, golden_dir, tmp_path):
    source = golden_dir / f"{name}.npz"
    report = convert.convert_file(source, tmp_path / "out")
    with np.load(source) as golden:
        assert report["parameters"] == json.loads(golden["config"].item())["n_params"]
    assert 0 < report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


@pytest.mark.parametrize("name", GOLDENS)
def test_numpy_network_agrees_with_the_goldens(name, golden_dir):
    with np.load(golden_dir / f"{name}.npz") as golden:
        tensors = {k: golden[k] for k in golden.files}
    c = json.loads(tensors["config"].item())["constructor"]
    c |= {"size": tensors["input"].shape[2:], "pool": "average" if "avg" in name else "max"}
    logits = hvt_numpy.hvt(tensors, c, tensors["input"])
    np.testing.assert_allclose(logits, tensors["logits_f64"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, {"pool": "conv", "variant": "convolution"}),
        ({"qkv_bias": False, "pool_kernel_size": 2, "num_blocks": 3, "pool_block_width": 2}, {}),
        ({"input_size": 28, "pool_kernel_size": 5}, {"pool_dims": 2, "variant": "2D average pool"}),
        ({"mlp_ratio": 1.5, "ln_eps": 1e-3}, {"pool": "conv", "pool_dims": 2}),
        ({"pool_block_width": None}, {"cls": True, "variant": "DeiT with CLS", "family": "DeiT"}),
        ({"pool_block_width": None, "in_chans": 1, "patch_size": 5}, {"size": (20, 15)}),
    ],
    ids=str,
)
def test_any_constructor(changes, own, tmp_path):
    constructor = {**SMALL, **changes}
    if "average" in own.get("variant", ""):
        own = {**own, "pool": "average"}
    tensors, source = written(tmp_path / "any.npz", constructor, **own)
    report = convert.convert_file(source)
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]
    assert report["parameters"] == sum(t.size for t in tensors.values())
    model = configs.from_json((tmp_path / "any-jax" / "config.json").read_text()).model
    assert model.eps == constructor["ln_eps"] and model.qkv_bias == constructor["qkv_bias"]


def test_sizes_from_shapes_and_options(tmp_path):
    """Nothing but tensors: heads are asked for; widths of 64 and a square image are the custom."""
    tensors, _ = written(tmp_path / "a.npz", SMALL)
    bare = {k: v for k, v in tensors.items() if k not in ("input", "logits", "config")}
    description = json.dumps({"family": "hvt"})
    np.savez(tmp_path / "bare.npz", **bare, config=description)
    with pytest.raises(ValueError, match="do not tell num_heads \\(say --heads\\)"):
        convert.convert_file(tmp_path / "bare.npz")
    convert.convert_file(tmp_path / "bare.npz", heads=3)
    config = configs.from_json((tmp_path / "bare-jax" / "config.json").read_text())
    assert config.data.image_size == (20, 20) and config.data.num_classes == 7
    assert config.model.stage_depth == 1 and config.model.pool == "max"
    model = models.build(config.model, image_size=(20, 20), channels=3, num_classes=7)
    assert model.config.tokens == 25


def test_a_named_variant_is_recognised(tmp_path):
    constructor = {**SMALL, "num_heads": 3, "head_dim": 64, "num_blocks": 12, "patch_size": 16}
    constructor |= {"input_size": 224, "pool_block_width": 12, "num_classes": 2}
    shapes = hvt_numpy.hvt_shapes({**constructor, "size": (224, 224)})
    tensors = {k: np.zeros(s, np.float32) for k, s in shapes.items()}
    model, data = convert.FAMILIES["hvt"].settings(tensors, {**constructor, "variant": ""})
    assert (model["family"], model["variant"]) == ("hvt", "ti-1")
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
    tensors, _ = written(tmp_path / "a.npz", SMALL)
    tensors = dict(tensors)
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
    _, source = written(tmp_path / "a.npz", SMALL)
    with pytest.raises(ValueError, match="num_heads=4 do not divide the width of a token, 6"):
        convert.convert_file(source, heads=4)


def test_a_published_checkpoint_s_form(tmp_path, monkeypatch):
    """The trainers of this family save {'model': …} and say nothing of sizes."""
    constructor = {**SMALL, "num_heads": 1, "head_dim": 64, "num_blocks": 1, "cls": True}
    shapes = hvt_numpy.hvt_shapes({**constructor, "pool_block_width": None, "size": (20, 20)})
    tensors = {k: FakeTensor(v) for k, v in hvt_numpy.random_state(shapes).items()}

    def load(path, **options):
        return {"model": tensors, "epoch": 3}

    fake = types.SimpleNamespace(load=load, Tensor=FakeTensor)
    monkeypatch.setitem(sys.modules, "torch", fake)
    (tmp_path / "deit.pth").write_bytes(b"x")
    assert convert.main([str(tmp_path / "deit.pth"), "--family=deit"]) == 0
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

    def numpy(self):
        return self.array
