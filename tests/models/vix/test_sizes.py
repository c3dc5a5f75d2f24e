"""The ViX paper's families: what follows from an image's size, and what is refused."""

import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.models import conv_layers
from hsvit_jax.models.vix import stems


def test_default_patches_leave_32_rows_and_columns():
    sides = {(8, 8): 1, (32, 32): 1, (64, 64): 2, (33, 33): 3, (224, 224): 7}
    sides |= {(16, 64): 1, (48, 64): 2, (35, 35): 5, (4, 4): 1}
    assert {size: stems.default_patch(size) for size in sides} == sides
    for size in ((37, 37), (74, 74), (148, 148), (64, 63)):
        with pytest.raises(ValueError, match=f"no patch divides {size[0]}×.*set model.patch"):
            stems.default_patch(size)


def test_default_strides_leave_32_rows_and_columns():
    strides = {(32, 32): (1, 1, 1), (28, 28): (1, 1, 1), (64, 64): (2, 1, 1)}
    strides |= {(65, 63): (2, 2, 1), (128, 128): (2, 2, 1), (512, 512): (2, 2, 2)}
    assert {size: stems.default_strides(size, 3) for size in strides} == strides
    assert conv_layers.map_size((7, 8), (2, 1, 2)) == (2, 2)
    assert conv_layers.map_size((7, 8), ()) == (7, 8)


def test_stages_of_pix_halve_the_map_and_double_the_width():
    settings = vix_files.small("pix", depths=(1, 2, 1), patch=1)
    network = models.build(settings, image_size=(5, 8), channels=3, num_classes=10)
    assert [(s.depth, s.map_size, s.tokens, s.dim) for s in network.config.stages] == [
        (1, (5, 8), 41, 10),
        (2, (3, 4), 13, 20),
        (1, (2, 2), 5, 40),
    ]
