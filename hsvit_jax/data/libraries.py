"""Reads sets of TensorFlow Datasets (without TensorFlow) and of Hugging Face's `datasets`.

TFDS reads its array_record and parquet forms without TensorFlow, but needs it to prepare most
sets. If it is missing, the error comes before any download.
"""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.util
import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data import dataset
from hsvit_jax.data.dataset import DataInfo, Source
from hsvit_jax.data.decode import Items, Request, decode_items
from hsvit_jax.data.folder import describe_files
from hsvit_jax.data.images import read_file
from hsvit_jax.data.published import DataUnavailable, probe
from hsvit_jax.text import few

SPLITS = {"train": dataset.TRAIN, "validation": dataset.VAL, "test": dataset.TEST}
#: The names that people give these splits in `datasets`.
_HF_NAMES = {name: (name,) for name in SPLITS}
_HF_NAMES["validation"] += ("valid", "val", "dev")
_READABLE = ("array_record", "parquet")


def items_of_splits(
    where: str, splits: Mapping[str, Sequence[Any]], read: Callable[[Any], tuple[bytes, int]]
) -> Items:
    """Returns the examples of a set that comes in splits, by the names of SPLITS.

    Without a labelled test split, 'validation' is the test split. ``read`` gives the bytes and the
    label of a record, -1 for none.
    """
    if "train" not in splits:
        raise ValueError(f"{where} has no split 'train', only {few(sorted(splits))}")
    splits = {name: splits[name] for name in SPLITS if len(splits.get(name, ()))}
    with contextlib.suppress(OSError):  # a record that cannot be read is named when it is decoded
        if "test" in splits and read(splits["test"][0])[1] < 0:
            del splits["test"]
    used = dataset.used_as([SPLITS[name] for name in splits])
    records = [(name, i) for name, rows in splits.items() for i in range(len(rows))]
    parts = np.array([used[SPLITS[name]] for name, _ in records], np.int8)
    names = [f"{where} {name}[{i}]" for name, i in records]

    def fetch(index: int) -> tuple[bytes, int]:
        name, i = records[index]
        return read(splits[name][i])

    return Items(names, parts, fetch)


def open_builder(name: str, data_dir: Path) -> Any:
    """Opens the TFDS builder of ``name``, from ``data_dir`` or TFDS' own folder."""
    import tensorflow_datasets as tfds

    unprepared, other_form = [], ""
    for folder, file_format in itertools.product((data_dir, None), _READABLE):
        try:
            builder = tfds.builder(name, data_dir=folder, file_format=file_format)
        except (tfds.core.DatasetNotFoundError, ImportError) as error:
            lines = (x.strip() for x in str(error).splitlines() if x[:3] != "\t- ")  # all names
            raise ValueError(f"tfds={name} cannot be opened: {' '.join(lines)}") from error
        except ValueError as error:  # prepared there in another form
            other_form = other_form or str(error)
            continue
        if is_prepared(builder):
            return builder
        unprepared.append(builder)
    if not unprepared:
        raise ValueError(f"tfds={name}: {other_form}")
    return unprepared[0]


def is_prepared(builder: Any) -> bool:
    """Returns whether the builder's files are there in a form that needs no TensorFlow."""
    form = builder.info.file_format
    return builder.is_prepared() and form is not None and form.value in _READABLE


def describe_tfds(name: str, builder: Any) -> DataInfo:
    """Describes a set by its builder's features; nothing is read or downloaded."""
    image_key, label_key = _keys(name, builder)
    features = builder.info.features
    height, width, channels = features[image_key].shape
    channels = 1 if channels == 1 else 3
    mean, std = dataset.default_statistics(channels)
    size = (height, width) if height and width else (128, 128)
    class_names, flip = tuple(features[label_key].names), dataset.keeps_label_mirrored(name)
    return DataInfo(f"tfds={name}", size, channels, class_names, mean, std, flip)


def load_tfds(name: str, builder: Any, request: Request) -> Source:
    """Reads a prepared TFDS set; prepares it first if TensorFlow is installed."""
    import tensorflow_datasets as tfds

    image_key, label_key = _keys(name, builder)
    if not is_prepared(builder):
        _prepare(name, builder)
    decoders = {image_key: tfds.decode.SkipDecoding()}
    splits = {
        split: builder.as_data_source(split=split, decoders=decoders)
        for split in builder.info.splits
        if split in SPLITS or "train" not in builder.info.splits
    }
    items = items_of_splits(
        f"tfds={name}", splits, lambda record: (record[image_key], int(record[label_key]))
    )
    key = {
        "tfds": str(builder.info.full_name),
        "at": str(builder.data_dir),
        "prepared": _stamp(Path(builder.data_dir)),
        "splits": [(split, len(source)) for split, source in splits.items()],
    }
    class_names = tuple(builder.info.features[label_key].names)
    return decode_items(items, class_names, request, f"tfds-{name}", key)


