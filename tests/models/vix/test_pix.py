"""PiX: exact sizes, what a pooling does to tokens and CLS, and what is refused."""

import jax
import numpy as np
import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.models.vix import pix


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


def test_stages_halve_the_map_and_double_the_width():
    settings = vix_files.small("pix", depths=(1, 2, 1), patch=1)
    stages = build(settings, (5, 8)).config.stages
    assert [(s.depth, s.map_size, s.tokens, s.dim) for s in stages] == [
        (1, (5, 8), 41, 10),
        (2, (3, 4), 13, 20),
        (1, (2, 2), 5, 40),
    ]


def test_a_pool_keeps_cls_apart():
    stage = pix.Stage(1, (3, 5), 16, 4)
    pool = pix.Pool(stage, jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
    jacobian = jax.jit(jax.jacrev(lambda x: pool(x[None])[0].sum(1)))(x[0])
    reach = np.abs(jacobian).max(2)  # (tokens out, tokens in)
    assert reach.shape == (7, 16)
    assert reach[0, 0] > 0 and not reach[0, 1:].any() and not reach[1:, 0].any()
    corner = reach[1, 1:].reshape(3, 5) > 0  # of the map: its own pixel, and those beside it
    np.testing.assert_array_equal(np.argwhere(corner), [[0, 0], [0, 1], [1, 0], [1, 1]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": ()}, r"every stage needs a block; got depths=\(\)"),
        ({"mixer": "mlp_mixer"}, "no CLS token, which PiX classifies"),
        ({"mixer": "nystrom", "landmarks": 8}, r"landmarks=8.*there are 7"),
        ({"patch": 3}, "4×5 pixels cannot be cut into patches of patch=3"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("pix", **changes), (4, 5))
