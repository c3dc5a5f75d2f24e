"""PoWER: which tokens stay, and the whole network against one in NumPy."""

import hvt_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax import convert_hvt
from hsvit_jax.models.vit import hvt, token_pruning


def test_the_most_significant_stay_in_their_order():
    x_BTD = jnp.arange(10.0).reshape(2, 5, 1)
    significance_BT = jnp.array([[0.0, 5, 1, 9, 2], [0, 1, 2, 3, 4]])
    kept = token_pruning.keep_significant(x_BTD, significance_BT, 3, cls=False)
    np.testing.assert_array_equal(kept[..., 0], [[1, 3, 4], [7, 8, 9]])
    kept = token_pruning.keep_significant(x_BTD, significance_BT, 3, cls=True)
    np.testing.assert_array_equal(kept[..., 0], [[0, 1, 3], [5, 8, 9]])


def test_a_schedule_falls_evenly_to_the_share():
    def cost(retained):
        return sum(retained)

    assert token_pruning.linear_schedule(4, 20, 0.5, cost) == (16, 12, 8, 4)
    assert token_pruning.linear_schedule(4, 20, 1.0, cost) == (20,) * 4


@pytest.mark.parametrize(("cls", "retained"), [(True, (9, 2)), (False, (12, 5))])
def test_logits_equal_a_network_in_numpy(cls, retained):
    config = hvt.HVTConfig(
        image_size=(12, 16),
        image_channels=3,
        num_classes=5,
        patch=4,
        heads=2,
        head_dim=3,
        depth=2,
        stage_depth=0,
        mlp_ratio=2.0,
        cls=cls,
        retained=retained,
        drop_path=0.0,
    )
    constructor = {"num_heads": 2, "head_dim": 3, "num_blocks": 2, "pool_block_width": 0}
    constructor |= {"pool_kernel_size": 3, "mlp_ratio": 2.0, "ln_eps": 1e-6, "qkv_bias": True}
    constructor |= {"patch_size": 4, "size": (12, 16), "num_classes": 5, "cls": cls}
    tensors = hvt_numpy.random_state(hvt_numpy.hvt_shapes(constructor))
    params, stats = convert_hvt.params_from_torch(tensors, config)
    images = np.random.default_rng(2).normal(size=(4, 12, 16, 3)).astype(np.float32)
    model = hvt.HVT(config)
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(model.apply)(params, stats, images)[0]
    nchw = images.transpose(0, 3, 1, 2)
    theirs = hvt_numpy.hvt(tensors, {**constructor, "retained": retained}, nchw)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    whole = hvt_numpy.hvt(tensors, constructor, nchw)
    assert np.abs(whole - theirs).max() > 1e-3 * np.abs(theirs).max()
    lengths = [row[1][0] for row in model.layer_table() if "feed-forward down" in row[0]]
    assert tuple(lengths) == retained


def test_gradients_reach_the_tokens_that_stay_alone():
    x_BTD = jnp.arange(10.0).reshape(2, 5, 1)
    significance_BT = jnp.array([[0.0, 5, 1, 9, 2], [0, 1, 2, 3, 4]])

    def total(x, significance):
        return token_pruning.keep_significant(x, significance, 2, cls=True).sum()

    grad_x, grad_significance = jax.grad(total, (0, 1))(x_BTD, significance_BT)
    np.testing.assert_array_equal(grad_x[..., 0], [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]])
    assert not np.any(grad_significance)
