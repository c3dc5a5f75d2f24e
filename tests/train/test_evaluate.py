"""Evaluation: every example counts exactly once, compared with NumPy's counts."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from hsvit_jax import data
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train import evaluate


class Linear:
    """A network of one matrix: logits are the normalised pixels times a kernel."""

    group_axis_limit = 8
    part_names = ("groups", "kernel")

    def spread_axis(self, path):
        return 0 if path[0] == "groups" else None

    def apply(self, params, stats, images_BHWC, *, shard, **_):
        flat = images_BHWC.reshape(images_BHWC.shape[0], -1)
        return shard.sum(params["groups"]["scale"][:, None, None] * flat[None]) @ params[
            "kernel"
        ], stats


def config_of(classes, tta="none"):
    """What evaluation reads of a configuration."""
    images = {"mean": (0.4,), "std": (0.3,), "num_classes": classes}
    task = {"data": {**images, "task": "classify"}, "train": {"loss": "", "metrics": ()}}
    return ml_collections.ConfigDict({**task, "eval": {"tta": tta}})


def linear_params(classes, seed=0):
    kernel = np.random.default_rng(seed).normal(size=(6, classes)).astype(np.float32)
    return {"groups": {"scale": jnp.full((8,), 0.125)}, "kernel": jnp.asarray(kernel)}


def split_of(count, classes, seed=1):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, size=(count, 2, 3, 1), dtype=np.uint8)
    return data.Split(rng.integers(classes, size=count).astype(np.int32), images, None)


def in_numpy(params, split):
    """Loss, top-1 and top-5 counts and the confusion matrix in float64."""
    x = (split.images.reshape(len(split), -1) / 255 - 0.4) / 0.3
    logits = x @ np.asarray(params["kernel"], np.float64)
    own = logits[np.arange(len(split)), split.labels]
    loss = np.log(np.exp(logits).sum(1)) - own
    rank = (logits > own[:, None]).sum(1)
    confusion = np.zeros((logits.shape[1],) * 2, int)
    np.add.at(confusion, (split.labels, logits.argmax(1)), 1)
    return loss.mean(), (rank == 0).sum(), (rank < 5).sum(), confusion


def run(params, split, batch, mesh, classes):
    evaluator = evaluate.make_evaluator(Linear(), mesh, config_of(classes))
    params = jax.device_put(params, mesh_lib.state_shardings(mesh, params, Linear()))
    return evaluator(params, {}, split, batch)


@pytest.mark.parametrize(("group", "count"), [(1, 1), (1, 8), (2, 4)])
def test_exact_counts(group, count):
    """101 and 3 divide by neither the batch nor the devices; resident, and read as needed."""
    mesh, params = mesh_lib.make(group, count, groups=8), linear_params(7)
    evaluator = evaluate.make_evaluator(Linear(), mesh, config_of(7))
    placed = jax.device_put(params, mesh_lib.state_shardings(mesh, params, Linear()))
    for examples, batch in ((101, 16), (101, 1000), (3, 16)):
        split = split_of(examples, 7)
        loss, top1, top5, confusion = in_numpy(params, split)
        for given in (split, data.Split(split.labels, None, split.images.__getitem__)):
            got = evaluator(placed, {}, given, batch)
            assert (got.examples, got.accuracy) == (examples, top1 / examples)
            assert got.top5 == top5 / examples
            np.testing.assert_array_equal(got.confusion_KK, confusion)
            assert got.confusion_KK.dtype == np.int64
            assert got.loss == pytest.approx(loss, rel=1e-5)


def test_no_batch_moves_a_matrix_of_all_classes(monkeypatch):
    moved, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: moved.append(jax.tree.leaves(x)) or get(x))
    found = run(linear_params(701), split_of(40, 701), 16, mesh_lib.make(1, 1, groups=8), 701)
    assert found.confusion_KK.shape == (701, 701) and found.confusion_KK.sum() == 40
    assert len(moved) == 3 and max(x.size for xs in moved for x in xs) == 32


def test_few_classes_ties_and_logits_that_are_not_finite():
    one = mesh_lib.make(1, 1, groups=8)
    params, split = linear_params(3), split_of(20, 3)
    got = run(params, split, 8, one, 3)
    assert (got.top5, got.accuracy) == (1.0, in_numpy(params, split)[1] / 20)
    assert list(got.figures) == ["loss", "accuracy", "interval", "macro_f1", "examples"]
    # A network with the same logit for all classes has a top-5 of 5/K, not 1.
    params = jax.tree.map(jnp.zeros_like, linear_params(7))
    images = np.zeros((14, 2, 3, 1), np.uint8)
    split = data.Split(np.arange(14, dtype=np.int32) % 7, images, None)
    got = run(params, split, 8, one, 7)
    assert (got.accuracy, got.top5, got.figures["top5"]) == (2 / 14, 10 / 14, 10 / 14)
    # NaN shows in the loss, and is no prediction of the first class.
    params = jax.tree.map(lambda x: x * jnp.nan, linear_params(7))
    got = run(params, split_of(20, 7), 8, one, 7)
    assert np.isnan(got.loss) and got.confusion_KK.sum() == 0
    assert (got.accuracy, got.top5, got.macro_f1, got.examples) == (0, 0, 0, 20)
    with pytest.raises(ValueError, match="empty split"):
        run(linear_params(7), split_of(0, 7), 8, one, 7)


def test_it_can_be_given_up_between_batches():
    calls = []

    def stop():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    mesh = mesh_lib.make(1, 1, groups=8)
    evaluator = evaluate.make_evaluator(Linear(), mesh, config_of(7))
    with pytest.raises(KeyboardInterrupt):
        evaluator(linear_params(7), {}, split_of(101, 7), 16, stop)
    assert len(calls) == 3


def test_logits_are_averaged_over_the_views_of_an_image():
    """flip: its mirror image too; shift: those, and both moved by a pixel each way."""
    mesh, params = mesh_lib.make(1, 1, groups=8), linear_params(7)
    images = split_of(5, 7).images
    views = ("none", "flip", "shift")
    plain, flip, shift = (
        evaluate.make_forward(Linear(), mesh, config_of(7, name)) for name in views
    )
    expected = (plain(params, {}, images) + plain(params, {}, images[:, :, ::-1])) / 2
    np.testing.assert_allclose(flip(params, {}, images), expected, rtol=1e-6)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    moved = [padded[:, y : y + 2, x : x + 3] for y in (0, 2) for x in (0, 2)]
    expected = np.mean([flip(params, {}, x) for x in (images, *moved)], axis=0)
    np.testing.assert_allclose(shift(params, {}, images), expected, rtol=1e-5)
    for forward in (plain, flip, shift):  # the network stands in the program once
        program = forward.lower(params, {}, images).as_text()
        assert program.count("stablehlo.dot_general") == 1


def test_macro_f1_of_a_known_confusion():
    """A class without examples or predictions has no F1."""
    confusion = np.array([[6, 2, 0, 0], [1, 3, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]])
    result = evaluate.Evaluation(0.5, 9 / 14, 1.0, 14, confusion)
    assert result.macro_f1 == pytest.approx((12 / 17 + 6 / 9 + 0) / 3)
    assert result.figures["macro_f1"] == result.macro_f1


class Coupled(Linear):
    """Each logit is multiplied by the largest pixel of the batch, as where maxima are coupled."""

    def apply(self, params, stats, images_BHWC, **others):
        logits_BK, stats = super().apply(params, stats, images_BHWC, **others)
        return logits_BK * images_BHWC.max(), stats


def test_padding_changes_no_answer_of_a_coupled_network():
    split, mesh = split_of(11, 7), mesh_lib.make(1, 1, groups=8)
    images = split.images // 2
    images[0] = 255  # the brightest, in the first batch alone
    split = data.Split(split.labels, images, None)
    evaluator = evaluate.make_evaluator(Coupled(), mesh, config_of(7))
    padded = evaluator(linear_params(7), {}, split, 8)
    parts = [data.Split(split.labels[p], images[p], None) for p in (slice(8), slice(8, 11))]
    losses = [len(p) * evaluator(linear_params(7), {}, p, len(p)).loss for p in parts]
    assert padded.loss == pytest.approx(sum(losses) / 11, rel=1e-6)
