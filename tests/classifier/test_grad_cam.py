"""Grad-CAM against answers that are known otherwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_runs

from hsvit_jax.classifier.grad_cam import grad_cam
from hsvit_jax.models import feature_extractor
from hsvit_jax.models.hsvit import hsvit, trunk

TINY = small_runs.HSVIT  # 4×8 pixels, 4 kernels in 2 groups, 5 classes
IMAGES = np.random.default_rng(1).normal(size=(3, 4, 8, 1)).astype(np.float32)


def made(model):
    params, stats = small_runs.made_up_values(model)
    return model, params, stats


@functools.cache
def of_family(family, side=32):
    return made(small_runs.stored(family, side=side).model)


def test_with_a_linear_head_it_is_the_weighted_maps():
    """A ResNet averages its last maps: α is the weight of the classifier over their places."""
    model, params, stats = of_family("resnet", 64)
    x = np.random.default_rng(2).normal(size=(2, 64, 64, 3)).astype(np.float32)
    a_BHWC = jax.jit(lambda: feature_extractor.features(model, "backbone", params, stats, x))()
    kernel_CK = params["head"]["linear"]["kernel"]
    for classes in ([3, 7], None):
        class_B = model.apply(params, stats, x)[0].argmax(1) if classes is None else classes
        alpha_BC = kernel_CK[:, np.array(class_B)].T / np.prod(a_BHWC.shape[1:3])
        expected = np.maximum(np.einsum("bhwc,bc->bhw", a_BHWC, alpha_BC), 0)
        found = grad_cam(model, params, stats, x, classes and jnp.array(classes))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert expected.max() > 0.01


def test_alpha_is_the_slope_of_the_logit(monkeypatch):
    """By finite differences: a kernel's whole map of an HSViT, raised and lowered."""
    model, params, stats = made(hsvit.HSViT(TINY))
    project, shift_C, maps = trunk.Projection.__call__, np.zeros(4), []

    def shifted(self, x_BHWC, *rest):
        maps.append(x_BHWC)
        return project(self, x_BHWC + jnp.asarray(shift_C)[None, None, None], *rest)

    classes = np.array([4, 0, 2])
    with jax.enable_x64(True):
        trees = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, stats))
        x = IMAGES.astype(np.float64)
        found = grad_cam(model, *trees, x, jnp.array(classes))
        monkeypatch.setattr(trunk.Projection, "__call__", shifted)
        slopes = []
        for c in range(4):
            ends = []
            for step in (1e-5, -1e-5):
                shift_C[:] = step * (np.arange(4) == c)
                logits = np.asarray(model.apply(*trees, x)[0])
                ends.append(logits[np.arange(3), classes])
            slopes.append((ends[0] - ends[1]) / 2e-5)
        a_BHWC = np.asarray(maps[0])
    alpha_BC = np.stack(slopes, 1) / np.prod(a_BHWC.shape[1:3])
    expected = np.maximum(np.einsum("bhwc,bc->bhw", a_BHWC, alpha_BC), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert (expected.max((1, 2)) > 1e-3).any()


def test_each_tile_lies_where_its_tower_sees_it():
    """A tower whose projection is zero has no gradient, so that its tile's half is empty."""
    model = hsvit.HSViT.of(dataclasses.replace(TINY, towers=2, tiles=(1, 2)))
    cam = jax.jit(lambda trees, class_B: grad_cam(model, *trees, IMAGES, class_B))
    for tower in (0, 1):
        trees = small_runs.made_up_values(model, 1)
        trees[0]["towers"]["trunk"]["embed"]["kernel"][tower] = 0
        of_classes = [np.asarray(cam(trees, np.full(3, k))) for k in range(5)]
        halves = np.split(np.stack(of_classes), 2, axis=3)
        assert halves[tower].max() == 0 and halves[1 - tower].max() > 0


@pytest.mark.parametrize("family", ["swiftformer", "cvx", "vit"])
def test_other_families_show_their_last_maps(family):
    model, params, stats = of_family(family)
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    found = jax.eval_shape(functools.partial(grad_cam, model), params, stats, x)
    assert (found is None) == (family == "vit")
    assert found is None or (found.shape[0] == 2 and 1 < found.shape[1] < 32)


def test_a_frozen_norm_may_get_its_mode_by_name():
    for family in ("swiftformer", "efficientvit"):
        network = of_family(family)[0]
        frozen = network.with_frozen({"norm"})
        x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
        _, stats = jax.eval_shape(
            functools.partial(frozen.apply, train=True), *network.init_shapes(), x
        )
        assert stats.keys() == network.init_shapes()[1].keys()
