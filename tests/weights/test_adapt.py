"""Refitting: only what is asked for changes, and it means what the old network meant."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import traverse_util
from support import small_runs

from hsvit_jax import models
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.models.vit import deit, hvt
from hsvit_jax.weights import adapt

KEEP = {"classifier": "keep", "stem": "keep", "positions": "keep"}
KEY = jax.random.key(5)
CONFIG = deit.DeiTConfig(
    image_size=(6, 4),
    image_channels=3,
    num_classes=5,
    patch=2,
    heads=1,
    head_dim=4,
    depth=1,
)
OLD = deit.DeiT(CONFIG)
VALUES = small_runs.made_up_values(OLD)


def changed(**sizes):
    return deit.DeiT(dataclasses.replace(CONFIG, **sizes))


def same_but(made, *names):
    """The trees are the old ones but for these leaves."""
    old, new = (traverse_util.flatten_dict(tree, sep=".") for tree in (VALUES[0], made.params))
    assert old.keys() == new.keys() and old.keys() >= set(names)
    for name in old.keys() - set(names):
        np.testing.assert_array_equal(new[name], old[name])


def test_nothing_is_done_unasked():
    same_but(adapt.refit(*VALUES, OLD, OLD, KEEP, KEY))
    for sizes, message in (
        ({"num_classes": 7}, "classes: it has 5, this configuration 7; init.classifier=new"),
        ({"num_classes": 4}, "classifier=new starts with .* and init.classifier=drop_first"),
        ({"image_channels": 1}, "it has 3, this configuration 1; init.stem=refit"),
        ({"image_size": (12, 8)}, "it has 6×4, this configuration 12×8; init.positions=resize"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt.refit(*VALUES, OLD, changed(**sizes), KEEP, KEY)


def test_a_new_classifier_is_the_only_fresh_part():
    """Also when the number of classes is the old one: they are other classes."""
    for classes in (7, 5):
        new = changed(num_classes=classes)
        made = adapt.refit(*VALUES, OLD, new, {**KEEP, "classifier": "new"}, KEY)
        same_but(made, "head.linear.kernel", "head.linear.bias")
        assert made.fresh == ("params.head.linear.bias", "params.head.linear.kernel")
        assert "head.linear.kernel" in made.notes[0]
    fresh = jax.jit(lambda key: new.init(key)[0]["head"]["linear"])(KEY)
    jax.tree.map(np.testing.assert_array_equal, made.params["head"]["linear"], fresh)


def test_the_background_class_is_left_out():
    new = changed(num_classes=4)
    made = adapt.refit(*VALUES, OLD, new, {**KEEP, "classifier": "drop_first"}, KEY)
    x = np.random.default_rng(0).normal(size=(2, 6, 4, 3)).astype(np.float32)
    old = jax.jit(OLD.apply)(*VALUES, x)[0]
    np.testing.assert_allclose(jax.jit(new.apply)(made.params, {}, x)[0], old[:, 1:], atol=1e-6)
    for classes in (3, 5):
        other = changed(num_classes=classes)
        with pytest.raises(
            ValueError, match=f"one class of 5, .* has {classes}: add --config.init.classifier="
        ):
            adapt.refit(*VALUES, OLD, other, {**KEEP, "classifier": "drop_first"}, KEY)


def test_grey_pictures_are_seen_as_before():
    """Three equal channels to one, and back: the same logits."""
    grey = np.random.default_rng(1).normal(size=(2, 6, 4, 1)).astype(np.float32)
    how = {**KEEP, "stem": "refit"}
    one = changed(image_channels=1)
    made = adapt.refit(*VALUES, OLD, one, how, KEY)
    same_but(made, "embedding.patches.linear.kernel")
    expected = jax.jit(OLD.apply)(*VALUES, np.repeat(grey, 3, 3))[0]
    np.testing.assert_allclose(jax.jit(one.apply)(made.params, {}, grey)[0], expected, atol=1e-5)
    back = adapt.refit(made.params, {}, one, OLD, how, KEY)
    again = jax.jit(OLD.apply)(back.params, {}, np.repeat(grey, 3, 3))[0]
    np.testing.assert_allclose(again, expected, atol=1e-5)


def test_factors_of_the_channels_are_no_sums():
    """T2T-ViT normalises the pixels of a window, channels and all, before it projects them."""
    sizes = {"token_dim": 4, "embed_dim": 8, "depth": 1, "heads": 2}
    settings = {"family": "t2t", "dtype": "float32", **models.FAMILIES["t2t"].defaults, **sizes}
    three, one = (
        models.build(settings, image_size=(16, 16), channels=channels, num_classes=5)
        for channels in (3, 1)
    )
    params, stats = small_runs.made_up_values(three)
    flat = traverse_util.flatten_dict(params)
    ones = {path: np.ones_like(x) for path, x in flat.items() if path[-1] == "scale"}
    zeros = {path: np.zeros_like(x) for path, x in flat.items() if path[-1] == "bias"}
    params = traverse_util.unflatten_dict(flat | ones | zeros)  # as at the start of training
    how = {**KEEP, "stem": "refit"}
    made = adapt.refit(params, stats, three, one, how, KEY)
    grey = np.random.default_rng(1).normal(size=(2, 16, 16, 1)).astype(np.float32)
    expected = jax.jit(three.apply)(params, stats, np.repeat(grey, 3, 3))[0]
    found = jax.jit(one.apply)(made.params, made.stats, grey)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_map_of_a_tile_is_a_grid_of_its_own():
    sizes = {"image_size": (32, 32), "conv_channels": (4, 8), "groups": 4, "pool_strides": (2, 2)}
    config = dataclasses.replace(small_runs.HSVIT, **sizes, towers=4, tiles=(1, 4))
    assert hsvit.TowerHSViT(config).grid(16) == (0, 8, 2)


def test_positions_are_a_picture_of_the_grid():
    """A ramp over the rows stays one; the CLS keeps its own position."""
    params = jax.tree.map(np.array, VALUES[0])
    grid = np.repeat(np.arange(3, dtype=np.float32)[:, None], 2, 1)  # rows × columns
    params["embedding"]["position"][1:] = grid.reshape(-1, 1)
    new = changed(image_size=(12, 8))
    made = adapt.refit(params, {}, OLD, new, {**KEEP, "positions": "resize"}, KEY)
    position = made.params["embedding"]["position"]
    np.testing.assert_array_equal(position[0], params["embedding"]["position"][0])
    rows = position[1:].reshape(6, 4, -1)
    assert np.ptp(rows, axis=(1, 2)).max() < 1e-5 and (np.diff(rows[:, 0, 0]) > 0).all()
    assert rows.mean() == pytest.approx(1, abs=1e-5)


def test_a_projection_of_maps_sums_as_before():
    """An HSViT's constant map gives the same token at another size."""
    old = hsvit.HSViT(small_runs.HSVIT)
    new = old.resized(image_size=(8, 16))
    params, stats = small_runs.made_up_values(old)
    params["trunk"]["embed"]["kernel"] = np.tile(np.arange(6, dtype=np.float32), (8, 1))
    made = adapt.refit(params, stats, old, new, {**KEEP, "positions": "resize"}, KEY)
    kernel = made.params["trunk"]["embed"]["kernel"]
    np.testing.assert_allclose(kernel, np.tile(np.arange(6) * 8 / 32, (32, 1)), rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, made.stats, stats)


def test_an_image_on_its_side_has_as_many_places_elsewhere():
    old = hsvit.HSViT(small_runs.HSVIT)
    for net, size in ((OLD, (4, 6)), (old, (8, 4))):
        values = VALUES if net is OLD else small_runs.made_up_values(net)
        for mode in ("keep", "resize"):
            with pytest.raises(ValueError, match=r"image size: it has .* would mean other places"):
                adapt.refit(
                    *values, net, net.resized(image_size=size), {**KEEP, "positions": mode}, KEY
                )
    assert not adapt.refit(*values, old, old.resized(image_size=(3, 7)), KEEP, KEY).notes


def test_what_is_no_grid_cannot_be_resized():
    sizes = {"image_channels": 3, "num_classes": 5, "patch": 2, "heads": 1, "head_dim": 4}
    config = hvt.HVTConfig(image_size=(6, 4), depth=1, stage_depth=1, **sizes)
    old, new = (hvt.HVT(dataclasses.replace(config, image_size=s)) for s in ((6, 4), (12, 8)))
    values = small_runs.made_up_values(old)
    with pytest.raises(ValueError, match=r"after0\.position of 2 places cannot be resized to 11"):
        adapt.refit(*values, old, new, {**KEEP, "positions": "resize"}, KEY)
