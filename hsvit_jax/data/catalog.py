"""Describes and loads the data sets that are known by name."""

import hashlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data import dataset, formats, published
from hsvit_jax.data.archives import SUFFIXES, unpack
from hsvit_jax.data.cache import cache_folder, read_or_build
from hsvit_jax.data.dataset import TEST, TRAIN, UNSPLIT, DataInfo, Source, Split
from hsvit_jax.data.decode import Request
from hsvit_jax.data.folder import load_listing, unpack_once
from hsvit_jax.data.images import fit_pillow
from hsvit_jax.data.libraries import is_prepared, load_tfds, open_builder
from hsvit_jax.data.listing import Listing, arrange, walk
from hsvit_jax.data.published import DataUnavailable, RemoteFile


@dataclass(frozen=True)
class Named:
    """Describes a set and the files it is read from; at most one of the two readers is set.

    Attributes:
      examples: numbers of training and test images.
      files: the published files; for image files the archive, then lists beside it.
      pixels: SHA-256 of all images and labels, if it is known.
      parse: parses the files of a set that is published as arrays.
      list_images: lists the images of the unpacked archive, by the lists beside it.
    """

    info: DataInfo
    examples: tuple[int, int] = (0, 0)
    files: tuple[RemoteFile, ...] = ()
    pixels: str = ""
    parse: Callable[[list[Path]], formats.Arrays] | None = None
    list_images: Callable[..., Listing] | None = None


_CIFAR10_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
# Numbers of training and test images of DomainNet's domains (DHVT supplement, table 6).
_DOMAINS = {
    "clipart": (33_525, 14_604),
    "infograph": (36_023, 15_582),
    "painting": (50_416, 21_850),
    "quickdraw": (120_750, 51_750),
    "real": (120_906, 52_041),
    "sketch": (48_212, 20_916),
}


def _named(
    name: str,
    side: int,
    class_names: Sequence[str] | int,
    mean: tuple[float, ...] = dataset.IMAGENET_MEAN,
    std: tuple[float, ...] = dataset.IMAGENET_STD,
    examples: tuple[int, int] = (0, 0),
    flip: bool = True,
    **readers: Any,
) -> Named:
    """Makes a set's record; a number of classes stands for names that only its archive holds."""
    if isinstance(class_names, int):
        class_names = [f"class_{i:03d}" for i in range(class_names)]
    info = DataInfo(name, (side, side), len(mean), tuple(class_names), mean, std, flip)
    return Named(info, examples, published.PUBLISHED.get(name, ()), **readers)


_SETS = (
    _named("digits", 32, "0123456789", (0.3053,), (0.3235,), flip=False),
    _named(
        *("cifar10", 32, _CIFAR10_NAMES),
        *((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), (50_000, 10_000)),
        parse=partial(formats.parse_cifar, label_bytes=1, names_file="batches.meta.txt"),
    ),
    _named(
        *("cifar100", 32, 100),
        *((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), (50_000, 10_000)),
        parse=partial(formats.parse_cifar, label_bytes=2, names_file="fine_label_names.txt"),
    ),
    _named(
        *("fashion_mnist", 28, _FASHION_NAMES, (0.2860,), (0.3530,), (60_000, 10_000)),
        pixels="06a254446df5df7b010e3758b59611ac2654722bf0942c5b7759926f5e809d35",
        parse=partial(formats.parse_fashion_mnist, class_names=_FASHION_NAMES),
    ),
    _named(
        *("tiny_imagenet", 64, 200),
        *((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821), (100_000, 10_000)),
        list_images=formats.list_tiny_imagenet,
    ),
    _named("food101", 128, 101, examples=(75_750, 25_250), list_images=formats.list_food101),
    *(
        _named(f"domainnet/{name}", 224, 345, examples=n, list_images=formats.list_domainnet)
        for name, n in _DOMAINS.items()
    ),
    _named("imagenet", 224, 1000),
)
REGISTRY: dict[str, Named] = {named.info.name: named for named in _SETS}


def load_named(name: str, request: Request) -> Source:
    """Loads all examples of a set in REGISTRY."""
    if name == "imagenet":
        return _load_imagenet(request)
    if name != "digits":
        return _load_published(name, request)
    images, labels = formats.read_digits()
    parts = np.full(len(labels), UNSPLIT, np.int8)
    split = _fitted(images[..., None], labels, request, bilinear=True)
    return Source(split, parts, REGISTRY[name].info.class_names, "digits, 8×8, scikit-learn")


def _fitted(
    images: np.ndarray, labels: np.ndarray, request: Request, bilinear: bool = False
) -> Split:
    """Fits arrays of images: all at once, or as they are read if they are too many."""
    from PIL import Image

    size, shape = request.image_size, (*request.image_size, request.channels)

    def read(index: int) -> np.ndarray:
        image = Image.fromarray(images[index].squeeze())
        return fit_pillow(image, size, request.channels, request.fit, bilinear=bilinear)

    if not request.resident(len(images)):
        return Split(labels, None, read)
    if images.shape[1:] == shape:
        return Split(labels, images)
    whole = np.empty((len(images), *shape), np.uint8)
    with ThreadPoolExecutor() as pool:
        for i, image in enumerate(pool.map(read, range(len(images)))):
            whole[i] = image
            if not (i + 1) % 10_000:
                request.progress("fitting images", i + 1, len(images))
    return Split(labels, whole)


