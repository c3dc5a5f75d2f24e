"""Cross-validation, the papers' studies, curves of several runs."""

import csv
import json
import types

import numpy as np
import pytest
from support.small_runs import small_dataset

from hsvit_jax import config, main, models
from hsvit_jax.studies import crossval, power_search, study

TINY = ["--config=c2a2:digits,tiny,conv_only", "--config.mesh.data=1", "--config.model.embed_dim=8"]
TINY += ["--config.data.image_size=8,8"]


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(power_search, "search", pytest.fail)
    (tmp_path / "link.safetensors").symlink_to("elsewhere")
    (tmp_path / "file").write_text("")
    for out in ("link.safetensors", "file/found.safetensors"):
        assert main.main(["hsvit", "power-search", *TINY, f"--out={tmp_path / out}"]) == 1
        assert str(tmp_path / out.partition("/")[0]) in capsys.readouterr().err


@pytest.mark.parametrize("streamed", [False, True])
def test_every_example_is_tested_once(streamed):
    whole = small_dataset((70, 21, 23), streamed=streamed)
    parts = list(crossval.folds(whole, 4, 0.2, seed=0))
    assert next(crossval.folds(whole.subset(0.5), 4, 0.2, seed=0)).fraction == 0.5
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
    every_image = next(crossval.folds(whole, 4, 0.0, seed=0))  # for train.select_on=last
    assert len(every_image.val) == 0 and len(every_image.train) + len(every_image.test) == 91
    again = next(crossval.folds(whole, 4, 0.2, seed=0))
    np.testing.assert_array_equal(again.test.labels, parts[0].test.labels)
    with pytest.raises(ValueError, match=r"'row 0' has 13 images .* too few for 14 folds"):
        next(crossval.folds(whole, 14, 0.2, seed=0))


def test_every_class_is_trained_in_every_fold():
    for count, images in ((2, 4), (3, 3)):
        few = small_dataset((7 * images, 0, 0))
        for part in crossval.folds(few, count, 0.8, seed=0):
            assert all(set(s.labels) == set(range(7)) for s in (part.train, part.val, part.test))
        with pytest.raises(ValueError, match=f"too few for {count} folds"):
            next(crossval.folds(small_dataset((7 * (images - 1), 0, 0)), count, 0.1, seed=0))


@pytest.mark.slow
def test_a_run_for_each_fold(tmp_path, capsys):
    words = ["crossval", *TINY, "--config.train.steps=2", f"--workdir={tmp_path}/run/", "--folds=2"]
    assert main.main(["hsvit", *words]) == 0
    first = capsys.readouterr().out
    with (tmp_path / "run-folds2" / "crossval.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["fold"] for row in rows] == ["1", "2"]
    images = sum(int(row["images"]) for row in rows)
    assert f"{images:,} images, each tested once" in first and "over folds" in first
    assert main.main(["hsvit", *words]) == 0  # nothing is trained again
    assert capsys.readouterr().out == first


def test_folds_that_chose_their_checkpoint_say_so(tmp_path, monkeypatch, capsys):
    """And lie beside the run's folder, whatever it is called."""
    test = types.SimpleNamespace(examples=10, accuracy=0.9, macro_f1=0.9, loss=0.1)
    folders = []
    monkeypatch.setattr(
        crossval.train,
        "train",
        lambda config, folder, **_: folders.append(folder) or types.SimpleNamespace(test=test),
    )
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["crossval", *TINY, "--workdir=.", "--folds=2", "--config.train.select_on=test"]
    assert main.main(["hsvit", *words]) == 0
    assert "all (best on test): 90.00%" in capsys.readouterr().out
    assert folders == [tmp_path / "here-folds2" / name for name in ("fold1", "fold2")]
    head = (tmp_path / "here-folds2" / "crossval.csv").read_text().partition("\n")[0]
    assert head == "fold,images,accuracy (best on test),macro_f1,loss"


@pytest.mark.parametrize("name", study.names())
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_every_network_of_a_study_can_be_built(name, stride):
    """Its configuration is good and its sizes fit; the longer suite builds all, not a sixth."""
    made, built = study.load(study.find(name)), []
    assert len({(cell.x, cell.line) for cell in made.cells}) == len(made.cells) > 5
    for number, (cell, system) in enumerate(zip(made.cells, made.systems(), strict=True)):
        settings = config.get_config(system.spec, *system.settings)
        assert settings.recipe == "paper" and settings.data.name in made.data
        assert all(settings.train.batch == cell.x for s in cell.settings if "batch" in s)
        size = settings.data.image_size or (32, 32)
        sizes = {"image_size": size, "channels": 3, "num_classes": 10}
        models.FAMILIES[settings.model.family].sizes(settings.model.to_dict(), **sizes)
        if number % stride == 0 and settings.model not in built:
            built.append(settings.model)
            models.build(settings.model.to_dict(), **sizes)


OWN_STUDY = """
from hsvit_jax.studies.study import Cell, Study


def get_study():
    cells = [Cell(n, "2 blocks", "c2a2", (f"model.heads={n}",)) for n in (1, 2)]
    return Study("Heads of attention", "heads", "depth", cells)
"""


@pytest.mark.slow
def test_a_study_of_ones_own(tmp_path, capsys):
    own = tmp_path / "heads.py"
    own.write_text(OWN_STUDY)
    words = ["study", str(own), "--data=digits,tiny", "--config.train.steps=1"]
    words += [f"--out={tmp_path}", "--config.train.epochs=0", "--config.mesh.data=1"]
    assert main.main(["hsvit", *words]) == 0
    table = capsys.readouterr().out
    assert (tmp_path / "heads.png").is_file() and table.splitlines()[2].startswith("| 2 blocks |")
    assert main.main(["hsvit", *words]) == 0
    assert capsys.readouterr().out == table


def test_curves_of_runs(tmp_path, capsys):
    lines = ({"step": 1, "epoch": 0, "loss": 2.0}, {"step": 2, "split": "val", "accuracy": 0.5})
    runs = [tmp_path / name for name in ("a/run", "b/run", "new", "short")]
    texts = ["".join(json.dumps(line) + "\n" for line in lines)] * 2 + ["", '{"step": 1}\n']
    for run, text in zip(runs, texts, strict=True):
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(text)
    words = [*map(str, runs), f"--out={tmp_path}/c.png"]
    assert main.main(["hsvit", "curves", *words]) == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().err
    assert f"{runs[2]} is skipped" in said and "short was never evaluated" in said
    assert main.main(["hsvit", "curves", str(runs[2]), f"--out={tmp_path}/d.png"]) == 1
