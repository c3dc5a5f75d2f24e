"""State dicts of ViT, HVT, DeiT and DHVT: goldens, named variants, and what a file does not say."""

import json
import sys

import numpy as np
import pytest
from support import hf_files, state_dicts, torch_files

from hsvit_jax import config as configs
from hsvit_jax import main
from hsvit_jax.commands import convert

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


@pytest.mark.parametrize(
    ("family", "variant", "side", "heads"), [("hvt", "ti-1", 224, 3), ("dhvt", "s-patch4", 32, 8)]
)
def test_shapes_tell_the_variant(family, variant, side, heads):
    assert torch_files.variant_of_shapes(family, variant, side, num_heads=heads) == variant


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("hvt", {}, r"do not tell num_heads \(say --heads\)"),
        ("hvt", {"heads": 4}, "num_heads=4 do not divide the width of a token, 6"),
        ("dhvt no affine, no head tokens", {}, r"--image_size\), num_heads \(say --heads"),
    ],
)
def test_what_the_tensors_do_not_tell_is_asked_for(case, options, message, tmp_path):
    description = json.dumps({"family": case[:4].strip()})
    np.savez(tmp_path / "bare.npz", **state_dicts.tensors(case), config=description)
    with pytest.raises(ValueError, match=message):
        convert.convert_file(tmp_path / "bare.npz", **options)
    options = {"heads": 3, "image_size": (16,)} if "dhvt" in case else {"heads": 3}
    convert.convert_file(tmp_path / "bare.npz", **options)
    config = configs.from_json((tmp_path / "bare-jax" / "config.json").read_text())
    side, depth = (16, 2) if "dhvt" in case else (20, config.model.depth)
    assert (config.model.patch, config.model.depth, config.model.heads) == (4, depth, 3)
    assert config.data.image_size == (side, side) and config.data.num_classes == 7


def test_a_published_checkpoint_s_form(tmp_path, monkeypatch):
    """The trainers of HVT and DeiT save {'model': …} and say nothing of sizes."""
    tensors = state_dicts.tensors("deit published")
    saved = {"model": {k: torch_files.FakeTensor(v) for k, v in tensors.items()}, "epoch": 3}
    monkeypatch.setitem(sys.modules, "torch", torch_files.fake_torch(lambda path, **_: saved))
    (tmp_path / "deit.pth").write_bytes(b"x")
    assert main.main(["hsvit", "convert", str(tmp_path / "deit.pth"), "--family=deit"]) == 0
    config = configs.from_json((tmp_path / "deit-jax" / "config.json").read_text())
    assert (config.model.family, config.model.cls, config.model.heads) == ("deit", True, 1)
    assert config.data.image_size == (20, 20)


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
    tensors = {k: np.zeros(s) for k, s in VIT_SHAPES.items()}
    model, data = torch_files.settings("vit", tensors, {"model_type": "vit", "image_size": 224})
    assert model["variant"] == "b-patch16"
    assert (data["image_size"], data["num_classes"]) == ((224, 224), 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 13}, "num_attention_heads=3 do not divide hidden_size=13"),
        ({"hidden_act": "laplace"}, "hidden_act: unknown activation 'laplace'; known: none"),
        ({"patch_size": [4, 4]}, r"patch_size must be of type int; got \[4, 4\]"),
        ({"qkv_bias": 1}, "qkv_bias must be of type bool; got 1"),
        ({"patch_size": 3}, "8×8 pixels cannot be cut into patches of patch=3"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be of type int; got True"),
        ({"hidden_dropout_prob": 1.5}, "dropout must be in"),
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


def test_what_a_configuration_lacks_is_told(tmp_path):
    shapes = {k: np.zeros(s, np.float32) for k, s in VIT_SHAPES.items()}
    for config, tensors, message in (
        ('{"constructor": {"model_type": "bert"}}', {}, "unknown model_type 'bert'; known: .*vit"),
        ('{"model_type": "vit"}', {}, "missing or misshapen vit.embeddings.patch_embeddings"),
        ('{"model_type": "vit"}', shapes, "say --image_size"),
    ):
        np.savez(tmp_path / "a.npz", config=config, **tensors)
        with pytest.raises(ValueError, match=message):
            convert.convert_file(tmp_path / "a.npz")
