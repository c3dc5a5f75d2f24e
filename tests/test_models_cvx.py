"""CvX: exact sizes, its norm, BatchNorm over devices, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import vix_files

from hsvit_jax import mesh, models
from hsvit_jax.models.vix import cvx

#: Variant → trained values for CIFAR-10 and Tiny ImageNet (ViX paper, tables 3 and 4), the norms
#: over channels and projections along the sequence included.
PARAMETERS = {
    "cvt": (1_102_602, 1_127_112),
    "cvp": (830_730, 855_240),
    "cvl": (976_650, 1_001_160),
    "cvn": (829_722, 854_232),
}


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


@pytest.mark.parametrize("variant", PARAMETERS)
def test_parameter_counts(variant):
    settings = {**cvx.DEFAULTS, **cvx.VARIANTS[variant], "family": "cvx", "dtype": "float32"}
    cases = ((32, 10), (64, 200))
    for (size, classes), expected in zip(cases, PARAMETERS[variant], strict=True):
        model = build(settings, (size, size), classes)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_every_variant_has_a_count():
    assert set(PARAMETERS) == set(cvx.VARIANTS)
    assert {("cvx", name) for name in PARAMETERS} <= set(models.VARIANTS)


def test_training_over_devices():
    """Gradients, logits and the statistics after the batch, whole and split over devices."""
    model = build(vix_files.small("cvx", depths=(1,), stage_strides=(2,), dropout=0.2), (6, 7), 5)
    params, stats = small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(0)))
    images = np.random.default_rng(1).normal(size=(4, 6, 7, 3)).astype(np.float32)

    def results(apply):
        def loss(p):
            logits, after = apply(p, stats, images, train=True, dropout_key=jax.random.key(3))
            return (logits**2).mean(), (logits, after)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    one, many = results(model.apply), results(mesh.spread(model, mesh.make(1, 2, groups=0)))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest), many, one)
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-4, one[1][1], stats)
    assert all(jax.tree.leaves(changed))


def test_the_norm_over_channels():
    norm = cvx.ChannelNorm(4)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32) * 1e-5
    expected = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-4, atol=1e-5)
    flat = jnp.ones((1, 2, 4))  # channels that do not differ have a gradient, too
    assert np.isfinite(jax.grad(lambda x: (norm(x) ** 2).sum())(flat)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage_strides": (1,)}, r"depths=\(1, 2\) and stage_strides=\(1,\)"),
        ({"mixer": "linformer", "projections": 8, "stage_strides": (1, 2)}, "there are 6"),
        ({"depths": (1, 0)}, "sizes must be positive"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("cvx", **changes), (4, 5))
