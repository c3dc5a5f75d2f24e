"""LeViX: exact sizes, BatchNorm over devices, the start as no attention, and what is refused."""

import jax
import numpy as np
import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.models import costs
from hsvit_jax.models.vix import levix
from hsvit_jax.models.vix.mixer_config import Mixing


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


def test_multiply_adds_of_levit():
    """By hand: the stem, four blocks of attention and feed-forward on 1,024 tokens, the head."""
    t, d = 1024, 128
    stem = t * 9 * (3 * 32 + 32 * 64 + 64 * d)
    block = 4 * t * d * d + 2 * t * t * d + 2 * t * d * 256
    settings = {**levix.DEFAULTS, "family": "levix", "dtype": "float32"}
    macs = costs.multiply_adds(build(settings))
    assert macs == stem + 4 * block + d * 10


def test_a_block_starts_without_its_attention():
    attention = levix.LeViTAttention(Mixing("softmax", heads=2, head_dim=3), 5, jax.random.key(0))
    assert not np.any(attention.out_norm.scale[...]) and np.all(attention.key_norm.scale[...] == 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem_strides": (1,)}, r"widths \(5, 10\).*stem_strides=\(1,\)"),
        ({"mixer": "nystrom", "landmarks": 55}, r"landmarks=55.*there are 54"),
        ({"mlp_dim": 0}, "sizes must be positive"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("levix", **{"stem_channels": (5,), **changes}), (6, 9))
