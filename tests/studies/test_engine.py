"""The engine of the studies and the comparison: rows, equal conditions, and what is written."""

import csv
import unittest.mock

import numpy as np
import pytest
from support.data_files import encoded, noise, write

from hsvit_jax import artifacts, main, train
from hsvit_jax import config as config_lib
from hsvit_jax.models import costs
from hsvit_jax.studies import engine, tables
from hsvit_jax.studies.engine import System, train_all

SYSTEM = System.parse("c2a2:digits,tiny,conv_only")
SETTINGS = [
    *("train.steps=1", "train.ema_decay=0.0", "model.embed_dim=8", "mesh.data=1"),
    *("data.image_size=8,8", "train.batch=16"),
]


def made_row(*accuracies, **columns):
    """A row without a training."""
    made = dict.fromkeys((*tables.COMPARISON.split(), *tables.GRID.split()), 1)
    made |= {"deviation": float(np.std(accuracies, ddof=len(accuracies) > 1)), "examples": 100}
    return made | {"accuracy": np.mean(accuracies), "accuracies": accuracies, **columns}


ROWS = [
    made_row(
        *(0.5, 0.7),
        **{"name": "a b", "parameters": 1000, "megabytes": 0.004, "flops": 5_000_000, "batch": 64},
        **{"forward_bytes": 2**20, "training_bytes": 2**22, "images_per_second": 1234.5},
        **{"top5": 0.95, "epochs": 2.0},
    ),
    made_row(0.9, 0.9, name="c", parameters=2_000_000, training_bytes=2**23, top5=None, epochs=2.0),
]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Memory without the seconds that XLA's figures take."""
    monkeypatch.setattr(costs, "training_bytes", lambda model, batch: batch << 20)
    monkeypatch.setattr(costs, "forward_bytes", lambda model, batch: batch << 10)


def test_a_row_for_each_system_and_nothing_trained_again(tmp_path):
    (row,) = tables.ranked(train_all([SYSTEM], tmp_path, SETTINGS, (1,)), 8)
    assert (row["name"], row["spec"]) == ("c2a2 tiny conv_only", SYSTEM.spec)
    assert len(row["accuracies"]) == 1 and 0 <= row["accuracy"] <= 1
    assert 0 < row["parameters"] < 20_000 and row["images_per_second"] > 0
    assert (row["forward_bytes"], row["training_bytes"]) == (8 << 10, 8 << 20)
    (log,) = tmp_path.glob("*/metrics.jsonl")
    before, environment = log.read_bytes(), log.parent / "environment.json"
    environment.write_text("{}")  # as of another machine
    (again,) = train_all([SYSTEM], tmp_path, SETTINGS, (1,))
    assert again["accuracies"] == row["accuracies"] and log.read_bytes() == before
    assert environment.read_text() == "{}"
    given = [*SETTINGS, "seed=1", "optim.learning_rate=0.7"]  # of a file that was edited
    with pytest.raises(ValueError, match=r"optim\.learning_rate"):
        train.train(config_lib.get_config(SYSTEM.spec, *given), log.parent, as_begun=True)
    given = [*SETTINGS, "seed=1", "train.loggers=()"]  # which change no result
    train.train(config_lib.get_config(SYSTEM.spec, *given), log.parent, as_begun=True)


