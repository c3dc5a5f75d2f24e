"""Data with several labels or numbers an image: tables, arrays, and their splits."""

import numpy as np
import pytest
from PIL import Image

import hsvit_jax
from hsvit_jax import data


def table(folder, text, images=12):
    """Writes a table, and the images img0.png … that its lines may name."""
    for i in range(images):
        Image.new("L", (8, 8), 10 * i).save(folder / f"img{i}.png")
    (folder / "table.csv").write_text(text)
    return f"csv={folder / 'table.csv'}"


def loaded(name, folder, **options):
    return data.load(name, data_dir=str(folder / "cache"), image_size=(8, 8), **options)


def every(dataset):
    """All examples of a set by file name."""
    parts = (dataset.train, dataset.val, dataset.test)
    names = [name.rsplit("/", 1)[-1] for part in parts for name in part.names]
    return dict(zip(names, np.concatenate([part.labels for part in parts]).tolist(), strict=True))


def test_names_between_semicolons_are_labels(tmp_path):
    lines = ["image,labels"] + [f"img{i}.png,{'dog; cat' if i % 2 else 'owl'}" for i in range(11)]
    name = table(tmp_path, "\n".join([*lines, "img11.png,"]))
    found = loaded(name, tmp_path, task="multilabel")
    assert [part.labels.sum(0).tolist() for part in (found.val, found.test)] == [[1, 1, 1]] * 2
    assert found.info.class_names == ("cat", "dog", "owl") and found.info.task == "multilabel"
    rows = every(found)
    assert rows["img1.png"] == [1, 1, 0] and rows["img0.png"] == [0, 0, 1]
    assert rows["img11.png"] == [0, 0, 0] and len(rows) == 12


def test_columns_of_0_and_1_are_labels(tmp_path):
    lines = ["file,split,sunny,Snow"] + [f"img{i}.png,train,{i % 2},1" for i in range(10)]
    lines += ["img10.png,test,0,1", "img11.png,test,1,1"]
    found = loaded(table(tmp_path, "\n".join(lines)), tmp_path, task="multilabel")
    assert found.info.class_names == ("sunny", "Snow") and len(found.test) == 2
    assert every(found)["img11.png"] == [1, 1]


def test_columns_of_numbers_are_standardised_by_the_training_images(tmp_path):
    lines = ["image,age,split,height"]
    lines += [f"img{i}.png,{20 + i},{'train' if i < 10 else 'test'},-{i}e3" for i in range(12)]
    found = loaded(table(tmp_path, "\n".join(lines)), tmp_path, task="regress", val_fraction=0)
    assert found.info.class_names == ("age", "height") and every(found)["img3.png"] == [23, -3000]
    np.testing.assert_allclose(found.info.target_mean, (24.5, -4500))
    np.testing.assert_allclose(found.info.target_std, np.sqrt(8.25) * np.array([1, 1000]))
    half = found.subset(0.5)
    assert len(half.train) == 5
    np.testing.assert_allclose(half.info.target_mean, half.train.labels.mean(0))


def test_a_changed_number_is_another_data_set(tmp_path):
    lines = ["image,age"] + [f"img{i}.png,{i}" for i in range(12)]
    name = table(tmp_path, "\n".join(lines))
    before = loaded(name, tmp_path, task="regress").fingerprint
    assert loaded(name, tmp_path, task="regress").fingerprint == before
    assert loaded(
        table(tmp_path, "\n".join([*lines[:-1], "img11.png,12"])), tmp_path, task="regress"
    )
    assert loaded(name, tmp_path, task="regress").fingerprint != before


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("regress", "image\nimg0.png", "needs the columns image and one or more of numbers"),
        ("regress", "image,age\nimg0.png,", "line 2 must have an image, a number in age"),
        ("regress", "image,age\nimg0.png,nan", "a number in age"),
        ("regress", "image,age\nimg0.png,tall", "a number in age"),
        (
            "regress",
            "image,age\n" + "\n".join(f"img{i}.png,3" for i in range(12)),
            "one value only",
        ),
        ("multilabel", "image,sun\nimg0.png,0.5", "0 or 1 in sun"),
        ("multilabel", "label\ncat", "needs the columns image"),
    ],
)
def test_a_table_that_fits_no_task_is_refused(tmp_path, task, text, message):
    with pytest.raises(ValueError, match=message):
        loaded(table(tmp_path, text), tmp_path, task=task)


def test_sets_of_one_class_an_image_are_refused():
    for name in ("digits", "folder=/tmp"):
        with pytest.raises(ValueError, match="use csv=PATH, or from_arrays"):
            data.load(name, task="regress")


def test_arrays_of_labels_and_numbers():
    rng = np.random.default_rng(0)
    images, rows = rng.integers(0, 255, (40, 8, 8, 1), np.uint8), rng.integers(0, 2, (40, 3))
    found = hsvit_jax.from_arrays(images, rows, ["a", "b", "c"], task="multilabel")
    assert (len(found.train), len(found.val), len(found.test)) == (28, 6, 6)  # 2 of a rarest label
    assert found.train.labels.dtype == np.float64 and found.info.class_names == ("a", "b", "c")
    one = hsvit_jax.from_arrays(images, rng.random(40), task="regress")
    assert one.train.labels.shape == (32, 1) and one.info.class_names == ("0",)
    for labels, names, task in (
        (rows + 0.5, None, "multilabel"),
        (rows, ["a", "b"], "multilabel"),
        (rows, ["a", "b", "a"], "regress"),
        (np.full((40, 1), np.nan), None, "regress"),
        ([[1.0]] * 39 + [[1.0, 2.0]], None, "regress"),
    ):
        with pytest.raises(ValueError, match=f"task='{task}' needs as many"):
            hsvit_jax.from_arrays(images, labels, names, task=task)
    with pytest.raises(ValueError, match="pass task='multilabel'"):
        hsvit_jax.from_arrays(images, rows)
