"""MobileNetV2: exact sizes, costs, dilation in place of strides, and how it starts."""

import pytest
from support import hf_files


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
    config = hf_files.network("mobilenet_v2", output_stride=output_stride).config
    assert config.map_size == (side, side)
    blocks = config.plan().blocks[1:]
    assert [block.depthwise.dilation for block in blocks] == dilations


def test_which_blocks_are_residual():
    blocks = hf_files.network("mobilenet_v2").config.plan().blocks[1:]
    residual = [i for i, block in enumerate(blocks) if block.residual]
    assert residual == [1, 3, 4, 6, 7, 8, 10, 11, 13, 14]


def test_the_last_convolution_of_a_narrow_network():
    assert hf_files.network("mobilenet_v2", width=0.5).config.widths[-1] == 1280
    assert hf_files.network("mobilenet_v2", width=0.5, full_top=False).config.widths[-1] == 640
    stem = hf_files.network("mobilenet_v2", stem_expansion=True).config.plan().blocks[0].expand
    assert (stem.c_in, stem.c_out, stem.size) == (32, 32, 1)
