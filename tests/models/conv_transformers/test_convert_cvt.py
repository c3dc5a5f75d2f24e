"""CvT's state dicts: a golden, any configuration, and what is refused."""

import pytest
from support import hf_files

SHAPES = {
    "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight": (6, 3, 5, 5),
    "classifier.weight": (7, 8),
}
SMALL = {
    "patch_sizes": [5, 2],
    "patch_stride": [3, 2],
    "patch_padding": [1, 0],
    "embed_dim": [6, 8],
    "num_heads": [3, 2],
    "depth": [1, 2],
    "mlp_ratio": [2.5, 3],
    "attention_drop_rate": [0.0, 0.1],
    "drop_rate": [0.2, 0.0],
    "drop_path_rate": [0.0, 0.3],
    "qkv_bias": [True, False],
    "cls_token": [False, True],
    "qkv_projection_method": ["dw_bn", "dw_bn"],
    "kernel_qkv": [3, 5],
    "padding_kv": [1, 0],
    "stride_kv": [2, 1],
    "padding_q": [1, 2],
    "stride_q": [1, 1],
    "model_type": "cvt",
}
IMAGE = (3, 30, 36)


def test_golden(golden_dir, tmp_path):
    hf_files.check_golden(golden_dir / "hf-cvt.npz", tmp_path / "out", "cvt")


def test_fields_make_the_network():
    network, model = hf_files.check_every_tensor_has_its_place("cvt", SMALL, SHAPES, image=IMAGE)
    c = network.config
    assert c.maps() == ((10, 12), (5, 6)) and c.key_map(1) == (1, 2)
    assert (c.hidden(0), c.dropouts, c.attention_dropouts) == (15, (0.2, 0.0), (0.0, 0.1))
    assert model["variant"] == "custom"


def test_published_sizes_have_their_name():
    for given, name in (({"patch_sizes": [4, 3, 3]}, "13-patch4"), ({"depth": [1, 4, 16]}, "21")):
        *_, model = hf_files.small_file("cvt", given, SHAPES, (3, 32, 32))
        assert model["variant"] == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": [6, 8, 9]}, r"an entry per stage; as many need widths=\(6, 8, 9\)"),
        ({"cls_token": [False, False]}, "cls_token=.* is not supported"),
        ({"stride_q": [1, 2]}, r"stride_q=\(1, 2\) is not supported; expected \(1, 1\)"),
        ({"padding_q": [1, 1]}, "query_paddings=1 with kernels=5 does not keep the map's size"),
        ({"qkv_projection_method": ["dw_bn", "avg"]}, "qkv_projection_method=.* is not supported"),
        ({"num_heads": [4, 2]}, "a width of 6 is not divisible by heads=4"),
        ({"embed_dim": 6}, "embed_dim must be a list of int; got 6"),
        ({"drop_rate": [1.0, 0]}, r"must be in \[0, 1\); got"),
        ({"kernel_qkv": [3, 9], "padding_q": [1, 4]}, "map of 5×6 is too small for .* size 9"),
    ],
)
def test_fields_that_do_not_fit_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_files.small_file("cvt", {**SMALL, **changes}, SHAPES, IMAGE)
