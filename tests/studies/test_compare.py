"""The comparison: one row for each system, equal conditions, and what it writes."""

import csv
import dataclasses
import itertools
import unittest.mock

import pytest
from support.data_files import encoded, noise, write

from hsvit_jax import artifacts, cli, main, train
from hsvit_jax import config as config_lib
from hsvit_jax.commands import compare
from hsvit_jax.models import costs
from hsvit_jax.studies.systems import System, images, name_of, point, train_all

ROWS = [
    compare.Row(
        (0.5, 0.7),
        *("a b", "x:a,b", 2.0, 1000, 0.004, 5_000_000, 64, 2**20, 2**22, 1234.5, 100, 0.95),
    ),
    compare.Row(
        (0.9, 0.9), *("c", "y", 2.0, 2_000_000, 8.0, 7_000_000, 64, 2**21, 2**23, 88.0, 100, None)
    ),
]
SYSTEM = System.parse("c2a2:digits,tiny,conv_only")
SETTINGS = [
    *("train.steps=1", "train.ema_decay=0.0", "model.embed_dim=8", "mesh.data=1"),
    *("data.image_size=8,8", "train.batch=16"),
]


def test_a_row_for_each_system_and_nothing_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "training_bytes", lambda model, batch: batch << 20)
    monkeypatch.setattr(costs, "forward_bytes", lambda model, batch: batch << 10)
    rows = compare.compare([SYSTEM], tmp_path, settings=SETTINGS, seeds=(1,), batch=8)
    assert (rows[0].name, rows[0].spec) == ("c2a2 tiny conv_only", SYSTEM.spec)
    assert len(rows[0].accuracies) == 1 and 0 <= rows[0].accuracy <= 1
    assert 0 < rows[0].parameters < 20_000 and rows[0].images_per_second > 0
    assert (rows[0].forward_bytes, rows[0].training_bytes) == (8 << 10, 8 << 20)
    (log,) = tmp_path.glob("*/metrics.jsonl")
    before, environment = log.read_bytes(), log.parent / "environment.json"
    environment.write_text("{}")  # as of another machine
    (again,) = train_all([SYSTEM], tmp_path, settings=SETTINGS, seeds=(1,))
    assert again.accuracies == rows[0].accuracies and log.read_bytes() == before
    assert environment.read_text() == "{}"
    given = [*SETTINGS, "seed=1", "optim.learning_rate=0.7"]  # of a file that was edited
    with pytest.raises(ValueError, match=r"begun with other settings.*: optim\.learning_rate: "):
        train.train(config_lib.get_config(SYSTEM.spec, *given), log.parent, as_begun=True)
    given = [*SETTINGS, "seed=1", "train.loggers=()"]  # which change no result
    train.train(config_lib.get_config(SYSTEM.spec, *given), log.parent, as_begun=True)


def test_a_run_that_patience_ended_counts_as_long_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "training_bytes", lambda model, batch: batch << 20)
    monkeypatch.setattr(costs, "forward_bytes", lambda model, batch: batch << 10)
    settings = [*SETTINGS, "train.steps=0", "train.epochs=4", "train.batch=256"]
    settings += ["train.patience=1", "optim.learning_rate=1e-12"]
    rows = compare.compare([SYSTEM], tmp_path, settings=settings)
    assert rows[0].epochs == 2
    (one,) = train_all([SYSTEM], tmp_path, settings=settings)  # found again
    assert point(one, "x", "line").line == "line"
    chosen = one.run.config.copy_and_resolve_references().unlock()
    chosen.train.select_on = "test"
    other = dataclasses.replace(one, run=dataclasses.replace(one.run, config=chosen))
    assert other.name == "c2a2 tiny conv_only (best on test)"
    assert point(other, "x", "line").line == "line (best on test)"
    steps = point(one, "x", "line").steps
    assert steps == 2 * one.run.steps_per_epoch < one.run.total_steps
    longer = dataclasses.replace(rows[0], epochs=3.0)
    text = compare.write([longer, rows[0]], tmp_path, "hsvit compare")[0].read_text()
    assert "2 to 3 epochs, 1 seed." in text


def test_a_training_that_diverges_costs_the_others_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(costs, "training_bytes", lambda model, batch: batch << 20)
    monkeypatch.setattr(costs, "forward_bytes", lambda model, batch: batch << 10)
    bad = f"{SYSTEM.spec} optim.name=sgd optim.learning_rate=1000 optim.clip_norm=0"
    words = [f"--config.{text}" for text in (*SETTINGS, "train.bad_steps_limit=1")]
    words = [word.replace("steps=1", "steps=40", 1) for word in words] + [f"--out={tmp_path}"]
    assert main.main(["hsvit", "compare", bad, SYSTEM.spec, *words]) == 3
    printed = capsys.readouterr()
    assert (tmp_path / "comparison.md").is_file() and printed.out.count("c2a2 tiny") == 1
    assert "sgd learning_rate=1000 clip_norm=0, seed 0 is left out: loss or" in printed.err
    assert "1 of 2 are left out, as their training diverged" in printed.err
    with pytest.raises(train.Diverged, match="not finite"):
        train_all([System.parse(bad)], tmp_path, settings=[word[9:] for word in words[:-1]])


