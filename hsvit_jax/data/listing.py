"""Lists image files with their classes and splits: of a folder, an archive or a table."""

import contextlib
import csv
import errno
import io
import json
import math
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hsvit_jax.data.dataset import TEST, TRAIN, UNSPLIT, VAL, nfc, number_labels, used_as
from hsvit_jax.data.images import holds_image, is_image_name, read_file
from hsvit_jax.text import few, one_line

SPLIT_NAMES = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
_SPELLINGS = {**SPLIT_NAMES, "training": TRAIN, "testing": TEST}
#: Names that begin like this are skipped: hidden files, and what systems put beside images.
HIDDEN = (".", "@eaDir", "__MACOSX", "Thumbs.db", "ehthumbs", "desktop.ini")
MAX_DEPTH = 100  # nested folders
LAYOUT = (
    "Expected PATH/CLASS/*.jpg, or PATH/train/CLASS/*.jpg with PATH/test/CLASS/*.jpg, "
    "PATH/val/CLASS/*.jpg, both or neither; or a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz of the "
    "same; with two or more classes."
)
_COLUMNS = (("image", "file", "filename", "path", "filepath"), ("label", "class"), ("split",))
_LABEL = "a label (in quotation marks if it has a comma)"
#: The endings of files that hold a sample's label, and the keys of a .json that do.
LABEL_ENDINGS = (".cls", ".json")
_LABEL_KEYS = ("label", "cls", "class", "class_id")
_TABLE_SPLITS = {**SPLIT_NAMES, "": TRAIN}


class File(NamedTuple):
    """Names an image file in its tree and on disk, and holds what shows that it changed.

    Some tools keep mtime (`exiftool -P`), none keeps ctime; renaming and moving change it too.
    """

    name: str
    path: str
    size: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True)
class Tree:
    """Holds a folder's or archive's image files, and the names of its folders and other files."""

    where: str
    files: tuple[File, ...]
    dirs: frozenset[str]
    others: tuple[str, ...] = ()


class Row(NamedTuple):
    """Holds an image file with its label and its part, TRAIN to UNSPLIT."""

    file: File
    label: int
    part: int


@dataclass(frozen=True)
class Listing:
    """Holds image files in a stable order; label ``i`` is ``class_names[i]``.

    A table for another task than classification has ``targets``, float64 (N, K), instead of labels.
    """

    where: str
    class_names: tuple[str, ...]
    rows: tuple[Row, ...]
    targets: np.ndarray | None = None


def walk(root: Path, extra_suffixes: tuple[str, ...] = ()) -> Tree:
    """Finds all image files below ``root``, and those with ``extra_suffixes``.

    Skips hidden names and thumbnails, follows links, and warns of links that lead in a circle.
    """
    files: list[File] = []
    dirs: set[str] = set()
    outer = root.stat()
    loops: list[str] = []
    others: list[str] = []
    stack = [(os.fspath(root), "", frozenset({(outer.st_dev, outer.st_ino)}))]
    while stack:
        path, inside, ancestors = stack.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                name = f"{inside}{entry.name}"
                if entry.name.startswith(HIDDEN):
                    continue
                try:
                    info = entry.stat()
                except OSError as error:  # a link to nowhere; decoding reports an image
                    if is_image_name(entry.name):
                        files.append(File(name, entry.path))
                    else:
                        (loops if error.errno == errno.ELOOP else others).append(name)
                    continue
                identity = (info.st_dev, info.st_ino)
                if not stat.S_ISDIR(info.st_mode):
                    known = is_image_name(entry.name) or entry.name.endswith(extra_suffixes)
                    if known or holds_image(entry.path):
                        files.append(File(name, entry.path, info.st_size, info.st_ctime_ns))
                    else:
                        others.append(name)
                elif identity in ancestors:
                    loops.append(name)
                else:
                    dirs.add(name)
                    stack.append((entry.path, f"{name}/", ancestors | {identity}))
    if loops:
        warnings.warn(
            f"links in {root} that lead in a circle are not followed: {few(sorted(loops))}",
            stacklevel=2,
        )
    return Tree(os.fspath(root), tuple(sorted(files)), frozenset(dirs), tuple(others))


