"""Named sets found unpacked, or where torchvision puts them, in tiny versions."""

import dataclasses
import gzip
import hashlib
import io
import pickle
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from hsvit_jax import data
from hsvit_jax.data import catalog, unpacked


def noise(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


class _Python2(pickle._Pickler):
    """Pickles as Python 2 did, where bytes were texts."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = save_bytes


def of_python_2(value: dict) -> bytes:
    """A pickle as the published ones, with arrays by way of numpy.core."""
    out = io.BytesIO()
    _Python2(out, protocol=2).dump({key.encode(): item for key, item in value.items()})
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.fixture
def published(monkeypatch):
    """Takes the files of a form for the published ones, and their counts for those expected."""

    def call(name: str, folder: Path, examples: tuple[int, int]) -> None:
        entry = dataclasses.replace(catalog.REGISTRY[name], examples=examples)
        monkeypatch.setitem(catalog.REGISTRY, name, entry)
        forms = []
        for usual, checksums in unpacked.FORMS[name]:
            known = {
                file: "md5:" + hashlib.md5((folder / file).read_bytes()).hexdigest()
                for file in checksums
                if checksums[file] and (folder / file).is_file()
            }
            forms.append((usual, {**checksums, **known}))
        monkeypatch.setitem(unpacked.FORMS, name, tuple(forms))

    return call


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match="which has a name of its own") as error:
        data.describe(f"folder={folder}")
    return str(error.value)


def test_cifar(tmp_path, published):
    """The Python and the binary version hold the same images; one of them is checked by MD5."""
    images, labels = noise((60, 3072)), np.arange(60) % 10
    names = catalog.REGISTRY["cifar10"].info.class_names
    meta = {"label_names": [name.encode() for name in names]}
    files = {"batches.meta": of_python_2(meta)}
    binary = {"batches.meta.txt": "\n".join(names).encode()}
    for i, batch in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows = slice(10 * i, 10 * i + 10)
        files[batch] = of_python_2({"data": images[rows], "labels": labels[rows].tolist()})
        binary[f"{batch}.bin"] = np.c_[labels[rows].astype(np.uint8), images[rows]].tobytes()
    python = write(tmp_path / "a/cifar-10-batches-py", files)
    published("cifar10", python, (50, 10))
    one = data.load("cifar10", data_dir=str(tmp_path / "a"), val_fraction=0)
    expected = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(one.train.images, expected[:50])
    np.testing.assert_array_equal(one.test.labels, labels[50:])
    assert one.info.class_names == names
    folder = write(tmp_path / "b/cifar10/cifar-10-batches-bin", binary)
    other = data.load("cifar10", data_dir=str(tmp_path / "b"), val_fraction=0)
    np.testing.assert_array_equal(other.train.images, one.train.images)
    assert f"use :cifar10 after the colon, with --config.data.dir={tmp_path / 'a'}" in refusal(
        python
    )
    assert f"data.dir={tmp_path / 'b'}" in refusal(folder)
    (python / "test_batch").write_bytes(of_python_2({"data": print}))
    with pytest.raises(ValueError, match="test_batch is not the published file"):
        data.load("cifar10", data_dir=str(tmp_path / "a"), image_size=(8, 8))
    (folder / "data_batch_1.bin").write_bytes(binary["data_batch_1.bin"][:3073])
    with pytest.raises(ValueError, match="holds 41 training and 10 test images, expected 50 and"):
        data.load("cifar10", data_dir=str(tmp_path / "b"))


def test_a_pickle_runs_nothing(tmp_path, published):
    files = {"train": of_python_2({"data": print}), "test": b"", "meta": b""}
    folder = write(tmp_path / "cifar-100-python", files)
    published("cifar100", folder, (1, 1))
    with pytest.raises(ValueError, match=r"it asks for __builtin__\.print"):
        data.load("cifar100", data_dir=str(tmp_path))


def test_fashion_mnist_where_torchvision_puts_it(tmp_path, published):
    def idx(array: np.ndarray) -> bytes:
        shape = np.array(array.shape, ">u4").tobytes()
        return b"\0\0\x08" + bytes([array.ndim]) + shape + array.tobytes()

    train, labels = noise((20, 28, 28)), np.arange(20, dtype=np.uint8) % 10
    arrays = {"train-images-idx3": train, "train-labels-idx1": labels}
    arrays |= {"t10k-images-idx3": train[:10], "t10k-labels-idx1": labels[:10]}
    for place, suffix, pack in (("a", "-ubyte.gz", gzip.compress), ("b", "-ubyte", bytes)):
        files = {name + suffix: pack(idx(array)) for name, array in arrays.items()}
        folder = write(tmp_path / place / "FashionMNIST/raw", files)
        published("fashion_mnist", folder, (20, 10))
        dataset = data.load("fashion_mnist", data_dir=str(tmp_path / place), val_fraction=0)
        np.testing.assert_array_equal(dataset.train.images[..., 0], train)
        for given in (folder, folder.parent, tmp_path / place):
            assert f"--config.data.dir={tmp_path / place}" in refusal(given)


def test_image_files(tmp_path, published):
    def image(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise((8, 8, 3), len(str(path)))).save(path)

    tiny = tmp_path / "tiny-imagenet-200"
    ids = [f"n{i:08d}" for i in range(200)]
    for wnid in ids:
        image(tiny / f"train/{wnid}/images/{wnid}_0.JPEG")
    image(tiny / "val/images/val_0.JPEG")
    image(tiny / "test/images/test_0.JPEG")
    words = {"words.txt": "\n".join(f"{wnid}\tword {wnid}" for wnid in ids).encode()}
    write(tiny, words | {"val/val_annotations.txt": f"val_0.JPEG\t{ids[3]}\t0\t0\t1\t1".encode()})
    published("tiny_imagenet", tiny, (200, 1))
    dataset = data.load("tiny_imagenet", data_dir=str(tmp_path), val_fraction=0)
    assert (len(dataset.train), dataset.test.labels.tolist()) == (200, [3])
    assert len(refusal(tiny)) < 300
    published("tiny_imagenet", tiny, (100_000, 10_000))
    with pytest.raises(ValueError, match="holds 200 training and 1 test images, expected 100,000"):
        data.load("tiny_imagenet", data_dir=str(tmp_path))
    food = tmp_path / "food-101"
    for name in ("pie/1", "pie/2", "soup/1", "soup/2"):
        image(food / f"images/{name}.jpg")
    for part, number in (("train", 1), ("test", 2)):
        listed = f'{{"pie": ["pie/{number}"], "soup": ["soup/{number}"]}}'
        write(food, {f"meta/{part}.json": listed.encode()})
    published("food101", food, (2, 2))
    dataset = data.load("food101", data_dir=str(tmp_path), val_fraction=0)
    assert dataset.info.class_names == ("pie", "soup")
    assert ":food101" in refusal(food)
