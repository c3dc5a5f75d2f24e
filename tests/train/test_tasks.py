"""Runs of several labels or numbers an image: training, evaluation, answers and exports."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from support.small_runs import PLAIN, digest, metric_lines, small_config

import hsvit_jax
from hsvit_jax import checkpoint, data, export, main, run_report, tasks, train
from hsvit_jax.runtime import signals
from hsvit_jax.serve import app, batching, votes
from hsvit_jax.serve.admission import Limits
from hsvit_jax.train import loop, metrics
from hsvit_jax.weights.stored import stored_network

TASKS = ("multilabel", "regress")
FIGURES = {"multilabel": ["map", "macro_f1", "micro_f1"], "regress": ["r2", "mae"]}
MINE = """
import jax.numpy as jnp
import hsvit_jax
from hsvit_jax import config

def absolute(outputs, targets, weights):
    return (abs(outputs - targets).mean(1) * weights).sum() / weights.sum()

def worst(answers, targets, weights):
    return -jnp.abs(answers - targets).max()

hsvit_jax.register_loss("absolute", absolute)
hsvit_jax.register_metric("worst", worst)

def get_config(argument=None):
    return config.for_network("c2a2")(argument)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with tables of labels and of numbers, and their 60 pictures."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    lines = {"multilabel": ["image,labels,split"], "regress": ["image,split,light,odd"]}
    for i in range(60):
        lit = rng.random(3) < 0.5
        pixels = rng.integers(0, 100, (8, 8), np.uint8)
        pixels[1:4] += (120 * lit).astype(np.uint8)[:, None]
        Image.fromarray(pixels).save(folder / f"{i}.png")
        split = "train" if i < 40 else "val" if i < 50 else "test"
        names = ";".join(f"row {k}" for k in np.flatnonzero(lit))
        lines["multilabel"] += [f"{i}.png,{names},{split}"]
        lines["regress"] += [f"{i}.png,{split},{1000 + 10 * pixels.mean():.3f},{i % 2}"]
    for task, rows in lines.items():
        (folder / f"{task}.csv").write_text("\n".join(rows))
    return folder


def dataset_of(photos, task):
    return data.load(f"csv={photos}/{task}.csv", data_dir=str(photos / "cache"), task=task,
                     image_size=(8, 8))  # fmt: skip


def run(photos, task, folder, **settings):
    settings = {**PLAIN, "train__batch": 20, "train__steps": 4, **settings}
    # Not Adam, which divides by a gradient's size, which may be rounding alone.
    settings = {"optim__name": "sgd", "optim__learning_rate": 0.05, **settings}
    settings = {"recipe": "strong", "augment__label_smoothing": 0.0, **settings}
    dataset = dataset_of(photos, task)
    return train.train(small_config(**settings), folder, dataset=dataset, verbose=False)


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return request.param


@pytest.fixture(scope="module")
def whole(photos, task, tmp_path_factory):
    """The folder and the result of a run of two epochs that nothing stopped."""
    folder = tmp_path_factory.mktemp(task)
    return folder, run(photos, task, folder)


def test_figures_are_those_of_the_answers(photos, task, whole):
    """Computed from `predict`, with the definitions written out."""
    folder, result = whole
    test, network = dataset_of(photos, task).test, hsvit_jax.load(folder)
    answers, labels = network.predict(test.images), test.labels
    if task == "regress":
        statistics = np.array([network.config.data.target_mean, network.config.data.target_std])
        trained = dataset_of(photos, task).train.labels
        np.testing.assert_allclose(statistics, [trained.mean(0), trained.std(0)])
        logits = network.logits(test.images).astype(np.float64)
        np.testing.assert_allclose(answers, logits * statistics[1] + statistics[0])
        errors = answers - labels
        r2 = 1 - (errors**2).sum(0) / ((labels - labels.mean(0)) ** 2).sum(0)
        expected = {"r2": r2.mean(), "mae": np.abs(errors).mean()}
        loss = ((errors / statistics[1]) ** 2).mean()
    else:
        over = answers >= 0.5
        both = (over & (labels > 0)).sum()
        expected = {"micro_f1": 2 * both / (over.sum() + labels.sum())}
        loss = -np.where(labels > 0, np.log(answers), np.log1p(-answers)).mean()
    found = result.test.figures
    assert [*found] == ["loss", *FIGURES[task], "examples"] and found["examples"] == 10
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert network.evaluate(dataset_of(photos, task)).figures == pytest.approx(found)


