"""``hf=<name or path>``: a data set of the Hugging Face `datasets` library."""

from pathlib import Path
from typing import Any

from hsvit_jax.data.dataset import DataInfo
from hsvit_jax.data.decode import Request, Source, decode_items, items_of_splits
from hsvit_jax.data.folder import describe_files
from hsvit_jax.data.images import few, read_file

# What the parts are called, by the names that `items_of_splits` knows.
_SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def open_set(name: str) -> tuple[dict[str, Any], str, str]:
    """Opens a data set by its name on the hub, or what `save_to_disk` wrote to a folder.

    Returns:
      the parts by 'train', 'validation' and 'test', their images undecoded; the image column; the
      label column.

    Raises:
      ValueError: `datasets` is not installed, there is no such set, or it has no images with one
        class label each.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(f"hf={name} needs datasets: pip install 'hsvit_jax[hf]'") from None
    folder = Path(name).expanduser()
    saved = any((folder / f).is_file() for f in ("dataset_dict.json", "dataset_info.json"))
    try:
        found = datasets.load_from_disk(folder) if saved else datasets.load_dataset(name)
    except Exception as error:  # of the network, of the disk, of any reader that it has
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(f"hf={name} cannot be read: {type(error).__name__}: {reason}") from None
    found = found if isinstance(found, dict) else {"train": found}
    if "train" not in found:
        raise ValueError(f"hf={name} has no split 'train', only {few(sorted(found))}")
    features = found["train"].features
    image = [key for key in features if isinstance(features[key], datasets.Image)]
    label = [key for key in features if isinstance(features[key], datasets.ClassLabel)]
    if len(image) != 1 or not label:
        raise ValueError(
            f"hf={name} needs one column of images and one of class labels "
            f"(dataset.class_encode_column makes one); its columns are {few(sorted(features))}"
        )
    raw = datasets.Image(decode=False)
    parts = {
        part: found[next(name for name in names if name in found)].cast_column(image[0], raw)
        for part, names in _SPLITS.items()
        if not found.keys().isdisjoint(names)
    }
    return parts, image[0], label[0]


def _bytes(image: dict[str, Any]) -> bytes:
    return image["bytes"] if image["bytes"] is not None else read_file(image["path"])


def describe_hf(name: str) -> DataInfo:
    """Describes a set by its columns and the headers of a few images."""
    parts, image, label = open_set(name)
    train, names = parts["train"], tuple(parts["train"].features[label].names)
    return describe_files(f"hf={name}", names, len(train), lambda i: _bytes(train[i][image]))


def load_hf(name: str, request: Request) -> Source:
    """Reads a set; splits are as TFDS' (see `decode.items_of_splits`).

    Raises:
      ValueError: as `open_set`, or an image cannot be used.
    """
    parts, image, label = open_set(name)

    def read(record: dict[str, Any]) -> tuple[bytes, int]:
        value = record[label]
        return _bytes(record[image]), -1 if value is None else int(value)

    items = items_of_splits(f"hf={name}", parts, read)
    key = {"hf": [(split, len(part), part._fingerprint) for split, part in parts.items()]}
    names = tuple(parts["train"].features[label].names)
    return decode_items(items, names, request, f"hf-{Path(name).name}", key)
