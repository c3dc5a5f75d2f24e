"""Listings of image files in a folder or an archive: the classes and splits in their paths."""

import errno
import os
import re
import stat
import unicodedata
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hsvit_jax.data.dataset import TEST, TRAIN, UNSPLIT, VAL, used_as
from hsvit_jax.data.images import holds_image, is_image_name
from hsvit_jax.text import few, one_line

SPLIT_NAMES = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
_SPELLINGS = {**SPLIT_NAMES, "training": TRAIN, "testing": TEST}
#: What names begin with that are passed over: hidden ones, and what systems put beside images.
HIDDEN = (".", "@eaDir", "__MACOSX", "Thumbs.db", "ehthumbs", "desktop.ini")
MAX_DEPTH = 100  # of folders within each other
LAYOUT = (
    "Expected PATH/CLASS/*.jpg, or PATH/train/CLASS/*.jpg with PATH/test/CLASS/*.jpg, "
    "PATH/val/CLASS/*.jpg, both or neither; or a .zip, .tar, .tar.gz, .tar.bz2 or .tar.xz of the "
    "same; with two or more classes."
)


class File(NamedTuple):
    """An image file: its name in the tree, its path on disk, and what shows that it changed.

    A new name or place changes ctime too, and tools that keep mtime (`exiftool -P`) cannot keep it.
    """

    name: str
    path: str
    size: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True)
class Tree:
    """The image files of a folder or archive, and the names of its folders and other files."""

    where: str
    files: tuple[File, ...]
    dirs: frozenset[str]
    others: tuple[str, ...] = ()


class Row(NamedTuple):
    """An image file with its label and the part, TRAIN to UNSPLIT, that it was found in."""

    file: File
    label: int
    part: int


@dataclass(frozen=True)
class Listing:
    """The image files of a tree in a stable order; label ``i`` is ``class_names[i]``."""

    where: str
    class_names: tuple[str, ...]
    rows: tuple[Row, ...]


def walk(root: Path, extra_suffixes: tuple[str, ...] = ()) -> Tree:
    """Finds all image files below ``root``, and those with ``extra_suffixes``; hidden names and
    thumbnails are passed over, links followed.

    Links that lead back to a folder they are in, or to themselves, are left out with a warning.
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


def tell_others(tree: Tree) -> None:
    """Warns of files that are no images, by their endings; not of those beside folders alone."""
    held = {file.name.rpartition("/")[0] for file in tree.files}
    outer = {name.rpartition("/")[0] for name in tree.dirs} - held
    others = [name for name in tree.others if name.rpartition("/")[0] not in outer]
    if others:
        ends = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in others)
        count = few([f"{count:,} {end}" for end, count in ends.most_common()])
        warnings.warn(
            f"{tree.where}: left out, as they are no images that can be read: {count}; "
            f"{one_line(min(others)[-80:])} first",
            stacklevel=3,
        )


@dataclass
class _Folder:
    """A folder: the images in it, those at any depth, and its folders by name."""

    own: list[File] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    folders: dict[str, "_Folder"] = field(default_factory=dict)

    @property
    def held(self) -> dict[str, "_Folder"]:
        """Its folders with images."""
        return {name: folder for name, folder in self.folders.items() if folder.files}

    @property
    def classes(self) -> set[str]:
        """Names of the folders with images in it, or in the only folder that it holds."""
        folder = self
        while not folder.own and len(held := folder.held) == 1:
            (folder,) = held.values()
        return {*folder.held}


def _grouped(tree: Tree) -> _Folder:
    """The outer folder of a tree."""
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

    With a ``train`` folder: ``test`` is the test split and ``val`` the validation split. If only
    one of them is there, it is the test split, and validation is to be held out of train. If
    neither is there, train is to be split. Where no other folders are beside them, or two of them
    hold class folders, they may be spelt ``Train`` or ``Training`` too. Without ``train``, every
    folder is a class. A single outer folder, as archives have, is looked into. Labels follow the
    sorted class names.

    Raises:
      ValueError: nothing found, or folders that look like splits and would become classes.
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
                f"{tree.where}: folders beside train are left out: {few(unused)}", stacklevel=2
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
    """The splits among the folders: by any spelling where all of them are splits, or where train
    and another hold class folders; else by the exact names, as a class may be called Train.
    """
    names = sorted(top.folders)
    spelt = {name: _SPELLINGS[name.lower()] for name in names if name.lower() in _SPELLINGS}
    if len(spelt) == len(names):
        return spelt
    held = {name: part for name, part in spelt.items() if len(top.folders[name].classes) > 1}
    several = TRAIN in held.values() and len(set(held.values())) > 1
    return {n: part for n, part in spelt.items() if n in SPLIT_NAMES or (several and n in held)}


def _refuse_splits_as_classes(tree: Tree, top: _Folder) -> None:
    """Refuses splits that are not called so, or without train; warns of a class test."""
    held = {
        name: classes
        for name, folder in sorted(top.folders.items())
        if {*re.split("[^a-z]+", name.lower())} & {*_SPELLINGS}
        and len(classes := folder.classes) > 1
    }
    shared = set.intersection(*held.values()) if len(held) > 1 else ()
    if shared or any(name.lower() in _SPELLINGS for name in held):
        raise ValueError(
            f"{tree.where} holds {few(held)}, which look like splits without train: rename them "
            f"to train, test and val, or take them away. {LAYOUT}"
        )
    if classes := sorted({*top.folders} & {*SPLIT_NAMES}):
        warnings.warn(
            f"{tree.where} has no train folder: {few(classes)} is taken for a class", stacklevel=2
        )


def _classes(tree: Tree, top: _Folder) -> dict[str, list[File]]:
    """Files by class name (NFC, so that one name spelled on two systems is one class)."""
    classes: dict[str, list[File]] = {}
    for name, folder in sorted(top.folders.items()):
        classes.setdefault(unicodedata.normalize("NFC", name), []).extend(folder.files)
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
