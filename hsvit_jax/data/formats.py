"""Parsers of the published archives: bytes to arrays or listings, without TensorFlow or pickle."""

import gzip
import io
import json
import zlib
from pathlib import Path, PurePosixPath

import numpy as np

from hsvit_jax.data.archives import members
from hsvit_jax.data.dataset import TEST, TRAIN
from hsvit_jax.data.listing import Listing, Tree

_IDX_LIMIT = 1 << 28  # the largest IDX file we know is 47 MB unpacked


class Arrays:
    """Collects (images uint8 (n, H, W, C), labels, part) pieces in order."""

    def __init__(self) -> None:
        self.images: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.parts: list[np.ndarray] = []

    def add(self, images_NHWC: np.ndarray, labels_N: np.ndarray, part: int) -> None:
        """Adds one piece."""
        self.images.append(images_NHWC)
        self.labels.append(labels_N.astype(np.int32))
        self.parts.append(np.full(len(labels_N), part, np.int8))

    def join(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All images, labels and parts."""
        return tuple(np.concatenate(pieces) for pieces in (self.images, self.labels, self.parts))


def parse_cifar(path: Path, label_bytes: int, names_file: str) -> tuple[Arrays, tuple[str, ...]]:
    """CIFAR's binary version: records of label bytes, then 3×32×32 planes.

    With two label bytes (CIFAR-100: coarse, fine) the last one counts. The test batch is the one
    whose name begins with 'test'.

    Raises:
      ValueError: a member that is not whole records, a label out of range, or members missing.
    """
    batches: dict[str, np.ndarray] = {}
    class_names: tuple[str, ...] = ()
    for member in members(path):
        base = PurePosixPath(member.name).name
        if member.is_dir:
            continue
        if base == names_file:
            lines = member.read().decode("utf-8").split("\n")
            class_names = tuple(line.strip() for line in lines if line.strip())
        elif base.endswith(".bin"):
            data = np.frombuffer(member.read(), np.uint8)
            if not len(data) or len(data) % (label_bytes + 3072):
                raise ValueError(f"{path}: {member.name} is not whole records of CIFAR images")
            batches[base] = data.reshape(-1, label_bytes + 3072)
    arrays = Arrays()
    for base in sorted(batches):
        records = batches[base]
        images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        part = TEST if base.startswith("test") else TRAIN
        arrays.add(np.ascontiguousarray(images), records[:, label_bytes - 1], part)
    if not class_names or len({base.startswith("test") for base in batches}) != 2:
        raise ValueError(f"{path} lacks {names_file}, training batches or the test batch")
    _check_labels(path, np.concatenate(arrays.labels), len(class_names))
    return arrays, class_names


def parse_idx(path: Path) -> np.ndarray:
    """A gzipped IDX file of unsigned bytes, as uint8 of the shape in its header.

    Raises:
      ValueError: it is not IDX, not gzip, cut off, or longer than its header says.
    """
    try:
        with gzip.open(path) as file:
            data = file.read(_IDX_LIMIT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}); get it again") from error
    rank = data[3] if len(data) >= 4 else 0
    if data[:3] != b"\0\0\x08" or not 1 <= rank <= 4 or len(data) < 4 + 4 * rank:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    shape = np.frombuffer(data, ">u4", rank, 4).astype(np.int64)
    if len(data) != 4 + 4 * rank + int(np.prod(shape)):
        raise ValueError(f"{path} does not hold the {shape.tolist()} bytes its header promises")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def parse_fashion_mnist(paths: list[Path], classes: int) -> Arrays:
    """Train images, train labels, test images and test labels, in that order."""
    arrays = Arrays()
    for part, images_path, labels_path in (
        (TRAIN, paths[0], paths[1]),
        (TEST, paths[2], paths[3]),
    ):
        images, labels = parse_idx(images_path), parse_idx(labels_path)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{images_path} {images.shape} and {labels_path} {labels.shape} do not belong "
                "together: expected (N, H, W) and (N,)"
            )
        _check_labels(labels_path, labels, classes)
        arrays.add(images[..., None], labels, part)
    return arrays


def list_tiny_imagenet(tree: Tree) -> Listing:
    """Tiny-ImageNet: train/<wnid>/images, and val with val_annotations.txt as the test split.

    The official test images have no labels, so, as is usual, the labelled validation images are
    the test split, and validation is held out of train. Labels follow the sorted WordNet ids;
    names are the first word of each in words.txt, with the id where two would be equal.
    """
    files = {name.partition("/")[2]: file for name, *file in tree.files}
    texts = {PurePosixPath(name).name: file[0] for name, file in files.items() if "." in name}
    for needed in ("val_annotations.txt", "words.txt"):
        if needed not in texts:
            raise ValueError(f"{tree.where} lacks {needed}: not the Tiny-ImageNet archive")
    rows = [
        (name.split("/")[1], name, TRAIN)
        for name in files
        if name.startswith("train/") and name.endswith(".JPEG")
    ]
    for line in Path(texts["val_annotations.txt"]).read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) > 1:
            rows.append((fields[1], f"val/images/{fields[0]}", TEST))
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
    """Food-101: images/<class>/<id>.jpg, split by meta/train.json and meta/test.json."""
    files = {name.partition("/")[2]: file for name, *file in tree.files}
    rows = []
    for part, name in ((TRAIN, "meta/train.json"), (TEST, "meta/test.json")):
        if name not in files:
            raise ValueError(f"{tree.where} lacks {name}: not the Food-101 archive")
        listed = json.loads(Path(files[name][0]).read_text(encoding="utf-8"))
        for label, images in listed.items():
            rows += [(label, f"images/{image}.jpg", part) for image in images]
    classes = sorted({label for label, _, part in rows if part == TRAIN})
    return _listing(tree, files, rows, classes, tuple(c.replace("_", " ") for c in classes))


def read_digits(packed: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The embedded digits: images uint8 (1797, 8, 8) scaled from 0..16 to 0..255, labels int32.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository (https://doi.org/10.24432/C50P49), licence CC BY 4.0; its test part, as
    scikit-learn's ``load_digits`` has it.
    """
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    return ((images.astype(np.int32) * 255 + 8) // 16).astype(np.uint8), labels.astype(np.int32)


def _listing(
    tree: Tree,
    files: dict[str, list],
    rows: list[tuple[str, str, int]],
    classes: list[str],
    class_names: tuple[str, ...],
) -> Listing:
    index = {name: i for i, name in enumerate(classes)}
    wrong = [name for label, name, _ in rows if name not in files or label not in index]
    if wrong or len(classes) < 2:
        raise ValueError(
            f"{tree.where}: {len(wrong)} listed images are missing or of no known class "
            f"({wrong[:3]}…), {len(classes)} classes; the archive is not as published"
        )
    rows = sorted(rows, key=lambda row: (row[2], index[row[0]], row[1]))
    return Listing(
        class_names,
        paths=tuple(files[name][0] for _, name, _ in rows),
        names=tuple(f"{tree.where}/{name}" for _, name, _ in rows),
        labels=np.array([index[label] for label, _, _ in rows], np.int32),
        parts=np.array([part for _, _, part in rows], np.int8),
        stamps=(),
    )


def _check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    if labels.max(initial=0) >= classes:
        raise ValueError(f"{path} holds label {labels.max()}, but there are {classes} classes")
