"""ResNet: exact sizes, costs, strides, and how it starts."""

import jax
import numpy as np
import pytest

from hsvit_jax import models
from hsvit_jax.models import costs
from hsvit_jax.models.convnets import resnet

#: Variant → trained values at 64 px and 200 classes, and at 224 px and 1000 classes.
COUNTS = {
    "18": (11_279_112, 11_689_512),
    "34": (21_387_272, 21_797_672),
    "50": (23_917_832, 25_557_032),
    "101": (42_909_960, 44_549_160),
    "152": (58_553_608, 60_192_808),
}


def built(size, classes, **changes):
    settings = {**resnet.DEFAULTS, **changes, "family": "resnet", "dtype": "float32"}
    return models.build(settings, image_size=(size, size), channels=3, num_classes=classes)


@pytest.mark.parametrize("variant", COUNTS)
def test_parameter_counts(variant):
    for (size, classes), expected in zip(((64, 200), (224, 1000)), COUNTS[variant], strict=True):
        network = built(size, classes, **resnet.VARIANTS[variant])
        params, _ = jax.eval_shape(network.init, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected
        assert network.config.map_size == (size // 32, size // 32)


def test_every_variant_has_a_count():
    assert set(COUNTS) == set(resnet.VARIANTS)
    assert {("resnet", name) for name in COUNTS} <= set(models.VARIANTS)


@pytest.mark.parametrize(("variant", "flops"), [("18", 0.296), ("50", 0.668)])
def test_flops_of_the_paper_s_table_2(variant, flops):
    network = built(64, 200, **resnet.VARIANTS[variant])
    assert round(costs.flops(network) / 1e9, 3) == flops


def test_where_the_strides_are():
    sizes = {"block": "bottleneck", "channels": (8, 16), "depths": (2, 1), "stem_channels": 4}

    def strides(**changes):
        stages = built(32, 2, **sizes, **changes).config.stages()
        return [[c.stride for c in block.convs] for stage in stages for block in stage]

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
