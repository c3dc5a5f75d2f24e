"""State dicts of the ViX paper's families: goldens, named variants, and what no file says."""

import json

import numpy as np
import pytest
from support import torch_files, vix_files

from hsvit_jax import config as configs
from hsvit_jax import models
from hsvit_jax.commands import convert

FAMILIES = ("vix", "levix", "ccx", "cvx", "pix")
#: Settings of small networks for images of 4×4 pixels.
SMALL = {
    "vix": {"patch": 2},
    "levix": {"stem_channels": (5,), "stem_strides": (1, 1)},
    "ccx": {"heads": 2, "conv_strides": (1, 1)},
    "cvx": {"stage_strides": (1, 1)},
}


#: Of a CCX's constructor.
NO_POSITIONS = {"stride": [2, 1], "pooling_stride": 2, "positional_embedding": "none"}


def state(family, **changes):
    settings = vix_files.small(family, **SMALL[family], **changes)
    network = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    return vix_files.state(family, network)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_tell_the_variant(family):
    rotary = {"layer_pos_emb.emb": np.broadcast_to(np.float32(0), (1025, 32))}
    for variant, changes in models.FAMILIES[family].variants.items():
        tables = rotary if changes.get("positions") == "rope" else {}
        assert torch_files.variant_of_shapes(family, variant, 32, tables, heads=4) == variant


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("vix", {"heads": 5}, "heads=5.*do not divide the attention's 12"),
        ("vix", {"heads": 3, "pool": "max"}, "pool='max' is not supported; expected 'cls' or 'm"),
        ("levix", {}, "say --image_size"),
        ("levix", {"image_size": 4}, "say --heads"),
        ("cvx", {"heads": 3}, "say --image_size"),
        ("cvx", {"image_size": 4}, "say --heads"),
        ("ccx", {}, "say --image_size"),
        ("ccx", {"img_size": 8}, "say --heads"),
        ("ccx", {"img_size": 8, "num_heads": 3}, "heads=3.*do not divide the attention's 8"),
        ("ccx", {"img_size": 8, "num_heads": 2, "dropout": "0.1"}, "must be of type float"),
    ],
)
def test_what_the_tensors_do_not_tell_is_asked_for(family, given, message):
    with pytest.raises(ValueError, match=message):
        torch_files.settings(family, state(family), given)


def test_the_image_of_a_cvx_is_its_first_map_by_its_stride():
    _, data = torch_files.settings("cvx", state("cvx"), {"heads": 3, "fmap": 4, "stride": 2})
    assert data["image_size"] == (8, 8)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"conv_strides": (2, 1)}, {}),
        ({"conv_strides": (2, 1), "pool_stride": 2}, {}),
        ({"conv_strides": (1, 2)}, {"stride": [1, 2, 1], "positional_embedding": "sine"}),
        ({"conv_padding": 0, "pool_padding": 0, "pool_window": 2, "conv_kernel": 2}, {}),
        ({"conv_padding": 3, "conv_strides": (2, 1)}, {}),
        ({"positions": False, "conv_strides": (2, 1), "pool_stride": 2}, NO_POSITIONS),
        ({"mixer": "nystrom", "head_dim": 7}, {}),  # heads wider than a token
        ({"mixer": "linformer", "projections": 70}, {}),  # and more positions than tokens
    ],
)
def test_strides_and_heads_of_a_ccx(changes, given):
    """Of its constructor's arguments some may be missing, and a list of strides too long."""
    settings = vix_files.small("ccx", **{"heads": 2, "conv_strides": (1, 1), **changes})
    sizes = {"image_size": (16, 16), "channels": 3, "num_classes": 7}
    tensors = vix_files.state("ccx", models.FAMILIES["ccx"].build(settings, **sizes))
    arguments = {"padding": "conv_padding", "pooling_padding": "pool_padding"}
    arguments = {k: settings[v] for k, v in arguments.items() if settings[v] >= 0}
    arguments |= {"pooling_kernel_size": settings["pool_window"]}
    arguments |= {"img_size": 16, "num_heads": 2, **given}
    told, _ = torch_files.settings("ccx", tensors, arguments)
    names = ("conv_strides", "pool_stride", "head_dim", "heads", "mixer")
    names += ("conv_kernel", "conv_padding", "pool_window", "pool_padding", "positions")
    assert {k: told[k] for k in names} == {k: settings[k] for k in names}


