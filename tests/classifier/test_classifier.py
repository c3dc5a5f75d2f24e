"""A loaded checkpoint: arrays and image files in, classes out."""

import csv
import dataclasses
import io
import json
import types

import jax
import numpy as np
import pytest
from PIL import Image
from support.small_runs import untrained_run

from hsvit_jax import checkpoint, data
from hsvit_jax import classifier as classifier_lib
from hsvit_jax.classifier import files
from hsvit_jax.cli import Request
from hsvit_jax.commands import trained

NAMES = tuple(f"class {i}" for i in range(10))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("run"), 1, 2)


@pytest.fixture(scope="module")
def classifier(run):
    return classifier_lib.load(run, devices=jax.devices()[:1])


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), np.uint8)


def test_load_chooses_the_step(run):
    best = classifier_lib.load(run)
    assert best.step == 1 and len(repr(best)) < 10_000  # by its metric; without its weights
    assert best.image_size == (32, 32) and best.channels == 1 and best.class_names == NAMES
    assert classifier_lib.load(run, "latest").step == 2
    assert classifier_lib.load(run / "checkpoints", 2).step == 2
    for which in ("9", "last"):
        with pytest.raises(ValueError, match=f"no step .*{which}"):
            classifier_lib.load(run, which)


def test_answers_are_those_of_the_network(run, classifier, images):
    """Whatever the parts of the batch and the devices; none for no images."""
    mean, std = classifier.config.data.mean[0], classifier.config.data.std[0]
    x = ((images / 255.0 - mean) / std).astype(np.float32)
    expected = jax.jit(classifier.model.apply)(classifier.params, classifier.stats, x)[0]
    found = classifier.logits(images)
    assert found.dtype == np.float32 and found.shape == (3, 10)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(classifier.logits(images, batch=2), found, atol=1e-6)
    many = classifier_lib.load(run)
    assert many.mesh.size == 8
    np.testing.assert_allclose(many.logits(images), found, atol=1e-5)
    p = classifier.predict(images)
    assert p.dtype == np.float32
    np.testing.assert_allclose(p, jax.nn.softmax(found), rtol=1e-5)
    np.testing.assert_allclose(classifier.predict((images[0] / 255).tolist()), p[0], rtol=1e-5)
    assert classifier.predict(np.zeros((0, 32, 32, 1), np.uint8)).shape == (0, 10)


class Column(np.ndarray):
    """Has a mode, as a column of a pandas table and a picture have."""

    mode = "L"


def test_images_of_any_kind_are_one_image(classifier, images, tmp_path):
    """A path, a picture, arrays of bytes, floats and colours, alone and among others."""
    image = images[0, ..., 0]
    Image.fromarray(image).save(tmp_path / "a.png")
    expected, path = classifier.predict(images), tmp_path / "a.png"
    colour, half = np.repeat(images[0], 3, 2), jax.numpy.asarray(image / 255, jax.numpy.float32)
    for one in (path, str(path), Image.fromarray(image), image, images[0], half, colour):
        np.testing.assert_allclose(classifier.predict(one), expected[0], atol=1e-6)
    for several in (images[..., 0], [image, Image.fromarray(images[1, ..., 0]), images[2]]):
        np.testing.assert_allclose(classifier.predict(several), expected, atol=1e-6)
    column = np.array([str(path)] * 2).view(Column)
    np.testing.assert_allclose(classifier.predict(column), expected[[0, 0]], atol=1e-6)
    larger = np.repeat(np.repeat(image, 2, 0), 2, 1)
    fitted = classifier.predict(Image.fromarray(larger))
    np.testing.assert_array_equal(classifier.predict(larger), fitted)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (np.full((32, 32), 255.0), "255"),
        (np.full((32, 32), np.nan), "nan"),
        (np.zeros((2, 32, 32, 2), np.uint8), r"\(32, 32, 2\)"),
        ("no.png", "^no.png"),
        ([np.zeros((8, 8)), np.ones((8, 8, 5))], r"^image 1: .*\(8, 8, 5\)"),
    ],
)
def test_what_is_no_image_is_refused(classifier, wrong, named):
    with pytest.raises(data.BadImage, match=named):
        classifier.predict(wrong)


