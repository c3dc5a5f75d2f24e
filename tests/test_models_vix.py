"""ViX: exact sizes, what positions and dropout do, the batch over devices, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import vix_files

from hsvit_jax import mesh, models
from hsvit_jax.models import costs
from hsvit_jax.models.vix import vix

#: Variant → trained values for CIFAR-10, and for Tiny ImageNet where the paper has it (tables 1, 2
#: and 6); counted with the positions, CLS and projections along the sequence that it leaves out.
PARAMETERS = {
    "vit": (661_770, 687_432),
    "vip": (663_306, 688_968),
    "vil": (809_482, 835_144),
    "vin": (662_298, 687_960),
    "fnet": (399_114, 424_776),
    "mlp_mixer": (8_533_002, 8_558_664),
    "hybrid_vit": (754_506, 779_016),
    "hybrid_vip": (756_042, 780_552),
    "hybrid_vil": (902_218, 926_728),
    "hybrid_vin": (755_034, 779_544),
    "hybrid_fnet": (491_850, 516_360),
    "hybrid_mlp_mixer": (8_625_738, 8_650_248),
    "vit_rope": (661_770, None),
    "vip_rope": (532_106, None),
    "vil_rope": (858_634, None),
    "vin_rope": (531_098, None),
    "hybrid_vit_rope": (754_506, None),
    "hybrid_vip_rope": (624_842, None),
    "hybrid_vil_rope": (951_370, None),
    "hybrid_vin_rope": (623_834, None),
}


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


def counts(model):
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("variant", PARAMETERS)
def test_parameter_counts(variant):
    settings = {**vix.DEFAULTS, **vix.VARIANTS[variant], "family": "vix", "dtype": "float32"}
    cifar, tiny = PARAMETERS[variant]
    assert counts(build(settings)) == cifar
    if tiny:
        assert counts(build(settings, (64, 64), 200)) == tiny


def test_every_variant_has_a_count():
    assert {("vix", name) for name in PARAMETERS} == {v for v in models.VARIANTS if v[0] == "vix"}


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


def test_dropout_follows_the_example_and_the_key(network):
    *_, images, run = network
    ids, key = np.array([31, 7, 2, 19]), jax.random.key(3)
    whole, order = run(images, ids, key), np.array([3, 1, 0, 2])
    np.testing.assert_allclose(run(images[order], ids[order], key), whole[order], atol=2e-5)
    assert np.abs(run(images, ids, jax.random.key(4)) - whole).max() > 1e-3
    assert np.abs(run(images, ids + 1, key) - whole).max() > 1e-3
    assert np.abs(run(images, ids, None) - whole).max() > 1e-3


def test_gradients_of_a_batch_over_devices(network):
    model, params, stats, images, _ = network

    def grads(apply):
        def loss(p):
            logits, _ = apply(p, stats, images, train=True, dropout_key=jax.random.key(3))
            return (logits**2).mean()

        return jax.jit(jax.grad(loss))(params)

    one, many = grads(model.apply), grads(mesh.spread(model, mesh.make(1, 4, groups=0)))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), many, one)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(one))  # every parameter matters


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