@pytest.mark.parametrize(("mixer", "rows"), [("performer", 17), ("nystrom", 20)])
def test_rotary_positions_tell_the_size_behind_a_stem(mixer, rows):
    """image_size is then that of the map; nystrom's table is of the padded sequence."""
    settings = vix_files.small("vix", mixer=mixer, positions="rope", stem_channels=(5,), patch=1)
    settings |= {"stem_strides": (2, 1)}
    sizes = {"image_size": (8, 8), "channels": 3, "num_classes": 7}
    tensors = vix_files.state("vix", models.FAMILIES["vix"].build(settings, **sizes))
    tensors["layer_pos_emb.emb"] = np.zeros((rows, 4), np.float32)
    given = {"image_size": 4, "num_landmarks": 4, "stem_strides": [2, 1]}
    told, data = torch_files.settings("vix", tensors, given)
    assert (data["image_size"], told["stem_strides"]) == ((8, 8), (2, 1))


@pytest.mark.parametrize(("family", "variant"), [("levix", "levip"), ("cvx", "cvp")])
def test_strides_that_nothing_tells_are_the_papers(family, variant):
    """Of Tiny ImageNet's images the first convolution halves the sides."""
    record = models.FAMILIES[family]
    sizes = {"image_size": (64, 64), "channels": 3, "num_classes": 200}
    settings = {**record.settings(variant), "embed_dim": 4, "heads": 1, "head_dim": 4}
    tensors = vix_files.state(family, record.build(settings, **sizes))
    told, _ = torch_files.settings(family, tensors, {"image_size": 64})
    assert told.get("stem_strides", told.get("stage_strides")) == (2, 1, 1)


def test_sizes_from_shapes_and_options(tmp_path):
    """Nothing but tensors: heads are asked for, a square image is taken from the positions."""
    tensors = {f"module.{k}": v for k, v in state("vix").items()}
    np.savez(tmp_path / "bare.npz", **tensors, config=json.dumps({"family": "vix"}))
    with pytest.raises(ValueError, match="do not tell the number of heads: say --heads"):
        convert.convert_file(tmp_path / "bare.npz")
    convert.convert_file(tmp_path / "bare.npz", heads=3)
    config = configs.from_json((tmp_path / "bare-jax" / "config.json").read_text())
    assert config.data.image_size == (4, 4) and config.data.channels == 3
    assert (config.model.patch, config.model.head_dim, config.model.depth) == (2, 4, 2)


@pytest.mark.parametrize(("index", "message"), [((), "has the shape"), (None, "is missing")])
def test_a_tensor_that_sizes_are_read_from_is_named(index, message):
    tensors = state("vix")
    weight = tensors.pop("mlp_head.1.weight")
    if index is not None:
        tensors["mlp_head.1.weight"] = weight[0]
    with pytest.raises(ValueError, match=f"the network's sizes: mlp_head.1.weight {message}"):
        torch_files.settings("vix", tensors, {"heads": 3})


def test_the_constructor_tells_what_is_classified():
    for pool in ("cls", "mean"):
        assert (
            torch_files.settings("vix", state("vix"), {"heads": 3, "pool": pool})[0]["head_pool"]
            == pool
        )


def test_another_number_of_steps_to_the_pseudo_inverse_is_refused():
    """Of the reference's constructor; no tensor shows it."""
    tensors = state("vix", mixer="nystrom")
    assert torch_files.settings("vix", tensors, {"pinv_iterations": 6})
    with pytest.raises(ValueError, match="pinv_iterations=4 is not supported; expected 6"):
        torch_files.settings("vix", tensors, {"pinv_iterations": 4})


def test_queries_that_are_missing_make_no_fnet():
    tensors = state("vix", mixer="nystrom")
    del tensors["transformer.layers.0.0.fn.to_qkv.weight"]
    with pytest.raises(ValueError, match=r"layers\.0\.0\.fn\.to_qkv\.weight or .* missing"):
        torch_files.settings("vix", tensors, {"heads": 3})
