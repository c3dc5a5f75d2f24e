"""Describes and loads data sets by name, as three splits of uint8 images.

Names: ``digits`` (embedded), ``cifar10``, ``cifar100``, ``fashion_mnist``, ``tiny_imagenet``,
``food101``, ``domainnet/<domain>``, ``imagenet``, ``folder=<path>``, ``csv=<path>``,
``hf=<name or path>`` and ``tfds=<name>``. Files are kept in ``data_dir``, which defaults to
$HSVIT_DATA_DIR, else ``~/.cache/hsvit_jax/data``.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hsvit_jax import storage
from hsvit_jax.data import remote
from hsvit_jax.data.cache import remove_abandoned
from hsvit_jax.data.catalog import REGISTRY, load_named
from hsvit_jax.data.dataset import DataInfo, Dataset, Source, Split, class_counts, split
from hsvit_jax.data.decode import Progress, Request
from hsvit_jax.data.examples import from_arrays, from_examples
from hsvit_jax.data.folder import (
    describe_files,
    find_listing,
    is_there,
    list_table,
    load_listing,
)
from hsvit_jax.data.images import BadImage, check_shape, fit_image, read_file, read_image
from hsvit_jax.data.libraries import describe_tfds, load_tfds, open_builder, open_hf
from hsvit_jax.data.published import DataUnavailable
from hsvit_jax.text import few, nearest

__all__ = [
    "BadImage",
    "DataInfo",
    "DataUnavailable",
    "Dataset",
    "Split",
    "class_counts",
    "describe",
    "fit_image",
    "from_arrays",
    "from_csv",
    "from_examples",
    "is_there",
    "load",
    "read_image",
]


def describe(name: str, data_dir: str | None = None, task: str = "classify") -> DataInfo:
    """Describes a data set without loading it; only ``hf=`` needs the network.

    An archive is unpacked to ``data_dir`` the first time. Class names of cifar100, tiny_imagenet,
    food101, domainnet and imagenet are placeholders until these are loaded.

    Args:
      name: a name from the head of this module.
      data_dir: the folder of archives and caches.
      task: as for `load`.

    Returns:
      Size, channels, class names and normalisation.

    Raises:
      ValueError: an unknown name, or a folder that is not laid out as a data set.
    """
    return _open(name, *_data_dirs(data_dir), task=task)[0]


def load(
    name: str,
    *,
    data_dir: str | None = None,
    image_size: tuple[int, int] | None = None,
    channels: int | None = None,
    fit: str = "crop",
    val_fraction: float = 0.1,
    on_bad_image: str = "error",
    resident_limit_bytes: int = 4 * 2**30,
    progress: Progress | None = None,
    test_only: bool = False,
    task: str = "classify",
) -> Dataset:
    """Loads a data set, downloading, checking and caching it as needed.

    If the set has a test part, validation is ``val_fraction`` of each training class, or the set's
    own validation part. If it comes in one piece, a tenth of each class is test and
    ``val_fraction`` validation.

    Args:
      name: a name from the head of this module.
      data_dir: the folder of archives and caches.
      image_size: (H, W) to fit the images to; defaults to `describe`'s.
      channels: 1 or 3; defaults to `describe`'s.
      fit: 'crop', 'pad' or 'stretch'.
      val_fraction: from 0 (no validation split) to 0.8.
      on_bad_image: 'error', or 'skip' to drop unusable images with a warning.
      resident_limit_bytes: sets with more bytes of pixels than this are read as needed.
      progress: called with (stage, done, total), from the calling thread.
      test_only: puts every image into the test split; one class is enough.
      task: 'classify', or 'multilabel' or 'regress' for the rows of a table.

    Returns:
      Training, validation and test split, and the fingerprint of their content.

    Raises:
      DataUnavailable: the files are missing and cannot be downloaded.
      ValueError: an argument or the data cannot be used.
    """
    progress = progress or (lambda *_: None)
    folder, url = _data_dirs(data_dir)
    remove_abandoned(folder / "cache")
    info, read = _open(name, folder, url, progress, task)
    size = info.image_size if image_size is None else image_size
    channels = info.channels if channels is None else channels
    size, channels = check_shape(size, channels, fit)
    request = Request(folder, size, channels, fit, on_bad_image, resident_limit_bytes, progress)
    dataset = split(read(request), info.with_shape(size, channels), fit, val_fraction, test_only)
    return dataclasses.replace(dataset, on_bad_image=on_bad_image)


def from_csv(path: str | os.PathLike, **options: Any) -> Dataset:
    """Loads the images of a table with the columns image and label; takes `load`'s options."""
    return load(f"csv={os.fspath(path)}", **options)


def _data_dirs(data_dir: str | None) -> tuple[Path, str]:
    """Returns the local folder of caches, and the URL of prepared sets or ''."""
    places = [data_dir, os.environ.get("HSVIT_DATA_DIR"), "~/.cache/hsvit_jax/data"]
    places = [place for place in places if place]
    local = next(place for place in places if not storage.is_url(place))
    url = storage.whole_url(places[0]) if storage.is_url(places[0]) else ""
    return Path(os.path.expanduser(local)), url


def _open(
    name: str,
    data_dir: Path,
    url: str = "",
    progress: Progress = lambda *_: None,
    task: str = "classify",
) -> tuple[DataInfo, Callable[[Request], Source]]:
    """Finds a set by its name; returns its description and its reader."""
    kind, equals, argument = name.partition("=")
    kind = kind if equals and argument else ""
    if task != "classify" and kind != "csv":
        raise ValueError(
            f"data.task={task} needs a table, and {name} has one class an image: use csv=PATH, or "
            f"from_arrays(…, task='{task}')"
        )
    if url and kind != "tfds":
        raise ValueError(f"data.dir={url} holds sets of tfds= only; set a local folder")
    if storage.is_url(argument) and "?" in argument:
        raise ValueError("a URL with ? may hold credentials, which a run would store; remove them")
    if kind in ("folder", "csv"):
        find = find_listing if kind == "folder" else partial(list_table, task=task)
        listing = find(argument, data_dir, progress)
        rows, names = listing.rows, listing.class_names
        info = describe_files(name, names, len(rows), lambda i: read_file(rows[i].file.path))
        info = dataclasses.replace(info, task=task)
        return info, partial(load_listing, listing, f"{kind}-{Path(argument).name}", own=True)
    if kind == "hf":
        return open_hf(argument)
    if kind == "tfds":
        if url:  # TFDS keeps a set in NAME/CONFIG/VERSION
            data_dir = remote.fetch_folder(url, data_dir, re.split("[:/]", argument)[0])
        builder = open_builder(argument, data_dir)
        return describe_tfds(argument, builder), partial(load_tfds, argument, builder)
    if name in REGISTRY:
        return REGISTRY[name].info, partial(load_named, name)
    if kind == "given":
        raise ValueError(
            f"the images of this run, {argument!r:.80}, were given from Python and are not stored "
            "with it: use hsvit eval RUN --config=c2a2:folder=PATH, or load(RUN).evaluate(dataset)"
        )
    near = f" Did you mean folder={name}?" if os.path.isdir(name) else nearest(name, REGISTRY)
    known = ["folder=<path>", "csv=<path>", "hf=<name or path>", "tfds=<name>", *REGISTRY]
    raise ValueError(f"unknown data set {name!r}.{near} Known: {few(known)}")
