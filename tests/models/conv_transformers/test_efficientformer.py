"""EfficientFormer: exact sizes and costs, its pool and biases by formula, and masks."""

import jax
import numpy as np
import pytest
from support import hf_files

from hsvit_jax.models.conv_transformers import efficientformer

SMALL = {
    "depths": (1, 2),
    "widths": (6, 10),
    "downsamples": (True,),
    "heads": 2,
    "key_dim": 3,
    "attention_ratio": 2.0,
}


def test_the_mean_counts_only_neighbours_that_are_there():
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4, 1)
    y = np.asarray(efficientformer.neighbour_mean(x, 3))[0, :, :, 0]
    assert y[0, 0] == x[0, :2, :2].mean() and y[1, 0] == x[0, :, :2].mean()
    assert y[1, 2] == x[0, :, 1:].mean() and y[2, 3] == x[0, 1:, 2:].mean()


def test_offsets_of_a_map_that_is_not_square():
    found = efficientformer.offsets((2, 3))
    expected = [[abs(a // 3 - b // 3) * 3 + abs(a % 3 - b % 3) for b in range(6)] for a in range(6)]
    np.testing.assert_array_equal(found, expected)


def test_the_start():
    model = hf_files.network("efficientformer", **{**SMALL, "widths": (6, 64)})
    params, stats = model.init(jax.random.key(0))
    block = params["stage1"]["attention_blocks"]["0"]
    assert not np.any(block["attention"]["offset_bias"])
    assert np.all(np.asarray(block["scales"]["scales"]["1"]) == np.float32(1e-5))
    pool = params["stage1"]["pool_blocks"]["0"]
    for kernel in (block["attention"]["qkv"]["kernel"], pool["up"]["conv"]["kernel"]):
        assert np.std(kernel) == pytest.approx(0.02, rel=0.1)
    assert np.all(np.asarray(stats["stage1"]["pool_blocks"]["0"]["up"]["norm"]["var"]) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"drop_path": 0.5}, {"dropout": 0.3}], ids=str)
def test_masks_of_each_rate(change):
    model = hf_files.network("efficientformer", size=(16, 12), **{**SMALL, **change})
    hf_files.check_masks(model)


def test_an_image_that_is_too_small_and_other_refusals():
    with pytest.raises(ValueError, match=r"map of 1×1 is too small"):
        hf_files.network("efficientformer", size=(16, 16))
    with pytest.raises(ValueError, match=r"unknown activation 'gleu'"):
        hf_files.network("efficientformer", activation="gleu")
    assert hf_files.network("efficientformer", size=(64, 96)).grid(6) == (0, 2, 3)
