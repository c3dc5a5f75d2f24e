"""Reads sets that TensorFlow Datasets has prepared, without TensorFlow.

TFDS reads its array_record and parquet forms without TensorFlow, but needs it to prepare most
sets. If it is missing, the error comes before any download.
"""

import hashlib
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

from hsvit_jax.data.dataset import DataInfo, Source, default_statistics, keeps_label_mirrored
from hsvit_jax.data.decode import SPLITS, Request, decode_items, items_of_splits
from hsvit_jax.data.published import DataUnavailable, probe
from hsvit_jax.text import few

_READABLE = ("array_record", "parquet")


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
    mean, std = default_statistics(channels)
    size = (height, width) if height and width else (128, 128)
    class_names, flip = tuple(features[label_key].names), keeps_label_mirrored(name)
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
