"""T2T-ViT in its authors' names: a golden and the way back, softmax tokens, constants."""

import math

import jax
import numpy as np
import pytest
from support import convnet_files, hf_files

from hsvit_jax.models.network import ForwardContext
from hsvit_jax.models.vix import t2t

SMALL = {"token_dim": 4, "embed_dim": 8, "depth": 1, "heads": 2}


def test_positions_of_a_file_are_those_of_a_fresh_network(golden_dir):
    tensors, *_ = convnet_files.read(golden_dir / "t2t-performer.npz")
    np.testing.assert_allclose(tensors["pos_embed"][0], t2t.sinusoids(17, 24), atol=1e-7)


def test_softmax_between_soft_splits():
    """The scale is the joined tokens', the skip is the values."""
    c = hf_files.network("t2t", "t-14", **SMALL).config
    with jax.enable_x64(True):
        layer = t2t.TokenLayer(c, 36, jax.random.key(0))
        x = np.random.default_rng(0).normal(size=(1, 5, 36))
        run = jax.jit(lambda x: layer(x, None, ForwardContext(False, None, np.arange(1)), 0))
        ours = run(x)
        linears = (layer.qkv, layer.out, layer.feed_forward.up, layer.feed_forward.down)
        qkv, out, up, down = (np.asarray(linear.kernel[...]) for linear in linears)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    q, k, v = np.split(norm(x[0]) @ qkv, 3, axis=1)
    weights = np.exp(q @ k.T / 36**0.5)
    y = v + weights / weights.sum(1, keepdims=True) @ v @ out
    hidden = norm(y) @ up
    gelu = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / 2**0.5))
    np.testing.assert_allclose(ours[0], y + gelu @ down, atol=1e-12)


@pytest.mark.parametrize("side", [16, 30, 33, 50])
def test_every_size_has_its_tokens(side):
    """The first split, unlike the others, is not padded to all of its stride."""
    network = hf_files.network("t2t", "t-14", size=(side, side), **SMALL)
    params, stats = network.init_shapes()
    images = jax.ShapeDtypeStruct((2, side, side, 3), np.float32)
    assert jax.eval_shape(network.apply, params, stats, images)[0].shape[0] == 2
    first = (side - 3) // 4 + 1
    assert network.config.grids[0] == (first, first)
    assert params["constants"]["position"].shape[0] == network.config.tokens


def test_a_width_survives_its_ratio():
    """A float's rounding takes no channel away: 44·(15/44) is below 15."""
    sizes = {**SMALL, "embed_dim": 44, "mlp_ratio": 15 / 44}
    assert hf_files.network("t2t", **sizes).config.hidden == 15
    swin = hf_files.network("swin", widths=(44,) * 4, heads=(1,) * 4, mlp_ratio=15 / 44)
    params, _ = swin.init_shapes()
    assert params["stage0"]["blocks"]["0"]["feed_forward"]["up"]["bias"].shape == (15,)
    mixer = {"mixer": "mlp_mixer", "patch": 8, "embed_dim": 44, "expansion": 15 / 44}
    assert hf_files.network("vix", **mixer).config.mlp_dim == 15


def test_constants_stay_and_scores_have_a_scale():
    network = hf_files.network("t2t", qk_scale=8**-0.5, **SMALL)
    assert network.with_frozen(["head"]).frozen == {"head", "constants"}
    with pytest.raises(ValueError, match="nothing would be left to train"):
        network.with_frozen(["embedding", "encoder", "head"])
    assert t2t.Attention(network.config, jax.random.key(0)).factor == 8**-0.5 * 4**0.5
