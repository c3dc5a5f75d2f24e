"""MobileViT's state dicts: a golden, any configuration, and what is refused."""

import pytest
from support import hf_files

SHAPES = {"mobilevit.conv_stem.convolution.weight": (4, 3, 3, 3), "classifier.weight": (7, 13)}
SMALL = {
    "neck_hidden_sizes": [4, 6, 8, 10, 12, 11, 13],
    "hidden_sizes": [6, 9, 12],
    "num_attention_heads": 3,
    "model_type": "mobilevit",
}


def test_golden_with_maps_that_are_resized(golden_dir, tmp_path):
    hf_files.check_golden(golden_dir / "hf-mobilevit-32.npz", tmp_path / "out", "mobilevit")


def test_fields_make_the_network():
    given = {
        **SMALL,
        "mlp_ratio": 1.5,
        "expand_ratio": 2,
        "conv_kernel_size": 5,
        "patch_size": 3,
        "output_stride": 8,
        "hidden_act": "relu",
        "qkv_bias": False,
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.3,
        "classifier_dropout_prob": 0.4,
        "layer_norm_eps": 1e-3,
    }
    network, model = hf_files.check_every_tensor_has_its_place(
        "mobilevit", given, SHAPES, image=(3, 40, 48)
    )
    c = network.config
    assert c.maps()[-3:] == ((5, 6),) * 3 and c.patch == 3
    assert (c.dropout, c.attention_dropout, c.head_dropout) == (0.2, 0.3, 0.4)
    assert (c.activation, c.eps, model["variant"]) == ("relu", 1e-3, "custom")


def test_published_sizes_have_their_name():
    given = {"hidden_sizes": [96, 120, 144], "neck_hidden_sizes": [16, 32, 48, 64, 80, 96, 384]}
    *_, model = hf_files.small_file("mobilevit", given, SHAPES, (3, 32, 32))
    assert model["variant"] == "xs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"neck_hidden_sizes": [4, 6]}, "has seven channels .* and three widths"),
        ({"hidden_sizes": [6, 9, 13]}, r"widths=\(6, 9, 13\) are not all divisible by heads=3"),
        ({"output_stride": 4}, "output_stride must be 8, 16 or 32; got 4"),
        ({"conv_kernel_size": 4}, "kernel must be odd; got 4"),
        ({"hidden_act": ["silu"]}, "hidden_act must be of type str"),
        ({"classifier_dropout_prob": 1}, r"must be in \[0, 1\); got 1.0"),
        ({"patch_size": 0}, "sizes must be positive"),
    ],
)
def test_fields_that_do_not_fit_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_files.small_file("mobilevit", {**SMALL, **changes}, SHAPES, (3, 32, 32))