def warn_of_others(tree: Tree) -> None:
    """Warns of files beside images that are no images, counted by their endings."""
    held = {file.name.rpartition("/")[0] for file in tree.files}
    outer = {name.rpartition("/")[0] for name in tree.dirs} - held
    others = [name for name in tree.others if name.rpartition("/")[0] not in outer]
    if others:
        ends = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in others)
        count = few([f"{count:,} {end}" for end, count in ends.most_common()])
        warnings.warn(
            f"{tree.where}: ignored, because they are no readable images: {count}; "
            f"{one_line(min(others)[-80:])} first",
            stacklevel=3,
        )


@dataclass
class _Folder:
    """Holds a folder's own images, those at any depth, and its folders by name."""

    own: list[File] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    folders: dict[str, "_Folder"] = field(default_factory=dict)

    @property
    def held(self) -> dict[str, "_Folder"]:
        """Returns its folders with images."""
        return {name: folder for name, folder in self.folders.items() if folder.files}

    @property
    def classes(self) -> set[str]:
        """Returns the names of its folders with images, looking through single folders."""
        folder = self
        while not folder.own and len(held := folder.held) == 1:
            (folder,) = held.values()
        return {*folder.held}


def _grouped(tree: Tree) -> _Folder:
    """Groups the files of a tree by folder; returns the outer one."""
    top = _Folder()
    for name in sorted(tree.dirs):
        folder = top
        for part in name.split("/"):
            folder = folder.folders.setdefault(part, _Folder())
    for file in tree.files:
        folder, parts = top, file.name.split("/")[:-1]
        if len(parts) > MAX_DEPTH:
            raise ValueError(
                f"{tree.where} holds images in more than {MAX_DEPTH} folders: move them up"
            )
        top.files.append(file)
        for part in parts:
            folder = folder.folders.setdefault(part, _Folder())
            folder.files.append(file)
        folder.own.append(file)
    return top


def arrange(tree: Tree) -> Listing:
    """Finds the classes and splits in the layout of a tree.

    With a ``train`` folder, ``test`` is the test split and ``val`` the validation split; one of
    them alone is the test split. ``Train`` and ``Training`` count too if all folders are splits, or
    if two splits hold class folders. Without ``train`` every folder is a class. A single outer
    folder, which archives have, is looked into. Labels follow the sorted class names.
    """
    top = _grouped(tree)
    if len(top.folders) == 1 and "train" not in top.folders:
        (inner,) = top.folders.values()
        if not inner.own and (len(inner.folders) > 1 or TRAIN in _splits(inner).values()):
            top = inner
    splits = _splits(top)
    if TRAIN in splits.values():
        if len(set(splits.values())) < len(splits):
            raise ValueError(f"{tree.where} holds {few(splits)}: keep one folder for each split")
        if unused := sorted(set(top.held) - set(splits)):
            warnings.warn(
                f"{tree.where}: folders beside train are ignored: {few(unused)}", stacklevel=2
            )
        splits = {n: part for n, part in splits.items() if part == TRAIN or n in top.held}
        used = used_as(splits.values())
        groups = {used[part]: top.folders[name] for name, part in splits.items()}
    else:
        _refuse_splits_as_classes(tree, top)
        groups = {UNSPLIT: top}
    by_part = {part: _classes(tree, groups[part]) for part in sorted(groups)}
    class_names = tuple(sorted(set().union(*by_part.values())))
    rows = tuple(
        Row(file, label, part)
        for part, classes in by_part.items()
        for label, name in enumerate(class_names)
        for file in classes.get(name, ())
    )
    if not rows:
        raise ValueError(f"no images in class folders were found in {tree.where}. {LAYOUT}")
    return Listing(tree.where, class_names, rows)


def _splits(top: _Folder) -> dict[str, int]:
    """Returns the splits among the folders, by any spelling where no class can be meant."""
    names = sorted(top.folders)
    spelt = {name: _SPELLINGS[name.lower()] for name in names if name.lower() in _SPELLINGS}
    if len(spelt) == len(names):
        return spelt
    held = {name: part for name, part in spelt.items() if len(top.folders[name].classes) > 1}
    several = TRAIN in held.values() and len(set(held.values())) > 1
    return {n: part for n, part in spelt.items() if n in SPLIT_NAMES or (several and n in held)}