def test_lines_and_the_best_checkpoint_follow_the_task(task, whole):
    folder, result = whole
    lines = metric_lines(folder)
    by_step = {x["step"]: x[FIGURES[task][0]] for x in lines if x.get("split") == "val"}
    assert result.best_step == max(by_step, key=by_step.get) and len(by_step) == 2
    assert tasks.TASKS[task].step_figure in lines[0] and "accuracy" not in lines[0]
    assert result.validation.figures[FIGURES[task][0]] == max(by_step.values())


@pytest.mark.parametrize("task", ["regress"], indirect=True, scope="module")
def test_a_mesh_of_2x2_gives_the_same(photos, task, whole, tmp_path):
    result = run(photos, task, tmp_path, mesh__group=2, mesh__data=2)
    assert result.test.figures == pytest.approx(whole[1].test.figures, rel=1e-5, abs=1e-5)
    states = (checkpoint.load_tree(folder)[1]["params"] for folder in (tmp_path, whole[0]))
    leaves = zip(*map(jax.tree.leaves, states), strict=True)
    for ours, theirs in leaves:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", ["multilabel"], indirect=True, scope="module")
def test_a_run_resumes_to_the_same_bits(photos, task, whole, tmp_path):
    write = metrics.MetricLog.write

    def signalled(self, number, values):
        write(self, number, values)
        if number == 1 and "split" not in values:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "in_flight", 0)
        patch.setattr(metrics.MetricLog, "write", signalled)
        with pytest.raises(signals.Interrupted):
            run(photos, task, tmp_path)
    run(photos, task, tmp_path)
    assert digest(tmp_path) == digest(whole[0])
    assert metric_lines(tmp_path) == metric_lines(whole[0])