def test_channels_that_come_first_are_told(classifier):
    config = classifier.config.copy_and_resolve_references()
    config.data.channels = 3
    colour = dataclasses.replace(classifier, config=config)
    with pytest.warns(UserWarning, match=r"array \(3, 32, 32\) is three grey images; .*h, w, 3"):
        assert len(colour._fitted(np.zeros((3, 32, 32), np.uint8))[0]) == 3


def test_a_network_whose_logits_are_not_finite_has_no_answer(classifier):
    params = jax.tree.map(lambda x: np.nan * x, classifier.params)
    broken = dataclasses.replace(classifier, params=params)
    with pytest.raises(ValueError, match=r"of step \d+ are not finite"):
        broken.predict(np.zeros((2, 32, 32), np.uint8))


@pytest.mark.parametrize(("label", "scale"), [(10, 1), (-1, 1), (1, 255.0)])
def test_a_split_that_would_be_counted_wrongly_is_refused(classifier, images, label, scale):
    pixels = images if scale == 1 else images / scale
    with pytest.raises(ValueError, match=r"label|uint8"):
        classifier.evaluate(data.Split(np.array([0, 0, label], np.int32), pixels))


def test_evaluate_finds_images_by_the_name_of_their_data_set(classifier, images, tmp_path):
    for turn, name in enumerate(NAMES[:3]):
        (tmp_path / name).mkdir()
        for number, image in enumerate(images[..., 0]):
            Image.fromarray(np.rot90(image, turn)).save(tmp_path / name / f"{number}.png")
    assert classifier.evaluate(f"folder={tmp_path}").examples == 9  # all are unseen
    seen = dataclasses.replace(
        classifier, fingerprint=data.load(f"folder={tmp_path}", image_size=(32, 32)).fingerprint
    )
    assert seen.evaluate(f"folder={tmp_path}/").examples == 3  # the others were trained on
    digits = data.describe("digits").class_names
    own = dataclasses.replace(classifier, class_names=digits).evaluate("digits")
    assert own.examples == 179  # its test split
    with pytest.raises(ValueError, match=r"does not know: 0, 1; .*class_names"):
        same = {"image_size": (32, 32), "test_only": True}
        classifier.evaluate(data.from_arrays(images, [0, 1, 0], **same))


def test_embeddings_and_explanations(classifier, images):
    """What the linear map of the classifier sees, and what visualize draws."""
    embedding, logits = classifier.embed(images), classifier.logits(images)
    linear = jax.device_get(classifier.params["head"]["linear"])
    assert embedding.shape == (3, linear["kernel"].shape[0])
    np.testing.assert_allclose(embedding @ linear["kernel"] + linear["bias"], logits, atol=1e-5)
    np.testing.assert_allclose(classifier.embed(images[0]), embedding[0], atol=1e-5)
    seen = classifier.explain(images[:2])
    assert len(seen) == 2 and seen[0].groups.maps_GCHW.ndim == 4
    np.testing.assert_allclose(seen[1].logits_K, logits[1], atol=1e-5)
    assert classifier.explain(images[0]).votes_GK.shape == (4, 10)


def test_the_moving_average_is_what_predicts(run, tmp_path):
    _, state, meta = checkpoint.load_tree(run)
    state["ema"] = {
        "params": jax.tree.map(lambda x: x * 0.5, state["params"]),
        "stats": state["stats"],
    }
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, meta, metric=0.0, wait=True)
    found, expected = classifier_lib.load(tmp_path).params, state["ema"]["params"]
    for got, averaged in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, averaged)


