"""Reads tar and zip archives member by member, never trusting their names or their sizes.

Nothing is extracted by name: regular members are copied, in order, to numbered files, so a
member called ``../evil`` or a link to ``/etc`` has nowhere to go. Such archives are refused all
the same, as something is wrong with them.
"""

import bz2
import contextlib
import gzip
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hsvit_jax.data.images import printable

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
MAX_MEMBERS = 5_000_000
_MAX_RATIO = 200  # unpacked over packed; images hardly shrink at all
_FLOOR_BYTES = 1 << 30
_MAX_HEADER_BYTES = 1 << 18
_BLOCK = 1 << 20
# The headers that tarfile reads whole: attributes and long names of the member that follows.
_SPECIAL = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class BadArchive(ValueError):
    """An archive that cannot be used; the message names it, the member, and the reason."""


@dataclass(frozen=True)
class Member:
    """A folder or a regular file of an archive; ``read`` is valid until the next member."""

    name: str
    is_dir: bool
    read: Callable[[], bytes]
    copy_to: Callable[[Path], None]


class _Archive:
    """An archive being read: counts the bytes unpacked, and says where it is damaged."""

    def __init__(self, path: Path):
        self.path = path
        self.member = ""  # the latest
        self._left = max(_FLOOR_BYTES, _MAX_RATIO * path.stat().st_size)

    def spend(self, count: int) -> None:
        """Counts bytes really unpacked, whatever the headers say.

        Raises:
          BadArchive: there are too many.
        """
        self._left -= count
        if self._left < 0:
            raise BadArchive(
                f"{self.path} unpacks to more than {_MAX_RATIO} times its size; refused"
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turns what the libraries raise for damage, which is nearly anything, into BadArchive."""
        try:
            yield
        except (BadArchive, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's own errors keep their meaning
            why = printable(str(error) or type(error).__name__)
            at = f", at member {printable(self.member)}," if self.member else ""
            where = f"{self.path}{at}"
            if isinstance(error, RuntimeError):  # zipfile: encrypted, unknown method
                raise BadArchive(f"{where} cannot be read: {why}") from error
            raise BadArchive(f"{where} is damaged or cut off ({why}); get it again") from error


class _Decompressed:
    """A tar's decompressed bytes: counted, and its last block, zeros in a whole tar, kept."""

    def __init__(self, file: IO[bytes], archive: _Archive):
        self._file = file
        self._archive = archive
        self.last = b""

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data = self._file.read(size)
        self._archive.spend(len(data))
        self.last = (self.last + data)[-tarfile.BLOCKSIZE :]
        return data


class _StrictHeader(tarfile.TarInfo):
    """A tar header that is right; tarfile takes a damaged one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        """Raises ReadError for a damaged header, or one that is too long."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise NotImplementedError("it has a sparse member; pack it without --sparse")
        if header.type in _SPECIAL and header.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        return header


def is_archive(path: Path) -> bool:
    """True for the name of an archive that `members` reads."""
    return path.name.lower().endswith(SUFFIXES)


def members(path: Path) -> Iterator[Member]:
    """Walks a tar (plain, gz, bz2, xz) or zip in its own order.

    Yields:
      Folders and regular files; links and devices are left out.

    Raises:
      BadArchive: a damaged or encrypted archive, unsafe names, or too much in it; reading and
        copying a member raise it too.
    """
    archive = _Archive(path)
    with archive.reading():
        walk = _zip_members if path.name.lower().endswith(".zip") else _tar_members
        for count, member in enumerate(walk(archive)):
            if count >= MAX_MEMBERS:
                raise BadArchive(f"{path} has more than {MAX_MEMBERS:,} members; refused")
            parts = member.name.split("/")
            if member.name.startswith("/") or ".." in parts or "\0" in member.name:
                raise BadArchive(f"{path} has a member with the unsafe name {member.name!r}")
            archive.member = member.name
            yield member


def unpack(path: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Copies wanted members to numbered files in ``folder``, with ``index.json`` naming them.

    Raises:
      BadArchive: see `members`.
    """
    files: list[tuple[str, str]] = []
    dirs: list[str] = []
    for member in members(path):
        if member.is_dir:
            dirs.append(member.name.strip("/"))
        elif wanted(member.name):
            name = f"{len(files):07d}"
            member.copy_to(folder / name)
            files.append((member.name, name))
    index = {"files": files, "dirs": dirs}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _tar_members(archive: _Archive) -> Iterator[Member]:
    # tarfile's own decompression takes a file that was cut off for one that ends there.
    openers = {"gz": gzip.open, "xz": lzma.open, "z2": bz2.open}
    with openers.get(archive.path.name.lower()[-2:], open)(archive.path, "rb") as file:
        stream = _Decompressed(file, archive)
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictHeader) as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # tarfile remembers every member, for going back
                name = info.name.removeprefix("./")
                if info.isdir():
                    yield _folder(name)
                elif info.issparse():  # as PAX headers say it
                    raise NotImplementedError(f"member {printable(name)} is sparse")
                elif info.isreg():
                    yield _file(archive, name, lambda info=info: tar.extractfile(info))
        while stream.read(_BLOCK):
            pass  # to the end, so that the checksum there is compared
        if stream.last.strip(b"\0") or len(stream.last) < tarfile.BLOCKSIZE:
            raise EOFError("the end of archive mark is missing")


def _zip_members(archive: _Archive) -> Iterator[Member]:
    with zipfile.ZipFile(archive.path) as file:
        for info in file.infolist():
            if info.is_dir():
                yield _folder(info.filename)
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(  # others are decompressed without a limit
                    f"member {printable(info.filename)} is neither stored nor deflated"
                )
            else:
                opener = lambda info=info: file.open(info)  # noqa: E731
                yield _file(archive, info.filename, opener, archive.spend)


def _folder(name: str) -> Member:
    def refuse(*_: object) -> None:
        raise IsADirectoryError(name)

    return Member(name, True, refuse, refuse)


def _file(
    archive: _Archive,
    name: str,
    opener: Callable[[], IO[bytes]],
    spend: Callable[[int], None] = lambda count: None,
) -> Member:
    def blocks() -> Iterator[bytes]:
        with opener() as file:
            while block := file.read(_BLOCK):
                spend(len(block))
                yield block

    def read() -> bytes:
        with archive.reading():
            return b"".join(blocks())

    def copy_to(target: Path) -> None:
        with archive.reading(), open(target, "xb") as out:
            for block in blocks():
                out.write(block)

    return Member(name, False, read, copy_to)
