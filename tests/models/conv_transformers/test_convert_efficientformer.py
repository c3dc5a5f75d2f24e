"""EfficientFormer's state dicts: goldens, any configuration, and what is refused."""

import numpy as np
import pytest
from support import hf_files, torch_files

SHAPES = {
    "efficientformer.patch_embed.convolution1.weight": (3, 3, 3, 3),
    "classifier.weight": (7, 11),
}
SMALL = {
    "depths": [1, 2, 3],
    "hidden_sizes": [6, 6, 11],
    "num_meta3d_blocks": 2,
    "downsamples": [False, False, True],
    "num_attention_heads": 3,
    "key_dim": 2,
    "attention_ratio": 2.5,
    "mlp_expansion_ratio": 3,
    "resolution": 3,
    "model_type": "efficientformer",
}
IMAGE = (3, 24, 24)


def test_golden(golden_dir, tmp_path):
    source = golden_dir / "hf-efficientformer-3d2.npz"
    hf_files.check_golden(source, tmp_path / "out", "efficientformer")


def test_fields_make_the_network():
    given = {
        **SMALL,
        "use_layer_scale": False,
        "hidden_act": "relu",
        "pool_size": 5,
        "drop_path_rate": 0.02,
        "hidden_dropout_prob": 0.1,
        "layer_norm_eps": 1e-3,
        "batch_norm_eps": 1e-2,
    }
    network, model = hf_files.check_every_tensor_has_its_place(
        "efficientformer", given, SHAPES, image=IMAGE
    )
    c = network.config
    assert c.maps() == ((12, 12), (6, 6), (6, 6), (3, 3))
    assert (c.value_dim, c.pool_window, c.activation, c.layer_scale) == (5, 5, "relu", 0)
    assert (c.dropout, c.eps, c.norm_eps, model["variant"]) == (0.1, 1e-3, 1e-2, "custom")
    assert c.drop_path == pytest.approx(0.02 * 5)  # the reference grows by 0.02 a block


def test_published_sizes_have_their_name():
    tensors = {k: np.zeros(s) for k, s in SHAPES.items()}
    model, data = torch_files.settings("efficientformer", tensors, {"resolution": 4})
    assert (model["variant"], data["image_size"]) == ("l1", (128, 128))


def test_indices_are_passed_over():
    network, tensors, _ = hf_files.small_file("efficientformer", SMALL, SHAPES, IMAGE)
    key = "efficientformer.encoder.last_stage.meta3D_layers.blocks.0.token_mixer"
    tensors[f"{key}.attention_bias_idxs"] = np.zeros((9, 9), np.int64)
    params, _ = torch_files.load("efficientformer", tensors, network)
    bias = params["stage2"]["attention_blocks"]["0"]["attention"]["offset_bias"]
    np.testing.assert_array_equal(bias, tensors[f"{key}.attention_biases"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resolution": 2}, "resolution=2 needs a last map of 2×2; an image of 24×24 leaves 3×3"),
        ({"dim": 12}, "dim=12 is not supported; expected 11"),
        ({"num_meta3d_blocks": 4}, "attention_blocks=4 must be from 0 to .* depth, 3"),
        ({"pool_size": 2}, "pool_window must be odd; got 2"),
        ({"depths": [1, 2]}, r"depths=\(1, 2\) and widths=\(6, 6, 11\) need one entry per stage"),
        ({"key_dim": 0}, "sizes must be positive"),
        ({"drop_path_rate": 0.5}, r"must be in \[0, 1\); got 2.5"),
        ({"layer_scale_init_value": 0.0}, "layer_scale_init_value=0 with use_layer_scale"),
    ],
)
def test_fields_that_do_not_fit_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_files.small_file("efficientformer", {**SMALL, **changes}, SHAPES, IMAGE)
