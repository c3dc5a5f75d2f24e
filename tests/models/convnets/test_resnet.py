"""ResNet: exact sizes, costs, strides, and how it starts."""

import jax
import numpy as np
import pytest

from hsvit_jax import models
from hsvit_jax.models.convnets import resnet


def built(size, classes, **changes):
    settings = {**resnet.DEFAULTS, **changes, "family": "resnet", "dtype": "float32"}
    return models.build(settings, image_size=(size, size), channels=3, num_classes=classes)


def test_where_the_strides_are():
    sizes = {"block": "bottleneck", "channels": (8, 16), "depths": (2, 1), "stem_channels": 4}

    def strides(**changes):
        blocks = built(32, 2, **sizes, **changes).config.blocks()
        return [[c.stride for c in block.convs] for block in blocks]

    assert strides() == [[1, 1, 1], [1, 1, 1], [1, 2, 1]]
    assert strides(stride_in_first_stage=True) == [[1, 2, 1], [1, 1, 1], [1, 2, 1]]
    assert strides(stride_in_first_conv=True) == [[1, 1, 1], [1, 1, 1], [2, 1, 1]]


def test_initial_values_are_the_reference_s():
    network = built(32, 50, block="basic", channels=(24, 40), depths=(1, 1), stem_channels=16)
    params, stats = jax.jit(network.init)(jax.random.key(0))
    backbone = params["backbone"]
    for kernel in (
        backbone["stem"]["kernel"],
        backbone["blocks"]["1"]["convs"]["1"]["kernel"],
        backbone["blocks"]["1"]["shortcut"]["kernel"],
    ):
        size, _, _, c_out = kernel.shape
        assert np.std(kernel) == pytest.approx((2 / (size**2 * c_out)) ** 0.5, rel=0.06)
    linear, bound = params["head"]["linear"], 40**-0.5
    for x in linear.values():
        assert 0.9 * bound < np.abs(x).max() <= bound
    norm, moments = backbone["stem"]["norm"], stats["backbone"]["stem"]["norm"]
    assert np.all(norm["scale"] == 1) and not np.any(norm["bias"])
    assert np.all(moments["var"] == 1) and not np.any(moments["mean"])
