"""ViT's state dicts: goldens in both versions' names, any configuration, and what is refused."""

import numpy as np
import pytest
from support import hf_files, torch_files

from hsvit_jax.commands import convert

SHAPES = {
    "vit.embeddings.patch_embeddings.projection.weight": (12, 3, 4, 4),
    "classifier.weight": (7, 12),
}
SMALL = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 13,
    "patch_size": 4,
    "model_type": "vit",
}


@pytest.mark.parametrize("name", ["hf-vit-p4", "hf-vit-p4-v5keys"])
def test_goldens(name, golden_dir, tmp_path):
    hf_files.check_golden(golden_dir / f"{name}.npz", tmp_path / "out", "vit")


def test_fields_make_the_network():
    given = {
        **SMALL,
        "qkv_bias": False,
        "hidden_act": "relu",
        "layer_norm_eps": 1e-3,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.2,
    }
    network, model = hf_files.check_every_tensor_has_its_place("vit", given, SHAPES)
    c = network.config
    assert (c.dropout, c.attention_dropout, c.eps, c.activation) == (0.1, 0.2, 1e-3, "relu")
    assert (c.tokens, c.hidden, c.qkv_bias, model["variant"]) == (5, 13, False, "custom")


def test_published_sizes_have_their_name():
    model, data = torch_files.settings(
        "vit", {k: np.zeros(s) for k, s in SHAPES.items()}, {"model_type": "vit", "image_size": 224}
    )
    assert (model["variant"], data["image_size"], data["num_classes"]) == (
        "b-patch16",
        (224, 224),
        7,
    )


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
        hf_files.small_file("vit", {**SMALL, **changes}, SHAPES)


def test_another_model_type_is_told(tmp_path):
    np.savez(tmp_path / "a.npz", config='{"constructor": {"model_type": "bert"}}')
    with pytest.raises(ValueError, match=r"unknown model_type 'bert'; known: .*vit"):
        convert.convert_file(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", config='{"model_type": "vit"}', x=np.zeros(2))
    with pytest.raises(ValueError, match=r"missing or misshapen vit.embeddings.patch_embeddings"):
        convert.convert_file(tmp_path / "b.npz")
    shapes = {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}
    np.savez(tmp_path / "c.npz", config='{"model_type": "vit"}', **shapes)
    with pytest.raises(ValueError, match="say --image_size"):
        convert.convert_file(tmp_path / "c.npz")
