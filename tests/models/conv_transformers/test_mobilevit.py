"""MobileViT: exact sizes and costs, patches unfolded and folded, dilation, and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hf_files

from hsvit_jax.models.conv_transformers import mobilevit


def test_dilation_takes_the_place_of_strides():
    """The first layer without its stride keeps its dilation, the next doubles it."""
    for stride, steps in (
        (32, ((2, 1), (2, 1), (2, 1))),
        (16, ((2, 1), (2, 1), (1, 1))),
        (8, ((2, 1), (1, 1), (1, 2))),
    ):
        c = hf_files.network("mobilevit", size=(64, 96), output_stride=stride).config
        assert c.strides() == steps
        assert c.maps()[-1] == (64 // stride, 96 // stride)


@pytest.mark.parametrize(("size", "new"), [(4, 3), (10, 9), (3, 4), (1, 2), (2, 1)])
def test_a_resized_map_is_interpolated_between_pixel_centres(size, new):
    """Without a wider kernel when it shrinks, and with the edge's value outside."""
    x = np.random.default_rng(0).normal(size=size)
    at = (np.arange(new) + 0.5) * size / new - 0.5
    expected = np.interp(at, np.arange(size), x)
    for axis in (1, 2):
        map_BHWD = np.expand_dims(x, tuple(a for a in range(4) if a != axis))
        shape = tuple(new if a == axis else 1 for a in (1, 2))
        with jax.enable_x64(True):
            found = mobilevit.resized(jnp.asarray(map_BHWD), shape)
        np.testing.assert_allclose(np.ravel(found), expected, atol=1e-12)
