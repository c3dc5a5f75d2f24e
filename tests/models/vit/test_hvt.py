"""HVT: what pooling leaves of a sequence, and what is refused."""

import dataclasses

import numpy as np
import pytest
from support import hf_files

from hsvit_jax.models.vit import hvt

SMALL = hvt.HVTConfig(
    image_size=(12, 20),
    image_channels=3,
    num_classes=5,
    patch=4,
    heads=2,
    head_dim=3,
    depth=3,
    stage_depth=2,
    mlp_ratio=2.0,
)


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, [(15,), (7,), (7,), (3,)]),
        ({"pool_dims": 2}, [(3, 5), (2, 3), (2, 3), (1, 2)]),
        ({"stage_depth": 0}, [(15,)] * 4),
        ({"pool_window": 2, "stage_depth": 1}, [(15,), (7,), (3,), (1,)]),
    ],
)
def test_lengths_of_the_sequence(changes, lengths):
    config = dataclasses.replace(SMALL, **changes)
    assert config.lengths() == lengths
    model = hvt.HVT(config)
    params, _ = model.init_shapes()
    pools = params["encoder"].get("pools", {})
    positions = {name: pool["position"].shape[0] for name, pool in pools.items()}
    expected = {f"after{i}": np.prod(lengths[i + 1]) for i in range(3) if config.pools_after(i)}
    assert positions == expected


def test_the_default_patch_leaves_tokens_for_four_poolings():
    sides = {224: 16, 384: 16, 160: 16, 112: 16, 64: 8, 100: 4, 32: 4, 28: 4, 8: 1, 7: 1, 4: 1}
    assert {side: hvt.default_patch((side, side)) for side in sides} == sides
    assert hvt.default_patch((32, 48)) == 4
    with pytest.raises(ValueError, match=r"no patch .* 225×225 pixels: set model.patch"):
        hvt.default_patch((225, 225))
    own = {**hvt.FAMILY.settings("s-4"), "patch": 9}  # as a file says it
    assert hvt.FAMILY.variant_of(own, (99, 99)) == "custom"
    assert hf_files.network("hvt", "s-4", (32, 32)).config.grid == (8, 8)
    assert hf_files.network("hvt", "s-4", (32, 32), patch=2).config.grid == (16, 16)
