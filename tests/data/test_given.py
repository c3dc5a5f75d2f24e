"""Data that is given: arrays, examples of any kind and tables, as named data sets."""

import dataclasses
import io
import os
import sys
import tracemalloc
import types

import numpy as np
import pytest
from PIL import Image
from support import small_runs
from support.data_files import encoded

import hsvit_jax
from hsvit_jax import checkpoint, data, main, train


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    return rng.integers(0, 256, (60, 8, 6, 3), np.uint8), labels


def test_arrays_are_split_measured_and_named(arrays):
    images, labels = arrays
    found = hsvit_jax.from_arrays(images, labels, ("a", "b", "c"), name="pots")
    assert found.info.name == "given=pots" and found.info.class_names == ("a", "b", "c")
    assert (found.info.image_size, found.info.channels) == ((8, 6), 3)
    assert sum(map(len, (found.train, found.val, found.test))) == 60
    mean, std = found.train.images.mean((0, 1, 2)) / 255, found.train.images.std((0, 1, 2)) / 255
    np.testing.assert_allclose((found.info.mean, found.info.std), (mean, std))
    assert np.bincount(found.test.labels).tolist() == [4, 4, 4]
    names = hsvit_jax.from_arrays(images, np.array(list("cab"))[labels], np.array(list("abc")))
    assert names.info.class_names == ("a", "b", "c")
    floats = hsvit_jax.from_arrays(images / np.float32(255), labels, ("a", "b", "c"))
    assert floats.fingerprint == found.fingerprint
    nested = hsvit_jax.from_arrays((images / 255).tolist(), labels.tolist(), ("a", "b", "c"))
    assert nested.fingerprint == found.fingerprint
    alone = hsvit_jax.from_arrays(images, labels, test_only=True)
    np.testing.assert_array_equal(alone.test.images, images)
    assert len(alone.train) == len(alone.val) == 0
    np.testing.assert_allclose(alone.info.mean, images.mean((0, 1, 2)) / 255)
    images[0, 0, 0, 0] += 1
    assert hsvit_jax.from_arrays(images, labels).fingerprint != found.fingerprint


def test_copies_are_named_and_names_are_those_of_folders(arrays):
    """An é is one letter or two; and a copy of a test image may be trained on."""
    images, labels = arrays
    names = np.array(["caf\u00e9", "cafe\u0301", "x"])
    found = hsvit_jax.from_arrays(images, names[labels])
    assert found.info.class_names == ("caf\u00e9", "x")
    found = hsvit_jax.from_arrays(images, names[labels], ("x", "cafe\u0301"))
    assert found.info.class_names == ("x", "caf\u00e9")
    images[7] = images[9] = images[4]
    with pytest.warns(match="2 of 60 images are copies of others, example 7 of example 4 first"):
        hsvit_jax.from_arrays(images, labels)
    hsvit_jax.from_arrays(images, labels, test_only=True)


def test_examples_of_any_kind(arrays):
    """Pictures, with names for labels, from a generator or by index."""
    images, labels = arrays
    expected = hsvit_jax.from_arrays(images, labels, ("a", "b", "c"))
    pairs = [(Image.fromarray(x), "abc"[y]) for x, y in zip(images, labels, strict=True)]
    endless = type("Endless", (), {"__getitem__": lambda _, i: pairs[i % 60]})
    endless.__len__ = lambda _: 60
    for examples in (iter(pairs), endless()):
        assert hsvit_jax.from_examples(examples).fingerprint == expected.fingerprint


GREY = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        (GREY[:0], [], {}, "no examples"),
        (GREY, [0, -1], {}, "label -1 is none"),
        (GREY, [0.5, 1], {}, "whole numbers or names"),
        (np.zeros((3, 8, 8), np.uint8), ["a", "b", float("nan")], {}, "got nan too"),
        (GREY, ["a", "b"], {"class_names": ("a", "c")}, "label 'b' is none"),
        (GREY, [0, 1], {"class_names": {"a": 1, "b": 0}}, "class_names"),
        (GREY, [0, 0], {}, "two or more different classes"),
        (GREY, [0, 1], {"class_names": ("a", "a")}, "two or more different classes"),
        (np.full((2, 8, 8), 7.0), [0, 1], {}, "example 0: float64 from 7.0 to 7.0"),
        (GREY, [0, 1], {"val_fraction": 20}, "val_fraction"),
        (GREY, [0, 1], {"image_size": (8, 10**6)}, "image_size"),
    ],
)
def test_what_is_no_data_set_is_refused(images, labels, options, message):
    with pytest.raises(ValueError, match=message):
        hsvit_jax.from_arrays(images, labels, **options)


