"""``tfds=<name>``: sets prepared by TensorFlow Datasets, read without TensorFlow.

TFDS reads its array_record and parquet forms without TensorFlow, but needs it to prepare most
sets; that is said before anything is downloaded.
"""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data.cache import cache_folder
from hsvit_jax.data.dataset import TEST, TRAIN, UNSPLIT, VAL, DataInfo
from hsvit_jax.data.decode import Items, Source, decode_items
from hsvit_jax.data.download import DataUnavailable, probe
from hsvit_jax.data.folder import IMAGENET_MEAN, IMAGENET_STD, Request
from hsvit_jax.data.images import few

_MIRROR_CHANGES = ("mnist", "svhn", "digits", "omniglot", "quickdraw", "letters")
_READABLE = ("array_record", "parquet")


def open_builder(name: str, data_dir: Path) -> Any:
    """The TFDS builder of ``name``, looked for in ``data_dir`` and in TFDS' own folder.

    Raises:
      ValueError: TFDS knows no such set.
    """
    import tensorflow_datasets as tfds

    candidates = []
    for folder in (data_dir, None):
        for file_format in _READABLE:
            try:
                builder = tfds.builder(name, data_dir=folder, file_format=file_format)
            except (tfds.core.DatasetNotFoundError, ImportError) as error:
                raise ValueError(
                    f"tfds={name} cannot be opened ({str(error).splitlines()[0]}); the names are "
                    "at https://www.tensorflow.org/datasets/catalog"
                ) from error
            except ValueError as error:  # prepared there in another form
                candidates.append(error)
                continue
            if is_prepared(builder):
                return builder
            candidates.append(builder)
    for candidate in candidates:
        if not isinstance(candidate, ValueError):
            return candidate
    raise ValueError(f"tfds={name}: {candidates[0]}") from candidates[0]


def is_prepared(builder: Any) -> bool:
    """True if the builder's files are on disk in a form that can be read without TensorFlow."""
    if not builder.is_prepared():
        return False
    return builder.info.file_format is not None and builder.info.file_format.value in _READABLE


def describe_tfds(name: str, label: str, data_dir: Path) -> DataInfo:
    """Describes a set by its builder's features; nothing is read or downloaded."""
    builder = open_builder(name, data_dir)
    image_key, label_key = _keys(name, builder)
    features = builder.info.features
    height, width, channels = features[image_key].shape
    grey = channels == 1
    flip = name.startswith("fashion_mnist") or not any(word in name for word in _MIRROR_CHANGES)
    return DataInfo(
        name=label,
        image_size=(height, width) if height and width else (128, 128),
        channels=1 if grey else 3,
        class_names=tuple(features[label_key].names),
        mean=(0.5,) if grey else IMAGENET_MEAN,
        std=(0.25,) if grey else IMAGENET_STD,
        flip=flip,
    )


def load_tfds(name: str, request: Request) -> Source:
    """Reads a prepared TFDS set; prepares it first where TensorFlow is installed.

    Splits: as for folders. 'test' is the test split and 'validation' the validation split; if
    only one of them is there (or the test part has no labels), it is the test split.

    Raises:
      DataUnavailable: not prepared, and TensorFlow or the connection is missing.
      ValueError: not a set of labelled images.
    """
    import tensorflow_datasets as tfds

    builder = open_builder(name, request.data_dir)
    image_key, label_key = _keys(name, builder)
    if not is_prepared(builder):
        _prepare(name, builder)
    decoders = {image_key: tfds.decode.SkipDecoding()}
    found = {}
    for split in builder.info.splits or ("train", "test"):
        if split in ("train", "test", "validation"):
            found[split] = builder.as_data_source(split=split, decoders=decoders)
    if "train" not in found:
        raise ValueError(
            f"tfds={name} has no split 'train', only {few(sorted(builder.info.splits))}"
        )
    if "test" in found and int(found["test"][0][label_key]) < 0:
        del found["test"]
    if "test" not in found and "validation" in found:
        found["test"] = found.pop("validation")
    codes = {"train": TRAIN if "test" in found else UNSPLIT, "validation": VAL, "test": TEST}
    sources = [(split, found[split]) for split in ("train", "validation", "test") if split in found]
    starts = np.cumsum([0] + [len(source) for _, source in sources])
    parts = np.concatenate([np.full(len(s), codes[split], np.int8) for split, s in sources])
    names = [f"tfds={name} {split}[{i}]" for split, s in sources for i in range(len(s))]

    def read(index: int) -> tuple[bytes, int]:
        which = int(np.searchsorted(starts, index, side="right")) - 1
        record = sources[which][1][index - int(starts[which])]
        return record[image_key], int(record[label_key])

    resident = request.resident(len(names))
    key = {
        "tfds": str(builder.info.full_name),
        "at": str(builder.data_dir),
        "prepared": _stamp(Path(builder.data_dir)),
        "splits": [(split, len(source)) for split, source in sources],
        "shape": [*request.image_size, request.channels],
        "in": resident,
    }
    return decode_items(
        Items(names, parts, read),
        tuple(builder.info.features[label_key].names),
        folder=cache_folder(request.data_dir, f"tfds-{name}", key),
        image_size=request.image_size,
        channels=request.channels,
        resident=resident,
        on_bad_image=request.on_bad_image,
        progress=request.progress,
    )


def _prepare(name: str, builder: Any) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        raise DataUnavailable(
            f"tfds={name} is not prepared in {builder.data_dir} in the array_record or parquet "
            "form, and TensorFlow, which TFDS needs to prepare it, is not installed. Nothing was "
            "downloaded. Either install TensorFlow once (pip install tensorflow-cpu) and start "
            "again, or prepare it elsewhere with "
            f"tfds.builder({name!r}, file_format='array_record').download_and_prepare() and copy "
            "the folder here. The data set 'digits' is embedded and needs neither (':digits')."
        )
    for url in list(builder.url_infos or {})[:1]:  # TFDS itself would retry for minutes
        why = probe(url)
        if why is not None:
            raise DataUnavailable(
                f"tfds={name} has to be downloaded and {url} cannot be reached: {why}. Put a "
                f"prepared copy at {builder.data_dir}, or use ':digits', which needs no download."
            )
    builder.download_and_prepare()


def _keys(name: str, builder: Any) -> tuple[str, str]:
    """Names of the image and label features."""
    import tensorflow_datasets as tfds

    features = builder.info.features
    keys = builder.info.supervised_keys or ("image", "label")
    if (
        len(keys) != 2
        or not all(isinstance(key, str) and key in features for key in keys)
        or not isinstance(features[keys[0]], tfds.features.Image)
        or not isinstance(features[keys[1]], tfds.features.ClassLabel)
    ):
        raise ValueError(
            f"tfds={name} is not a set of images with one class label each: its features are "
            f"{few(sorted(features))}"
        )
    return keys


def _stamp(folder: Path) -> str:
    """Digest of the prepared files' names, sizes and times: preparing again changes it."""
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.glob("*"))
        if path.is_file()
    ]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
