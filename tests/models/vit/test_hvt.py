"""HVT: exact sizes and costs, what pooling leaves, and dropped paths that follow the example."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import models
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


def built(variant, size, classes, **changes):
    settings = {"family": "hvt", "dtype": "float32", **hvt.DEFAULTS, **hvt.VARIANTS[variant]}
    return models.build(
        {**settings, **changes}, image_size=(size, size), channels=3, num_classes=classes
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
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    pools = params["encoder"].get("pools", {})
    positions = {name: pool["position"].shape[0] for name, pool in pools.items()}
    expected = {f"after{i}": np.prod(lengths[i + 1]) for i in range(3) if config.pools_after(i)}
    assert positions == expected


@pytest.fixture(scope="module")
def small():
    """A small network with dropped paths, its parameters, images and one jitted function."""
    model = hvt.HVT(dataclasses.replace(SMALL, drop_path=0.5, depth=2))
    params, stats = small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(1)))
    images = np.random.default_rng(2).normal(size=(8, 12, 20, 3)).astype(np.float32)

    @jax.jit
    def run(images, ids, key):
        with jax.numpy_rank_promotion("raise"):
            return model.apply(
                params, stats, images, train=True, dropout_key=key, example_ids_B=ids
            )[0]

    return model, params, images, run


def test_dropped_paths_follow_the_example_and_the_key(small):
    _, _, images, run = small
    ids, key = np.array([31, 7, 2, 19, 3, 5, 40, 8]), jax.random.key(3)
    whole = run(images, ids, key)
    order = np.array([3, 1, 4, 0, 2, 7, 6, 5])
    np.testing.assert_allclose(run(images[order], ids[order], key), whole[order], atol=2e-5)
    assert np.abs(run(images, ids, jax.random.key(4)) - whole).max() > 1e-3
    assert np.abs(run(images, ids + 1, key) - whole).max() > 1e-3
    assert np.abs(run(images, ids, None) - whole).max() > 1e-3


def test_bfloat16_computes_narrow_and_returns_float32(small):
    model, params, images, _ = small
    narrow = hvt.HVT(model.config, jnp.bfloat16)
    exact = jax.jit(lambda p: model.apply(p, {}, images)[0])(params)
    logits = jax.jit(lambda p: narrow.apply(p, {}, images)[0])(params)
    assert logits.dtype == jnp.float32
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.1


def test_initial_values_are_the_reference_s():
    model = hvt.HVT(dataclasses.replace(SMALL, head_dim=64, num_classes=50))
    params, stats = jax.jit(model.init)(jax.random.key(4))
    assert stats == {}
    block = params["encoder"]["blocks"]["1"]
    for kernel in (
        block["mixer"]["qkv"]["kernel"],
        block["feed_forward"]["down"]["kernel"],
        params["head"]["linear"]["kernel"],
    ):
        assert np.std(kernel) == pytest.approx(0.02, rel=0.05)
        assert np.abs(kernel).max() > 0.05  # not cut off at two standard deviations
    for position in (
        params["embedding"]["position"],
        params["encoder"]["pools"]["after0"]["position"],
    ):
        assert np.std(position) == pytest.approx(0.02, rel=0.1)
    assert not np.any(block["mixer"]["qkv"]["bias"]) and np.all(block["norm1"]["scale"] == 1)
    patches = params["embedding"]["patches"]["linear"]
    bound = (4 * 4 * 3) ** -0.5  # PyTorch's own
    for x in patches.values():
        assert bound * 0.9 < np.abs(x).max() <= bound
    assert np.std(patches["kernel"]) == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 8}, "12×20 pixels cannot be cut into patches of patch=8"),
        ({"stage_depth": 1, "depth": 4}, r"1 tokens after block 3 are fewer than pool_window=3"),
        ({"pool": "median"}, r"unknown model.pool 'median'; choose one of \('max'"),
        ({"pool_dims": 3}, "pool_dims must be 1 or 2; got 3"),
        ({"pool_dims": 2, "pool_window": 2}, "odd in 2-D; got 2"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\); got 1.0"),
        ({"cls": True}, "no CLS token"),
        ({"heads": 0}, "sizes must be positive"),
        ({"stage_depth": -1}, "sizes must be positive"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_the_default_patch_leaves_tokens_for_four_poolings():
    sides = {224: 16, 384: 16, 160: 16, 112: 16, 64: 8, 100: 4, 32: 4, 28: 4, 8: 1, 7: 1, 4: 1}
    assert {side: hvt.default_patch((side, side)) for side in sides} == sides
    assert hvt.default_patch((32, 48)) == 4
    assert built("s-4", 32, 10).config.grid == (8, 8)
    assert built("s-4", 32, 10, patch=2).config.grid == (16, 16)
