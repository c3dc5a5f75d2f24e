"""``folder=<path>``: class folders, or an archive of them, as a data set."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax.data import archives
from hsvit_jax.data.cache import cache_folder, publish, scratch_folder
from hsvit_jax.data.dataset import DataInfo
from hsvit_jax.data.decode import Items, Progress, Source, decode_items
from hsvit_jax.data.images import is_image_name, peek, printable, read_file
from hsvit_jax.data.listing import LAYOUT, Listing, Tree, arrange, unpacked_tree, walk

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY_MEAN, _GREY_STD = (0.5,), (0.25,)
_HEADER_BYTES = 1 << 18


@dataclass(frozen=True)
class Request:
    """The arguments of `load`, with the defaults filled in."""

    data_dir: Path
    image_size: tuple[int, int]
    channels: int
    on_bad_image: str
    resident_limit_bytes: int
    progress: Progress | None

    def resident(self, examples: int) -> bool:
        """True if that many images stay within the limit."""
        height, width = self.image_size
        return examples * height * width * self.channels <= self.resident_limit_bytes


def find_listing(path: str, data_dir: Path, progress: Progress | None = None) -> Listing:
    """Lists the classes and files of a folder or archive; an archive is unpacked once.

    Args:
      path: the text after ``folder=``.
      data_dir: folder that an archive is unpacked to.
      progress: see `load`.

    Raises:
      ValueError: nothing there, or a layout that `listing.arrange` refuses.
    """
    found = Path(os.path.expanduser(path))
    # os.path's functions are false for names that the system refuses; Path's may raise.
    if not path or not os.path.exists(found):
        what = printable(path)
        raise ValueError(f"folder={what}: there is no such folder or archive. {LAYOUT}")
    if os.path.isdir(found):
        return arrange(walk(found))
    if not os.path.isfile(found) or not archives.is_archive(found):
        raise ValueError(f"folder={path} is neither a folder nor an archive. {LAYOUT}")
    info = found.stat()
    key = {"archive": os.path.realpath(found), "size": info.st_size, "time": info.st_mtime_ns}
    return arrange(unpack_once(found, found.name, key, data_dir, progress))


def unpack_once(
    path: Path,
    name: str,
    key: dict[str, Any],
    data_dir: Path,
    progress: Progress | None,
    extra: Callable[[str], bool] = lambda member: False,
) -> Tree:
    """Unpacks an archive's image files when they are first asked for.

    The folder ``data_dir/cache/unpacked-…`` may be removed at any time; it is made again.

    Args:
      path: of the archive.
      name: of the folder.
      key: everything that the content depends on.
      data_dir: folder of the cache.
      progress: see `load`.
      extra: true for names of other members that are wanted.

    Raises:
      BadArchive: see `archives.members`.
      ValueError: the folder cannot be written.
    """
    folder = cache_folder(data_dir, f"unpacked-{name}", key)
    try:
        return unpacked_tree(os.fspath(path), folder)
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):  # its index is damaged
        shutil.rmtree(folder, ignore_errors=True)
    if progress is not None:
        progress(f"unpacking {path.name}", 0, 1)
    with scratch_folder(folder) as scratch:
        archives.unpack(path, scratch, lambda member: is_image_name(member) or extra(member))
        publish(scratch, folder)
    if progress is not None:
        progress(f"unpacking {path.name}", 1, 1)
    return unpacked_tree(os.fspath(path), folder)


def describe_folder(name: str, listing: Listing) -> DataInfo:
    """Class names from the layout; size and channels from the headers of a few files.

    The size is the smallest of 32, 64 and 128 that is at least the median shorter side, else 128;
    one channel only if every file peeked at is grey. Mean and std are ImageNet's, or 0.5 and 0.25
    for grey.
    """
    at = 2 ** np.arange(20) - 1  # few, spread over the classes, and always the same ones
    headers = [_header(listing.paths[i]) for i in at[at < len(listing.paths)]]
    known = [header for header in headers if header is not None]
    median = float(np.median([side for side, _ in known])) if known else 128.0
    side = next((size for size in (32, 64, 128) if size >= median), 128)
    grey = bool(known) and all(is_grey for _, is_grey in known)
    return DataInfo(
        name=name,
        image_size=(side, side),
        channels=1 if grey else 3,
        class_names=listing.class_names,
        mean=_GREY_MEAN if grey else IMAGENET_MEAN,
        std=_GREY_STD if grey else IMAGENET_STD,
        flip=True,
    )


def load_listing(
    listing: Listing, name: str, request: Request, key: dict[str, Any] | None = None
) -> Source:
    """Decodes, or streams, the files of a listing.

    ``key`` identifies the content; without one the arrays are used again as long as the same
    files have the same sizes and times.
    """
    resident = request.resident(len(listing.paths))
    if key is None:
        files = [listing.paths, listing.names, listing.parts.tolist(), listing.stamps]
        key = {"files": hashlib.sha256(json.dumps(files).encode()).hexdigest()}

    def read(index: int) -> tuple[bytes, int]:
        return read_file(listing.paths[index]), int(listing.labels[index])

    shape = [*request.image_size, request.channels]
    return decode_items(
        Items(listing.names, listing.parts, read),
        listing.class_names,
        folder=cache_folder(request.data_dir, name, {**key, "shape": shape, "in": resident}),
        image_size=request.image_size,
        channels=request.channels,
        resident=resident,
        on_bad_image=request.on_bad_image,
        progress=request.progress,
    )


def _header(path: str) -> tuple[int, bool] | None:
    try:
        return peek(read_file(path, _HEADER_BYTES))
    except OSError:
        return None  # decoding reports it, with its name
