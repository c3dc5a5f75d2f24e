"""Figures of the tasks against those of scikit-learn 1.8, and losses and metrics by name."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax import tasks

P_63 = np.array(
    [
        [0.9, 0.2, 0.6],
        [0.6, 0.7, 0.4],
        [0.4, 0.3, 0.6],
        [0.8, 0.6, 0.1],
        [0.3, 0.5, 0.9],
        [0.6, 0.1, 0.2],
    ]
)
LABELS_63 = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 0]], float)


def configured(task="classify", threshold=(0.5,), mean=(), std=(), loss="", metrics=()):
    space = types.SimpleNamespace
    return space(
        data=space(task=task, target_mean=mean, target_std=std),
        eval=space(threshold=threshold),
        train=space(loss=loss, metrics=metrics),
    )


@pytest.mark.parametrize(
    ("threshold", "f1", "macro", "micro", "precision", "recall"),
    [
        ((0.5,), [0.75, 2 / 3, 0.8], 0.7388888888888889, 0.7368421052631579, 0.75, 0.75),
        ((0.65, 0.25, 0.5), [2 / 3, 4 / 7, 0.8], 0.6793650793650793, 2 / 3, 1.0, 0.5),
    ],
)
def test_labels_are_measured_as_by_scikit_learn(threshold, f1, macro, micro, precision, recall):
    """average_precision_score, f1_score, precision_score and recall_score of tied scores."""
    logits = np.log(P_63 / (1 - P_63))
    found, by_label = tasks.of(configured("multilabel", threshold)).measure(logits, LABELS_63)
    assert found == pytest.approx({"map": 0.8143518518518519, "macro_f1": macro, "micro_f1": micro})
    np.testing.assert_allclose(by_label["average precision"], [0.8875, 13 / 18, 5 / 6])
    np.testing.assert_allclose(by_label["F1"], f1)
    assert (by_label["precision"][0], by_label["recall"][0]) == (precision, recall)
    assert by_label["images"].tolist() == [4, 3, 2]


def test_a_label_that_no_image_has_counts_in_no_mean():
    logits, labels = np.array([[3.0, -1], [-2, -1], [1, -1]]), np.array([[1.0, 0], [0, 0], [0, 0]])
    found, by_label = tasks.of(configured("multilabel")).measure(logits, labels)
    assert np.isnan(by_label["average precision"][1]) and np.isnan(by_label["F1"][1])
    assert found == pytest.approx({"map": 1.0, "macro_f1": 2 / 3, "micro_f1": 2 / 3})


def test_numbers_are_measured_as_by_scikit_learn():
    """r2_score and mean_absolute_error of two columns, in the unit of the data."""
    labels = np.array([[3.1, -10.0], [2.2, 4.0], [5.0, 0.5], [1.2, 7.0]])
    answers = np.array([[2.5, -8.0], [2.0, 1.0], [4.0, 2.0], [8.0, 6.0]])
    mean, std = (2.0, -1.0), (0.5, 4.0)
    task = tasks.of(configured("regress", mean=mean, std=std))
    found, by_column = task.measure((answers - mean) / std, labels)
    assert found == pytest.approx({"r2": -2.09245307832491, "mae": 2.0125})
    np.testing.assert_allclose(by_column["R²"], [-5.08623443, 0.90132827], rtol=1e-8)
    np.testing.assert_allclose(by_column["MAE"], [2.15, 1.875])
    np.testing.assert_allclose(task.encode(labels)[0], [2.2, -2.25], rtol=1e-6)
    np.testing.assert_allclose(task.answer(jnp.ones((1, 2))), [[2.5, 3.0]])
    outputs, targets = jnp.array([[1.0, 0.5], [0, 0]]), jnp.zeros((2, 2))
    assert float(task.step_value(outputs, targets)) == pytest.approx((0.25 + 1.0) / 2)


def test_losses_are_weighted_means():
    outputs, targets = jnp.array([[3.0, 0.5], [0.0, 2.0]]), jnp.zeros((2, 2))
    weights = jnp.array([3.0, 1.0])
    for name, each in (
        ("squared", ((9 + 0.25) / 2, 4 / 2)),
        ("huber", ((2.5 + 0.125) / 2, 1.5 / 2)),
        ("binary_cross_entropy", tuple(np.logaddexp(0, outputs).mean(1))),
    ):
        found = tasks.LOSSES[name](outputs, targets, weights)
        assert float(found) == pytest.approx((3 * each[0] + each[1]) / 4, rel=1e-6), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "huber"}, "train.loss=huber is none of data.task=classify"),
        ({"task": "regress", "loss": "cross_entropy"}, "choose from squared, huber"),
        ({"loss": "mine"}, "--config=FILE.py"),
        ({"metrics": ("auc",)}, "train.metrics=auc"),
    ],
)
def test_an_unknown_loss_or_metric_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tasks.check(configured(**changes))


def test_a_name_of_the_package_is_not_replaced():
    with pytest.raises(ValueError, match="register yours by another"):
        tasks.register_loss("huber", lambda o, t, w: o.mean())
    with pytest.raises(ValueError, match="register yours by another"):
        tasks.register_metric("r2", lambda o, t, w: 0.0)


def test_answers_and_texts():
    several = tasks.of(configured("multilabel", (0.6, 0.1, 0.6)))
    names = ("cat", "dog", "owl")
    assert [row["label"] for row in several.rows(P_63[0], names)] == ["cat", "owl", "dog"]
    assert several.rows(np.zeros(3), names) == [] and several.said(np.zeros(3), names) == "none"
    assert several.said(P_63[0], names) == "cat (90%), owl (60%), dog (20%)"
    assert several.text(np.array([1.0, 0, 0.4]), names) == "cat + owl 40%"
    np.testing.assert_allclose(several.answer(np.array([-800.0, 0, 800])), [0, 0.5, 1])
    numbers = tasks.of(configured("regress", mean=(30.0,), std=(2.0,)))
    assert numbers.rows(np.array([31.5]), ("age",)) == [{"label": "age", "value": 31.5}]
    assert numbers.said(np.array([31.5]), ("age",)) == "age 31.5"
