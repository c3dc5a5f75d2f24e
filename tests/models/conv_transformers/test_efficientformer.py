"""EfficientFormer: exact sizes and costs, its pool and biases by formula, and masks."""

import jax
import numpy as np
import pytest
from support import hf_files

from hsvit_jax.models.conv_transformers import efficientformer


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
    c = hf_files.network("efficientformer").config
    block = efficientformer.AttentionBlock(c, 3, 0.0, 0, jax.random.key(0))
    pool = efficientformer.PoolBlock(c, 0, 0.0, 0, jax.random.key(0))
    assert not np.any(block.attention.offset_bias[...])
    assert np.all(np.asarray(block.scales.scales[1][...]) == np.float32(1e-5))
    for kernel in (block.attention.qkv.kernel, pool.up.conv.kernel):
        assert np.std(kernel[...]) == pytest.approx(0.02, rel=0.1)


def test_where_tokens_lie():
    assert hf_files.network("efficientformer", size=(64, 96)).grid(6) == (0, 2, 3)


@pytest.mark.parametrize(
    ("family", "side", "changes", "message"),
    [
        ("efficientformer", 16, {}, r"map of 1×1 is too small"),
        ("efficientformer", 64, {"activation": "gleu"}, r"unknown activation 'gleu'"),
        ("swiftformer", 8, {}, r"map of 1×1 is too small .* larger data.image_size"),
        ("swiftformer", 64, {"queries": "none"}, r"unknown model.queries 'none'"),
        ("mobilevit", 16, {}, r"map of 1×1 is too small .* use a larger"),
        ("cvt", 3, {}, "map of 1×1 is too small"),
        ("cvt", 64, {"drop_path_of": "block"}, r"unknown model.drop_path_of 'block'"),
    ],
)
def test_images_and_settings_that_do_not_fit_are_told(family, side, changes, message):
    with pytest.raises(ValueError, match=message):
        hf_files.network(family, size=(side, side), **changes)