@pytest.fixture
def pictures(tmp_path):
    """Two good images, one below another folder in colour, a bad one, and other files."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    grey = np.random.default_rng(1).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(grey).save(folder / "b.png")
    Image.fromarray(np.stack([grey] * 3, -1)).resize((50, 40)).save(folder / "more" / "a.jpg")
    (folder / "c.png").write_bytes(b"no image")
    (folder / "Thumbs.db").write_text("x")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "d.png").write_bytes(b"")
    (folder / "folder.png").mkdir()
    return folder


def test_image_files(pictures, tmp_path):
    found = files.listed([str(pictures / "c.png"), str(pictures)])
    names = [str(p.relative_to(pictures)) for p in found]
    assert names == ["c.png", "b.png", "more/a.jpg"]  # each once
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "photos").symlink_to(pictures)
    found = files.listed([str(tmp_path / "linked")])
    assert [path.name for path in found] == ["b.png", "c.png", "a.jpg"]
    (tmp_path / "empty").mkdir()
    for name in ("empty", "x.png", "x" * 300 + ".png"):
        with pytest.raises(ValueError, match=name):
            files.listed([str(tmp_path / name)])


def test_a_bad_file_spoils_no_other(classifier, pictures):
    paths = files.listed([str(pictures)])
    rows, errors = files.predict(classifier, paths, top_k=3)
    assert [(r["file"], r["rank"]) for r in rows] == [
        (str(pictures / name), rank) for name in ("b.png", "more/a.jpg") for rank in (1, 2, 3)
    ]
    assert len(errors) == 1 and "c.png" in errors[0]
    image = classifier.read(pictures / "b.png")
    p = classifier.predict(image[None])[0]
    best = np.argsort(-p)[:3]
    assert [r["label"] for r in rows[:3]] == [NAMES[k] for k in best]
    np.testing.assert_allclose([r["probability"] for r in rows[:3]], p[best], rtol=1e-5)
    assert len(files.predict(classifier, paths[:1], top_k=99)[0]) == 10


def test_a_csv_is_printed_as_it_grows(classifier, pictures, monkeypatch, capsys):
    """The images so far are kept where a run over many files ends early."""
    monkeypatch.setattr(trained, "_FILES_AT_ONCE", 1)
    monkeypatch.setattr(trained, "load_classifier", lambda request: classifier)
    words = [str(pictures / name) for name in ("b.png", "c.png", "more/a.jpg")]
    values = types.SimpleNamespace(format="csv", top_k=2)
    request = Request("hsvit", "predict", [], values, words=words)
    whole = trained.predict.work(request), capsys.readouterr().out
    names = [row["file"] for row in csv.DictReader(io.StringIO(whole[1]))]
    assert whole[0] == 1 and names == [words[0]] * 2 + [words[2]] * 2
    assert (
        trained.predict.work(dataclasses.replace(request, words=words[1:2])) == 1
    )  # of no image at all
    assert capsys.readouterr().out == "file,rank,label,probability\n"

    find = files.predict

    def interrupted(network, paths, top_k):
        if str(paths[0]) == words[2]:
            raise KeyboardInterrupt
        return find(network, paths, top_k)

    monkeypatch.setattr(files, "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained.predict.work(request)
    assert capsys.readouterr().out.splitlines() == whole[1].splitlines()[:3]


ROWS = [
    {"file": "a,b.png", "rank": 1, "label": "käse", "probability": 0.75},
    {"file": "a,b.png", "rank": 2, "label": 'a "cat"', "probability": 0.25},
    {"file": "c.png", "rank": 1, "label": "dog", "probability": 1.0},
]


def test_rows_as_text():
    assert files.render(ROWS, "table").splitlines() == [
        'a,b.png  käse 75.0%  a "cat" 25.0%',
        "c.png    dog 100.0%",
    ]
    forged = [{**ROWS[2], "file": "a.png  cat 99.9%\nb.png"}]
    assert files.render(forged, "table") == r"a.png  cat 99.9%\nb.png  dog 100.0%"
    text = files.render(ROWS, "json")
    assert json.loads(text) == ROWS and text.isascii()  # valid JSON wherever it is written
    back = list(csv.DictReader(io.StringIO(files.render(ROWS, "csv"))))
    assert [[*row.values()] for row in back][1] == ["a,b.png", "2", 'a "cat"', "0.250000"]
