"""A network as pure functions: what `apply` is given stays as it is."""

import dataclasses

import jax
import numpy as np
import pytest
from support.small_runs import HSVIT, made_up_values

import hsvit_jax
from hsvit_jax.models import network
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.models.layers import BatchNorm


class Normalised(network.Network):
    """A BatchNorm, the mean of whose output over the image is the logits."""

    def __init__(self):
        super().__init__(type("Config", (), {"image_size": (2, 2), "image_channels": 3}))

    def parts(self, key):
        return {"norm": BatchNorm(3)}

    def forward(self, params, stats, images_BHWC, context):
        bound = self.bind(params, stats)
        return bound["norm"](images_BHWC, train=context.train).mean((1, 2)), bound.stats()


def test_training_leaves_numpy_statistics_as_they_are():
    model = Normalised()
    params, stats = given = jax.tree.map(np.array, model.init(jax.random.key(0)))
    before = jax.tree.map(np.copy, given)
    images = np.random.default_rng(0).normal(size=(4, 2, 2, 3)).astype(np.float32)
    expected = model.apply(*jax.tree.map(jax.numpy.asarray, given), images, train=True)
    assert np.abs(expected[1]["norm"]["mean"]).max() > 0
    closed_over = jax.jit(lambda x: model.apply(params, stats, x, train=True))
    for found in (model.apply(params, stats, images, train=True), closed_over(images)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
        jax.tree.map(np.testing.assert_array_equal, given, before)


def test_initial_values_are_single_precision_always():
    """Also where a program has switched jax_enable_x64 on, and of towers: the same numbers."""
    model = hsvit.TowerHSViT(dataclasses.replace(HSVIT, towers=2, votes="learned"))
    expected = model.init(jax.random.key(0))
    with jax.enable_x64(True):
        found = model.init(jax.random.key(0))
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_another_networks_is_refused():
    model = hsvit.HSViT(HSVIT)
    params, stats = made_up_values(model)
    images = np.zeros((2, *HSVIT.image_size, HSVIT.image_channels))  # of NumPy's double precision
    votes_G = np.eye(HSVIT.groups)[0]
    assert np.isfinite(jax.jit(model.apply)(params, stats, images, votes_G=votes_G)[0]).all()
    other = model.resized(num_classes=HSVIT.num_classes + 1)
    other, _ = other.init_shapes()
    message = r"params of another network: head\.linear\.bias is \(\d+,\), where this one has \("
    with pytest.raises(ValueError, match=message):
        model.apply(other, stats, images)
    with pytest.raises(ValueError, match=r"stats of another network: .* is missing, where"):
        model.apply(params, {}, images)
    for wrong in (np.ones(1), 0 * votes_G):
        with pytest.raises(ValueError, match=r"voting groups, not all 0; got \["):
            model.apply(params, stats, images, votes_G=wrong)
    vit = hsvit_jax.build_model("vit:tiny")
    trees = vit.init_shapes()
    with pytest.raises(ValueError, match="each of 0 voting groups"):
        vit.apply(*trees, np.zeros((1, 32, 32, 3)), votes_G=votes_G)