def _refuse_splits_as_classes(tree: Tree, top: _Folder) -> None:
    """Refuses folders that look like splits without train; warns of a class called test."""
    held = {
        name: classes
        for name, folder in sorted(top.folders.items())
        if {*re.split("[^a-z]+", name.lower())} & {*_SPELLINGS}
        and len(classes := folder.classes) > 1
    }
    shared = set.intersection(*held.values()) if len(held) > 1 else ()
    if shared or any(name.lower() in _SPELLINGS for name in held):
        raise ValueError(
            f"{tree.where} holds {few(held)}, which look like splits without train: rename "
            f"them to train, test and val, or remove them. {LAYOUT}"
        )
    if classes := sorted({*top.folders} & {*SPLIT_NAMES}):
        warnings.warn(
            f"{tree.where} has no train folder: {few(classes)} is taken for a class", stacklevel=2
        )


def _classes(tree: Tree, top: _Folder) -> dict[str, list[File]]:
    """Returns files by class name, in NFC, so that one name from two systems is one class."""
    classes: dict[str, list[File]] = {}
    for name, folder in sorted(top.folders.items()):
        classes.setdefault(nfc(name), []).extend(folder.files)
    deep = {name: folder.held for name, folder in top.folders.items() if len(folder.held) > 1}
    for name in sorted(deep)[:1]:
        warnings.warn(
            f"{tree.where}: folders within a class are no classes: {name} holds "
            f"{few(sorted(deep[name]))}",
            stacklevel=2,
        )
    if top.own and classes:
        warnings.warn(
            f"{len(top.own)} images of {tree.where} lie in no class folder and are not used, "
            f"{one_line(top.own[0].name)} first",
            stacklevel=2,
        )
    return classes


def list_csv(
    path: str, fetch: Callable[[list[str]], None] = lambda _: None, task: str = "classify"
) -> Listing:
    """Lists the images of a table with the columns image and label, and optionally split.

    Paths are relative to the table's folder. Lines that repeat a file, label and split are one.
    ``fetch`` is called with the images' names before their files are used. A label of 'multilabel'
    holds names between semicolons; without that column, and to 'regress', every other column counts
    (0 or 1, or a number).
    """
    table = Path(os.path.expanduser(path))
    try:
        text = io.StringIO(read_file(table).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, skipinitialspace=True)
        head = {name.strip().lower(): name for name in reader.fieldnames or ()}
        images, labels, splits = _COLUMNS
        labels = {"classify": labels, "multilabel": (*labels, "labels"), "regress": ()}[task]
        found = ([head[n] for n in names if n in head] for names in (images, labels, splits))
        columns = [(*names, "")[0] for names in found]
        numbers = [name for name in head.values() if name and name not in columns]
        numbers = [] if columns[1] or task == "classify" else numbers
        if not columns[0] or not (columns[1] or numbers):
            wanted = "label" if labels else "one or more of numbers"
            raise ValueError(f"it needs the columns image and {wanted}; it has {few(head)}")
        lines = []
        for cells in reader:
            image, label, split = ((cells.get(name) or "").strip() for name in columns)
            row: Any = nfc(label) if task == "classify" else _row(cells, label, numbers)
            if (
                not (image and (row or task != "classify"))
                or (numbers and not row)
                or (task == "multilabel" and numbers and not {*row} <= {0, 1})
                or any(cells.get(None, ()))
                or split.lower() not in _TABLE_SPLITS
            ):
                kind = "a number" if task == "regress" else "0 or 1"
                what = f"{kind} in {few(numbers)}" if numbers else _LABEL
                raise ValueError(
                    f"line {reader.line_num} must have an image, {what} and no split but "
                    f"{few(SPLIT_NAMES)}; got {few((image, label or row, split))}"
                )
            lines.append((image, row, split.lower()))
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"csv={one_line(path)} cannot be read: {error}") from None
    if unread := [name for name in head.values() if name and name not in (*columns, *numbers)]:
        warnings.warn(f"csv={path}: columns not read: {few(unread)}", stacklevel=2)
    blank = sum(not split for *_, split in lines)
    if 0 < blank < len(lines):
        warnings.warn(
            f"csv={path}: {blank:,} of {len(lines):,} lines have a blank split and count as train",
            stacklevel=2,
        )
    several = [row for _, row, _ in lines] if task != "classify" else [[x] for _, x, _ in lines]
    listed = sorted({name for row in several for name in row}) if columns[1] else numbers
    names = tuple(nfc(name.strip()) for name in listed)
    number = {name: i for i, name in enumerate(names)}
    used = used_as({_TABLE_SPLITS[split] for *_, split in lines})
    rows: dict[Any, tuple[Row, Any]] = {}
    fetch([image for image, *_ in lines])
    for image, label, split in lines:
        file = os.fspath(table.parent / image)
        info = os.stat(file) if os.path.isfile(file) else None  # decoding reports a missing one
        stamp = (info.st_size, info.st_ctime_ns) if info else ()
        place = number[label] if task == "classify" else 0
        row = Row(File(image, file, *stamp), place, used[_TABLE_SPLITS[split]])
        rows.setdefault((os.path.abspath(file), label, row.part), (row, label))
    found = tuple(row for row, _ in rows.values())
    if task == "classify":
        return Listing(os.fspath(table.parent), names, found)
    targets = [[n in row for n in names] if columns[1] else row for _, row in rows.values()]
    targets = np.array(targets, np.float64).reshape(len(rows), len(names))
    return Listing(os.fspath(table.parent), names, found, targets)


