"""LeViX: exact sizes, BatchNorm over devices, the start as no attention, and what is refused."""

import jax
import numpy as np
import pytest
import small_runs
import vix_files

from hsvit_jax import mesh, models
from hsvit_jax.models import costs
from hsvit_jax.models.vix import levix
from hsvit_jax.models.vix.mixer_config import Mixing

#: Variant → trained values for CIFAR-10 and Tiny ImageNet (ViX paper, tables 3 and 4; LeViP's is
#: 622,410, which the paper prints as 662,410).
PARAMETERS = {
    "levit": (624_970, 649_480),
    "levip": (622_410, 646_920),
    "levil": (768_330, 792_840),
    "levin": (621_402, 645_912),
}


def build(settings, size=(32, 32), classes=10):
    return models.build(settings, image_size=size, channels=3, num_classes=classes)


@pytest.mark.parametrize("variant", PARAMETERS)
def test_parameter_counts(variant):
    settings = {**levix.DEFAULTS, **levix.VARIANTS[variant], "family": "levix", "dtype": "float32"}
    cases = ((32, 10), (64, 200))
    for (size, classes), expected in zip(cases, PARAMETERS[variant], strict=True):
        model = build(settings, (size, size), classes)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_every_variant_has_a_count():
    assert set(PARAMETERS) == set(levix.VARIANTS)
    assert {("levix", name) for name in PARAMETERS} <= set(models.VARIANTS)


def test_multiply_adds_of_levit():
    """By hand: the stem, four blocks of attention and feed-forward on 1,024 tokens, the head."""
    t, d = 1024, 128
    stem = t * 9 * (3 * 32 + 32 * 64 + 64 * d)
    block = 4 * t * d * d + 2 * t * t * d + 2 * t * d * 256
    settings = {**levix.DEFAULTS, "family": "levix", "dtype": "float32"}
    macs = costs.multiply_adds(build(settings))
    assert macs == stem + 4 * block + d * 10


def test_training_over_devices():
    """Gradients, logits and the statistics after the batch, whole and split over devices."""
    settings = vix_files.small("levix", stem_channels=(5,), stem_strides=(2, 1), dropout=0.2)
    model = build({**settings, "depth": 1}, (6, 9), 7)
    params, stats = small_runs.random_tree(jax.eval_shape(model.init, jax.random.key(0)))
    images = np.random.default_rng(1).normal(size=(4, 6, 9, 3)).astype(np.float32)

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


def test_a_block_starts_without_its_attention():
    attention = levix.LeViTAttention(Mixing("softmax", heads=2, head_dim=3), 5, jax.random.key(0))
    assert not np.any(attention.out_norm.scale[...]) and np.all(attention.key_norm.scale[...] == 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem_strides": (1,)}, r"widths \(5, 10\).*stem_strides=\(1,\)"),
        ({"mixer": "nystrom", "landmarks": 55}, r"landmarks=55.*there are 54"),
        ({"mlp_dim": 0}, "sizes must be positive"),
    ],
)
def test_sizes_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        build(vix_files.small("levix", **{"stem_channels": (5,), **changes}), (6, 9))
