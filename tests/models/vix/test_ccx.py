"""CCX: exact sizes, dropped paths, the block's quirk, how it starts, and what is refused."""

import jax
import numpy as np
import pytest
from support import vix_files

from hsvit_jax import models
from hsvit_jax.models import costs
from hsvit_jax.models.vix import ccx


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


def test_multiply_adds_of_cct():
    """By hand: the tokenizer, four blocks on 1,024 tokens, sequence pooling, the classifier."""
    t, d = 1024, 128
    tokenizer = t * 9 * (3 * 64 + 64 * 64 + 64 * d)
    block = 4 * t * d * d + 2 * t * t * d + 2 * t * d * 512
    settings = {**ccx.DEFAULTS, "family": "ccx", "dtype": "float32"}
    macs = costs.multiply_adds(build(settings))
    assert macs == tokenizer + 4 * block + 2 * t * d + d * 10


def test_initial_values_are_the_reference_s():
    settings = vix_files.small("ccx", heads=2, embed_dim=48, conv_channels=(20,), depth=1)
    params, _ = jax.jit(build(settings, (12, 12), 50).init)(jax.random.key(0))
    block = params["encoder"]["blocks"]["0"]
    assert np.std(params["encoder"]["position"]) == pytest.approx(0.2, rel=0.05)
    convs = params["tokenizer"]["convs"]
    for i, fan_in in (("0", 27), ("1", 180)):
        assert np.std(convs[i]["kernel"]) == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
        assert "bias" not in convs[i]
    for linear in (block["mixer"]["qkv"], block["feed_forward"]["up"], params["head"]["linear"]):
        assert np.std(linear["kernel"]) == pytest.approx(0.02, rel=0.1)
        assert not np.any(linear.get("bias", 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "embed_dim=10 is not divisible by heads=3"),
        ({"conv_kernel": 4}, "must be odd; got conv_kernel=4 and pool_window=3"),
        ({"pool_window": 2}, "must be odd; got conv_kernel=3 and pool_window=2"),
        ({"conv_strides": (1, 1, 1)}, r"widths \(7, 10\).*conv_strides=\(1, 1, 1\)"),
        ({"mixer": "linformer", "projections": 21}, "projections=21.*there are 20"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\); got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("ccx", **{"heads": 2, **changes}), (4, 5))
