"""State dicts of ViT, HVT, DeiT and DHVT: goldens, named variants, and what a file does not say."""

import sys

import numpy as np
import pytest
from support import hf_files, state_dicts, torch_files

from hsvit_jax import config as configs
from hsvit_jax import main, models
from hsvit_jax.weights import torch
from hsvit_jax.weights.convert import convert

VIT_SHAPES = {
    "vit.embeddings.patch_embeddings.projection.weight": (12, 3, 4, 4),
    "classifier.weight": (7, 12),
}
VIT = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 13,
    "patch_size": 4,
    "model_type": "vit",
}


# --- ViT of `transformers` -----------------------------------------------------------------------


def test_fields_make_the_network():
    given = {
        **VIT,
        "qkv_bias": False,
        "hidden_act": "relu",
        "layer_norm_eps": 1e-3,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.2,
    }
    network, model = hf_files.check_every_tensor_has_its_place("vit", given, VIT_SHAPES)
    c = network.config
    assert (c.dropout, c.attention_dropout, c.eps, c.activation) == (0.1, 0.2, 1e-3, "relu")
    assert (c.tokens, c.hidden, c.qkv_bias, model["variant"]) == (5, 13, False, "custom")


def test_published_sizes_have_their_name():
    given = {"model_type": "vit", "image_size": 224, "id2label": {"0": "cat", "1": "dog"}}
    model, data = torch_files.settings("vit", {}, given)
    assert model["variant"] == "b-patch16"
    assert (data["image_size"], data["num_classes"]) == ((224, 224), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 3}, "8×8 pixels cannot be cut into patches of patch=3"),
    ],
)
def test_fields_that_do_not_fit_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_files.small_file("vit", {**VIT, **changes}, VIT_SHAPES)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("hvt", {"qk_scale": 0.5}),
        ("dhvt", {"qk_scale": 0.5}),
        ("deit cls", {"global_pool": "avg"}),
        ("hvt no pool, not square", {"global_pool": "max"}),
    ],
)
def test_arguments_that_no_tensor_tells_are_refused(case, changes):
    family = state_dicts.CASES[case]["family"].lower()
    given = state_dicts.CASES[case]["constructor"] | changes
    with pytest.raises(ValueError, match=f"{next(iter(changes))}=.* is not supported"):
        torch_files.settings(family, state_dicts.tensors(case), given)


def test_what_a_file_does_not_say_is_asked_for(tmp_path):
    """A model type that nobody has, and heads that no tensor shows."""
    for config, message in (
        ('{"constructor": {"model_type": "bert"}}', "unknown model_type 'bert'; known: .*vit"),
        ('{"family": "hvt", "constructor": {"patch_size": 4}}', "num_heads is missing"),
        ('{"family": "hvt"}', "does not say what network it holds: name one, as in --config="),
    ):
        np.savez(tmp_path / "a.npz", config=config, x=np.zeros(1, "f"))
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "a.npz")


def test_a_published_checkpoint_s_form(tmp_path, monkeypatch):
    """The trainers of HVT and DeiT save {'model': …} and say nothing of sizes."""
    tensors = state_dicts.tensors("deit published")
    saved = {"model": {k: torch_files.FakeTensor(v) for k, v in tensors.items()}, "epoch": 3}
    monkeypatch.setitem(sys.modules, "torch", torch_files.fake_torch(lambda path, **_: saved))
    (tmp_path / "deit.pth").write_bytes(b"x")
    words = ["--config=deit", "--config.model.patch=4", "--config.model.heads=1"]
    words += ["--config.model.depth=1", "--config.data.image_size=20,20"]
    assert main.main(["hsvit", "convert", str(tmp_path / "deit.pth"), *words]) == 0
    config = configs.from_json((tmp_path / "deit-jax" / "config.json").read_text())
    assert (config.model.family, config.model.cls, config.model.heads) == ("deit", True, 1)
    assert (config.data.image_size, config.data.num_classes) == ((20, 20), 7)


def test_a_family_without_a_table_has_no_files():
    with pytest.raises(ValueError, match="the family 'mine' has no table of PyTorch's names"):
        torch.table("mine")
    assert torch.TABLES.keys() <= models.FAMILIES.keys()
