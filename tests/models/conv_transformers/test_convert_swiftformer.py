"""SwiftFormer's state dicts: a golden, any configuration, and what is refused."""

import pytest
from support import hf_files

SHAPES = {"swiftformer.patch_embed.patch_embedding.0.weight": (3, 3, 3, 3), "head.weight": (7, 11)}
SMALL = {"depths": [1, 2, 1], "embed_dims": [6, 6, 11], "model_type": "swiftformer"}


def test_golden(golden_dir, tmp_path):
    source = golden_dir / "hf-swiftformer.npz"
    hf_files.check_golden(source, tmp_path / "out", "swiftformer")


def test_fields_make_the_network():
    given = {
        **SMALL,
        "mlp_ratio": 3,
        "downsamples": [False, False, True],
        "down_patch_size": 5,
        "down_stride": 3,
        "down_pad": 2,
        "hidden_act": "relu",
        "use_layer_scale": False,
        "drop_path_rate": 0.1,
        "drop_mlp_rate": 0.2,
        "drop_conv_encoder_rate": 0.3,
        "batch_norm_eps": 1e-3,
    }
    network, model = hf_files.check_every_tensor_has_its_place(
        "swiftformer", given, SHAPES, image=(3, 24, 28)
    )
    c = network.config
    assert c.maps() == ((12, 14), (6, 7), (6, 7), (2, 3)) and c.hidden(2) == 33
    assert (c.drop_path, c.dropout, c.conv_drop_path, c.eps) == (0.1, 0.2, 0.3, 1e-3)
    assert (c.layer_scale, c.activation, model["variant"]) == (0, "relu", "custom")


def test_published_sizes_have_their_name():
    given = {"depths": [3, 3, 9, 6], "embed_dims": [48, 64, 168, 224], "mlp_ratio": 4}
    _, _, model = hf_files.small_file("swiftformer", given, SHAPES, (3, 32, 32))
    assert model["variant"] == "s"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": [1, 2]}, r"depths=\(1, 2\) and widths=\(6, 6, 11\) need one entry per stage"),
        ({"depths": [1, 0, 1]}, "sizes must be positive"),
        ({"embed_dims": [6, 6.5, 11]}, r"embed_dims must be of type int; got 6.5"),
        ({"down_patch_size": [3, 3]}, "down_patch_size must be of type int"),
        ({"down_patch_size": 9}, "a map of 4×4 is too small for a convolution of size 9"),
        ({"hidden_act": "selu"}, "unknown activation 'selu'"),
        ({"layer_scale_init_value": 0.0}, "layer_scale_init_value=0 with use_layer_scale"),
        ({"drop_path_rate": 1}, r"must be in \[0, 1\); got 1.0"),
    ],
)
def test_fields_that_do_not_fit_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        given = {**SMALL, **changes}
        hf_files.small_file("swiftformer", given, SHAPES, (3, 16, 16))
