"""ViX: exact sizes, what positions and dropout do, the batch over devices, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs, vix_files

from hsvit_jax import models
from hsvit_jax.models import costs
from hsvit_jax.models.vix import vix


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


def test_multiply_adds_of_vit():
    """By hand: patches, four blocks of attention and feed-forward on 1,025 tokens, the head."""
    settings = {**vix.DEFAULTS, "family": "vix", "dtype": "float32"}
    t, d = 1025, 128
    block = t * d * 3 * d + 2 * t * t * d + t * d * d + 2 * t * d * 256
    expected = 1024 * 3 * d + 4 * block + d * 10
    assert costs.multiply_adds(build(settings)) == expected


@pytest.fixture(scope="module")
def network():
    """A small ViT with dropout everywhere, its parameters, images and a compiled pass."""
    settings = vix_files.small("vix", patch=3, dropout=0.2, embed_dropout=0.2, depth=1)
    model = build(settings, (6, 9))
    params, stats = small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(0)))
    images = np.random.default_rng(1).normal(size=(4, 6, 9, 3)).astype(np.float32)

    @jax.jit
    def run(images, ids, key):
        with jax.numpy_rank_promotion("raise"):
            return model.apply(params, stats, images, dropout_key=key, example_ids_B=ids)[0]

    return model, params, stats, images, run


def test_rope_uses_no_learned_positions():
    settings = vix_files.small("vix", patch=3, positions="rope", depth=1)
    model = build(settings, (6, 9))
    params, _ = small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(0)))
    images = np.random.default_rng(1).normal(size=(1, 6, 9, 3)).astype(np.float32)
    grads = jax.jit(jax.grad(lambda p: model.apply(p, {}, images)[0].sum()))(params)
    assert not np.any(grads["encoder"].pop("position"))  # the reference keeps it, too
    assert all(np.any(x) for x in jax.tree.leaves(grads))


def test_bfloat16_computes_narrow(network):
    model, params, stats, images, _ = network
    narrow = vix.ViX(model.config, jnp.bfloat16)
    ours, exact = (jax.jit(m.apply)(params, stats, images)[0] for m in (narrow, model))
    assert ours.dtype == jnp.float32
    assert 1e-5 < np.abs(ours - exact).max() / np.abs(exact).max() < 0.1


def test_initial_values_are_the_reference_s():
    settings = vix_files.small("vix", patch=2, embed_dim=50, depth=1)
    params, _ = jax.jit(build(settings, (20, 20), 40).init)(jax.random.key(0))
    encoder = params["encoder"]
    for values in (encoder["position"], encoder["cls"]):
        assert abs(np.var(values) - 1) < 4 * (2 / values.size) ** 0.5
    assert np.abs(encoder["position"]).max() > 3  # not cut off
    block = encoder["blocks"]["0"]
    for linear, fan_in in (
        (params["patches"]["embed"]["linear"], 12),
        (block["mixer"]["out"], 12),
        (block["feed_forward"]["up"], 50),
        (params["head"]["linear"], 50),
    ):
        for values in linear.values():
            assert 0.8 * fan_in**-0.5 < np.abs(values).max() <= fan_in**-0.5
    assert "bias" not in block["mixer"]["qkv"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 4}, r"6×9 pixels cannot be cut into patches of patch=4"),
        ({"mixer": "nystrom", "landmarks": 8}, r"landmarks=8.*there are 7"),
        ({"mixer": "linformer", "projections": 8}, r"projections=8.*there are 7"),
        ({"stem_channels": (4,), "stem_strides": (1,)}, r"widths \(4, 10\).*stem_strides=\(1,\)"),
        ({"stem_channels": (4,), "patch": 3}, r"patch=3 and stem_channels=\(4,\)"),
        ({"positions": "sine"}, "unknown model.positions 'sine'; choose learned or rope"),
        ({"mixer": "fnet", "positions": "rope"}, "mixer='fnet' has none"),
        ({"depth": 0}, "sizes must be positive"),
        ({"embed_dropout": 1.0}, r"dropout must be in \[0, 1\); got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("vix", **{"patch": 3, **changes}), (6, 9))
