"""The separable trunk: its parameters and costs, what it computes, and that it can be spread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hlo, small_runs

from hsvit_jax.models import network as network_lib
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.ops import conv_direct
from hsvit_jax.planner import costs

SIZES = {"image_size": (8, 4), "image_channels": 3, "conv_channels": (4, 8), "groups": 4}
CONFIG = dataclasses.replace(
    small_runs.HSVIT, **SIZES, conv_kernels=(3, 5), convolution="separable"
)
NETWORKS = {
    "replicated": hsvit.HSViT(CONFIG),
    "sharded": hsvit.HSViT(dataclasses.replace(CONFIG, trunk="sharded")),
    "towers": hsvit.TowerHSViT(dataclasses.replace(CONFIG, towers=2)),
}


def test_parameters_counted():
    """The image's convolution is dense; each later one is k·k per channel in, and in × out."""
    params, _ = NETWORKS["replicated"].init_shapes()
    blocks = params["trunk"]["blocks"]
    shapes = jax.tree.map(lambda x: x.shape, blocks)
    assert shapes["0"]["kernels"] == {"0": (3, 3, 3, 4), "1": (1, 1, 4, 4)}
    assert shapes["0"]["depthwise"] == {"0": (3, 3, 1, 4)}
    assert shapes["1"]["kernels"] == {"0": (1, 1, 4, 8), "1": (1, 1, 8, 8)}
    assert shapes["1"]["depthwise"] == {"0": (5, 5, 1, 4), "1": (3, 3, 1, 8)}
    total = sum(x.size for x in jax.tree.leaves(blocks))
    norms = 2 * (4 + 4 + 8 + 8)
    assert total == 9 * 3 * 4 + (9 * 4 + 16) + (25 * 4 + 32) + (9 * 8 + 64) + norms


def test_a_block_is_depthwise_then_pointwise_then_norm():
    network = NETWORKS["replicated"]
    params, stats = small_runs.made_up_values(network)
    own, norm = params["trunk"]["blocks"]["1"], stats["trunk"]["blocks"]["1"]["norms"]
    x = np.random.default_rng(2).normal(size=(2, 4, 2, 4)).astype(np.float32)
    block = network.bind(params, stats)["trunk"].blocks[1]
    context = network_lib.ForwardContext(False, None, jnp.arange(2))
    found = block(x, context, network_lib.UNSHARDED, replicated=False)
    for i in ("0", "1"):
        y = conv_direct.conv2d_xla(x, own["depthwise"][i])
        y = conv_direct.conv2d_xla(y, own["kernels"][i])
        scale = own["norms"][i]["scale"] / np.sqrt(norm[i]["var"] + 1e-5)
        shift = own["norms"][i]["bias"] - norm[i]["mean"] * scale
        x = np.maximum(y * scale[None, None, None] + shift[None, None, None], 0)
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-5 * np.abs(x).max())


@pytest.mark.slow
def test_the_plan_knows_it():
    """Matrix products, bytes of every collective, and depthwise FLOPs by hand."""
    for way in ("sharded", "towers"):
        for row in hlo.compare(way, NETWORKS[way], 2):
            if not row["quantity"].startswith("activations"):
                assert row["predicted"] == pytest.approx(row["compiled"], rel=0.01), row
    cost = costs.Cost("data", NETWORKS["replicated"], data=1, group=1, batch=1)
    counted = 2 * (32 * 9 * 4 + 8 * (25 * 4 + 9 * 8))
    assert cost.depthwise_flops == (counted, 3 * counted)
    dense = costs.Cost(
        "data",
        hsvit.HSViT(dataclasses.replace(CONFIG, convolution="dense")),
        data=1,
        group=1,
        batch=1,
    )
    assert dense.depthwise_flops == (0, 0) and dense.forward_flops > cost.forward_flops
