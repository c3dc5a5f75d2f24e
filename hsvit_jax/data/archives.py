"""Reads tar and zip archives member by member, never trusting their names or their sizes.

Nothing is extracted by name: regular members are copied, in order, to numbered files, so a
member called ``../evil`` or a link to ``/etc`` has nowhere to go. Such archives are refused all
the same, as something is wrong with them.
"""

import bz2
import contextlib
import errno
import functools
import gzip
import lzma
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hsvit_jax.data.images import BEGINNINGS, HEAD_BYTES, is_image_name
from hsvit_jax.text import few, one_line

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
    """A folder or a regular file of an archive; `blocks` is valid until the next member."""

    name: str
    is_dir: bool
    blocks: Callable[[], Iterator[bytes]]

    def read(self) -> bytes:
        """The member's content."""
        return b"".join(self.blocks())


class _Archive:
    """An archive being read: counts the unpacked bytes and names the member that is damaged."""

    def __init__(self, path: Path):
        self.path = path
        self.member = ""  # the latest
        self.links: list[str] = []  # to images
        self._left = max(_FLOOR_BYTES, _MAX_RATIO * path.stat().st_size)

    def count(self, block: bytes) -> bytes:
        """Counts bytes really unpacked, whatever the headers say, and refuses too many."""
        self._left -= len(block)
        if self._left < 0:
            raise BadArchive(
                f"{self.path} unpacks to more than {_MAX_RATIO} times its size; refused"
            )
        return block

    def blocks(
        self, opener: Callable[[], IO[bytes]], count: Callable[[bytes], bytes] = bytes
    ) -> Iterator[bytes]:
        """Reads a member, block by block; the first is small."""
        size = HEAD_BYTES
        with self.reading(), opener() as file:
            while block := file.read(size):
                yield count(block)
                size = _BLOCK

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turns what the libraries raise for damage, which is nearly anything, into BadArchive."""
        try:
            yield
        except (BadArchive, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # the disk's own errors keep their meaning; a zip's wrong offset is EINVAL
            why = one_line(str(error) or type(error).__name__)
            where = f"{self.path}{self.member and f', at member {one_line(self.member)},'}"
            if isinstance(error, RuntimeError):  # zipfile: encrypted, unknown method
                raise BadArchive(f"{where} cannot be read: {why}") from error
            raise BadArchive(f"{where} is damaged or cut off ({why}); get it again") from error


class _Counted:
    """A decompressed stream whose bytes count; keeps the last block of a tar, which is zeros."""

    def __init__(self, file: IO[bytes], count: Callable[[bytes], bytes]):
        self._file, self._count = file, count
        self.last = b""

    def read(self, size: int) -> bytes:
        """Reads the next bytes."""
        data = self._count(self._file.read(size))
        self.last = (self.last + data)[-tarfile.BLOCKSIZE :]
        return data


class _StrictHeader(tarfile.TarInfo):
    """A tar header that must be valid; tarfile takes a damaged one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Raises ReadError for a damaged header."""
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _SPECIAL and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)


def members(path: Path) -> Iterator[Member]:
    """Walks a tar (plain, gz, bz2, xz) or zip in its own order.

    Yields:
      Folders and regular files; links and devices are left out, images with a warning.

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
    if archive.links:
        warnings.warn(
            f"links to images in {path} are left out: {few(archive.links)}; pack the files "
            "themselves: tar --dereference --hard-dereference, or zip without --symlinks",
            stacklevel=2,
        )


def unpack(path: Path, folder: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Copies images and members of wanted names to numbered files in ``folder``.

    Returns:
      'files', pairs of a member's name and its number, 'dirs', the names of the folders, and
      'others', those of members that are not copied.

    Raises:
      BadArchive: see `members`.
    """
    files: dict[str, str] = {}  # of a name that comes again, as of `tar -r`, the last one counts
    dirs: set[str] = set()
    others: list[str] = []
    count = 0
    for member in members(path):
        if member.is_dir:
            dirs.add(member.name.strip("/"))
            continue
        blocks = member.blocks()
        head = next(blocks, b"")
        if wanted(member.name) or BEGINNINGS.match(head):
            number = f"{count:07d}"
            count += 1
            with open(folder / number, "xb") as file:
                file.write(head)
                file.writelines(blocks)
            if member.name in files:
                (folder / files[member.name]).unlink()
            files[member.name] = number
        else:  # a folder without images has an entry of its own in some archives only
            others.append(member.name)
            dirs.add(member.name.rpartition("/")[0])
    return {"files": list(files.items()), "dirs": sorted(dirs - {""}), "others": others}


def _tar_members(archive: _Archive) -> Iterator[Member]:
    # tarfile's own decompression takes a file that was cut off for one that ends there.
    openers = {"gz": gzip.open, "xz": lzma.open, "z2": bz2.open}
    with openers.get(archive.path.name.lower()[-2:], open)(archive.path, "rb") as file:
        stream = _Counted(file, archive.count)
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictHeader) as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # tarfile remembers every member, for going back
                name = info.name.removeprefix("./")
                if info.issparse():
                    raise NotImplementedError(
                        f"{one_line(name)} is sparse; pack it without --sparse"
                    )
                if info.isdir() or info.isreg():
                    opener = functools.partial(tar.extractfile, info)
                    yield Member(name, info.isdir(), functools.partial(archive.blocks, opener))
                elif is_image_name(name):
                    archive.links.append(name)
        while stream.read(_BLOCK):
            pass  # to the end, so that the checksum there is compared
        if stream.last.strip(b"\0") or len(stream.last) < tarfile.BLOCKSIZE:
            raise EOFError("the end of archive mark is missing")


def _zip_members(archive: _Archive) -> Iterator[Member]:
    with zipfile.ZipFile(archive.path) as file:
        for info in file.infolist():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(  # others are decompressed without a limit
                    f"member {one_line(info.filename)} is neither stored nor deflated"
                )
            name = _zip_name(info)
            if not stat.S_ISLNK(info.external_attr >> 16):
                opener = functools.partial(file.open, info)
                blocks = functools.partial(archive.blocks, opener, archive.count)
                yield Member(name, name.endswith("/"), blocks)
            elif is_image_name(name):
                archive.links.append(name)


def _zip_name(info: zipfile.ZipInfo) -> str:
    """A member's name as Windows and macOS mean it."""
    name = info.filename
    if not info.flag_bits & 0x800:  # macOS packs names in UTF-8 without the flag that says so
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    if info.create_system == 0:  # FAT, where no name can hold a backslash: PowerShell packed it
        name = name.replace("\\", "/")
    return name.removeprefix("./")  # of Windows' tar
