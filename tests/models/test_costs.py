"""Parameters and FLOPs of towers and separable trunks: formulas worked out apart from the model."""

import pytest
from support import hf_files

from hsvit_jax import models
from hsvit_jax.models import costs
from hsvit_jax.models.hsvit import hsvit

#: Parameters of 1, 2, 4, 8 and 16 towers, dense and separable; 32 px, 3 channels, 10 classes.
PARAMETERS = {
    ("c2a2", "dense"): (812_298, 687_434, 631_242, 615_626, 632_778),
    ("c2a2", "separable"): (585_226, 575_050, 576_202, 589_258, 620_746),
    ("c3a4", "dense"): (2_242_826, 1_675_594, 1_398_218, 1_272_010, 1_233_866),
    ("c3a4", "separable"): (1_232_778, 1_173_450, 1_150_026, 1_150_794, 1_176_138),
    ("c4a8", "dense"): (6_873_354, 4_536_650, 3_374_538, 2_805_962, 2_546_634),
    ("c4a8", "separable"): (2_724_490, 2_468_554, 2_346_826, 2_298_442, 2_299_210),
}
TOWERS = (1, 2, 4, 8, 16)


def build(variant, towers, convolution, **changes):
    settings = {
        **hsvit.FAMILY.settings(variant),
        "dtype": "float32",
        "towers": towers,
        "convolution": convolution,
        **changes,
    }
    return models.build(settings, image_size=(32, 32), channels=3, num_classes=10)


def counted(variant, towers, separable):
    """(parameters, multiply-adds) of one 32×32 image in 10 classes: 16 groups, 64 dimensions."""
    sizes = hsvit.FAMILY.settings(variant)
    channels, depth = sizes["conv_channels"], sizes["depth"]
    sides = {"c2a2": (32, 16), "c3a4": (32, 16, 16), "c4a8": (32, 16, 16, 8)}[variant]
    weights = macs = 0
    before, image = 3, True
    for kernels, side in zip(channels, sides, strict=True):
        for _ in range(2):
            own = kernels // towers
            count = 9 * before + before * own if separable and not image else 9 * before * own
            weights += count + 2 * own
            macs += count * side * side
            before, image = own, False
    weights += 64 * 64 + 64  # an 8×8 map to a token
    macs += channels[-1] // towers * 64 * 64
    tokens = channels[-1] // 16 + 1
    block = 2 * 64 + 4 * (64 * 64 + 64)
    groups = 16 * (64 + tokens * 64 + depth * block)
    attention = 16 * depth * (4 * tokens * 64 * 64 + 2 * tokens * tokens * 64)
    head = 2 * 64 + 64 * 10 + 10
    return towers * weights + groups + head, towers * macs + attention + 64 * 10


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case[0] != "c2a2")) for case in PARAMETERS],
    ids=str,
)
def test_towers_have_the_parameters_and_flops_of_the_formula(case):
    variant, convolution = case
    for towers, published in zip(TOWERS, PARAMETERS[case], strict=True):
        network = build(variant, towers, convolution)
        parameters, macs = counted(variant, towers, convolution == "separable")
        assert costs.parameters(network) == parameters == published
        assert costs.flops(network) == 2 * macs


@pytest.mark.parametrize("towers", [1, 4])
def test_training_takes_three_passes_less_the_gradient_of_the_images(towers):
    """And the first block's attention weights once more, which are not kept; the last block is
    computed for its CLS only."""
    network = build("c2a2", towers, "dense")
    tokens, first = 128 // 16 + 1, 9 * 3 * 64 * 32 * 32
    spared = 16 * (tokens - 1) * (2 * 64 * 64 + 2 * tokens * 64)
    weights = 16 * (tokens * tokens + tokens) * 64
    computed = costs.computed_flops(network)
    assert computed == costs.flops(network) - 2 * spared
    assert costs.training_flops(network) == 3 * computed - 2 * first + 2 * weights


STAGES = {"in_channels": (32, 24), "out_channels": (24, 16), "repeats": (1, 1)}
STAGES |= {"strides": (2, 2), "kernels": (3, 5), "expand": (1, 6)}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("resnet", {"block": "basic", "channels": (24, 40), "depths": (1, 1)}),
        ("efficientnet", STAGES),
    ],
)
def test_zeros_in_the_gradient_of_a_strided_convolution_are_no_work(family, sizes):
    network = hf_files.network(family, **sizes)
    stem = dict((path, macs) for path, _, macs in costs.modules(network))["backbone.stem"]
    assert costs.training_flops(network) == 3 * costs.flops(network) - 2 * stem


def test_maps_of_a_single_pixel_are_counted():
    """One value of each channel in the last convolution, which has no moments in one image."""
    blocks = {"conv_channels": (4, 4, 8), "conv_kernels": (3,) * 3, "pool_strides": (4, 8, 1)}
    network = build("c2a2", 1, "dense", **blocks, groups=2)
    assert network.config.map_size == (1, 1)
    assert 2 < costs.training_flops(network) / costs.computed_flops(network) < 3


def test_learned_votes_are_one_more_each():
    for towers in (1, 4):
        equal, learned = (build("c2a2", towers, "dense", votes=v) for v in ("equal", "learned"))
        assert costs.parameters(learned) == costs.parameters(equal) + 16