def _row(cells: Mapping[str, str], label: str, numbers: Sequence[str]) -> tuple[Any, ...]:
    """Returns a line's labels, sorted, or its finite numbers; () if one of these is none."""
    if not numbers:
        return tuple(sorted({nfc(name) for name in map(str.strip, label.split(";")) if name}))
    try:
        found = tuple(float(cells[name]) for name in numbers)
    except (TypeError, ValueError):
        return ()
    return found if all(map(math.isfinite, found)) else ()


def expand_shards(place: str) -> list[str]:
    """Returns the names that braces stand for, as in WebDataset.

    >>> expand_shards("photos-{008..010}.tar")
    ['photos-008.tar', 'photos-009.tar', 'photos-010.tar']
    """
    found = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", place)
    if not found:
        return [place]
    start, first, last, end = found.groups()
    return [f"{start}{i:0{len(first)}}{end}" for i in range(int(first), int(last) + 1)]


def list_shards(place: str, trees: Sequence[Tree]) -> Listing:
    """Lists the samples of WebDataset shards: an image, and a .cls or .json with its label.

    Labels that are all whole numbers number the classes from 0; others are names.
    """
    samples = []
    for tree in trees:
        by_key: dict[str, dict[str, File]] = {}
        for file in tree.files:
            folder, _, name = file.name.rpartition("/")
            key, _, ending = name.partition(".")
            by_key.setdefault(f"{folder}/{key}", {})[f".{ending.lower()}"] = file
        shard = tree.where.rpartition("/")[2]
        for files in by_key.values():
            images = [files[end] for end in sorted(files, key=len) if is_image_name(f"a{end}")]
            for file in images[:1]:  # others are masks and the like
                samples.append((file._replace(name=f"{shard}/{file.name}"), _read_label(files)))
    labels = [label for _, label in samples]
    if not all(labels) or not labels:
        bad = [file.name for file, label in samples if not label]
        raise ValueError(
            f"folder={place}: {len(bad):,} of {len(samples):,} images have no label in a .cls or "
            f".json file beside them: {few(bad)}"
        )
    labels = [*map(int, labels)] if all(map(str.isdecimal, labels)) else labels
    names, numbers = number_labels(labels)
    pairs = zip(samples, numbers.tolist(), strict=True)
    rows = tuple(Row(file, number, UNSPLIT) for (file, _), number in pairs)
    return Listing(os.path.dirname(place), names, rows)


def _read_label(files: dict[str, File]) -> str:
    """Returns the label in a sample's files, '' if there is none."""
    for ending in LABEL_ENDINGS:
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
            text = Path(files[ending].path).read_text("utf-8")
            if ending == ".json":
                held = json.loads(text)
                text = next((str(held[key]) for key in _LABEL_KEYS if key in held), "")
            return text.strip()
    return ""
