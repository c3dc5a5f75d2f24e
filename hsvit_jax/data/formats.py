"""Parses the published archives to arrays or listings, without TensorFlow."""

import gzip
import io
import json
import math
import pickle
import zlib
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hsvit_jax.data.dataset import TEST, TRAIN
from hsvit_jax.data.listing import File, Listing, Row, Tree
from hsvit_jax.text import few

_IDX_LIMIT = 1 << 28  # the largest IDX file we know is 47 MB unpacked
#: Images uint8 (N, H, W, C), labels int32 (N,), parts int8 (N,), class names.
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]


def parse_cifar(paths: list[Path], label_bytes: int, names_file: str) -> Arrays:
    """Parses the files of CIFAR's binary or Python version.

    A binary record is label bytes, the last of which counts, then 3×32×32 planes. The Python
    version is pickled, and read without running anything. Test batches begin with 'test'.
    """
    batches: dict[str, np.ndarray] = {}
    class_names: tuple[str, ...] = ()
    for path in paths:
        name = path.name
        if name == names_file:
            lines = path.read_text("utf-8").split("\n")
            class_names = tuple(line.strip() for line in lines if line.strip())
        elif name.endswith(".bin"):
            data = np.fromfile(path, np.uint8)
            if not len(data) or len(data) % (label_bytes + 3072):
                raise ValueError(f"{name} is not whole records of CIFAR images")
            batches[name] = data.reshape(-1, label_bytes + 3072)[:, label_bytes - 1 :]
        elif name in ("batches.meta", "meta"):
            names = _unpickle(path)
            names = names.get(b"fine_label_names") or names.get(b"label_names", ())
            class_names = tuple(name.decode("utf-8") for name in names)
        elif name in ("train", "test") or name.startswith(("data_batch_", "test_batch")):
            batches[name] = _pickled_records(path)
    parts = {name: TEST if name.startswith("test") else TRAIN for name in sorted(batches)}
    if not class_names or len(set(parts.values())) != 2:
        raise ValueError(f"it lacks {names_file}, training batches or the test batch")
    records = np.concatenate([batches[name] for name in parts])
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = records[:, 0]
    _check_labels(labels, len(class_names))
    part = np.repeat(list(parts.values()), [len(batches[name]) for name in parts])
    return np.ascontiguousarray(images), labels.astype(np.int32), part.astype(np.int8), class_names


def _pickled_records(path: Path) -> np.ndarray:
    """Reads a pickled batch as records of the label and the planes, uint8 (N, 1 + 3072)."""
    batch = _unpickle(path)
    labels = np.asarray(batch.get(b"fine_labels") or batch.get(b"labels", ()))
    images = np.asarray(batch.get(b"data"))
    if labels.ndim != 1 or images.shape != (len(labels), 3072) or images.dtype != np.uint8:
        raise ValueError(f"{path.name} is not a batch of CIFAR images and labels")
    return np.concatenate([labels.astype(np.uint8)[:, None], images], 1)


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickle of plain values and NumPy arrays; looks up and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds the parts of an array; raises UnpicklingError for all else."""
        known = {"ndarray": np.ndarray, "dtype": np.dtype}
        known["_reconstruct"] = np.zeros(0).__reduce__()[0]
        if module.split(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[name]


def _unpickle(path: Path) -> dict:
    try:
        value = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(f"{path.name} is a pickle that cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def parse_idx(path: Path) -> np.ndarray:
    """Parses an IDX file of unsigned bytes, gzipped or not: uint8 of the shape in its header."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rb") as file:
            data = file.read(_IDX_LIMIT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    rank = data[3] if len(data) >= 4 else 0
    shape = np.frombuffer(data[4 : 4 + 4 * rank].ljust(4 * rank, b"\0"), ">u4").astype(np.int64)
    if data[:3] != b"\0\0\x08" or len(data) != 4 + 4 * rank + math.prod(shape.tolist()):
        raise ValueError(f"{path.name} is no IDX file of unsigned bytes, or is cut off")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def parse_fashion_mnist(paths: list[Path], class_names: tuple[str, ...]) -> Arrays:
    """Parses training images, training labels, test images and test labels, in that order."""
    images, labels = [parse_idx(path) for path in paths[::2]], [parse_idx(p) for p in paths[1::2]]
    for pixels, of in zip(images, labels, strict=True):
        if pixels.ndim != 3 or of.shape != pixels.shape[:1]:
            raise ValueError(f"{pixels.shape} images and {of.shape} labels do not belong together")
    part = np.repeat([TRAIN, TEST], [len(array) for array in labels]).astype(np.int8)
    joined = np.concatenate(labels).astype(np.int32)
    _check_labels(joined, len(class_names))
    return np.concatenate(images)[..., None], joined, part, class_names


def list_tiny_imagenet(tree: Tree) -> Listing:
    """Lists Tiny-ImageNet: train/<wnid>/images, and val with val_annotations.txt as the test split.

    The official test images have no labels. Labels follow the sorted WordNet ids. A class has the
    first name of words.txt, with the id if two would be equal.
    """
    files = {file.name.partition("/")[2]: file for file in tree.files}
    texts = {PurePosixPath(name).name: file.path for name, file in files.items() if "." in name}
    for needed in ("val_annotations.txt", "words.txt"):
        if needed not in texts:
            raise ValueError(f"{tree.where} lacks {needed}: not the Tiny-ImageNet archive")
    rows = [
        (name.split("/")[1], name, TRAIN)
        for name in files
        if name.startswith("train/") and name.endswith(".JPEG")
    ]
    held = {PurePosixPath(name).name: name for name in files if name.startswith("val/")}
    for line in Path(texts["val_annotations.txt"]).read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) > 1:  # a file is in val/images, or its owner sorted it into val/<wnid>
            rows.append((fields[1], held.get(fields[0], fields[0]), TEST))
    wnids = sorted({wnid for wnid, _, part in rows if part == TRAIN})
    words = {}
    for line in Path(texts["words.txt"]).read_text(encoding="utf-8").splitlines():
        wnid, _, name = line.partition("\t")
        words[wnid] = name.split(",")[0].strip()
    first = [words.get(wnid, wnid) for wnid in wnids]
    names = tuple(
        name if first.count(name) == 1 else f"{name} ({wnid})"
        for name, wnid in zip(first, wnids, strict=True)
    )
    return _listing(tree, files, rows, wnids, names)


