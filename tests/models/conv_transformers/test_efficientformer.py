"""EfficientFormer: exact sizes and costs, its pool and biases by formula, and masks."""

import numpy as np
from support import hf_files

from hsvit_jax.models.conv_transformers import efficientformer


def test_offsets_of_a_map_that_is_not_square():
    found = efficientformer.offsets((2, 3))
    expected = [[abs(a // 3 - b // 3) * 3 + abs(a % 3 - b % 3) for b in range(6)] for a in range(6)]
    np.testing.assert_array_equal(found, expected)


def test_where_tokens_lie():
    assert hf_files.network("efficientformer", size=(64, 96)).grid(6) == (0, 2, 3)
