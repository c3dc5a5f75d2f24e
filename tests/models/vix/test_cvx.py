"""CvX: exact sizes, its norm, BatchNorm over devices, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.models.vix import cvx


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


def test_the_norm_over_channels():
    norm = cvx.ChannelNorm(4)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32) * 1e-5
    expected = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-4, atol=1e-5)
    flat = jnp.ones((1, 2, 4))  # channels that do not differ have a gradient, too
    assert np.isfinite(jax.grad(lambda x: (norm(x) ** 2).sum())(flat)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage_strides": (1,)}, r"depths=\(1, 2\) and stage_strides=\(1,\)"),
        ({"mixer": "linformer", "projections": 8, "stage_strides": (1, 2)}, "there are 6"),
        ({"depths": (1, 0)}, "sizes must be positive"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("cvx", **changes), (4, 5))