def test_what_is_written(tmp_path):
    table = compare.table(ROWS)
    lines = table.splitlines()
    assert lines[:2] == [f"| {' | '.join(compare.COLUMNS)} |", "| --- |" + " ---: |" * 8]
    accuracy = "60.00% ± 14.14 (95% interval 50.2–69.1)"
    cells = f"1,000 | 0.00 | 0.005 G | 1 MiB | 4 MiB | 1,234 | {accuracy} | 95.00%"
    assert lines[2] == f"| a b | {cells} |"
    assert lines[3].endswith("| 90.00% ± 0.00 (95% interval 82.6–94.5) | – |")
    markdown, csv_file, plot = compare.write(ROWS, tmp_path, "hsvit compare x:a,b y")
    text = markdown.read_text()
    assert table in text and "    hsvit compare x:a,b y\n" in text
    assert "2 epochs, 2 seeds, ± one standard deviation" in text
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    assert list(rows[0])[-4:] == ["top5", "accuracy", "deviation", "accuracies"]
    assert [row["name"] for row in rows] == ["a b", "c"]
    assert float(rows[0]["accuracy"]) == pytest.approx(0.6)
    assert rows[0]["accuracies"] == "0.5 0.7"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_points_of_many_systems_differ_by_more_than_colour():
    many = [dataclasses.replace(ROWS[0], name=f"{i}") for i in range(100)]
    panel = compare._figure(many).axes[0]
    looks = [(x.lines[0].get_marker(), x.lines[0].get_color()) for x in panel.containers]
    assert len(set(looks)) == 100
    assert all(a[0] != b[0] for a, b in itertools.pairwise(looks[:20]))