def list_food101(tree: Tree) -> Listing:
    """Lists Food-101: images/<class>/<id>.jpg, split by meta/train.json and meta/test.json."""
    files = {file.name.partition("/")[2]: file for file in tree.files}
    rows = []
    for part, name in ((TRAIN, "meta/train.json"), (TEST, "meta/test.json")):
        if name not in files:
            raise ValueError(f"{tree.where} lacks {name}: not the Food-101 archive")
        listed = json.loads(Path(files[name].path).read_text(encoding="utf-8"))
        for label, images in listed.items():
            rows += [(label, f"images/{image}.jpg", part) for image in images]
    classes = sorted({label for label, _, part in rows if part == TRAIN})
    return _listing(tree, files, rows, classes, tuple(c.replace("_", " ") for c in classes))


def list_domainnet(tree: Tree, train: Path, test: Path) -> Listing:
    """Lists a domain of DomainNet by its two lists, of lines such as 'clipart/axe/1.jpg 11'.

    A class is a folder, and its number in the lists is its label.
    """
    files = {file.name: file for file in tree.files}
    rows, numbers = [], {}
    for part, path in ((TRAIN, train), (TEST, test)):
        for line in path.read_text(encoding="utf-8").split("\n"):
            name, _, number = line.strip().rpartition(" ")
            if name and number.isdigit():
                label = PurePosixPath(name).parent.name
                numbers[label] = int(number)
                rows.append((label, name, part))
    classes = sorted(numbers, key=numbers.__getitem__)
    return _listing(tree, files, rows, classes, tuple(c.replace("_", " ") for c in classes))


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Reads the embedded digits: images uint8 (1797, 8, 8), scaled from 0..16, and labels int32.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository (https://doi.org/10.24432/C50P49), licence CC BY 4.0; its test part, as
    scikit-learn's ``load_digits`` has it.
    """
    packed = (resources.files("hsvit_jax.data") / "digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    return ((images.astype(np.int32) * 255 + 8) // 16).astype(np.uint8), labels.astype(np.int32)


def _listing(
    tree: Tree,
    files: dict[str, File],
    rows: list[tuple[str, str, int]],
    classes: list[str],
    class_names: tuple[str, ...],
) -> Listing:
    """Makes a listing of (class, file, part) rows; `files` are the tree's without outer folder."""
    index = {name: i for i, name in enumerate(classes)}
    wrong = [name for label, name, _ in rows if name not in files or label not in index]
    if wrong or len(classes) < 2:
        raise ValueError(
            f"{tree.where}: {len(wrong)} listed images are missing or of no known class "
            f"({few(wrong)}), {len(classes)} classes; the archive is not as published"
        )
    rows = sorted(rows, key=lambda row: (row[2], index[row[0]], row[1]))
    return Listing(
        tree.where,
        class_names,
        tuple(Row(files[name], index[label], part) for label, name, part in rows),
    )


def _check_labels(labels: np.ndarray, classes: int) -> None:
    if labels.max(initial=0) >= classes:
        raise ValueError(f"it holds label {labels.max()}, but there are {classes} classes")
