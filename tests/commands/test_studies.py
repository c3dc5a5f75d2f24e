"""Looking for a learning rate, and cross-validation."""

import csv

import numpy as np
import pytest
from support.small_runs import small_dataset

from hsvit_jax import main
from hsvit_jax.commands.studies import crossval, lr_find

TINY = ["--config=c2a2:digits,tiny", "--config.model.depth=1", "--config.mesh.data=1"]


def test_the_steepest_rate_is_before_the_lowest_loss():
    rates = np.logspace(-6, 1, 71)
    losses = 2.3 - 1.0 / (1 + np.exp(-6 * (np.log10(rates) + 3))) + 8 * (rates > 0.1)
    found = lr_find.Search(rates, losses)
    assert found.steepest == pytest.approx(1e-3, rel=0.3)


def test_rates_grow_until_the_loss_does(tmp_path, capsys):
    out = tmp_path / "found.png"
    words = ["lr-find", *TINY, "--config.train.batch=64", "--steps=24", f"--out={out}"]
    assert main.main(["hsvit", *words]) == 0
    printed = capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "falls fastest at a rate of" in printed
    assert "--config.optim.learning_rate=" in printed


@pytest.mark.parametrize("streamed", [False, True])
def test_every_example_is_tested_once(streamed):
    whole = small_dataset((70, 21, 23), streamed=streamed)
    parts = list(crossval.folds(whole, 4, 0.2, seed=0))
    every = [whole.train.gather(range(70)), whole.val.gather(range(21))]
    tested = np.concatenate([part.test.gather(range(len(part.test))) for part in parts])
    assert sorted(x.tobytes() for x in tested) == sorted(x.tobytes() for x in np.concatenate(every))
    for part in parts:
        splits = (part.train, part.val, part.test)
        assert sum(map(len, splits)) == 91 and part.resident is not streamed
        assert abs(len(part.test) - 91 / 4) < 2
        assert all(set(split.labels) == set(range(7)) for split in splits)
        images = [x.tobytes() for split in splits for x in split.gather(range(len(split)))]
        assert len(set(images)) == 91
    assert len({part.fingerprint for part in parts}) == 4
    again = next(crossval.folds(whole, 4, 0.2, seed=0))
    np.testing.assert_array_equal(again.test.labels, parts[0].test.labels)
    with pytest.raises(ValueError, match=r"'row 0' has 13 images .* too few for 14 folds"):
        next(crossval.folds(whole, 14, 0.2, seed=0))


@pytest.mark.slow
def test_a_run_for_each_fold(tmp_path, capsys):
    words = ["crossval", *TINY, "--config.train.steps=2", f"--workdir={tmp_path}/run", "--folds=2"]
    assert main.main(["hsvit", *words]) == 0
    first = capsys.readouterr().out
    with (tmp_path / "run-folds2" / "crossval.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["fold"] for row in rows] == ["1", "2"]
    images = sum(int(row["images"]) for row in rows)
    assert f"{images:,} images, each tested once" in first and "over folds" in first
    assert main.main(["hsvit", *words]) == 0  # nothing is trained again
    assert capsys.readouterr().out == first
