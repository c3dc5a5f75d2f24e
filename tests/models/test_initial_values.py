"""How parameters start: each family's as its reference's do."""

import math

import jax
import numpy as np
import pytest
from support import hf_files

BLOCK = "encoder/blocks/0"
SMALL = {"depth": 1, "heads": 2, "head_dim": 32}
VIX = {"embed_dim": 50, "mlp_dim": 40, "depth": 1}
STAGES = {"in_channels": (32, 24), "out_channels": (24, 16), "repeats": (1, 1)}
STAGES |= {"strides": (1, 1), "kernels": (3, 5), "expand": (1, 6)}
SLOW = ("mobilevit", "mobilenet_v2")
#: Family → side of an image, settings, and by path: the deviation of a normal distribution that is
#: not cut off, a pair (-b, b) of uniform bounds, or a constant, of a fraction in a list.
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
    "levix": (
        *(8, {**VIX, "stem_channels": (), "stem_strides": (1,), "heads": 2, "mixer": "softmax"}),
        {f"{BLOCK}/mixer/out_norm/scale": 0, f"{BLOCK}/mixer/key_norm/scale": 1},
    ),
    "cvt": (
        16,
        {
            **{"widths": (16,), "heads": (1,), "depths": (1,), "mlp_ratios": (4.0,)},
            **{"patches": (7,), "strides": (4,), "paddings": (2,), "qkv_bias": (True,)},
            **{"kernels": (3,), "query_paddings": (1,), "key_paddings": (1,), "key_strides": (2,)},
            **{"dropouts": (0.0,), "attention_dropouts": (0.0,), "drop_paths": (0.0,)},
        },
        {
            "stage0/blocks/0/mixer/qkv/kernel": 0.02,
            "stage0/blocks/0/mixer/local/key/conv/kernel": 0.02,
            "stage0/blocks/0/feed_forward/down/kernel": 0.02,
        },
    ),
    "mobilevit": (
        *(32, {}),
        {
            "layer2/blocks/1/mixer/qkv/kernel": 0.02,
            "layer2/down/depthwise/conv/kernel": 0.02,
            "layer2/project/kernel": 0.02,
            "layer2/fuse/conv/kernel": 0.02,
            "layer2/fuse/norm/scale": 1,
        },
    ),
    "swiftformer": (
        *(32, {"depths": (1,), "widths": (40,), "downsamples": ()}),
        {
            "stage0/blocks/0/scales/scales/0": [1e-5],
            "stage0/blocks/0/local/scale": 1,
            "stage0/blocks/0/local/depthwise/conv/kernel": 0.02,
            "stage0/blocks/0/attention/score": 1.0,
            "stage0/blocks/0/attention/mix/kernel": 0.02,
            "stage0/blocks/0/feed_forward/up/kernel": 0.02,
        },
    ),
    "efficientformer": (
        *(32, {"depths": (1, 2), "widths": (24, 40), "downsamples": (True,)}),
        {
            "stage1/attention_blocks/0/attention/offset_bias": 0,
            "stage1/attention_blocks/0/attention/qkv/kernel": 0.02,
            "stage1/attention_blocks/0/scales/scales/1": [1e-5],
            "stage0/pool_blocks/0/up/conv/kernel": 0.02,
        },
    ),
    "resnet": (
        *(32, {"block": "basic", "channels": (24, 40), "depths": (1, 1), "stem_channels": 16}),
        {
            "backbone/stem/kernel": (2 / (49 * 16)) ** 0.5,
            "backbone/blocks/1/convs/1/kernel": (2 / (9 * 40)) ** 0.5,
            "backbone/blocks/1/shortcut/kernel": (2 / 40) ** 0.5,
            "head/linear": (-(40**-0.5), 40**-0.5),
            "backbone/stem/norm/scale": 1,
            "backbone/stem/norm/bias": 0,
            "stats/backbone/stem/norm/var": 1,
            "stats/backbone/stem/norm/mean": 0,
        },
    ),
    "efficientnet": (
        *(32, {**STAGES, "width": 0.5}),
        {
            "backbone/top/kernel": 0.02,
            "backbone/blocks/1/expand/kernel": 0.02,
            "backbone/blocks/1/depthwise/kernel": 0.02,
            "backbone/blocks/1/squeeze/reduce/kernel": 0.02,
            "backbone/blocks/1/squeeze/expand/bias": 0,
            "backbone/blocks/1/project/norm/scale": 1,
            "head/linear/kernel": 0.02,
        },
    ),
    "mobilenet_v2": (
        *(32, {"width": 0.5}),
        {
            "backbone/blocks/9/expand/kernel": 0.02,
            "backbone/blocks/9/depthwise/kernel": 0.02,
            "head/linear/kernel": 0.02,
            "head/linear/bias": 0,
        },
    ),
}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in STARTS]
)
def test_initial_values_are_the_reference_s(family):
    side, settings, starts = STARTS[family]
    network = hf_files.network(family, size=(side, side), classes=40, **settings)
    # A generator that XLA need not unroll: compiled in a fraction of the time.
    params, stats = jax.jit(network.init)(jax.random.key(0, impl="rbg"))
    for path, expected in starts.items():
        part = params | {"stats": stats}
        for name in path.split("/"):
            part = part[name]
        for values in jax.tree.leaves(part):
            largest, deviation = np.abs(values).max(), np.std(values)
            if isinstance(expected, tuple):
                bound = expected[1]
                assert 0.8 * bound < largest <= bound
                assert deviation == pytest.approx(bound / 3**0.5, rel=4 / values.size**0.5)
            elif isinstance(expected, int | list):
                assert np.all(values == np.float32(expected))
            else:
                assert deviation == pytest.approx(expected, rel=4 / math.sqrt(2 * values.size))
                assert largest > 2.5 * expected or values.size < 500
