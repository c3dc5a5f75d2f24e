"""MobileViT: exact sizes and costs, patches unfolded and folded, dilation, and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hf_files

from hsvit_jax.models.conv_transformers import mobilevit


def test_a_sequence_holds_one_place_of_every_patch():
    x = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    y = mobilevit.unfold(x, 2)
    assert y.shape == (8, 6, 3)
    for place, (i, j) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        np.testing.assert_array_equal(y[4 + place], x[1, i::2, j::2].reshape(6, 3))
    np.testing.assert_array_equal(mobilevit.fold(y, (4, 6), 2), x)


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


def test_the_start():
    c = hf_files.network("mobilevit", "xxs", (32, 32)).config
    layer = mobilevit.TransformerLayer(c, 0, jax.random.key(0))
    for kernel in (
        layer.down.depthwise.conv.kernel,
        layer.project.kernel,
        layer.blocks[1].mixer.qkv.kernel,
        layer.fuse.conv.kernel,
    ):
        assert np.std(kernel[...]) == pytest.approx(0.02, rel=0.1)
    assert np.all(np.asarray(layer.fuse.norm.scale[...]) == 1)


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