def test_classes_without_an_example_and_of_one(arrays):
    images, labels = arrays
    with pytest.warns(UserWarning, match="^given=examples has no training image of 0, "):
        hsvit_jax.from_arrays(images, labels + 1)
    assert hsvit_jax.from_arrays(images[:3], ["cat"] * 3, test_only=True).info.num_classes == 1


def test_sizes_and_channels(arrays, tmp_path):
    """Of memory maps, pictures of 16 bits and turned photos; NumPy's numbers are sizes, too."""
    images, labels = arrays
    np.save(tmp_path / "images.npy", images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert hsvit_jax.from_arrays(mapped, labels).info.image_size == (8, 6)
    grey = [Image.fromarray(np.full((8, 6), 1000 * i, np.uint16)) for i in range(4)]
    assert hsvit_jax.from_arrays(grey, [0, 0, 1, 1]).info.channels == 1
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photo = Image.open(io.BytesIO(encoded(images[0], "JPEG", exif=exif)))  # 8 rows of 6
    found = hsvit_jax.from_examples([(photo, "a"), (photo, "b")], test_only=True)
    assert found.info.image_size == (6, 8)
    size = {"image_size": np.array([4, 4]), "channels": np.int64(1)}
    found = hsvit_jax.from_arrays(images, labels, **size)
    same = hsvit_jax.from_arrays(images, labels, image_size=(4, 4), channels=1)
    assert found.fingerprint == same.fingerprint and found.info.channels == 1
    assert data.load("digits", **size).info.image_size == (4, 4)


def test_statistics_need_no_memory_to_speak_of():
    images = np.zeros((40, 256, 256, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(40)
    tracemalloc.start()
    hsvit_jax.from_arrays(images, np.arange(40) % 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * images.nbytes  # the images, one by one, stacked and split


def test_a_run_keeps_the_name_and_asks_for_the_data(arrays, tmp_path, capsys):
    images, labels = np.repeat(arrays[0], 2, 2)[..., :8, :1], arrays[1]
    names, how = ("a", "b", "c"), {"name": "pots", "flip": False, "fit": "pad"}
    how["val_fraction"] = 0.2
    given = hsvit_jax.from_arrays(images, labels, names, **how)
    config = small_runs.small_config(train__steps=1, recipe="strong")
    run = train.prepare(config, dataset=given)
    assert run.config.data.name == "given=pots" and run.config.data.num_classes == 3
    assert run.config.data.val_fraction == 0.2  # by which the splits are found again
    params, stats = small_runs.made_up_values(run.model)
    with checkpoint.Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params, "stats": stats}, run.meta, wait=True)
    classifier = hsvit_jax.load(tmp_path / "run")
    assert classifier.fingerprint == given.fingerprint
    assert given == given and given != dataclasses.replace(given)  # by identity, as arrays are
    assert classifier.evaluate(given).examples == len(given.test) == 12
    with pytest.raises(ValueError, match=r"image_size=\(8, 8\), channels=1, fit='pad'"):
        classifier.evaluate(hsvit_jax.from_arrays(images, labels, names, fit="crop"))
    some = data.Split(np.array([0, 1, 1]), images[:3])
    info = dataclasses.replace(given.info, class_names=("c", "a"))
    assert classifier.relabelled(some, info).labels.tolist() == [2, 0, 0]
    info = dataclasses.replace(given.info, class_names=("c", "x"))
    with pytest.raises(ValueError, match=r"does not know: x; .*class_names"):
        classifier.relabelled(some, info)
    assert classifier.config.data.fit == "pad"  # what predictions are fitted by
    assert main.main(["hsvit", "report", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "'pots', were given from Python" in error
    assert "hsvit eval RUN --config=c2a2:folder=PATH" in error


def test_a_run_stores_how_the_data_given_to_it_are_found_again(arrays, tmp_path):
    for i, image in enumerate(arrays[0]):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    path.write_bytes(b"no image")
    with pytest.warns(UserWarning, match="1 of 60"):
        whole = data.load(f"folder={tmp_path / 'photos'}", on_bad_image="skip")
    given = whole.subset(0.5)
    run = train.prepare(hsvit_jax.get_config("c2a2:tiny"), dataset=given)
    with pytest.warns(UserWarning, match="1 of 60"):
        assert train.load_data(run.config).fingerprint == given.fingerprint
    with pytest.raises(ValueError, match="run lies in the folder of the images"):
        hsvit_jax.fit(hsvit_jax.get_config("c2a2:tiny"), tmp_path / "photos/run", dataset=given)
    assert not (tmp_path / "photos/run").exists()


def test_settings_of_loading_are_refused_for_data_that_are_given(arrays, tmp_path):
    given = hsvit_jax.from_arrays(*arrays)
    for setting in ("fraction=0.5", "fit=stretch", "image_size=64", "channels=1"):
        config = hsvit_jax.get_config("c2a2:tiny", f"data.{setting}")
        with pytest.raises(ValueError, match=rf"data\.{setting.partition('=')[0]}=.* is given has"):
            hsvit_jax.fit(config, tmp_path / "run", dataset=given)
        assert not (tmp_path / "run").exists()
    for spec in ("vix:tiny", "hvt:s-4,paper", "c2a2:tiny"):  # with image sizes of their own
        square = hsvit_jax.from_arrays(*arrays, image_size=(64, 64))
        same = ("train.batch=8", "data.image_size=64", "data.channels=3")
        run = train.prepare(hsvit_jax.get_config(spec, *same), dataset=square)
        assert run.model.config.image_size == (64, 64)
    padded = hsvit_jax.from_arrays(*arrays, image_size=(16, 16), fit="pad")
    assert train.prepare(hsvit_jax.get_config("c2a2"), dataset=padded).config.data.fit == "pad"
    digits = hsvit_jax.data.load("digits")
    assert train.prepare(hsvit_jax.get_config("c2a2"), dataset=digits).config.data.name == "digits"


def test_a_table(arrays, tmp_path):
    images, labels = arrays
    lines = ["\ufeffFile,class,split"]
    for i, (image, label) in enumerate(zip(images[:30], labels[:30], strict=True)):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
        space = " " * (i % 2)  # which means nothing, beside a comma
        lines.append(f"{space}{i}.png,{space}{'abc'[label]}{space},{'val' if i > 20 else 'train'}")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines))
    found = hsvit_jax.from_csv(table, data_dir=str(tmp_path), image_size=(8, 6))
    assert found.info.class_names == ("a", "b", "c") and found.info.name == f"csv={table}"
    np.testing.assert_array_equal(found.test.images, images[21:30])  # no test: it is the test
    table.write_text('file,label,split\n0.png, "cat, small",Train\n1.png, dog,TRAIN,,\n')
    found = hsvit_jax.from_csv(table, data_dir=str(tmp_path), test_only=True)
    assert found.info.class_names == ("cat, small", "dog")
    table.write_text("file,label,set,\n0.png,b,train,\nb.png,c,test,")
    with pytest.warns(UserWarning, match="columns not read: set$"):
        assert data.describe(f"csv={table}", str(tmp_path)).num_classes == 2
    table.write_text("file,label\n1.png,b\n2.png,b")
    for name in ("1.png", "2.png"):
        os.utime(tmp_path / name, (0, 0))  # as reproducible archives and images of systems have it
    assert len(hsvit_jax.from_csv(table, data_dir=str(tmp_path), test_only=True).test) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,name\na.png,b", "columns image and label; it has file, name"),
        ("image,label,split\na.png,b,exam\na.png,c,train", "line 2 .* got a.png, b, exam"),
        ("file,label\n0.png,cat\n1.png,dog, small\n", "line 3 must have"),
        ("image,label\na.png,B\xe4r", "utf-8"),
        ('file,label\n0.png,b\n1.png,"c\n2.png,b"\n3.png,c', r"characters: c\\n2\.png,b; rename"),
        ("file,label\n0.png,cat\n", "no such file|cannot be used|two or more"),
        ("file,label\nx/a.png,b\nx/b.png,c", r"2 of 2 images cannot be used:\n.*x/a\.png"),
    ],
)
def test_a_table_that_cannot_be_read(text, message, tmp_path):
    (tmp_path / "table.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        hsvit_jax.from_csv(tmp_path / "table.csv", data_dir=str(tmp_path))


def test_images_named_again_are_in_one_split(arrays, tmp_path):
    """By any path; those with two labels or splits are named as copies."""
    lines = [f"{i}.png,{'abc'[label]}" for i, label in enumerate(arrays[1])]
    for i, image in enumerate(arrays[0]):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    table = tmp_path / "table.csv"
    again = [f"./{line}" for line in lines[:30]] + [f"{tmp_path}/{line}" for line in lines[30:]]
    table.write_text("\n".join(["image,label", *lines, *again]))
    found = hsvit_jax.from_csv(table, data_dir=str(tmp_path))
    images = [x.tobytes() for s in (found.train, found.val, found.test) for x in s.images]
    assert len(images) == len(set(images)) == 60
    table.write_text("\n".join(["image,label", *lines, "./0.png,b"]))
    with pytest.warns(UserWarning, match=r"1 of 61 images are copies .*one in another class"):
        hsvit_jax.from_csv(table, data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("datasets", ["--config=c2a2:hf=beans"], "hf"),
        ("huggingface_hub", ["--config=c2a2:digits", "--config.init.from=hub:a/b"], "hub"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    monkeypatch, tmp_path, capsys, library, words, extra
):
    monkeypatch.setitem(sys.modules, library, None)
    assert main.main(["hsvit", "train", *words, f"--workdir={tmp_path}/run"]) == 1
    said = f"{library} is not installed: pip install 'hsvit_jax[{extra}]'\n"
    assert capsys.readouterr().err.endswith(said)


class Rows:
    """The interface of a Hugging Face data set: its columns, and image i of value 10·i."""

    labelled = True

    def __init__(self, count: int, missing: int = -1):
        self.count, self.missing, self._fingerprint = count, missing, f"{count} {missing}"

    def with_format(self, form):
        assert form is None
        return self

    def cast_column(self, name, feature):
        assert name == "photo" and not feature.decode
        return self

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        content = encoded(np.full((8, 6, 3), 10 * i, np.uint8))
        stored = None if i == self.missing else {"bytes": content, "path": None}
        return {"photo": stored, "domain": 0} | ({"label": i % 2} if self.labelled else {})


def test_the_interface_of_hugging_face_sets(tmp_path, monkeypatch):
    """Splits by any of their names; an image that a row lacks is named as a damaged one is."""

    def kind(name, **attributes):
        return type(
            name, (), {"__init__": lambda self, **how: vars(self).update(how), **attributes}
        )

    image, label = kind("Image"), kind("ClassLabel", names=["even", "odd"])
    Rows.features = {
        "photo": image(decode=True),
        "domain": label(names=["sketch"]),
        "label": label(),
    }
    found = {"train": Rows(20), "dev": Rows(6), "test": Rows(0), "extra": Rows(1)}
    library = types.SimpleNamespace(Image=image, ClassLabel=label)
    library.load_dataset = lambda name, config: found
    monkeypatch.setitem(sys.modules, "datasets", library)

    def load():
        return data.load("hf=me/pots", data_dir=str(tmp_path), image_size=(8, 6))

    dataset = load()
    assert dataset.info.class_names == ("even", "odd") and dataset.info.channels == 3
    assert dataset.test.images[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    assert dataset.test.labels.tolist() == [0, 1] * 3
    assert dataset.info.flip and not data.describe("hf=me/MNIST").flip
    with monkeypatch.context() as patch:
        patch.setitem(Rows.features, "style", Rows.features.pop("label"))
        with pytest.warns(UserWarning, match="of domain, style the classes are domain"):
            assert data.describe("hf=me/pots").class_names == ("sketch",)
    Rows.features["label"] = label(names=["even", "odd", "both"])
    with pytest.warns(match=r"hf=me/pots has no training image of both, .*test: both 0/0/0\)"):
        load()
    Rows.features["label"] = label(names=["even\n", "odd"])
    with pytest.raises(ValueError, match=r"hf=me/pots has classes whose .* several lines"):
        load()
    Rows.features["label"] = label()
    found["test"] = Rows(6, missing=0)
    with pytest.raises(ValueError, match=r"test\[0\]: cannot be read: it has no image"):
        load()
    found["test"] = Rows(6)
    found["test"].features = {**Rows.features, "label": label(names=["odd"])}  # the test's own
    with pytest.raises(ValueError, match="label numbers other classes in test than in train"):
        load()
    found["test"].features = {"photo": Rows.features["photo"]}
    found["test"].labelled = False
    assert len(load().test) == 6  # the part dev
    found["train"] = Rows(20, missing=3)
    with pytest.raises(ValueError, match=r"hf=me/pots train\[3\]: cannot be read: it has no image"):
        load()
    del found["train"]
    with pytest.raises(ValueError, match="has no split 'train', only dev, extra"):
        load()


def test_a_configuration_of_a_hugging_face_set(tmp_path, monkeypatch):
    """It is named after a colon, where there is no such file; the library's list is whole."""
    asked, names = [], [f"configuration {i}" for i in range(40)]

    def load_dataset(name, config, cache_dir=None):
        asked.append((name, config))
        raise ValueError(f"Config name is missing.\nPlease pick one among: {names}\nExample: …")

    where = types.SimpleNamespace(HF_DATASETS_CACHE=str(tmp_path / "kept"))
    library = types.SimpleNamespace(load_dataset=load_dataset, config=where)
    monkeypatch.setitem(sys.modules, "datasets", library)
    (tmp_path / "a:b").mkdir()
    for argument in ("me/pots", "me/pots:mini", f"{tmp_path}/a:b", f"{tmp_path}/a:b:mini"):
        with pytest.raises(ValueError, match=r"Config name is missing. Please pick") as error:
            data.describe(f"hf={argument}")
        assert str(names) in str(error.value)
        whole = argument.removesuffix(":mini")
        assert f"hf={whole}:CONFIG chooses" in str(error.value)
        assert asked.pop() == (whole, "mini" if whole != argument else None)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of that library's own
def test_a_hugging_face_set(arrays, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    images, labels = arrays
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b", "c"])
    )
    columns = {"image": [Image.fromarray(x) for x in images], "label": labels.tolist()}
    whole = datasets.Dataset.from_dict(columns, features=features)
    parts = {"train": whole.select(range(40)), "valid": whole.select(range(40, 60))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    found = data.load(f"hf={tmp_path / 'set'}", data_dir=str(tmp_path), image_size=(8, 6))
    assert found.info.class_names == ("a", "b", "c") and found.info.channels == 3
    np.testing.assert_array_equal(found.test.images, images[40:])
    np.testing.assert_array_equal(found.test.labels, labels[40:])
    again = hsvit_jax.from_examples(((r["image"], r["label"]) for r in whole), ("a", "b", "c"))
    assert len(again.train) == 36
    for form in ({"type": "pandas"}, {"columns": ["label"]}):  # stored with the set
        shown = datasets.DatasetDict(parts).with_format(**form)
        shown.save_to_disk(tmp_path / "shown")
        same = data.load(f"hf={tmp_path / 'shown'}", data_dir=str(tmp_path), image_size=(8, 6))
        np.testing.assert_array_equal(same.test.images, found.test.images)
    for number, place in enumerate(("old/both/mini", "both/full", "both/mini", "old/both/full")):
        for i in range(12):
            path = tmp_path / f"{place}/train/{'ab'[i % 2]}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[i + 12 * number]).save(path)
    lines = [
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train/**"
        for name in ("full", "mini")
    ]
    for number, place in ((0, tmp_path / "old/both"), (2, tmp_path / "both")):
        (place / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
        chosen = data.load(f"hf={place}:mini", data_dir=str(tmp_path), image_size=(8, 6))
        own = {x.tobytes() for x in images[12 * number : 12 * number + 12]}
        assert {x.tobytes() for x in chosen.train.images} < own  # though the folders' names agree
    for argument in (tmp_path / "both", f"{tmp_path / 'both'}:tiny"):
        with pytest.raises(ValueError, match=r"\['full', 'mini'\].*both:CONFIG chooses"):
            data.describe(f"hf={argument}")
    whole.save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match="a Dataset and a DatasetDict"):
        data.describe(f"hf={tmp_path / 'set'}")
