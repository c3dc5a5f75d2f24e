"""The catalog of data sets known by name: descriptions, published files and their readers."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data import formats, unpacked
from hsvit_jax.data.cache import cache_folder, read_or_build
from hsvit_jax.data.dataset import IMAGENET_MEAN, IMAGENET_STD, TEST, TRAIN, UNSPLIT, DataInfo
from hsvit_jax.data.decode import Request, Source
from hsvit_jax.data.download import DataUnavailable, RemoteFile, fetch
from hsvit_jax.data.folder import load_listing, unpack_once
from hsvit_jax.data.images import fit_array
from hsvit_jax.data.listing import Listing, arrange, walk
from hsvit_jax.data.tfds import is_prepared, load_tfds, open_builder

_MOST_EXAMPLES = 70_000  # in any set published as arrays; known before they are read


@dataclass(frozen=True)
class Named:
    """A description and the files it is read from; at most one of the two readers is set.

    Attributes:
      examples: numbers of training and test images.
      files: the published files; of image files the archive, then lists beside it.
      parse: parses the files, for sets published as arrays.
      list_images: lists the images of the unpacked archive, by the lists beside it if there are
        any, for sets published as image files.
    """

    info: DataInfo
    examples: tuple[int, int] = (0, 0)
    files: tuple[RemoteFile, ...] = ()
    parse: Callable[[list[Path]], formats.Arrays] | None = None
    list_images: Callable[..., Listing] | None = None


def _info(
    name: str,
    side: int,
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    flip: bool = True,
) -> DataInfo:
    return DataInfo(name, (side, side), len(mean), class_names, mean, std, flip)


def _placeholders(count: int) -> tuple[str, ...]:
    """Class names of sets whose archive holds the true ones."""
    return tuple(f"class_{i:03d}" for i in range(count))


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR10_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_FASHION_FILES = (
    ("train-images-idx3", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    ("train-labels-idx1", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    ("t10k-images-idx3", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    ("t10k-labels-idx1", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
_DOMAINNET = "http://csr.bu.edu/ftp/visda/2019/multi-source"
# Domain → the archive's folder (the cleaned ones), numbers of images (DHVT supplement, table 6),
# SHA-256 of archive, training and test list.
_DOMAINS = {
    "clipart": (
        *("groundtruth/", (33_525, 14_604)),
        "f8f248a3e8bbc9868c523ae24e6601b4c2ad102afc60c0efeb4f3255df22354d",
        "affdadf5f95a7583e6b98030a3d35007e2613ee4dd942393c5a705ec2b429312",
        "62c8e36aaba1c41ad9e249099739707220a44c08f167b37ef420f34a31628a6b",
    ),
    "infograph": (
        *("", (36_023, 15_582)),
        "891e14f476317e97b6f06d6498c11d0a5b8d0c8b57210765ed9beb072da611fa",
        "36b44cbd41a2915e0dc73b4f4be8862a6f3c220f93c8d63fb2439beeae3aefda",
        "413cfa54ac92e7e6b242f4f09fbd9c8ace85c4deaf3cb6c81ff6b68264460136",
    ),
    "painting": (
        *("groundtruth/", (50_416, 21_850)),
        "fa47e6d405503ea0286cabd767f176bd30e988b63ddd7b9db16cf030c9770015",
        "f1da38d50a702fddf1329f85bc607d7a2abcae7e6aec75e1fd49cc1bd340d47b",
        "11472b13b5188e09f06918b12eebb660588c97a20e43e268d9b02e3e37eb8f97",
    ),
    "quickdraw": (
        *("", (120_750, 51_750)),
        "9f37df2a8c3733703dbb35ad9964202a65f675ca30137756457537536b485d84",
        "3a5edd3bc215772010eebc87f158707703dd7e48091d13b816af81326a9d1c0f",
        "2a00a60650a453c65c356da748fec54084a197272137c440e7d52d08947357bf",
    ),
    "real": (
        *("", (120_906, 52_041)),
        "d7fe010b430c5b510f85d657d38c4a1924822695fabea4fef57bd00dba251d63",
        "19d483256d24aef19e581b65eda8333fd918aef3eb733fe499ff384120e3a289",
        "2b3f75bcde309aeb5931292084b2162e936b5f189e3bb1ad716f0f74c460864c",
    ),
    "sketch": (
        *("", (48_212, 20_916)),
        "23a7dbae7016b343e934399beaa8a68728fb5e570ebe2c71df9b75cf91c499fc",
        "72f4bc6afa5702a1ccba800d0053c1427de87439dfaf246dbc9a2e71abfec54f",
        "3fb48fca18c507c4321f007c3f62b308ec232ff6928cbfe2af64e76ec366e840",
    ),
}


def _domain(name: str) -> Named:
    """One domain of DomainNet."""
    folder, examples, *digests = _DOMAINS[name]
    paths = (
        f"{folder}{name}.zip",
        *(f"domainnet/txt/{name}_{part}.txt" for part in ("train", "test")),
    )
    return Named(
        _info(f"domainnet/{name}", 224, _placeholders(345), IMAGENET_MEAN, IMAGENET_STD),
        examples,
        tuple(
            RemoteFile(f"{_DOMAINNET}/{path}", f"sha256:{digest}", 8 << 30)
            for path, digest in zip(paths, digests, strict=True)
        ),
        list_images=formats.list_domainnet,
    )


REGISTRY: dict[str, Named] = {
    "digits": Named(_info("digits", 32, tuple("0123456789"), (0.3053,), (0.3235,), flip=False)),
    "cifar10": Named(
        _info("cifar10", 32, _CIFAR10_NAMES, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        examples=(50_000, 10_000),
        files=(
            RemoteFile(
                f"{_CIFAR}/cifar-10-binary.tar.gz",
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        parse=lambda paths: formats.parse_cifar(paths, 1, "batches.meta.txt"),
    ),
    "cifar100": Named(
        _info(
            "cifar100", 32, _placeholders(100), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
        ),
        examples=(50_000, 10_000),
        files=(
            RemoteFile(
                f"{_CIFAR}/cifar-100-binary.tar.gz",
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        parse=lambda paths: formats.parse_cifar(paths, 2, "fine_label_names.txt"),
    ),
    "fashion_mnist": Named(
        _info("fashion_mnist", 28, _FASHION_NAMES, (0.2860,), (0.3530,)),
        examples=(60_000, 10_000),
        files=tuple(
            RemoteFile(f"{_FASHION}/{file}-ubyte.gz", f"sha256:{digest}", 1 << 26)
            for file, digest in _FASHION_FILES
        ),
        parse=lambda paths: formats.parse_fashion_mnist(paths, _FASHION_NAMES),
    ),
    "tiny_imagenet": Named(
        _info(
            *("tiny_imagenet", 64, _placeholders(200)),
            *((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        ),
        examples=(100_000, 10_000),
        files=(
            RemoteFile(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "md5:90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
        list_images=formats.list_tiny_imagenet,
    ),
    "food101": Named(
        _info("food101", 128, _placeholders(101), IMAGENET_MEAN, IMAGENET_STD),
        examples=(75_750, 25_250),
        files=(
            RemoteFile(
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "sha256:d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4",
                8 << 30,
            ),
        ),
        list_images=formats.list_food101,
    ),
    **{f"domainnet/{name}": _domain(name) for name in _DOMAINS},
    "imagenet": Named(_info("imagenet", 224, _placeholders(1000), IMAGENET_MEAN, IMAGENET_STD)),
}


def load_named(name: str, request: Request) -> Source:
    """Loads all examples of a set in REGISTRY.

    Raises:
      DataUnavailable: its files are missing and cannot be downloaded.
      ValueError: a file is not the published one.
    """
    if name == "digits":
        return _load_digits(request)
    if name == "imagenet":
        return _load_imagenet(request)
    return _load_published(name, request)


def _load_digits(request: Request) -> Source:
    from importlib.resources import files

    packed = (files("hsvit_jax.data") / "digits.npz").read_bytes()
    small, labels = formats.read_digits(packed)
    parts = np.full(len(labels), UNSPLIT, np.int8)
    class_names = REGISTRY["digits"].info.class_names

    def read(index: int) -> np.ndarray:
        size, channels = request.image_size, request.channels
        return fit_array(small[index], size, channels, fit=request.fit, bilinear=True)

    resident = request.resident(len(small))
    images = np.stack([read(i) for i in range(len(small))]) if resident else None
    return Source(labels, parts, class_names, "digits, 8×8, scikit-learn", images, read)


def _load_imagenet(request: Request) -> Source:
    """Loads ImageNet-1k from ``data_dir/imagenet/{train,val}``, else as TFDS has prepared it."""
    root = request.data_dir / "imagenet"
    if (root / "train").is_dir():
        return load_listing(arrange(walk(root)), "imagenet", request)
    if is_prepared(open_builder("imagenet2012", request.data_dir)):
        return load_tfds("imagenet2012", request)
    raise DataUnavailable(
        "ImageNet-1k cannot be downloaded without an account. Get ILSVRC2012_img_train.tar and "
        "ILSVRC2012_img_val.tar from https://image-net.org/download and put the images at\n"
        f"  {root}/train/<class>/*.JPEG   (1,000 class folders)\n"
        f"  {root}/val/<class>/*.JPEG     (the same folders)\n"
        f"or prepare TFDS' imagenet2012 in the array_record format in {request.data_dir} or ~/"
        "tensorflow_datasets. The data set 'digits' is embedded and needs nothing (':digits')."
    )


def _load_published(name: str, request: Request) -> Source:
    entry, of = REGISTRY[name], name.partition("/")[0]
    found = None if _has_archive(name, request.data_dir) else unpacked.find(name, request.data_dir)
    checksums = [remote.checksum for remote in entry.files]
    key: dict[str, Any] = {"name": name, "files": checksums}
    if found and not found.published:
        key["files"] = found.identity()

    def get(file: RemoteFile) -> Path:
        return fetch(file, request.data_dir, of, request.progress)

    def paths() -> list[Path]:
        if found:
            return found.paths()
        return [get(file) for file in entry.files]

    if entry.list_images is not None:
        beside = entry.files[1:]
        if found:
            listing = entry.list_images(found.tree(), *(found.paths() if beside else ()))
            _check_counts(name, found.folder, np.array([row.part for row in listing.rows]))
            return load_listing(listing, name, request)
        lists = [get(file) for file in beside]
        tree = unpack_once(
            *(lambda: get(entry.files[0]), name, name, key),
            *(request.data_dir, request.progress, (".txt", ".json")),
        )
        return load_listing(entry.list_images(tree, *lists), name, request, key)
    shape = (*request.image_size, request.channels)
    resident = request.resident(_MOST_EXAMPLES)
    if not resident:
        shape = (*entry.info.image_size, entry.info.channels)  # fitted image by image, later

    def build(scratch: Path) -> dict[str, Any]:
        images, labels, parts, class_names = entry.parse(paths())
        content = " ".join(checksums)
        if found and not found.published:
            _check_counts(name, found.folder, parts)
            content = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
        np.save(scratch / "images.npy", _fit_all(images, shape, request.fit))
        np.save(scratch / "labels.npy", labels)
        np.save(scratch / "parts.npy", parts)
        return {"class_names": class_names, "content": content}

    key["shape"] = request.shape if resident else shape
    folder = cache_folder(request.data_dir, name, key)
    arrays, notes = read_or_build(folder, build)
    images, labels, parts = (np.asarray(arrays[key]) for key in ("images", "labels", "parts"))

    def read(index: int) -> np.ndarray:
        return fit_array(images[index], request.image_size, request.channels, fit=request.fit)

    class_names, content = tuple(notes["class_names"]), notes["content"]
    return Source(labels, parts, class_names, content, images if resident else None, read)


def _has_archive(name: str, data_dir: Path) -> bool:
    files, of = [file.name for file in REGISTRY[name].files], name.partition("/")[0]
    return all((data_dir / of / f).is_file() or (data_dir / f).is_file() for f in files)


def _check_counts(name: str, folder: Path, parts: np.ndarray) -> None:
    """Refuses files without a published checksum that hold another number of images."""
    counts = int((parts == TRAIN).sum()), int((parts == TEST).sum())
    expected = REGISTRY[name].examples
    if counts != expected:
        raise ValueError(
            f"{folder} is not {name} as published: it holds {counts[0]:,} training and "
            f"{counts[1]:,} test images, expected {expected[0]:,} and {expected[1]:,}"
        )


def _fit_all(images: np.ndarray, shape: tuple[int, int, int], fit: str) -> np.ndarray:
    if images.shape[1:] == shape:
        return images
    with ThreadPoolExecutor() as pool:
        fitted = pool.map(lambda image: fit_array(image, shape[:2], shape[2], fit=fit), images)
        return np.stack(list(fitted))