def test_a_run_that_patience_ended_counts_as_long_as_it_was(tmp_path):
    settings = [*SETTINGS, "train.steps=0", "train.epochs=4", "train.batch=256"]
    settings += ["train.patience=1", "optim.learning_rate=1e-12"]
    (row,) = train_all([SYSTEM], tmp_path, settings)
    assert row["epochs"] == 2 and row["name"] == "c2a2 tiny conv_only"
    assert row["steps"] == 2 * (row["training_images"] // 256)
    (row,) = train_all([SYSTEM], tmp_path, [*SETTINGS, "train.select_on=test"])
    assert row["name"] == "c2a2 tiny conv_only (best on test)" and row["line"] == " (best on test)"
    rows = [{**ROWS[0], "epochs": 3.0}, ROWS[1]]
    assert (
        "2 to 3 epochs, 2 seeds" in tables.write_comparison(rows, tmp_path, "hsvit")[0].read_text()
    )


def test_a_training_that_diverges_costs_the_others_nothing(tmp_path, capsys):
    bad = f"{SYSTEM.spec} optim.name=sgd optim.learning_rate=1000 optim.clip_norm=0"
    words = [f"--config.{text}" for text in (*SETTINGS, "train.bad_steps_limit=1")]
    words = [word.replace("steps=1", "steps=40", 1) for word in words] + [f"--out={tmp_path}"]
    assert main.main(["hsvit", "compare", bad, SYSTEM.spec, *words]) == 3
    printed = capsys.readouterr()
    assert (tmp_path / "comparison.md").is_file() and printed.out.count("c2a2 tiny") == 1
    assert "sgd learning_rate=1000 clip_norm=0, seed 0 is skipped" in printed.err
    assert "1 of 2 are missing" in printed.err
    with pytest.raises(train.Diverged):
        train_all([System.parse(bad)], tmp_path, [word[9:] for word in words[:-1]])


def test_what_is_written(tmp_path):
    table = tables.comparison(ROWS)
    lines = table.splitlines()
    assert lines[:2] == [f"| {' | '.join(tables.SHOWN)} |", "| --- |" + " ---: |" * 8]
    accuracy = "60.00% ± 14.14 (95% interval 50.2–69.1)"
    cells = f"1,000 | 0.00 | 0.005 G | 1 MiB | 4 MiB | 1,234 | {accuracy} | 95.00%"
    assert lines[2] == f"| a b | {cells} |"
    assert lines[3].endswith("| 90.00% ± 0.00 (95% interval 82.6–94.5) | – |")
    markdown, csv_file, plot = tables.write_comparison(ROWS, tmp_path, "hsvit compare x:a,b y")
    text = markdown.read_text()
    assert table in text and "    hsvit compare x:a,b y\n" in text
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    head = "name,spec,epochs,parameters,megabytes,flops,batch,forward_bytes,training_bytes,"
    head += "images_per_second,examples,top5,accuracy,deviation,accuracies"  # old files have it
    assert csv_file.read_text().partition("\n")[0] == head
    assert [row["name"] for row in rows] == ["a b", "c"]
    assert float(rows[0]["accuracy"]) == pytest.approx(0.6)
    assert rows[0]["accuracies"] == "0.5 0.7" and plot.read_bytes().startswith(b"\x89PNG")


def test_names_are_drawn_as_they_are(tmp_path):
    """Matplotlib leaves a label _name out of a legend, and ends at `$^$`."""
    rows = [made_row(0.5, x=x, line=n) for n, x in (("_a", "$^$"), ("$^$", "\udce9"))]
    words = {"x": "$^$ x"}, lambda row: row["line"], "$^$ title", "$^$ line"
    figure = tables.figure(rows, *words)
    artifacts.save_figure(figure, tmp_path / "names.png")
    assert [text.get_text() for text in figure.legends[0].texts] == ["_a", "$^$"]
    assert figure.legends[0].get_title().get_text() == "$^$ line"


@pytest.mark.parametrize(
    ("specs", "settings", "seeds", "named"),
    [
        (["c2a2:digits", "c2a2:digits"], [], [0], "named twice"),
        (["c2a2:digits", "c2a2:digits,strong"], [], [0], "named twice in c2a2 strong"),
        (["c2a2:digits", "c3a4:cifar10"], [], [0], "data.name"),
        (["c2a2:digits", "c3a4:digits,paper"], [], [0], "train.epochs"),
        (["c2a2:digits"], [], [0, 0], "--seeds"),
        (["c2a2:digits"], [], ["4294967296"], "4294967295"),
        (["c2a2:digits", "c2a2:digits mesh.data=1"], [], [0], "one run's folder"),
        (["c2a2:digits"], ["model.groups=5"], [0], "c2a2: .*groups=5"),
        (["c2a2:digits model.groups=5"], [], [0], "c2a2 groups=5: .*groups=5"),
    ],
)
def test_what_cannot_be_compared(tmp_path, specs, settings, seeds, named):
    with pytest.raises(ValueError, match=named):
        train_all(System.parse_all(specs), tmp_path, settings, seeds)
    assert not list(tmp_path.iterdir())


def test_equal_training_is_that_of_the_runs(tmp_path):
    """The recipe `small`, by the number of images, has a length of its own."""
    folder = tmp_path / "own"
    write(folder, {f"{'ab'[i % 2]}/{i}.png": encoded(noise((8, 8), i)) for i in range(24)})
    specs = [f"c2a2:folder={folder},strong", f"c2a2:folder={folder} model.depth=1"]
    settings = [f"data.dir={tmp_path}", "mesh.data=1"]
    with pytest.raises(ValueError, match=r"train\.epochs.* c2a2 has 100.*, c2a2 depth=1 has 48"):
        train_all(list(map(System.parse, specs)), tmp_path / "runs", settings)


def test_names_and_settings_of_a_system():
    for spec, name in (
        ("configs/c2a2.py:digits", "c2a2"),
        ("configs/vix.py:vin, hybrid,cifar10,paper", "vix vin hybrid"),
        ("c3a4:folder=my_images,conv_only", "c3a4 conv_only"),
    ):
        assert engine.name_of(spec) == name
    system = System.parse("c2a2:digits,tiny model.depth=1  optim.name=sgd")
    assert (system.spec, system.settings) == (
        "c2a2:digits,tiny",
        ("model.depth=1", "optim.name=sgd"),
    )
    assert system.name == "c2a2 tiny depth=1 name=sgd"
    blank = System.parse("c2a2:folder=my photos,fast model.depth=1")
    assert (blank.spec, blank.settings) == ("c2a2:folder=my photos,fast", ("model.depth=1",))
    recipes = ["c2a2:digits", "c2a2:digits,fast", "c2a2:digits,paper optim.name=sgd"]
    names = [system.name for system in System.parse_all(recipes)]
    assert names == ["c2a2 strong", "c2a2 fast", "c2a2 paper name=sgd"]
    names = [system.name for system in System.parse_all([*recipes[1:], "c3a4:digits,fast"])]
    assert names == ["c2a2", "c2a2 name=sgd", "c3a4"]  # their networks differ


def test_a_setting_of_all_systems_may_be_for_others(tmp_path, monkeypatch):
    """One of a system's own has to be for itself."""
    prepared = InterruptedError("prepared: it would be trained now")
    monkeypatch.setattr(train, "train", unittest.mock.Mock(side_effect=prepared))
    softmax, nystrom = System.parse("vix:vit,digits,tiny"), System.parse("vix:vin,digits,tiny")
    with pytest.raises(InterruptedError):
        train_all([softmax, nystrom], tmp_path, ["model.landmarks=8"])
    own = System.parse("vix:vit,digits,tiny model.landmarks=8")
    for systems, settings in ([softmax], ["model.landmarks=8"]), ([own], []):
        with pytest.raises(ValueError, match=r"model\.landmarks"):
            train_all(systems, tmp_path, settings)


@pytest.mark.slow
def test_equal_compute_on_shares_of_the_images(tmp_path):
    wide = System.parse("c2a2:digits,tiny,conv_only model.conv_channels=32,64")
    settings = [*SETTINGS, "train.epochs=0", "train.batch=8", "train.steps=6"]
    rows = engine.learning_curves([wide, SYSTEM], tmp_path, [0.05, 0.1], settings)
    assert [row["line"] for row in rows] == [wide.name, SYSTEM.name] * 2
    assert rows[0]["training_images"] < rows[2]["training_images"] < 200
    for costly, cheap in (rows[:2], rows[2:]):
        assert (costly["steps"], costly["x"]) == (6, cheap["x"])
        assert cheap["steps"] == round(6 * costly["flops"] / cheap["flops"]) > 6


def test_a_grid(tmp_path):
    rows = [made_row(0.1 * g, 0.05 * x, x=str(x), line=str(g)) for g in (1, 2) for x in (8, 16)]
    axes = "kernels | each", "groups"
    table, markdown, file, plot = tables.write_grid(
        rows[:3], "Title", axes, tmp_path, "fig", "hsvit study"
    )
    assert table.splitlines()[0] == "| groups \\ kernels \\| each | 8 | 16 |"
    assert table.splitlines()[3].endswith("| – |") and "2 seeds, ± one" in markdown.read_text()
    head = "x,line,parameters,flops,training_images,steps,batch,examples,accuracy,deviation,"
    assert file.read_text().startswith(head)
    with file.open() as lines:
        places = [(row["x"], row["line"]) for row in csv.DictReader(lines)]
    assert places == [("8", "1"), ("16", "1"), ("8", "2")]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_intervals_of_a_grid():
    """Three seeds: 4.3027 standard errors, by a table of Student's t; one: Wilson's, uneven."""
    three = made_row(0.90, 0.92, 0.94, examples=10**9)
    assert tables.interval(three) == pytest.approx([100 * 4.3027 * 0.02 / 3**0.5] * 2, rel=1e-4)
    perfect = made_row(1.0, examples=90)
    assert tables.interval(perfect) == pytest.approx((384.15 / 93.8415, 0), rel=1e-4, abs=1e-12)
