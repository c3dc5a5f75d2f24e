"""CvT: exact sizes and costs, which paths are dropped and how often, training over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hf_files

from hsvit_jax.models import network
from hsvit_jax.models.conv_transformers import cvt

SMALL = {"widths": (4, 5, 6), "heads": (1, 1, 3), "depths": (1, 1, 2), "drop_paths": (0.0,) * 3}


def test_rates_of_dropped_paths():
    """The reference picks a stage's rate by the stage's number, the paper by the block's."""
    c = hf_files.network("cvt", "13").config
    assert [c.drop_path_rate(s, 0) for s in range(3)] == [0, 0, pytest.approx(0.1 * 2 / 9)]
    assert c.drop_path_rate(2, 9) == pytest.approx(0.02222, rel=1e-3)
    c = hf_files.network("cvt", "21").config
    assert c.drop_path_rate(2, 5) == pytest.approx(0.01333, rel=1e-3)
    c = hf_files.network("cvt", "13", drop_path_of="branch").config
    assert [c.drop_path_rate(2, i) for i in (0, 9)] == [0, 0.1]


@pytest.mark.parametrize("of", ("tokens", "branch"))
def test_what_a_dropped_path_takes(of):
    """With nothing from attention: an example's tokens, or its feed-forward alone."""
    settings = {**SMALL, "drop_paths": (0.0, 0.0, 0.75), "drop_path_of": of}
    c = hf_files.network("cvt", size=(48, 48), **settings).config
    # The reference picks the rate of block 2, of two blocks the second one's.
    block = cvt.Block(c, 2, 1, jax.random.key(0))
    block.mixer.out.kernel[...] = jnp.zeros_like(block.mixer.out.kernel[...])
    x_BTD = jax.random.normal(jax.random.key(1), (64, 10, 6))
    context = network.ForwardContext(True, tuple(jnp.uint32([3, 4])), jnp.arange(64))
    y = block(x_BTD, context, 2)
    branch = block.feed_forward(block.norm2(x_BTD), context, 0)
    kept = np.asarray(x_BTD + branch) * 4 if of == "tokens" else np.asarray(x_BTD + 4 * branch)
    dropped = np.zeros_like(x_BTD) if of == "tokens" else np.asarray(x_BTD)
    gone = np.abs(np.asarray(y) - dropped).max((1, 2)) < 1e-6
    assert 36 <= gone.sum() <= 60
    np.testing.assert_allclose(np.asarray(y)[~gone], kept[~gone], rtol=1e-3, atol=1e-4)


def test_where_tokens_lie():
    """Of a stage's own map, and of its keys; CLS only in the last stage."""
    model = hf_files.network("cvt", "13-patch4", (64, 64))
    assert model.config.maps() == ((17, 17), (9, 9), (5, 5))
    assert [model.grid(n) for n in (289, 81, 26, 10, 7)] == [
        (0, 17, 17),
        (0, 9, 9),
        (1, 5, 5),
        (1, 3, 3),
        None,
    ]
