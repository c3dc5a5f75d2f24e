"""Unpacks tar and zip archives without trusting their names or sizes.

Only regular files and folders are unpacked, and no name may leave the folder. Bytes are counted as
they arrive, whatever the headers claim.
"""

import bz2
import contextlib
import errno
import functools
import gzip
import lzma
import shutil
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from hsvit_jax.data.images import is_image_name
from hsvit_jax.data.listing import MAX_DEPTH
from hsvit_jax.text import few, one_line

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
MAX_MEMBERS = 5_000_000
_MAX_RATIO = 200  # unpacked over packed; images hardly shrink at all
_FLOOR_BYTES = 1 << 30
_MAX_HEADER_BYTES = 1 << 18
_BLOCK = 1 << 16
#: Errors that the archive causes: a zip's wrong offset, and impossible names.
_OWN_ERRORS = (None, errno.EINVAL, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)

#: A name, a folder's with a slash at its end, and what opens a file (None for others).
_Member = tuple[str, Callable[[], IO[bytes]] | None]


class BadArchive(ValueError):
    """Reports an archive that cannot be used, with the member and the reason."""


class _Bounded:
    """Bounds a tar's bytes; headers have their own limit, because tarfile reads them whole."""

    def __init__(self, file: IO[bytes], check: Callable[[int], None]):
        self._file, self._check, self.tell = file, check, file.tell

    def seek(self, place: int) -> None:
        """Skips to a place; raises BadArchive beyond the limit."""
        self._check(place)
        self._file.seek(place)

    def read(self, size: int) -> bytes:
        """Reads the next bytes; raises BadArchive beyond the limit, ReadError for a long header."""
        if size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        data = self._file.read(size)
        self._check(self._file.tell())
        return data


def unpack(path: Path, folder: Path) -> None:
    """Unpacks a tar (plain, gz, bz2, xz) or zip to ``folder``; warns of links to images."""
    most = max(_FLOOR_BYTES, _MAX_RATIO * path.stat().st_size)
    links: list[str] = []
    name = ""

    def check(size: int) -> None:
        if size > most:
            raise BadArchive(f"{path} unpacks to more than {_MAX_RATIO} times its size; refused")

    try:
        walk = _zip_members if path.name.lower().endswith(".zip") else _tar_members
        for count, (name, opener) in enumerate(walk(path, check)):
            short = one_line(name[:60])
            if count >= MAX_MEMBERS:
                raise BadArchive(f"{path} has more than {MAX_MEMBERS:,} members; refused")
            if name.startswith("/") or ".." in name.split("/"):
                raise BadArchive(f"{path} has a member with the unsafe name {short!r}")
            if name.count("/") > MAX_DEPTH + 2:
                raise BadArchive(f"{path} has more than {MAX_DEPTH} folders in {short}…")
            if name.endswith("/"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            elif opener is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with opener() as source, open(folder / name, "wb") as file:
                    shutil.copyfileobj(source, file, _BLOCK)
            elif is_image_name(name):
                links.append(name)
    except (BadArchive, MemoryError):
        raise
    except Exception as error:  # damage makes the libraries raise nearly anything
        if isinstance(error, OSError) and error.errno not in _OWN_ERRORS:
            raise  # the disk's errors keep their meaning
        why = one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise BadArchive(f"{path} cannot be unpacked at {one_line(name[:60])!r}: {why}") from error
    if links:
        warnings.warn(
            f"links to images in {path} are ignored: {few(links)}; pack the files "
            "themselves: tar --dereference --hard-dereference, or zip without --symlinks",
            stacklevel=2,
        )


def _tar_members(path: Path, check: Callable[[int], None]) -> Iterator[_Member]:
    openers = {"gz": gzip.open, "xz": lzma.open, "z2": bz2.open}
    with openers.get(path.name.lower()[-2:], open)(path, "rb") as raw:
        file = _Bounded(raw, check)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep every member
                if info.issparse():
                    raise NotImplementedError(f"{info.name} is sparse; pack it without --sparse")
                opener = functools.partial(tar.extractfile, info) if info.isreg() else None
                yield f"{info.name}/" if info.isdir() else info.name, opener
            # tarfile takes a damaged header, and the end of a file that was cut off, for the end.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("the end of archive mark is missing")
            while file.read(_BLOCK):
                pass  # the checksum at the end is compared once it is read


def _zip_members(path: Path, check: Callable[[int], None]) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as file:
        check(sum(info.file_size for info in file.infolist()))  # zipfile reads no more of each
        for info in file.infolist():
            name = _zip_name(info)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(  # others are decompressed without a limit
                    f"member {one_line(name)} is neither stored nor deflated"
                )
            link = stat.S_ISLNK(info.external_attr >> 16)
            yield name, None if link else functools.partial(file.open, info)


def _zip_name(info: zipfile.ZipInfo) -> str:
    """Returns a member's name as Windows and macOS mean it."""
    name = info.filename
    if not info.flag_bits & 0x800:  # macOS packs names in UTF-8 without the flag that says so
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    if info.create_system == 0:  # FAT names hold no backslash, so PowerShell packed it
        name = name.replace("\\", "/")
    return name
