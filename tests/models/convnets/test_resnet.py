"""ResNet: exact sizes, costs, strides, and how it starts."""

from support import hf_files


def test_where_the_strides_are():
    sizes = {"block": "bottleneck", "channels": (8, 16), "depths": (2, 1), "stem_channels": 4}

    def strides(**changes):
        blocks = hf_files.network("resnet", **sizes, **changes).config.blocks()
        return [[c.stride for c in block.convs] for block in blocks]

    assert strides() == [[1, 1, 1], [1, 1, 1], [1, 2, 1]]
    assert strides(stride_in_first_stage=True) == [[1, 2, 1], [1, 1, 1], [1, 2, 1]]
    assert strides(stride_in_first_conv=True) == [[1, 1, 1], [1, 1, 1], [2, 1, 1]]
