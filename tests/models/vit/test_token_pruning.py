"""PoWER: which tokens stay, in one step and in a network."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax.models.vit import deit


def test_the_most_significant_stay_in_their_order():
    x_BTD = jnp.arange(10.0).reshape(2, 5, 1)
    significance_BT = jnp.array([[0.0, 5, 1, 9, 2], [0, 1, 2, 3, 4]])
    kept = deit.keep_significant(x_BTD, significance_BT, 3, cls=False)
    np.testing.assert_array_equal(kept[..., 0], [[1, 3, 4], [7, 8, 9]])
    kept = deit.keep_significant(x_BTD, significance_BT, 3, cls=True)
    np.testing.assert_array_equal(kept[..., 0], [[0, 1, 3], [5, 8, 9]])


def test_tokens_are_weighed_by_their_rank():
    x_BTD = jnp.ones((2, 5, 1))
    significance_BT = jnp.array([[0.0, 5, 1, 9, 2], [0, 1, 2, 3, 4]])
    retention_P = jnp.array([1.0, 0.5, 0.25, 0.0])
    weighed = deit.weigh(x_BTD, significance_BT, retention_P, cls=True)
    np.testing.assert_array_equal(weighed[..., 0], [[1, 0.5, 0, 1, 0.25], [1, 0, 0.25, 0.5, 1]])
    learned = np.array([[1.0, 1, 1, 0.2], [1, 0.5, 0, 0], [1, 1, 0.1, 0], [0, 0, 0, 0]])
    assert deit.learned_schedule(learned, cls=True) == (5, 3, 3, 1)
    assert deit.learned_schedule(learned, cls=False) == (4, 2, 2, 1)


def test_soft_pruning_of_nothing_is_the_network():
    config = deit.DeiTConfig((8, 8), 3, 5, patch=4, heads=2, head_dim=3, depth=1, cls=True)
    params, stats = small_runs.made_up_values(deit.DeiT(config))
    soft = deit.SoftlyPruned(config)
    retention = soft.init(jax.random.key(0))[0]["retention"]
    images = np.random.default_rng(2).normal(size=(4, 8, 8, 3)).astype(np.float32)
    expected, _ = jax.jit(deit.DeiT(config).apply)(params, stats, images)
    logits, _ = jax.jit(soft.apply)({**params, "retention": retention}, stats, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_schedule_falls_evenly_to_the_share():
    def cost(retained):
        return sum(retained)

    assert deit.linear_schedule(4, 20, 0.5, cost) == (16, 12, 8, 4)
    assert deit.linear_schedule(4, 20, 1.0, cost) == (20,) * 4


@pytest.mark.parametrize(("cls", "retained"), [(True, (9, 2)), (False, (12, 5))])
def test_a_block_keeps_the_tokens_that_are_attended_to_most(cls, retained):
    """The tokens after it are those of a block that keeps all, but for those that were dropped."""
    config = deit.DeiTConfig(
        image_size=(12, 16),
        image_channels=3,
        num_classes=5,
        patch=4,
        heads=2,
        head_dim=3,
        depth=2,
        mlp_ratio=2.0,
        cls=cls,
        retained=retained,
        drop_path=0.0,
    )
    images = np.random.default_rng(2).normal(size=(4, 12, 16, 3)).astype(np.float32)
    params, stats = small_runs.made_up_values(deit.DeiT(config))

    def views(retained):
        model = deit.DeiT(dataclasses.replace(config, retained=retained))
        return jax.jit(model.views)(params, stats, images)

    pruned = views(retained)
    for block, (before, after) in enumerate(
        zip((config.tokens, retained[0]), retained, strict=True)
    ):
        significance_BT = np.array(pruned["attention"][block].sum((1, 2)))
        assert significance_BT.shape == (4, before)
        if cls:
            significance_BT[:, 0] = np.inf
        whole = views((before, before))["tokens"][block]
        kept = [np.sort(np.argsort(-row)[:after]) for row in significance_BT]
        expected = np.stack([x[places] for x, places in zip(whole, kept, strict=True)])
        np.testing.assert_allclose(pruned["tokens"][block], expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_tokens_that_stay_alone():
    x_BTD = jnp.arange(10.0).reshape(2, 5, 1)
    significance_BT = jnp.array([[0.0, 5, 1, 9, 2], [0, 1, 2, 3, 4]])

    def total(x, significance):
        return deit.keep_significant(x, significance, 2, cls=True).sum()

    grad_x, grad_significance = jax.grad(total, (0, 1))(x_BTD, significance_BT)
    np.testing.assert_array_equal(grad_x[..., 0], [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]])
    assert not np.any(grad_significance)
