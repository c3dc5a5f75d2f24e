"""Parts that one family of the ViX paper has: ViX's pooling and its single head, CvX's norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs, torch_files, vix_files

from hsvit_jax import models
from hsvit_jax.models.vix import cvx


def test_channels_that_do_not_differ_have_a_gradient_in_cvx_too():
    norm, flat = cvx.ChannelNorm(4), jnp.ones((1, 2, 4))
    gradient = jax.jit(jax.grad(lambda x: (norm(x) ** 2).sum()))(flat)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("family", ["levix", "ccx", "cvx"])
def test_tokens_after_each_block_are_shown(family):
    settings = vix_files.small(family, **({"heads": 2} if family == "ccx" else {}))
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=10)
    trees = model.init_shapes()
    images = jax.ShapeDtypeStruct((2, 4, 4, 3), jnp.float32)
    tokens = jax.eval_shape(model.views, *trees, images)["tokens"]
    blocks = sum(settings["depths"]) if family == "cvx" else settings["depth"]
    assert [x.shape for x in tokens] == [(2, 16, 10)] * blocks


def test_the_mean_of_all_tokens_is_classified():
    """The CLS token's too, before the norm, as in the authors' code."""
    settings = vix_files.small("vix", patch=2, head_pool="mean")
    model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
    params, stats = small_runs.made_up_values(model)
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    mean_BD = np.asarray(model.views(params, stats, images)["tokens"][-1], np.float64).mean(1)
    centred_BD = mean_BD - mean_BD.mean(1, keepdims=True)
    norm, linear = (jax.tree.map(np.float64, params["head"][part]) for part in ("norm", "linear"))
    scaled_BD = centred_BD / np.sqrt((centred_BD**2).mean(1, keepdims=True) + 1e-5)
    expected = (scaled_BD * norm["scale"] + norm["bias"]) @ linear["kernel"] + linear["bias"]
    logits, _ = model.apply(params, stats, images)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_one_head_as_wide_as_a_token_is_not_projected():
    """In ViX and PiX, whose files have no tensors for it, by the authors' code; CCX projects it."""
    for family, sizes in (("vix", {"patch": 2, "head_dim": 10}), ("pix", {"head_dim": 10})):
        settings = vix_files.small(family, heads=1, **sizes)
        model = models.build(settings, image_size=(4, 4), channels=3, num_classes=7)
        keys = [entry.key for entry in torch_files.listing(family, model)]
        outs = [key for key in keys if ".to_out." in key]
        given = {"heads": 1, "patch_size": settings["patch"], "image_size": 4}
        assert [key.split(".")[1] for key in outs] == (["2"] * 4 if family == "pix" else [])
        told, _ = torch_files.settings(family, vix_files.state(family, model), given)
        assert (told["heads"], told["head_dim"]) == (1, 10)
    ccx = models.build(
        vix_files.small("ccx", heads=1), image_size=(4, 4), channels=3, num_classes=7
    )
    assert any("self_attn.proj." in entry.key for entry in torch_files.listing("ccx", ccx))
