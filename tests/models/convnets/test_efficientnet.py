"""EfficientNet: exact sizes, costs, the published tables, and how it starts."""

import pytest
from support import hf_files

from hsvit_jax.models.convnets import efficientnet


def test_squeezed_widths_of_b0():
    blocks = hf_files.network("efficientnet").config.plan().blocks
    first = [8, 4, *(6,) * 2, *(10,) * 2, *(20,) * 3, *(28,) * 3, *(48,) * 4]
    assert [block.squeeze for block in blocks] == first
    assert [i for i, block in enumerate(blocks) if block.depthwise.stride == 2] == [1, 3, 5, 11]
    assert [block.rate for block in blocks] == pytest.approx([0.2 * i / 16 for i in range(16)])


@pytest.mark.parametrize("variant", ["b0", "b5"])
def test_native_padding_is_same_at_the_native_size_alone(variant):
    """The paper's SAME; at 64 px all but B0 have maps for which the library's zeros differ."""

    def zeros(size, padding):
        network = hf_files.network("efficientnet", variant, (size, size), padding=padding)
        found, now = [], network.config.image_size
        for conv in network.config.convs():
            if conv.stride == 2:
                found.append(conv.pads(now))
                now = conv.map_size(now)
        return found

    side = efficientnet.FAMILY.native_sizes.get(variant, 224)
    assert zeros(side, "native") == zeros(side, "same")
    assert (zeros(64, "native") == zeros(64, "same")) == (variant == "b0")
