"""Parts that one family of the ViX paper has: CvX's norm, LeViT's start, PiX's pool, positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs, vix_files

from hsvit_jax import models
from hsvit_jax.models.vix import cvx, levix, pix
from hsvit_jax.models.vix.mixer_config import Mixing


def test_cvx_s_norm_over_channels():
    norm = cvx.ChannelNorm(4)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32) * 1e-5
    expected = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(jax.jit(norm)(x), expected, rtol=1e-4, atol=1e-5)
    flat = jnp.ones((1, 2, 4))  # channels that do not differ have a gradient, too
    gradient = jax.jit(jax.grad(lambda x: (norm(x) ** 2).sum()))(flat)
    assert np.isfinite(gradient).all()


def test_a_block_of_levit_starts_without_its_attention():
    attention = levix.LeViTAttention(Mixing("softmax", heads=2, head_dim=3), 5, jax.random.key(0))
    assert not np.any(attention.out_norm.scale[...]) and np.all(attention.key_norm.scale[...] == 1)


def test_pix_s_pool_keeps_cls_apart():
    stage = pix.Stage(1, (3, 5), 16, 4)
    pool = pix.Pool(stage, jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
    jacobian = jax.jit(jax.jacrev(lambda x: pool(x[None])[0].sum(1)))(x[0])
    reach = np.abs(jacobian).max(2)  # (tokens out, tokens in)
    assert reach.shape == (7, 16)
    assert reach[0, 0] > 0 and not reach[0, 1:].any() and not reach[1:, 0].any()
    corner = reach[1, 1:].reshape(3, 5) > 0  # of the map: its own pixel, and those beside it
    np.testing.assert_array_equal(np.argwhere(corner), [[0, 0], [0, 1], [1, 0], [1, 1]])


def test_rope_uses_no_learned_positions():
    settings = vix_files.small("vix", patch=3, positions="rope", depth=1)
    model = models.build(settings, image_size=(6, 9), channels=3, num_classes=10)
    params, _ = small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(0)))
    images = np.random.default_rng(1).normal(size=(1, 6, 9, 3)).astype(np.float32)
    grads = jax.jit(jax.grad(lambda p: model.apply(p, {}, images)[0].sum()))(params)
    assert not np.any(grads["encoder"].pop("position"))  # the reference keeps it, too
    assert all(np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("family", ["levix", "ccx", "cvx"])
def test_tokens_after_each_block_are_shown(family):
    settings = vix_files.small(family, **({"heads": 2} if family == "ccx" else {}))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=10)
    trees = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, 4, 4, 3), jnp.float32)
    tokens = jax.eval_shape(model.views, *trees, images)["tokens"]
    blocks = sum(settings["depths"]) if family == "cvx" else settings["depth"]
    assert [x.shape for x in tokens] == [(2, 16, 10)] * blocks
