"""Stems: what patch and strides an image gets by itself, and what is refused."""

import pytest

from hsvit_jax.models import conv_layers
from hsvit_jax.models.vix import stems


@pytest.mark.parametrize(
    ("image_size", "patch"),
    [
        *[((8, 8), 1), ((32, 32), 1), ((64, 64), 2), ((33, 33), 3), ((224, 224), 7)],
        *[((16, 64), 1), ((48, 64), 2), ((37, 37), 37)],
    ],
)
def test_default_patch(image_size, patch):
    assert stems.default_patch(image_size) == patch


@pytest.mark.parametrize(
    ("image_size", "strides"),
    [
        *[((32, 32), (1, 1, 1)), ((28, 28), (1, 1, 1)), ((64, 64), (2, 1, 1))],
        *[((65, 63), (2, 2, 1)), ((128, 128), (2, 2, 1)), ((512, 512), (2, 2, 2))],
    ],
)
def test_default_strides(image_size, strides):
    assert stems.default_strides(image_size, 3) == strides


def test_map_sizes_round_up():
    assert conv_layers.map_size((7, 8), (2, 1, 2)) == (2, 2)
    assert conv_layers.map_size((7, 8), ()) == (7, 8)


@pytest.mark.parametrize(("widths", "strides"), [((5, 6), (1,)), ((), ()), ((0, 6), (1, 1))])
def test_stems_that_do_not_pair_up(widths, strides):
    with pytest.raises(ValueError, match=r"one positive width and stride per convolution; got wid"):
        stems.check_stem(widths, strides)
