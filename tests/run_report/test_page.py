"""Tests the HTML report: its figures against their definitions, and the page that shows them."""

import base64
import csv
import dataclasses
import hashlib
import html.parser
import json
import re
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import special
from support import reports, small_runs
from support.data_files import class_folders

from hsvit_jax import artifacts, classifier, data, main, run_report
from hsvit_jax.run_report import findings, measures
from hsvit_jax.run_report.page import line_charts
from hsvit_jax.text import printable
from hsvit_jax.train import metrics


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.sources, self.attributes, self.text = [], [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, text):
        self.text.append(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return reports.written(tmp_path_factory.mktemp("run")).read_text("utf-8")


def test_a_page_holds_everything_and_fetches_nothing(page):
    read = Reader(page)
    text = " ".join(read.text)
    heads = ("Curves", "Confusion matrix", "By class", "Calibration", "Most wrong", "Least sure")
    for head in (*heads, "Augmentation of the recipe", "Images by split", "Environment"):
        assert head in read.text
    for name in reports.NAMES:
        assert printable(name) in read.text
    assert read.tags.count("script") == read.tags.count("h1") == read.tags.count("style") == 1
    assert not [name for name in read.attributes if name.startswith("on")]
    assert read.sources and all(source.startswith("data:") for source in read.sources)
    assert "http" not in page.replace("http-equiv", "")
    assert "python <b>train</b>" in read.text and "\x1b" not in page
    assert "val accuracy on 21 images; 95 % interval" in text
    before = text.partition("final test accuracy on 23 images")[0]
    assert before.split()[-1] == "30.00%"  # by this very checkpoint
    assert "--config.train.batch=16" in text


def test_curves_differ_in_grey(page):
    for series, border in (("s1", "dashed"), ("s2", "dotted")):  # s0 is solid
        assert f'<polyline class="line {series}"' in page and f'<span class="key {series}">' in page
        assert f".line.{series} {{ stroke-dasharray: " in page
        assert f".key.{series}::before {{ border-top: 3px {border} " in page


def test_the_policy_names_the_script(page):
    """No other script of a page is executed."""
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


def test_what_is_found():
    trained, dataset = reports.untrained()
    found = findings.find(trained, dataset, "val")
    logits = trained.logits(dataset.val.images)
    assert found.confusion_KK.sum() == 21
    assert np.trace(found.confusion_KK) == (logits.argmax(1) == dataset.val.labels).sum()
    examples = [*found.wrong, *found.unsure]
    assert len(examples) == 21 and len(found.wrong) == 12
    example = found.wrong[0]
    assert example.probabilities_K.argmax() != example.label
    assert sum(example.votes.values()) == trained.config.model.groups
    covered = example.image_HWC.copy()
    covered[3:5, 3:5] = round(255 * 0.3)  # the middle of the heat map
    best = example.probabilities_K.argmax()
    fall = example.probabilities_K.max() - trained.predict(covered[None])[0][best]
    assert example.heat_RR.shape == (7, 7)
    assert example.heat_RR[3, 3] == pytest.approx(fall, abs=1e-5)
    (image, *variants), *rest = found.augmented
    assert len(rest) == 3 and len(variants) == 5 and image[0].shape == variants[0][0].shape
    np.testing.assert_allclose([target.sum() for _, target in variants], 1, rtol=1e-5)


def test_images_are_named_and_all_wrong_ones_listed(tmp_path):
    """Some files are called as formulas and markup, and the first has gone."""
    trained, dataset = reports.untrained()
    (tmp_path / "photos").mkdir()
    files = [tmp_path / "photos" / f"=row {n} <b>%.png" for n in range(len(dataset.val))]
    for file in files[1:]:
        file.write_bytes(b"an image")
    val = dataclasses.replace(dataset.val, names=np.array([*map(str, files)], object))
    dataset = dataclasses.replace(dataset, val=val)
    path = run_report.write(trained, tmp_path, tmp_path / "r.html", dataset=dataset)
    page = path.read_text("utf-8")
    links = [source for source in Reader(page).sources if not source.startswith("data:")]
    assert len(links) == 20 and "photos/%3Drow%201%20%3Cb%3E%25.png" in links  # but the one gone
    assert "photos/=row 0 &lt;b&gt;%.png" in page and "r-wrong.csv lists every" in page
    with (tmp_path / "r-wrong.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    p = trained.predict(dataset.val.images)
    wrong = np.flatnonzero(p.argmax(1) != dataset.val.labels)
    assert {row["file"] for row in rows} == {dataset.val.names[n] for n in wrong}
    first = list(dataset.val.names).index(rows[0]["file"])
    assert rows[0]["predicted"] == reports.NAMES[p[first].argmax()]
    assert float(rows[0]["probability"]) == pytest.approx(p[first].max(), abs=1e-5)
    reports.written(tmp_path)  # of images in no files
    assert "val image " in (tmp_path / "report-wrong.csv").read_text("utf-8")


def test_names_follow_images_into_parts_and_subsets(tmp_path):
    class_folders(tmp_path / "photos", ["a", "b"])
    (tmp_path / "photos" / "a" / "0.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="ignored|dropped"):
        dataset = data.load(
            f"folder={tmp_path}/photos", data_dir=str(tmp_path), on_bad_image="skip"
        )
    for part in (dataset.train, dataset.val, dataset.subset(0.5).train):
        for name, label, image in zip(part.names, part.labels, part.images, strict=True):
            assert Path(name).parent.name == "ab"[label]
            np.testing.assert_array_equal(data.read_image(name, (32, 32), 1), image)


def test_heat_maps_end_in_time_and_the_cards_stay(tmp_path, monkeypatch):
    trained, dataset = reports.untrained()
    monkeypatch.setattr(findings, "_SECONDS", 0.0)
    found = findings.find(trained, dataset, "val")
    heats = [example.heat_RR is not None for example in (*found.wrong, *found.unsure)]
    assert heats == [True, *[False] * 20]
    page = run_report.write(trained, tmp_path, tmp_path / "r.html", dataset=dataset)
    assert page.read_text("utf-8").count("covering a part") == 1


def test_hostile_files_of_a_run_cost_their_own_part_of_the_report(tmp_path, capsys):
    reports.written(tmp_path)
    log = tmp_path / "metrics.jsonl"
    text = log.read_text()
    odd = ['"accuracy": 1e308', '"loss": -1.7e308', '"loss": 1.7e308', '"loss": 1e999']
    odd.append('"loss": [], "accuracy": {}')
    for step, line in enumerate(odd, 5):
        text += f'{{"step": {step}, {line}}}\n{{"step": {step}, "split": "$_", {line}}}\n'
    text += '{"step": 3, "split": "test"}\n{"step": 3, "split": "test", "accuracy": "high"}\n'
    text += '{"step": 3, "split": "test", "accuracy": -7.5, "examples": -3}\n'
    deep = '{"a": ' + "[" * 100_000
    trained, dataset = reports.untrained()
    log.write_text(text)
    for environment in ('{"a": 1', "[[[], 1]]", "7", deep):
        (tmp_path / "environment.json").write_text(environment)
        assert "data" in run_report._environment(trained, tmp_path)
        assert "environment.json is damaged and left out" in capsys.readouterr().err
    page = run_report.write(trained, tmp_path, tmp_path / "r.html", dataset=dataset)
    assert "<h2>Curves</h2>" in page.read_text("utf-8")
    assert metrics.draw_curves(tmp_path, "run").stat().st_size
    assert main.main(["hsvit", "curves", str(tmp_path), f"--out={tmp_path}/c.png"]) == 0


def test_probabilities_by_the_temperature_of_the_report(tmp_path, monkeypatch, capsys):
    from PIL import Image

    reports.written(tmp_path)
    kept = json.loads((tmp_path / "calibration.json").read_text())
    trained, dataset = reports.untrained()
    logits = trained.logits(dataset.val.images)
    fitted = measures.fit_temperature(logits.astype(np.float64), dataset.val.labels)
    assert kept == {"step": trained.step, "temperature": pytest.approx(fitted, rel=1e-3)}
    Image.fromarray(dataset.val.images[0, ..., 0]).save(tmp_path / "a.png")
    words = ["hsvit", "predict", f"--checkpoint={tmp_path}", f"{tmp_path}/a.png", "--format=json"]
    monkeypatch.setattr(classifier, "load", lambda *_, **__: trained)
    (tmp_path / "checkpoints").mkdir()
    assert main.main([*words, "--calibrated", "--top_k=1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    wanted = special.softmax(logits[0].astype(np.float64) / kept["temperature"])
    assert row["probability"] == pytest.approx(wanted.max(), abs=1e-5)
    assert main.main([*words, "--top_k=1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["probability"] == pytest.approx(trained.predict(dataset.val.images[:1]).max())
    for text in (json.dumps(kept | {"step": 99}), "[" * 100_000, '{"step": 3, "temperature": 0}'):
        (tmp_path / "calibration.json").write_text(text)
        assert main.main([*words, "--calibrated"]) == 1
        assert "has no calibration of step 3: run hsvit report" in capsys.readouterr().err


def test_a_network_that_is_sure_and_right_everywhere(tmp_path, monkeypatch):
    trained, dataset = reports.untrained()
    sure = 100.0 * np.eye(small_runs.CLASSES)
    monkeypatch.setattr(findings, "_logits", lambda network, part, batch: sure[part.labels])
    found = findings.find(trained, dataset, "val")
    assert found.wrong == found.unsure == []
    path = run_report.write(trained, tmp_path, tmp_path / "r.html", dataset=dataset)
    assert path.read_text("utf-8").count("No image is misclassified.") == 1


def test_logits_that_are_not_finite_are_no_predictions():
    trained, dataset = reports.untrained()
    params = jax.tree.map(lambda x: np.nan * x, trained.params)
    with pytest.raises(ValueError, match="logits of 21 of 21 images are not finite"):
        findings.find(dataclasses.replace(trained, params=params), dataset, "val")


def test_confusions_of_many_classes_need_no_second_matrix():
    counts = np.zeros((2000, 2000), np.int64)
    counts[3, 4], counts[1999, 0], counts[5, 5] = 2, 7, 9
    tracemalloc.start()
    found = measures.frequent_confusions(counts, 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(7, 1999, 0), (2, 3, 4)]
    assert peak < counts.nbytes / 4


def test_measures_by_class():
    counts = np.array([[2, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    first, second, third, fourth = measures.by_class(counts)
    assert (first.images, first.precision[0], first.recall[0]) == (3, 2 / 4, 2 / 3)
    assert first.f1.value == pytest.approx(2 / (1 / (2 / 4) + 1 / (2 / 3)))
    assert first.recall[1:] == artifacts.wilson(2, 3)
    assert first.f1.low < first.f1.value < first.f1.high
    assert second.f1.value == pytest.approx(0.5)
    assert (third.precision, third.recall.value, third.f1.value) == (None, 0, 0)
    assert fourth == (0, None, None, None)
    assert measures.frequent_confusions(counts, 9)[0] == (1, 0, 1)
    assert len(measures.frequent_confusions(counts, 9)) == 3


def test_calibration_and_its_temperature():
    """Labels drawn from softmax(logits) are calibrated; logits three times as large are not."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 5)) * 2
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    fair = measures.calibration(logits, labels)
    bold = measures.calibration(3 * logits, labels)
    assert fair.ece < 0.03 < 0.1 < bold.ece and fair.loss < bold.loss
    assert sum(b.images for b in bold.bins) == 4000
    temperature = measures.fit_temperature(3 * logits, labels)
    assert temperature == pytest.approx(3, rel=0.05)
    assert measures.calibration(3 * logits, labels, temperature).ece < 0.03
    wrong, unsure = measures.hardest(special.softmax(logits, axis=1), labels, 5)
    assert len(wrong) == len(unsure) == 5 and not set(wrong) & set(unsure)
    assert all(logits[i].argmax() != labels[i] for i in wrong)


def test_ticks_are_round():
    (chart,) = line_charts("loss", {"train": [(1, 0.0003), (66, 0.0011)]}, False)
    assert [label for _, label in chart.x_ticks] == ["0", "20", "40", "60"]
    assert [label for _, label in chart.y_ticks] == ["0", "0.0005", "0.001"]
    assert len(line_charts("accuracy", {"val": [(1, 0.5)]}, True)[0].y_ticks) == 6
    assert line_charts("loss", {"val": []}, False) == []


def test_a_report_that_fails_is_a_note(tmp_path, capsys):
    assert run_report.write_after_training(tmp_path / "nothing") is None
    assert "no report (CheckpointError: " in capsys.readouterr().err
    trained, _ = reports.untrained()
    with pytest.raises(ValueError, match="has other classes"):
        run_report.write(trained, tmp_path, tmp_path / "r.html", dataset=small_runs.small_dataset())


def test_prediction_is_compiled_once_for_a_padded_shape():
    trained, dataset = reports.untrained()
    images = dataset.train.images[:8]
    eight = trained.predict(images)
    programs = trained._forward._cache_size()
    np.testing.assert_allclose(trained.predict(images[:5]), eight[:5], atol=1e-6)
    assert trained._forward._cache_size() == programs
