"""Reads class folders, archives of them, and tables, as data sets."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import storage
from hsvit_jax.data import archives, remote
from hsvit_jax.data import listing as listings
from hsvit_jax.data.cache import cache_folder, read_or_build
from hsvit_jax.data.dataset import DataInfo, Source, default_statistics
from hsvit_jax.data.decode import Items, Progress, Request, decode_items
from hsvit_jax.data.images import peek, read_file
from hsvit_jax.data.listing import LAYOUT, Listing, Tree
from hsvit_jax.data.published import refuse_named
from hsvit_jax.text import few, is_printable, one_line


def find_listing(path: str, data_dir: Path, progress: Progress = lambda *_: None) -> Listing:
    """Lists the classes and files of a folder, an archive or shards; archives are unpacked once.

    An archive may lie in an object store.
    """
    root, shards = Path(os.path.expanduser(path)), listings.expand_shards(path)
    # os.path's functions return False for names that the system refuses; Path's may raise.
    there = bool(path) and os.path.exists(root)
    if not there and not storage.is_url(path) and shards == [path]:
        place = "" if root.is_absolute() else " below the current folder"
        raise ValueError(
            f"folder={one_line(path)}: there is no such folder or archive{place}. {LAYOUT}"
        )
    if there or shards == [path]:
        if there:
            refuse_named(root)
        folder = os.path.isdir(root)
        tree = listings.walk(root) if folder else _open_archive(path, data_dir, progress)
        labels = [name for name in tree.others if name.endswith(listings.LABEL_ENDINGS)]
        if folder or tree.dirs or not labels:
            listings.warn_of_others(tree)
            return listings.arrange(tree)
        shards = [path]  # an archive of images and labels in no folder is a shard, too
    if storage.is_url(path) and "{" in path.rpartition("/")[2]:  # several at once
        names = [shard.rpartition("/")[2] for shard in shards]
        remote.fetch_files(storage.whole_url(path).rpartition("/")[0], names, data_dir, progress)
    more = listings.LABEL_ENDINGS
    trees = [_open_archive(shard, data_dir, progress, more) for shard in shards]
    return listings.list_shards(path, trees)


def list_table(
    path: str, data_dir: Path, progress: Progress = lambda *_: None, task: str = "classify"
) -> Listing:
    """Lists the images of a table; fetches both if the table lies in an object store."""
    if not storage.is_url(path):
        return listings.list_csv(path, task=task)
    url = storage.whole_url(path)
    table, version = remote.fetch(url, data_dir, progress)
    record = table.with_name(f".{table.name}.images.json")

    def fetch(names: list[str]) -> None:
        if not record.exists() or json.loads(record.read_text()) != version:
            remote.fetch_files(url.rpartition("/")[0], names, data_dir, progress)
            record.write_text(json.dumps(version))

    return listings.list_csv(os.fspath(table), fetch, task)


def is_there(place: str) -> bool:
    """Returns whether a local folder, archive, table or all shards exist; True for a URL."""
    return storage.is_url(place) or any(
        all(os.path.exists(os.path.expanduser(path)) for path in paths)
        for paths in ([place], listings.expand_shards(place))
    )


def _open_archive(
    place: str, data_dir: Path, progress: Progress, extra_suffixes: tuple[str, ...] = ()
) -> Tree:
    root, name = Path(os.path.expanduser(place)), place.rpartition("/")[2]
    known = name.lower().endswith(archives.SUFFIXES)
    if not (known and (storage.is_url(place) or os.path.isfile(root))):
        raise ValueError(f"folder={one_line(place)} is neither a folder nor an archive. {LAYOUT}")
    if storage.is_url(place):
        root, version = remote.fetch(storage.whole_url(place), data_dir, progress)
        key = {"archive": storage.whole_url(place), "version": version}
    else:
        info, place = root.stat(), os.fspath(root)
        key = {"archive": os.path.realpath(root), "size": info.st_size, "time": info.st_ctime_ns}
    key |= {"labels": extra_suffixes} if extra_suffixes else {}
    return unpack_once(lambda: root, place, name, key, data_dir, progress, extra_suffixes)


def unpack_once(
    archive: Callable[[], Path],
    where: str,
    name: str,
    key: dict[str, Any],
    data_dir: Path,
    progress: Progress,
    extra_suffixes: tuple[str, ...] = (),
) -> Tree:
    """Unpacks an archive into the cache, the first time, and finds its images.

    ``archive`` finds the archive; it is not called if the folder is there. ``where`` is the name
    in messages.
    """
    folder = cache_folder(data_dir, f"unpacked-{name}", key)

    def build(scratch: Path) -> dict[str, Any]:
        path = archive()
        progress(f"unpacking {path.name}", 0, 0)
        (scratch / "files").mkdir()
        archives.unpack(path, scratch / "files")
        return {"files": len(listings.walk(scratch / "files", extra_suffixes).files)}

    for _ in range(2):
        _, notes = read_or_build(folder, build)
        tree = listings.walk(folder / "files", extra_suffixes)
        if len(tree.files) == notes["files"]:
            break
        shutil.rmtree(folder, ignore_errors=True)  # a cleaner of temporary files removed some
    return dataclasses.replace(tree, where=where)


def describe_files(
    name: str, class_names: tuple[str, ...], count: int, read: Callable[[int], bytes]
) -> DataInfo:
    """Describes images by the headers of 20 files, spread evenly; `read(i)` gives a file's bytes.

    The size is the smallest of 32, 64 and 128 that is at least the median shorter side, else 128.
    There is one channel only if all these files are grey.
    """
    if strange := [label for label in class_names if not is_printable(label)]:
        raise ValueError(
            f"{name} has classes whose names are not UTF-8, of several lines or with control "
            f"characters: {few(strange)}; rename them (in a table, look for an open quotation mark)"
        )
    headers = []
    for i in sorted({*np.linspace(0, count - 1, min(count, 20)).astype(int).tolist()}):
        with contextlib.suppress(OSError, ValueError):  # decoding reports it, with its name
            headers.append(peek(read(i)))
    readable = [header for header in headers if header is not None]
    median = float(np.median([side for side, _ in readable])) if readable else 128.0
    side = next((size for size in (32, 64, 128) if size >= median), 128)
    channels = 1 if readable and all(is_grey for _, is_grey in readable) else 3
    mean, std = default_statistics(channels)
    return DataInfo(name, (side, side), channels, class_names, mean, std, flip=True)


def load_listing(
    listing: Listing,
    name: str,
    request: Request,
    key: dict[str, Any] | None = None,
    own: bool = False,
) -> Source:
    """Decodes, or streams, the files of a listing.

    ``key`` identifies the content. By default that are the files' names, sizes and times, and the
    folders that their paths and links resolve to.
    """
    names = [os.path.join(listing.where, row.file.name) for row in listing.rows]
    parts = np.array([row.part for row in listing.rows], np.int8)
    if key is None:
        folders = {os.path.dirname(row.file.path) for row in listing.rows}
        files = json.dumps([sorted(map(os.path.realpath, folders)), names, listing.rows])
        key = {"files": hashlib.sha256(files.encode()).hexdigest()}

    def read(index: int) -> tuple[bytes, int]:
        row = listing.rows[index]
        return read_file(row.file.path), row.label

    items = Items(names, parts, read, own, listing.targets)
    return decode_items(items, listing.class_names, request, name, key)
