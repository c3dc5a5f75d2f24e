"""TFDS sets: prepared here without TensorFlow, in the forms that can be read without it."""

import io
import os

import fsspec
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from hsvit_jax import data
from hsvit_jax.data import libraries


def example(value: int, label: int) -> dict:
    file = io.BytesIO()
    Image.new("RGB", (9, 6), (value, 0, 0)).save(file, "PNG")
    file.seek(0)
    return {"image": file, "label": label}


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    counts = {"train": 20, "test": 6}  # noqa: RUF012 (read-only)
    unlabelled = ()  # (split, index) of examples without a label

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=["dark", "light"]),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.counts}

    def _generate_examples(self, split):
        offset = 100 if split == "train" else 200
        for i in range(self.counts[split]):
            yield i, example(offset + i, -1 if (split, i) in self.unlabelled else i % 2)


def two_tone(suffix: str = "", **attributes):
    """A builder, which TFDS registers by its name, 'two_tone' and the suffix."""
    return type(f"TwoTone{suffix}", (_Builder,), {"__module__": __name__, **attributes})


TWO_TONE = two_tone()


class WithoutLabels(_Builder):
    def _info(self):
        features = {"image": tfds.features.Image(shape=(None, None, 3))}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))


def prepare(builder, folder, file_format="array_record"):
    builder(data_dir=str(folder), file_format=file_format).download_and_prepare()


@pytest.mark.parametrize("file_format", ["array_record", "parquet"])
def test_prepared_sets_are_read_without_tensorflow(file_format, tmp_path):
    prepare(TWO_TONE, tmp_path, file_format)
    info = data.describe("tfds=two_tone", str(tmp_path))
    assert (info.class_names, info.channels, info.image_size) == (("dark", "light"), 3, (128, 128))
    options = {"data_dir": str(tmp_path), "image_size": (6, 6)}
    for limit in (2**30, 2**30, 0):
        dataset = data.load("tfds=two_tone", **options, resident_limit_bytes=limit)
        assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (18, 2, 6)
        assert dataset.resident == (limit > 0)
        for split, offset in ((dataset.train, 100), (dataset.val, 100), (dataset.test, 200)):
            values = split.gather(np.arange(len(split)))[:, 3, 3, 0].astype(int) - offset
            np.testing.assert_array_equal(values % 2, split.labels)
        assert set(values.tolist()) == set(range(6))
    (folder,) = tmp_path.glob("two_tone/*")
    stamp, shard = libraries._stamp(folder), next(folder.glob("*train*"))
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    shard.write_bytes(shard.read_bytes()[::-1])  # other images, as old and as large
    os.utime(shard, ns=times)
    assert libraries._stamp(folder) != stamp


def test_which_splits_are_used(tmp_path):
    three = {"train": 20, "validation": 4, "test": 6}
    hidden = [("test", i) for i in range(6)]
    for suffix, attributes, expected in (
        ("A", {"counts": {"train": 20, "validation": 6}}, (18, 2, 6)),
        ("B", {"counts": three}, (20, 4, 6)),
        ("C", {"counts": three, "unlabelled": hidden}, (18, 2, 4)),
        ("D", {"counts": {"train": 20}}, (12, 4, 4)),
    ):
        prepare(two_tone(suffix, **attributes), tmp_path)
        name = f"tfds=two_tone_{suffix.lower()}"
        dataset = data.load(name, data_dir=str(tmp_path), image_size=(6, 6))
        assert (len(dataset.train), len(dataset.val), len(dataset.test)) == expected


def test_examples_without_a_label_are_refused(tmp_path):
    prepare(two_tone("E", unlabelled=[("train", 3), ("test", 3)]), tmp_path)
    with pytest.raises(ValueError, match=r"2 of 26 examples have none .*train\[\d+\] first"):
        data.load("tfds=two_tone_e", data_dir=str(tmp_path), image_size=(6, 6))


@pytest.mark.parametrize(
    ("tensorflow", "why"),
    [(None, "TensorFlow.*Nothing was downloaded"), (object(), r"no route to https://www\.cs\.tor")],
)
def test_unprepared_sets_say_so_before_any_download(tensorflow, why, tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "probe", lambda url: f"no route to {url}")
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", None)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: tensorflow)
    with (
        tfds.testing.mock_data(num_examples=3),
        pytest.raises(data.DataUnavailable, match=rf"(?s){why}"),
    ):
        data.load("tfds=cifar10", data_dir=str(tmp_path))


def test_descriptions_come_from_the_features(tmp_path):
    with tfds.testing.mock_data(num_examples=3):
        cifar = data.describe("tfds=cifar10", str(tmp_path))
        assert (cifar.image_size, cifar.channels, cifar.num_classes) == ((32, 32), 3, 10)
        assert cifar.flip
        mnist = data.describe("tfds=mnist", str(tmp_path))
        assert (mnist.image_size, mnist.channels, mnist.flip) == ((28, 28), 1, False)
        assert data.describe("tfds=fashion_mnist", str(tmp_path)).flip


def test_sets_that_are_unknown_or_no_labelled_images(tmp_path):
    with pytest.raises(ValueError, match=r"tfds=cifar1O cannot be opened: .* Did you mean: cifar1"):
        data.load("tfds=cifar1O", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="not a set of images with one class label each"):
        data.load("tfds=without_labels", data_dir=str(tmp_path))


def test_a_set_in_an_object_store_is_fetched(tmp_path, monkeypatch):
    prepare(TWO_TONE, tmp_path / "there")
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/there/two_tone", "/sets/two_tone", recursive=True)
    monkeypatch.setenv("HSVIT_DATA_DIR", str(tmp_path / "here"))
    how = {"image_size": (6, 6)}
    found = data.load("tfds=two_tone", data_dir="memory://sets", **how)
    local = data.load("tfds=two_tone", data_dir=str(tmp_path / "there"), **how)
    assert found.fingerprint == local.fingerprint
    with pytest.raises(ValueError, match="memory://sets/mnist: no such bucket or object"):
        data.load("tfds=mnist", data_dir="memory://sets", **how)
