"""Probes of embeddings, against plain loops and a plain minimiser."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import optimize
from support import small_runs
from support.small_runs import DATASET

from hsvit_jax import classifier, data, main, train
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import probe


def test_neighbours_vote_by_similarity():
    rng = np.random.default_rng(0)
    bank, x = rng.normal(size=(31, 5)), rng.normal(size=(17, 5))
    labels, found = rng.integers(0, 4, 31), []
    for row in x:
        votes = [0.0] * 4
        cosine = [row @ b / (np.sqrt(row @ row) * np.sqrt(b @ b)) for b in bank]
        for n in sorted(range(31), key=lambda n: -cosine[n])[:7]:
            votes[labels[n]] += np.exp(cosine[n] / 0.07)
        found.append(int(np.argmax(votes)))
    np.testing.assert_array_equal(probe.knn(bank, labels, x, 7), found)
    assert probe.knn(bank, labels, bank, 100).tolist() == labels.tolist()  # more than there are


def test_the_linear_fit_is_the_minimum():
    """Of a loss in plain loops, by another method and without its gradient."""
    rng = np.random.default_rng(1)
    x, labels, penalty = rng.normal(size=(14, 2)), np.arange(14) % 3, 0.05

    def loss(flat):
        w, total = flat.reshape(3, 3), 0.0
        for row, label in zip(x, labels, strict=True):
            z = row @ w[:2] + w[2]
            total += np.log(np.exp(z).sum()) - z[label]
        return total / 14 + penalty / 2 * (w[:2] ** 2).sum()

    best = optimize.minimize(loss, np.zeros(9), method="Powell", options={"ftol": 1e-12})
    found = probe.fit_linear(x, labels, penalty)
    assert loss(found.ravel()) == pytest.approx(best.fun, rel=1e-6)
    np.testing.assert_allclose(found[:2], best.x.reshape(3, 3)[:2], atol=2e-3)


def test_validation_chooses_the_penalty(monkeypatch):
    """And test images count once; the embedding is the row of pixels itself."""
    config = config_lib.resolve(small_runs.small_config(), DATASET.info, images=70)
    seen = []

    def embed(images):
        seen.append(len(images))
        return images.reshape(len(images), -1).astype(np.float32)

    network = SimpleNamespace(config=config, embed=embed)
    line = probe.measure(network, DATASET, k=3)
    assert {n: line[n] for n in ("train", "val", "test")} == {"train": 70, "val": 21, "test": 23}
    flat = {n: getattr(DATASET, n).images.reshape(-1, 64) / 1.0 for n in ("train", "val", "test")}
    labels = DATASET.train.labels
    own = (probe.knn(flat["train"], labels, flat["test"], 3) == DATASET.test.labels).mean()
    assert line["knn"] == pytest.approx(own) and line["width"] == 64 and line["k"] == 3
    mean, std = flat["train"].mean(0), flat["train"].std(0)
    scores = {}
    for penalty in (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6):
        w = probe.fit_linear((flat["train"] - mean) / std, labels, penalty)
        right = {
            n: (((x - mean) / std @ w[:-1] + w[-1]).argmax(1) == getattr(DATASET, n).labels).mean()
            for n, x in flat.items()
        }
        scores[penalty] = right["val"], right["test"]
    best = max(scores, key=lambda penalty: (scores[penalty][0], penalty))
    assert (line["penalty"], line["linear"]) == (best, pytest.approx(scores[best][1]))
    with pytest.raises(ValueError, match="rows has no val split: add images"):
        probe.measure(network, small_runs.small_dataset((70, 0, 23)))


def test_the_command_takes_other_data(monkeypatch, capsys):
    """With classes that the network does not know."""
    network = small_runs.made_up_classifier(tuple(f"class {k}" for k in range(7)))
    monkeypatch.setattr(classifier, "load", lambda *_, **__: network)
    asked = []

    def load_data(config, **_):
        asked.append((config.data.name, config.data.image_size))
        return DATASET

    monkeypatch.setattr(train, "load_data", load_data)
    words = ("probe", "--checkpoint=x", "--config=c2a2:folder=photos", "--k=5")
    assert main.main(["hsvit", *words]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["data"] == "folder=photos" and line["k"] == 5 and line["width"] == 8
    assert asked[-1] == ("folder=photos", (8, 8)) and 0 <= line["linear"] <= 1
    part = data.Split(DATASET.test.labels, DATASET.test.images)
    np.testing.assert_allclose(
        probe.embeddings(network, part), network.embed(part.images), rtol=1e-5, atol=1e-6
    )
