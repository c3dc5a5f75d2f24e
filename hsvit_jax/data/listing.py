"""Listings of image files in a folder or an archive: the classes and splits in their paths."""

import errno
import functools
import os
import re
import stat
import unicodedata
import warnings
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
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

    @functools.cached_property
    def held(self) -> dict[str, set[str]]:
        """Folder with images at any depth → names of such folders in it, and '' for own images."""
        held: dict[str, set[str]] = {}
        for folder in {file.name.rpartition("/")[0] for file in self.files}:
            if folder.count("/") >= MAX_DEPTH:
                raise ValueError(
                    f"{self.where} holds images more than {MAX_DEPTH} folders deep, in "
                    f"{one_line(folder[:60])}…: move them up"
                )
            held.setdefault(folder, set()).add("")
            while folder:
                folder, _, name = folder.rpartition("/")
                if name in (names := held.setdefault(folder, set())):
                    break  # and so has every folder above
                names.add(name)
        return held


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
    prefix = _wrapper(tree)
    tops = _children(tree, prefix)
    splits = _splits(tree, prefix, tops)
    if TRAIN in splits.values():
        groups = _named_splits(tree, prefix, splits)
        unused = [f"{prefix}{name}" for name in sorted(tops - set(splits))]
        if unused := [name for name in unused if name in tree.held]:
            warnings.warn(
                f"{tree.where}: folders beside train are left out: {few(unused)}", stacklevel=2
            )
    else:
        _refuse_splits_as_classes(tree, prefix, tops)
        groups = {UNSPLIT: prefix}
    _tell_folders_within(tree, groups.values())
    by_part = {part: _classes(tree, at) for part, at in groups.items()}
    class_names = tuple(sorted(set().union(*by_part.values())))
    rows = tuple(
        Row(file, label, part)
        for part in sorted(by_part)
        for label, name in enumerate(class_names)
        for file in by_part[part].get(name, ())
    )
    if not rows:
        raise ValueError(f"no images in class folders were found in {tree.where}. {LAYOUT}")
    return Listing(tree.where, class_names, rows)


def _tell_folders_within(tree: Tree, prefixes: Collection[str]) -> None:
    """Warns of classes with several folders of images, of which somebody may think as classes."""
    held: dict[tuple[str, str], set[str]] = {}
    for folder in {file.name.rpartition("/")[0] for file in tree.files}:
        for prefix in filter(folder.startswith, prefixes):
            top, *inner = folder[len(prefix) :].split("/", 2)
            if inner:
                held.setdefault((prefix, top), set()).add(inner[0])
    if deep := sorted(place for place, inner in held.items() if len(inner) > 1):
        warnings.warn(
            f"{tree.where}: folders within a class are no classes: {deep[0][1]} holds "
            f"{few(sorted(held[deep[0]]))}",
            stacklevel=3,
        )


def _splits(tree: Tree, prefix: str, tops: set[str]) -> dict[str, int]:
    """The splits among the top folders: by any spelling where all of them are splits, or where
    train and another hold class folders; else by the exact names, as a class may be called Train.
    """
    spelt = {name: _SPELLINGS[name.lower()] for name in sorted(tops) if name.lower() in _SPELLINGS}
    if set(spelt) == tops:
        return spelt
    held = {name: part for name, part in spelt.items() if len(_held(tree, prefix + name)) > 1}
    several = TRAIN in held.values() and len(set(held.values())) > 1
    return {n: part for n, part in spelt.items() if n in SPLIT_NAMES or (several and n in held)}


def _held(tree: Tree, folder: str) -> set[str]:
    """Names of the folders with images in a folder, or in the only folder that it holds."""
    while len(names := tree.held.get(folder, set())) == 1 and "" not in names:
        folder = f"{folder}/{next(iter(names))}"
    return names - {""}


def _refuse_splits_as_classes(tree: Tree, prefix: str, tops: set[str]) -> None:
    """Refuses splits that are not called so, or without train; warns of a class test."""
    like = [name for name in sorted(tops) if {*re.split("[^a-z]+", name.lower())} & {*_SPELLINGS}]
    held = {name: _held(tree, prefix + name) for name in like}
    held = {name: inner for name, inner in held.items() if len(inner) > 1}
    shared = set.intersection(*held.values()) if len(held) > 1 else ()
    if shared or any(name.lower() in _SPELLINGS for name in held):
        raise ValueError(
            f"{tree.where} holds {few(held)}, which look like splits without train: rename them "
            f"to train, test and val, or take them away. {LAYOUT}"
        )
    if classes := sorted(tops & {*SPLIT_NAMES}):
        warnings.warn(
            f"{tree.where} has no train folder: {few(classes)} is taken for a class", stacklevel=2
        )


def _wrapper(tree: Tree) -> str:
    """The single outer folder, if it looks like a data set and not like a class; else ''."""
    tops = _children(tree, "")
    if len(tops) != 1 or "train" in tops:
        return ""
    outer = f"{next(iter(tops))}/"
    inner = _children(tree, outer)
    is_set = len(inner) > 1 or TRAIN in _splits(tree, outer, inner).values()
    return outer if is_set and "" not in tree.held.get(outer[:-1], ()) else ""


def _children(tree: Tree, prefix: str) -> set[str]:
    """Names of the folders directly below ``prefix``, empty ones included, hidden ones not."""
    below = {name[len(prefix) :].split("/")[0] for name in tree.dirs if name.startswith(prefix)}
    return {name for name in below if name and not name.startswith(HIDDEN)}


def _named_splits(tree: Tree, prefix: str, splits: dict[str, int]) -> dict[int, str]:
    if len(set(splits.values())) < len(splits):
        raise ValueError(f"{tree.where} holds {few(splits)}: keep one folder for each split")
    splits = {n: part for n, part in splits.items() if part == TRAIN or prefix + n in tree.held}
    used = used_as(splits.values())
    return {used[part]: f"{prefix}{name}/" for name, part in splits.items()}


def _classes(tree: Tree, prefix: str) -> dict[str, list[File]]:
    """Files by class name (NFC, so that one name spelled on two systems is one class)."""
    classes = {unicodedata.normalize("NFC", name): [] for name in _children(tree, prefix)}
    loose = []
    for file in tree.files:
        if file.name.startswith(prefix):
            top, slash, _ = file.name[len(prefix) :].partition("/")
            top = unicodedata.normalize("NFC", top)
            if not slash:
                loose.append(file.name)
            elif top in classes:
                classes[top].append(file)
    if loose and classes:
        warnings.warn(
            f"{len(loose)} images of {tree.where} lie in no class folder and are not used, "
            f"{one_line(loose[0])} first",
            stacklevel=2,
        )
    return classes
