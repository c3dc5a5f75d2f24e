"""Large images cut into tiles that towers share: who sees what, and small objects found."""

import dataclasses

import jax
import numpy as np
from support import small_runs

from hsvit_jax.models import costs as model_costs
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.planner import costs

TILES, SIDE = (2, 2), 8
SIZES = {"image_size": (16, 16), "conv_channels": (32, 32), "embed_dim": 8, "groups": 8}
CONFIG = dataclasses.replace(small_runs.HSVIT, **SIZES, towers=8, tiles=TILES)


def cls_of(network, values, images):
    keep = small_runs.Keep()
    network.apply(*values, images, shard=keep)
    return keep.cls


def test_a_tile_reaches_only_its_towers():
    """Tower k sees tile k mod 4, counted row by row."""
    network = hsvit.TowerHSViT(CONFIG)
    values = small_runs.made_up_values(network)
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 1)).astype(np.float32)
    run = jax.jit(lambda images: cls_of(network, values, images))
    before = run(images)
    for tile in range(4):
        row, column = np.array(divmod(tile, 2)) * SIDE
        changed = images.copy()
        changed[:, row : row + SIDE, column : column + SIDE] += 1
        moved = np.abs(run(changed) - before).max((1, 2)) > 0
        assert moved.tolist() == [k % 4 == tile for k in range(8)]


def test_costs_are_of_a_tile():
    network = hsvit.TowerHSViT(CONFIG)
    rows = {path: numbers for path, *numbers in model_costs.modules(network)}
    weights = 9 * 4 + 9 * 4 * 4
    assert rows["towers.trunk.blocks.0"] == [  # each tower sees 64 of the 256 pixels
        8 * (weights + 2 * 8),
        8 * 64 * weights,
    ]
    assert sum(count for count, _ in rows.values()) == model_costs.parameters(network)
    whole = hsvit.TowerHSViT(dataclasses.replace(CONFIG, tiles=(1, 1)))
    tiled, dense = (
        costs.Cost("towers", n, data=1, group=8, batch=1).forward_flops for n in (network, whole)
    )
    assert tiled < 0.4 * dense
