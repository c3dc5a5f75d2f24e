"""Reads ``hf=<name or path>[:<configuration>]``, a set of the Hugging Face `datasets` library."""

import dataclasses
import errno
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsvit_jax.data.dataset import DataInfo, Source, keeps_label_mirrored
from hsvit_jax.data.decode import Request, decode_items, items_of_splits
from hsvit_jax.data.folder import describe_files
from hsvit_jax.data.images import read_file
from hsvit_jax.text import few

# The parts by the names that `items_of_splits` knows, and the names that people give them.
_SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def open_hf(name: str) -> tuple[DataInfo, Callable[[Request], Source]]:
    """Opens a data set by its name on the hub, by its folder, or as `save_to_disk` wrote it.

    Returns its description, from its columns and the headers of a few images, and its reader.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(f"hf={name} needs datasets: pip install 'hsvit_jax[hf]'") from None
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
        for part, names in _SPLITS.items()
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
                f"hf={name}: {label[0]} numbers other classes in {part} than in train: give all "
                "splits the same datasets.ClassLabel(names=[…]), with cast_column from the names"
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
    info = dataclasses.replace(info, flip=keeps_label_mirrored(Path(name).name))

    def load(request: Request) -> Source:
        items = items_of_splits(f"hf={name}", parts, read)
        prints = [(split, len(part), part._fingerprint) for split, part in parts.items()]
        return decode_items(items, names, request, f"hf-{Path(name).name}", {"hf": prints} | where)

    return info, load
