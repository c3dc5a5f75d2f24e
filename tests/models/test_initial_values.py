"""How parameters start: each family's as its reference's do."""

import math

import jax
import numpy as np
import pytest
from support import hf_files

BLOCK = "encoder/blocks/0"
SMALL = {"depth": 1, "heads": 2, "head_dim": 32}
VIX = {"embed_dim": 50, "mlp_dim": 40, "depth": 1}
#: Family → side of an image, settings, and by path: the deviation of a normal distribution that is
#: not cut off, a pair (-b, b) of uniform bounds, or a constant.
STARTS = {
    "vix": (
        *(20, {**VIX, "patch": 2, "stem_channels": (), "mixer": "softmax"}),
        {
            "encoder/position": 1.0,
            "encoder/cls": 1.0,
            "patches/embed/linear": (-(12**-0.5), 12**-0.5),
            f"{BLOCK}/mixer/out": (-(128**-0.5), 128**-0.5),
            f"{BLOCK}/feed_forward/up": (-(50**-0.5), 50**-0.5),
            "head/linear": (-(50**-0.5), 50**-0.5),
        },
    ),
    "ccx": (
        *(12, {**VIX, "conv_channels": (20,), "heads": 2, "mixer": "softmax"}),
        {
            "encoder/position": 0.2,
            "tokenizer/convs/0/kernel": (2 / 27) ** 0.5,
            "tokenizer/convs/1/kernel": (2 / 180) ** 0.5,
            f"{BLOCK}/mixer/qkv/kernel": 0.02,
            f"{BLOCK}/feed_forward/up/kernel": 0.02,
            f"{BLOCK}/feed_forward/up/bias": 0,
            "head/linear/kernel": 0.02,
        },
    ),
    "hvt": (
        *(20, {**SMALL, "stage_depth": 1, "patch": 4}),
        {
            f"{BLOCK}/mixer/qkv/kernel": 0.02,
            f"{BLOCK}/mixer/qkv/bias": 0,
            f"{BLOCK}/feed_forward/down/kernel": 0.02,
            f"{BLOCK}/norm1/scale": 1,
            "head/linear/kernel": 0.02,
            "embedding/position": 0.02,
            "encoder/pools/after0/position": 0.02,
            "embedding/patches/linear": (-(48**-0.5), 48**-0.5),
        },
    ),
    "vit": (
        *(8, {**SMALL, "mlp_dim": 90, "patch": 4}),
        {
            "embedding/patches/linear/kernel": 0.02,
            f"{BLOCK}/mixer/qkv/kernel": 0.02,
            f"{BLOCK}/mixer/out/bias": 0,
            f"{BLOCK}/feed_forward/up/kernel": 0.02,
        },
    ),
}


@pytest.mark.parametrize("family", STARTS)
def test_initial_values_are_the_reference_s(family):
    side, settings, starts = STARTS[family]
    network = hf_files.network(family, size=(side, side), classes=40, **settings)
    # A generator that XLA need not unroll: compiled in a fraction of the time.
    params, stats = jax.jit(network.init)(jax.random.key(0, impl="rbg"))
    assert stats == {}
    for path, expected in starts.items():
        part = params
        for name in path.split("/"):
            part = part[name]
        for values in jax.tree.leaves(part):
            largest, deviation = np.abs(values).max(), np.std(values)
            if isinstance(expected, tuple):
                bound = expected[1]
                assert 0.8 * bound < largest <= bound
                assert deviation == pytest.approx(bound / 3**0.5, rel=4 / values.size**0.5)
            elif isinstance(expected, int):
                assert np.all(values == expected)
            else:
                assert deviation == pytest.approx(expected, rel=4 / math.sqrt(2 * values.size))
                assert largest > 2.5 * expected or values.size < 500
