"""EfficientNet: exact sizes, costs, the published tables, and how it starts."""

import jax
import numpy as np
import pytest

from hsvit_jax import models
from hsvit_jax.models.convnets import efficientnet


def built(size, classes, **changes):
    settings = {
        **efficientnet.FAMILY.defaults,
        **changes,
        "family": "efficientnet",
        "dtype": "float32",
    }
    return models.build(settings, image_size=(size, size), channels=3, num_classes=classes)


def test_squeezed_widths_of_b0():
    blocks = built(64, 10).config.plan().blocks
    first = [8, 4, *(6,) * 2, *(10,) * 2, *(20,) * 3, *(28,) * 3, *(48,) * 4]
    assert [block.squeeze for block in blocks] == first
    assert [i for i, block in enumerate(blocks) if block.depthwise.stride == 2] == [1, 3, 5, 11]
    assert [block.rate for block in blocks] == pytest.approx([0.2 * i / 16 for i in range(16)])


@pytest.mark.parametrize("variant", ["b0", "b5"])
def test_native_padding_is_same_at_the_native_size_alone(variant):
    """The paper's SAME; at 64 px all but B0 have maps for which the library's zeros differ."""

    def zeros(size, padding):
        network = built(size, 10, **efficientnet.VARIANTS[variant], padding=padding)
        found, now = [], network.config.image_size
        for conv in network.config.convs():
            if conv.stride == 2:
                found.append(conv.pads(now))
                now = conv.map_size(now)
        return found

    side = efficientnet.FAMILY.native_sizes.get(variant, 224)
    assert zeros(side, "native") == zeros(side, "same")
    assert (zeros(64, "native") == zeros(64, "same")) == (variant == "b0")


def test_initial_values_are_the_reference_s():
    stages = {"in_channels": (32, 24), "out_channels": (24, 16), "repeats": (1, 1)}
    stages |= {"strides": (1, 1), "kernels": (3, 5), "expand": (1, 6)}
    network = built(32, 50, width=0.5, **stages)
    params, _ = jax.jit(network.init)(jax.random.key(0))
    block = params["backbone"]["blocks"]["1"]
    for kernel in (
        params["backbone"]["top"]["kernel"],
        block["expand"]["kernel"],
        block["depthwise"]["kernel"],
        block["squeeze"]["reduce"]["kernel"],
        params["head"]["linear"]["kernel"],
    ):
        assert np.std(kernel) == pytest.approx(0.02, rel=0.05)
    assert not np.any(block["squeeze"]["expand"]["bias"])
    assert np.all(block["project"]["norm"]["scale"] == 1)