def test_eval_and_predict_print_labels_and_numbers(photos, task, whole, capfd):
    folder, result = whole
    assert main.main(["main", "eval", str(folder), "--split=test"]) == 0
    out, err = capfd.readouterr()
    line = json.loads(out)
    assert line["split"] == "test" and line["loss"] == pytest.approx(result.test.loss)
    names = hsvit_jax.load(folder).class_names
    assert all(name in err for name in (*names, "R²" if task == "regress" else "recall"))
    pictures = [str(photos / f"{i}.png") for i in (50, 51)]
    assert main.main(["main", "predict", str(folder), *pictures, "--format=json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    answers = hsvit_jax.load(folder).predict(pictures)
    for picture, answer in zip(pictures, answers, strict=True):
        own = {
            r["label"]: r.get("value", r.get("probability")) for r in rows if r["file"] == picture
        }
        if task == "regress":
            assert own == pytest.approx(dict(zip(names, answer.tolist(), strict=True)))
        else:
            over = {n: p for n, p in zip(names, answer.tolist(), strict=True) if p >= 0.5}
            assert own == pytest.approx(over or {"": None})
    for words in (["eval", "--curve=a.png"], ["predict", pictures[0], "--calibrated"]):
        assert main.main(["main", words[0], str(folder), *words[1:]]) != 0
        assert "counts right classes" in capfd.readouterr().err


def test_a_report_shows_every_output(photos, task, whole):
    folder, _ = whole
    trained, dataset = hsvit_jax.load(folder), dataset_of(photos, task)
    page = run_report.write(trained, folder, folder / "report.html", dataset=dataset).read_text()
    assert "By output" in page and "Confusion" not in page and "Calibration" not in page
    assert page.count('class="dot s0"') >= (20 if task == "regress" else 0)
    assert not (folder / "calibration.json").exists()
    head, *rows = (folder / "report-wrong.csv").read_text().splitlines()
    assert head == f"file,label,true,{trained.config and tasks.TASKS[task].unit}"
    wrong = trained.predict(dataset.val.images) - dataset.val.labels
    count = wrong.size if task == "regress" else int((np.abs(wrong) > 0.5).sum())
    assert len(rows) == count


def test_a_server_answers_with_labels_and_numbers(photos, task, whole):
    trained = hsvit_jax.load(whole[0], devices=jax.devices()[:1])
    network = votes.Network(trained)
    batcher = batching.Batcher(network, network, [1], wait=0.001)
    picture = photos / "55.png"
    with TestClient(app.Interface(batcher, Limits()).app) as client:
        files = [("files", ("a.png", picture.read_bytes()))]
        answer = client.post("/explain", files=files).json()
        assert client.get("/healthz").json()["task"] == task
        assert f'data-task="{task}"' in client.get("/").text
    rows = tasks.of(trained.config).rows(trained.predict(picture), trained.class_names)
    unit = tasks.TASKS[task].unit
    assert [row["label"] for row in answer["top"]] == [row["label"] for row in rows]
    assert [r[unit] for r in answer["top"]] == pytest.approx([r[unit] for r in rows], rel=1e-4)
    assert all(part["top"]["label"] in trained.class_names for part in answer["parts"])


def test_exported_files_answer_the_same(photos, task, whole, tmp_path):
    folder, _ = whole
    stored, images = stored_network(folder), dataset_of(photos, task).test.images
    about = export.describe(stored, str(folder))
    assert set(about["measured"]["test"]) == {*FIGURES[task], "loss", "examples"}
    export.write(stored, about, tmp_path / "a.safetensors", "file")
    expected = hsvit_jax.load(folder).predict(images)
    again = hsvit_jax.load(tmp_path / "a.safetensors").predict(images)
    np.testing.assert_array_equal(again, expected)
    export.write(stored, about, tmp_path / "a.stablehlo", "stablehlo")
    program = jax.export.deserialize(bytearray((tmp_path / "a.stablehlo").read_bytes()))
    np.testing.assert_allclose(program.call(images)[1], expected, rtol=1e-4)
    export.write(stored, about, tmp_path / "hub", "hub")
    card = (tmp_path / "hub/README.md").read_text()
    assert all(tasks.name_of(name) in card for name in FIGURES[task])
    settings = json.loads((tmp_path / "hub/config.json").read_text())
    kinds = {"multilabel": "multi_label_classification", "regress": "regression"}
    assert settings["problem_type"] == kinds[task]


def test_other_tables_are_matched_by_their_names(photos, task, whole, tmp_path):
    network = hsvit_jax.load(whole[0])
    head, row = {
        "multilabel": ("image,labels", "row 2"),
        "regress": ("image,odd,light", "1,1500"),
    }[task]
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes((photos / f"{i}.png").read_bytes())
    lines = [head, *(f"{i}.png,{row}" for i in range(3))]
    (tmp_path / "other.csv").write_text("\n".join(lines))
    found = network.evaluate(f"csv={tmp_path}/other.csv")
    column = found.by_output["images" if task == "multilabel" else "mean"]
    assert column.tolist() == ([0, 0, 3] if task == "multilabel" else [1500, 1])
    lines = [
        head.replace("odd", "even").replace("labels", "label"),
        f"0.png,{row}".replace("2", "7"),
    ]
    (tmp_path / "other.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"does not know: (even|row 7)"):
        network.evaluate(f"csv={tmp_path}/other.csv")


def test_own_loss_and_metric_from_a_config_file(photos, tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HSVIT_DATA_DIR", str(photos / "cache"))
    words = [f"--config=mine.py:csv={photos}/regress.csv,fast", "--config.data.task=regress"]
    for size in ("conv_channels=4,16", "conv_kernels=3,3", "groups=4", "depth=1", "embed_dim=8"):
        words += [f"--config.model.{size}"]
    words += [
        "--config.train.loss=absolute",
        "--config.train.metrics=worst",
        "--workdir=run",
        "--config.model.heads=2",
    ]
    words += ["--config.data.image_size=8,8", "--config.train.steps=4", "--config.train.batch=20"]
    words += ["--config.init.whiten=false", "--config.augment.crop_padding=0"]
    words += ["--config.mesh.data=1"]
    assert main.main(["main", "train", *words, "--noreport"]) == 0
    capfd.readouterr()
    network, dataset = hsvit_jax.load("run"), dataset_of(photos, "regress")
    answers, labels = network.predict(dataset.val.images), dataset.val.labels
    (line,) = [x for x in metric_lines(Path("run")) if x.get("split") == "val"][-1:]
    standardised = np.abs(answers - labels) / network.config.data.target_std
    assert line["worst"] == pytest.approx(-np.abs(answers - labels).max(), rel=1e-5)
    assert line["loss"] == pytest.approx(standardised.mean(), rel=1e-5)
    monkeypatch.delitem(tasks.LOSSES, "absolute")
    monkeypatch.delitem(tasks.METRICS, "worst")
    assert main.main(["main", "eval", "run"]) == 1
    assert "--config=FILE.py, the file that registers it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("regress", {"augment__label_smoothing": 0.1}, "label_smoothing has no effect"),
        ("regress", {"train__select_on": "macro_f1"}, "set 'val' to select by R²"),
        ("regress", {"eval__threshold": (0.4,)}, "eval.threshold has no effect"),
        ("multilabel", {"eval__threshold": (0.4, 0.5)}, "one for each of 3 labels"),
        ("multilabel", {"data__balance": "sample"}, "data.balance has no effect"),
        ("multilabel", {"data__num_classes": 7}, "has 3 labels: remove it"),
        ("multilabel", {"data__task": "regress"}, "has multilabel: remove the setting"),
    ],
)
def test_what_makes_no_sense_is_refused(photos, task, settings, message):
    config = small_config(**{**PLAIN, "train__batch": 20, **settings})
    with pytest.raises(ValueError, match=message):
        train.prepare(config, dataset=dataset_of(photos, task))
