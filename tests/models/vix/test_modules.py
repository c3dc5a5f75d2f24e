"""Parts that one family of the ViX paper has: CvX's norm, LeViT's start, PiX's pool, positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import vix_files

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
    trees = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, 4, 4, 3), jnp.float32)
    tokens = jax.eval_shape(model.views, *trees, images)["tokens"]
    blocks = sum(settings["depths"]) if family == "cvx" else settings["depth"]
    assert [x.shape for x in tokens] == [(2, 16, 10)] * blocks