def test_names_of_systems_are_drawn_as_they_are(tmp_path):
    """Matplotlib leaves a label _name out of a legend, and ends at `$^$`."""
    figure = compare._figure([dataclasses.replace(ROWS[0], name=name) for name in ("_a", "$^$")])
    artifacts.save_figure(figure, tmp_path / "names.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["_a: 60.00%", "$^$: 60.00%"]


@pytest.mark.parametrize(
    ("specs", "settings", "seeds", "said"),
    [
        (["c2a2:digits", "c2a2:digits"], [], [0], "named twice"),
        (["c2a2:digits", "c2a2:digits,strong"], [], [0], "named twice in c2a2 strong"),
        (["c2a2:digits", "c3a4:cifar10"], [], [0], "the same data, but of data.name c2a2 has"),
        (["c2a2:digits", "c3a4:digits,paper"], [], [0], "equal training, but train.epochs"),
        (["c2a2:digits"], [], [0, 0], "different whole numbers"),
        (["c2a2:digits", "c2a2:digits seed=3"], [], [0], "--seeds names the seeds of all"),
        (["c2a2:digits", "c2a2:digits mesh.data=1"], [], [0], "one run would serve for both"),
        (["c2a2:digits", "c2a2:digits model.depth=2"], [], [0], "depth=2 are the same config"),
        (["c2a2:digits", "c2a2:digits model.depth=1"], ["model.depth=1"], [0], "the same config"),
        (["c2a2:digits"], ["model.groups=5"], [0], "c2a2: .*groups=5"),
        (["c2a2:digits model.groups=5"], [], [0], "c2a2 groups=5: .*groups=5"),
        (["c9a9:digits"], [], [0], "unknown network"),
    ],
)
def test_what_cannot_be_compared(tmp_path, specs, settings, seeds, said):
    with pytest.raises(ValueError, match=said):
        compare.compare(System.parse_all(specs), tmp_path, settings=settings, seeds=seeds)
    assert not list(tmp_path.iterdir())


def test_equal_training_is_that_of_the_runs(tmp_path):
    """The recipe `small`, by the number of images, has a length of its own."""
    folder = tmp_path / "own"
    write(folder, {f"{'ab'[i % 2]}/{i}.png": encoded(noise((8, 8), i)) for i in range(24)})
    specs = [f"c2a2:folder={folder},strong", f"c2a2:folder={folder} model.depth=1"]
    settings = [f"data.dir={tmp_path}", "mesh.data=1"]
    with pytest.raises(ValueError, match=r"equal training.* c2a2 100/0/16, c2a2 depth=1 48/0/8"):
        compare.compare(list(map(System.parse, specs)), tmp_path / "runs", settings=settings)


def test_the_shares_are_those_of_fractions(tmp_path):
    with pytest.raises(ValueError, match="--fractions names the shares of all systems"):
        compare.learning_curves([SYSTEM], tmp_path, [0.1], settings=["data.fraction=0.5"])
    assert not list(tmp_path.iterdir())


def test_names_and_settings_of_a_system():
    for spec, name in (
        ("configs/c2a2.py:digits", "c2a2"),
        ("configs/vix.py:vin, hybrid,cifar10,paper", "vix vin hybrid"),
        ("c3a4:folder=my_images,conv_only", "c3a4 conv_only"),
    ):
        assert name_of(spec) == name
    system = System.parse("c2a2:digits,tiny model.depth=1  optim.name=sgd")
    assert system.spec == "c2a2:digits,tiny"
    assert system.settings == ("model.depth=1", "optim.name=sgd")
    assert system.name == "c2a2 tiny depth=1 name=sgd"
    assert System.parse("c2a2:digits augment.mixup=0.1").name == "c2a2 mixup=0.1"
    blank = System.parse("c2a2:folder=my photos,fast model.depth=1")
    assert (blank.spec, blank.settings) == ("c2a2:folder=my photos,fast", ("model.depth=1",))
    recipes = ["c2a2:digits", "c2a2:digits,fast", "c2a2:digits,paper optim.name=sgd"]
    names = [system.name for system in System.parse_all(recipes)]
    assert names == ["c2a2 strong", "c2a2 fast", "c2a2 paper name=sgd"]
    names = [system.name for system in System.parse_all([*recipes[1:], "c3a4:digits,fast"])]
    assert names == ["c2a2", "c2a2 name=sgd", "c3a4"]  # told apart by their networks


def test_a_setting_of_all_systems_may_be_for_others(tmp_path, monkeypatch):
    """One of a system's own has to be for itself."""
    prepared = InterruptedError("prepared: it would be trained now")
    monkeypatch.setattr(train, "train", unittest.mock.Mock(side_effect=prepared))
    softmax, nystrom = System.parse("vix:vit,digits,tiny"), System.parse("vix:vin,digits,tiny")
    with pytest.raises(InterruptedError):
        train_all([softmax, nystrom], tmp_path, settings=["model.landmarks=8"])
    with pytest.raises(cli.Misuse, match="landmarks has no effect with"):
        train_all([softmax], tmp_path, settings=["model.landmarks=8"])
    with pytest.raises(ValueError, match="landmarks has no effect with"):
        train_all([System.parse("vix:vit,digits,tiny model.landmarks=8")], tmp_path)


def test_every_system_reads_its_own_images():
    loaded = {}
    found = [
        images(config_lib.get_config("c2a2:digits,tiny", *settings), loaded)
        for settings in ([], ["data.image_size=16,16"], ["data.fit=stretch"], ["data.repeats=2"])
    ]
    assert [one.info.image_size for one in found] == [(32, 32), (16, 16), (32, 32), (32, 32)]
    assert found[0] is found[3] and found[0] is not found[2]


@pytest.mark.slow
def test_equal_compute_on_shares_of_the_images(tmp_path):
    wide = System.parse("c2a2:digits,tiny,conv_only model.conv_channels=32,64")
    settings = [*SETTINGS, "train.epochs=0", "train.batch=8", "train.steps=6"]
    points = compare.learning_curves([wide, SYSTEM], tmp_path, [0.05, 0.1], settings=settings)
    assert [p.line for p in points] == [wide.name, SYSTEM.name] * 2
    assert points[0].training_images < points[2].training_images < 200
    for dear, cheap in (points[:2], points[2:]):
        assert (dear.steps, dear.x) == (6, cheap.x)
        assert cheap.steps == round(6 * dear.flops / cheap.flops) > 6


def test_mistakes_on_the_command_line(capsys):
    for words, message in (
        ([], "compare --help"),
        ([" "], "--config names no file"),
        (["c2a2:digits", "--seeds=x"], "whole numbers; got x"),
        (["c2a2:digits", "--seeds=0,4294967296"], "0 to 4294967295; got 4294967296"),
        (["c2a2:digits", "--fractions=0.1,2"], "above 0, at most 1"),
        (["c2a2:digits", "--fractions="], "expected numbers"),
        (["c2a2:digits", "--sedes=1"], "sedes"),
    ):
        assert main.main(["hsvit", "compare", *words]) == 2
        assert message in capsys.readouterr().err
