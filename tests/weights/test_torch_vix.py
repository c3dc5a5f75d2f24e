"""State dicts of the ViX paper's families: goldens, named variants, and what no file says."""

import pytest
from support import torch_files, vix_files

from hsvit_jax import models

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


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("vix", {"heads": 3, "pool": "max"}, "pool='max' is not supported; expected 'cls' or 'm"),
        ("vix", {"heads": 3}, "patch_size is missing"),
        ("levix", {"image_size": 4}, "num_heads is missing"),
        ("ccx", {"img_size": 8, "stride": 1}, "num_heads is missing"),
        ("ccx", {"img_size": 8, "num_heads": 2}, "pool_strides is missing"),
    ],
)
def test_what_a_constructor_lacks_is_told(family, given, message):
    with pytest.raises(ValueError, match=message):
        torch_files.settings(family, state(family), given)


def test_the_image_of_a_cvx_is_its_first_map_by_its_stride():
    given = {"heads": 3, "fmap": 4, "stride": 2}
    _, data = torch_files.settings("cvx", state("cvx"), given)
    assert data["image_size"] == (8, 8)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"conv_strides": (2, 1), "pool_stride": 2}, {}),
        ({"conv_strides": (1, 2)}, {"stride": [1, 2, 1], "positional_embedding": "sine"}),
        ({"conv_padding": 0, "pool_padding": 0, "pool_window": 2, "conv_kernel": 2}, {}),
        ({"positions": False, "conv_strides": (2, 1), "pool_stride": 2}, NO_POSITIONS),
        ({"mixer": "nystrom", "head_dim": 7}, {}),  # heads wider than a token
    ],
)
def test_strides_and_heads_of_a_ccx(changes, given):
    """Of its constructor's arguments some may be missing, and a list of strides too long."""
    settings = vix_files.small("ccx", **{"heads": 2, "conv_strides": (1, 1), **changes})
    sizes = {"image_size": (16, 16), "channels": 3, "num_classes": 7}
    tensors = vix_files.state("ccx", models.FAMILIES["ccx"].build(settings, **sizes))
    arguments = {"padding": "conv_padding", "pooling_padding": "pool_padding"}
    arguments = {k: settings[v] for k, v in arguments.items() if settings[v] >= 0}
    arguments |= {
        "pooling_kernel_size": settings["pool_window"],
        "stride": settings["conv_strides"],
    }
    arguments |= {"pooling_stride": settings["pool_stride"], "img_size": 16, "num_heads": 2}
    told, _ = torch_files.settings("ccx", tensors, {**arguments, **given})
    names = ("conv_strides", "pool_stride", "head_dim", "heads", "mixer")
    names += ("conv_kernel", "conv_padding", "pool_window", "pool_padding", "positions")
    assert {k: told[k] for k in names} == {k: settings[k] for k in names}


def test_behind_a_stem_image_size_is_that_of_the_map():
    settings = vix_files.small("vix", stem_channels=(5,), patch=1, stem_strides=(2, 1))
    sizes = {"image_size": (8, 8), "channels": 3, "num_classes": 7}
    tensors = vix_files.state("vix", models.FAMILIES["vix"].build(settings, **sizes))
    given = {"image_size": 4, "heads": 3, "stem_strides": [2, 1]}
    told, data = torch_files.settings("vix", tensors, given)
    assert (data["image_size"], told["stem_strides"]) == ((8, 8), (2, 1))


def test_the_constructor_tells_what_is_classified():
    for pool in ("cls", "mean"):
        given = {"heads": 3, "patch_size": 2, "image_size": 4, "pool": pool}
        assert torch_files.settings("vix", state("vix"), given)[0]["head_pool"] == pool


def test_another_number_of_steps_to_the_pseudo_inverse_is_refused():
    """No tensor shows it."""
    given = {"heads": 3, "patch_size": 2, "image_size": 4, "pinv_iterations": 4}
    with pytest.raises(ValueError, match="pinv_iterations=4 is not supported; expected 6"):
        torch_files.settings("vix", state("vix", mixer="nystrom"), given)