def _prepare(name: str, builder: Any) -> None:
    why = None
    if importlib.util.find_spec("tensorflow") is None:
        why = "TensorFlow, which TFDS needs for it, is not installed. Nothing was downloaded"
    for url in [] if why else list(builder.url_infos or {})[:1]:
        reason = probe(url)  # TFDS itself would retry for minutes
        why = reason and f"{url} cannot be reached: {reason}"
    if why:
        raise DataUnavailable(
            f"tfds={name} is not prepared in {builder.data_dir} in the array_record or parquet "
            f"form, and {why}. Install tensorflow-cpu and start again with a connection, or "
            f"prepare it elsewhere with tfds.builder({name!r}, file_format='array_record')."
            "download_and_prepare() and copy the folder here; ':digits' needs no download."
        )
    builder.download_and_prepare()


def _keys(name: str, builder: Any) -> tuple[str, str]:
    import tensorflow_datasets as tfds

    features = builder.info.features
    keys = builder.info.supervised_keys or ("image", "label")
    kinds = tuple(features[key] for key in keys if isinstance(key, str) and key in features)
    wanted = tfds.features.Image, tfds.features.ClassLabel
    if len(kinds) != len(keys) or len(keys) != 2 or not all(map(isinstance, kinds, wanted)):
        raise ValueError(
            f"tfds={name} is not a set of images with one class label each: its features are "
            f"{few(sorted(features))}"
        )
    return keys


def _stamp(folder: Path) -> str:
    """Returns a digest of the prepared files' names, sizes and times."""
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*")) if path.is_file()]
    files = [(name, info.st_size, info.st_ctime_ns) for name, info in stats]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def open_hf(name: str) -> tuple[DataInfo, Callable[[Request], Source]]:
    """Opens a data set by its name on the hub, by its folder, or as `save_to_disk` wrote it.

    Returns its description, from its columns and the headers of a few images, and its reader.
    """
    import datasets

    path, config = os.path.expanduser(name), None
    if ":" in name and not os.path.exists(path):
        path, _, config = path.rpartition(":")
    folder, where = Path(path), {}
    saved = [(folder / f).is_file() for f in ("dataset_dict.json", "dataset_info.json")]
    if all(saved):  # datasets would read only the Dataset, though the dict may be newer
        raise ValueError(f"hf={name} holds a Dataset and a DatasetDict: remove it and save again")
    if folder.is_dir():  # datasets would read its cache of another folder of that name
        stamps = [(str(f), f.lstat().st_ctime_ns) for f in sorted(folder.resolve().rglob("*"))]
        digest = hashlib.sha256(repr(stamps).encode()).hexdigest()
        where["cache_dir"] = os.path.join(datasets.config.HF_DATASETS_CACHE, digest[:16])
    try:
        if any(saved) and not config:
            found = datasets.load_from_disk(folder)
        else:
            found = datasets.load_dataset(path, config, **where)
    except Exception as error:  # its network, disk and readers raise nearly anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        whole = name.removesuffix(f":{config}")
        raise ValueError(
            f"hf={name} cannot be read: {reason}; hf={whole}:CONFIG chooses a configuration"
        ) from None
    found = found if isinstance(found, dict) else {"train": found}
    parts = {
        part: found[next(name for name in names if name in found)]
        for part, names in _HF_NAMES.items()
        if not found.keys().isdisjoint(names)
    }
    if "train" not in parts:
        raise ValueError(f"hf={name} has no split 'train', only {few(sorted(found))}")
    features = parts["train"].features
    image = [key for key in features if isinstance(features[key], datasets.Image)]
    label = [key for key in features if isinstance(features[key], datasets.ClassLabel)]
    if len(image) != 1 or not label:
        raise ValueError(
            f"hf={name} needs one column of images and one of class labels "
            f"(dataset.class_encode_column makes one); its columns are {few(sorted(features))}"
        )
    label.sort(key=lambda key: key not in ("label", "labels"))
    if label[0] not in ("label", "labels") and label[1:]:
        warnings.warn(f"hf={name}: of {few(label)} the classes are {label[0]}", stacklevel=2)
    names = tuple(features[label[0]].names)
    for part, rows in parts.items():  # splits that were encoded apart number their own classes
        own = rows.features.get(label[0], features[label[0]])
        if tuple(getattr(own, "names", None) or ()) != names:
            raise ValueError(
                f"hf={name}: {label[0]} numbers other classes in {part} than in train: use the "
                "same datasets.ClassLabel(names=[…]) for all, with cast_column from the names"
            )
    # A set may be stored with a format, such as pandas, or with some of its columns.
    raw = datasets.Image(decode=False)
    parts = {
        part: rows.with_format(None).cast_column(image[0], raw) for part, rows in parts.items()
    }
    train = parts["train"]

    def read(record: dict[str, Any]) -> tuple[bytes, int]:
        stored, value = record[image[0]], record.get(label[0])  # a test part may lack labels
        if stored is None:
            raise FileNotFoundError(errno.ENOENT, "it has no image")
        content = stored["bytes"] if stored["bytes"] is not None else read_file(stored["path"])
        return content, -1 if value is None else int(value)

    info = describe_files(f"hf={name}", names, len(train), lambda i: read(train[i])[0])
    info = dataclasses.replace(info, flip=dataset.keeps_label_mirrored(Path(name).name))

    def load(request: Request) -> Source:
        items = items_of_splits(f"hf={name}", parts, read)
        prints = [(split, len(part), part._fingerprint) for split, part in parts.items()]
        return decode_items(items, names, request, f"hf-{Path(name).name}", {"hf": prints} | where)

    return info, load