def _load_imagenet(request: Request) -> Source:
    """Loads ImageNet-1k from ``data_dir/imagenet/{train,val}``, else as TFDS has prepared it."""
    root = request.data_dir / "imagenet"
    if (root / "train").is_dir():
        return load_listing(arrange(walk(root)), "imagenet", request)
    builder = open_builder("imagenet2012", request.data_dir)
    if is_prepared(builder):
        return load_tfds("imagenet2012", builder, request)
    raise DataUnavailable(
        "ImageNet-1k cannot be downloaded without an account. Get ILSVRC2012_img_train.tar and "
        "ILSVRC2012_img_val.tar from https://image-net.org/download and put the images at\n"
        f"  {root}/train/<class>/*.JPEG   (1,000 class folders)\n"
        f"  {root}/val/<class>/*.JPEG     (the same folders)\n"
        f"or prepare TFDS' imagenet2012 in the array_record format in {request.data_dir} or ~/"
        "tensorflow_datasets. The data set 'digits' is embedded and needs nothing (':digits')."
    )


def _load_published(name: str, request: Request) -> Source:
    entry, of, data_dir = REGISTRY[name], name.partition("/")[0], request.data_dir.absolute()
    checksums = [file.checksum for file in entry.files]
    key, content = {"name": name, "files": checksums}, " ".join(checksums)
    kept = cache_folder(data_dir, name if entry.parse else f"unpacked-{name}", key)
    copies = [published.find_copy(file, data_dir, of) for file in entry.files]
    if all(copies):  # unless all are as published, one of them was packed anew
        given = dict(zip(map(str, copies), checksums, strict=True))
        found = published.Found(copies[0].parent, given)
        found = None if kept.is_dir() or found.paths()[1] else found
    else:
        found = published.find(name, data_dir)
    if found:
        key["files"] = found.identity()

    def get(file: RemoteFile) -> Path:
        return published.fetch(file, data_dir, of, request.progress)

    if entry.parse is not None:
        files = found.paths if found else lambda: ([get(file) for file in entry.files], True)
        source = _load_arrays(entry, files, request, key, content)
        other = source.content not in (content, entry.pixels)  # such as those of KMNIST
        other = other and (entry.pixels or any(found.checksums.values()))
    else:
        other = found and all(copies)
        if found and not other:
            tree, key = found.tree(), None
            lists = found.paths()[0] if entry.files[1:] else ()
        else:
            lists = [get(file) for file in entry.files[1:]]
            tree = unpack_once(
                *(lambda: copies[0] if found else get(entry.files[0]), name, name, key),
                *(data_dir, request.progress, (".txt", ".json")),
            )
        listing = entry.list_images(tree, *lists)
        if found:
            _check_counts(name, np.array([row.part for row in listing.rows]))
        source = load_listing(listing, name, request, key)
    if other:
        warnings.warn(
            f"{name}: the files hold as many images as published, but have other checksums",
            stacklevel=2,
        )
    return source


def _load_arrays(
    entry: Named,
    files: Callable[[], tuple[list[Path], bool]],
    request: Request,
    key: dict[str, Any],
    content: str,
) -> Source:
    name = entry.info.name

    def build(scratch: Path) -> dict[str, Any]:
        paths, as_published = files()
        where = paths[0] if len(paths) == 1 else paths[0].parent
        within = scratch / "files"
        if where.name.endswith(SUFFIXES):
            within.mkdir()
            unpack(where, within)
            paths = [path for path in within.rglob("*") if path.is_file()]
        try:
            images, labels, parts, class_names = entry.parse(paths)
            if not as_published:
                _check_counts(name, parts, labels)
        except ValueError as error:
            raise ValueError(f"{where} is not {name} as published: {error}") from error
        shutil.rmtree(within, ignore_errors=True)
        pixels = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
        known = as_published or pixels == entry.pixels
        for stem, array in (("images", images), ("labels", labels), ("parts", parts)):
            np.save(scratch / f"{stem}.npy", array)
        return {"class_names": class_names, "content": content if known else pixels}

    arrays, notes = read_or_build(cache_folder(request.data_dir, name, key), build)
    images, labels, parts = (np.asarray(arrays[key]) for key in ("images", "labels", "parts"))
    split = _fitted(images, labels, request)
    return Source(split, parts, tuple(notes["class_names"]), notes["content"])


def _check_counts(name: str, parts: np.ndarray, labels: np.ndarray | None = None) -> None:
    """Refuses files without a published checksum that hold another number of images."""
    counts = [int((parts == part).sum()) for part in (TRAIN, TEST)]
    expected = [*REGISTRY[name].examples]
    if counts != expected:
        raise ValueError(
            f"{name} has {expected} training and test images; these files hold {counts}"
        )
    if labels is not None and len({*np.bincount(labels)}) > 1:
        # MNIST's files have Fashion-MNIST's names.
        raise ValueError(f"{name} has equally many images of each class; these files do not")
