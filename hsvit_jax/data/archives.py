"""Reads tar and zip archives member by member, never trusting their names or their sizes.

Nothing is extracted by name: regular members are copied, in order, to numbered files, so a
member called ``../evil`` or a link to ``/etc`` has nowhere to go. Such archives are refused all
the same, as something is wrong with them.
"""

import bz2
import gzip
import json
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
MAX_MEMBERS = 5_000_000
_MAX_RATIO = 200  # unpacked over packed; images hardly shrink at all
_FLOOR_BYTES = 1 << 30
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Member:
    """A folder or a regular file of an archive; ``open()`` is valid until the next member."""

    name: str
    is_dir: bool
    read: Callable[[], bytes]
    copy_to: Callable[[Path], None]


class _Budget:
    """Counts the bytes that really come out, whatever the headers say."""

    def __init__(self, archive: Path):
        self.archive = archive
        self.left = max(_FLOOR_BYTES, _MAX_RATIO * archive.stat().st_size)

    def blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        while block := file.read(_BLOCK):
            self.left -= len(block)
            if self.left < 0:
                raise ValueError(
                    f"{self.archive} unpacks to more than {_MAX_RATIO} times its size; refused"
                )
            yield block


def is_archive(path: Path) -> bool:
    """Whether the file's name is that of an archive we read."""
    return path.name.lower().endswith(SUFFIXES)


def members(path: Path) -> Iterator[Member]:
    """Folders and regular files of a tar (plain, gz, bz2, xz) or zip, in the archive's order.

    Raises:
      ValueError: a damaged or encrypted archive, unsafe names, or too much in it.
    """
    budget = _Budget(path)
    try:
        walk = _zip_members if path.name.lower().endswith(".zip") else _tar_members
        for count, member in enumerate(walk(path, budget)):
            if count >= MAX_MEMBERS:
                raise ValueError(f"{path} has more than {MAX_MEMBERS:,} members; refused")
            parts = member.name.split("/")
            if member.name.startswith("/") or ".." in parts or "\0" in member.name:
                raise ValueError(f"{path} has a member with the unsafe name {member.name!r}")
            yield member
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}); get it again") from error
    except (RuntimeError, NotImplementedError) as error:  # zipfile: encrypted, unknown method
        raise ValueError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        if error.errno is not None:  # the disk's own errors keep their meaning
            raise
        raise ValueError(f"{path} is damaged or cut off ({error}); get it again") from error


def unpack(path: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Copies wanted members to numbered files in ``folder``, with ``index.json`` naming them."""
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


def _tar_members(path: Path, budget: _Budget) -> Iterator[Member]:
    # tarfile's own decompression takes a file that was cut off for one that ends there.
    name = path.name.lower()
    openers = {"gz": gzip.open, "xz": lzma.open, "z2": bz2.open}
    with openers.get(name[-2:], open)(path, "rb") as file:
        tail = _Tail(file)
        with tarfile.open(fileobj=tail, mode="r|") as tar:
            for info in tar:
                name = info.name.removeprefix("./")
                if info.isdir():
                    yield _folder(name)
                elif info.isreg():
                    yield _file(name, lambda info=info: tar.extractfile(info), budget)
        for _ in budget.blocks(tail):
            pass  # to the end, so that the checksum there is compared
        if tail.last.strip(b"\0") or len(tail.last) < tarfile.BLOCKSIZE:
            raise EOFError("the end of archive mark is missing")


class _Tail:
    """Passes reads on and remembers the last block, which ends a whole tar with zeros."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.last = b""

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.last = (self.last + data)[-tarfile.BLOCKSIZE :]
        return data


def _zip_members(path: Path, budget: _Budget) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                yield _folder(info.filename)
            else:
                yield _file(info.filename, lambda info=info: archive.open(info), budget)


def _folder(name: str) -> Member:
    def refuse(*_: object) -> None:
        raise IsADirectoryError(name)

    return Member(name, True, refuse, refuse)


def _file(name: str, opener: Callable[[], IO[bytes]], budget: _Budget) -> Member:
    def read() -> bytes:
        with opener() as file:
            return b"".join(budget.blocks(file))

    def copy_to(target: Path) -> None:
        with opener() as file, open(target, "xb") as out:
            for block in budget.blocks(file):
                out.write(block)

    return Member(name, False, read, copy_to)


def remove(folder: Path) -> None:
    """Removes an unpacked folder."""
    shutil.rmtree(folder, ignore_errors=True)
