"""MobileNetV2: exact sizes, costs, dilation in place of strides, and how it starts."""

import jax
import numpy as np
import pytest

from hsvit_jax import models
from hsvit_jax.models.convnets import inverted_residual, mobilenet_v2


def built(size, classes, **changes):
    settings = {
        **mobilenet_v2.FAMILY.defaults,
        **changes,
        "family": "mobilenet_v2",
        "dtype": "float32",
    }
    return models.build(settings, image_size=(size, size), channels=3, num_classes=classes)


@pytest.mark.parametrize(
    ("output_stride", "side", "dilations"),
    [
        (32, 2, [1] * 16),
        (16, 4, [1] * 12 + [1, 2, 2, 2]),
        (8, 8, [1] * 5 + [1] + [2] * 6 + [2] + [4] * 3),
    ],
)
def test_dilation_in_place_of_strides(output_stride, side, dilations):
    """The first block that keeps its stride back is not yet dilated."""
    config = built(64, 10, output_stride=output_stride).config
    assert config.map_size == (side, side)
    blocks = config.plan().blocks[1:]
    assert [block.depthwise.dilation for block in blocks] == dilations


def test_which_blocks_are_residual():
    blocks = built(64, 10).config.plan().blocks[1:]
    residual = [i for i, block in enumerate(blocks) if block.residual]
    assert residual == [1, 3, 4, 6, 7, 8, 10, 11, 13, 14]


def test_the_last_convolution_of_a_narrow_network():
    assert built(64, 10, width=0.5).config.widths[-1] == 1280
    assert built(64, 10, width=0.5, full_top=False).config.widths[-1] == 640
    stem = built(64, 10, stem_expansion=True).config.plan().blocks[0].expand
    assert (stem.c_in, stem.c_out, stem.size) == (32, 32, 1)


def test_initial_values_are_the_reference_s():
    config = built(32, 50).config
    block = inverted_residual.Block(config.plan().blocks[9], jax.random.key(0))
    linear = config.head(jax.random.key(0)).linear
    for kernel in (block.expand.kernel, block.depthwise.kernel, linear.kernel):
        assert np.std(kernel[...]) == pytest.approx(0.02, rel=0.05)
    assert not np.any(linear.bias[...])
