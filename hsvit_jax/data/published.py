"""Finds the files of named sets: copies in the data folder, else downloads; always checked.

A host that does not answer is reported within ``PROBE_SECONDS``. A download goes to a scratch
folder and is moved into place once its checksum is right.
"""

import dataclasses
import hashlib
import itertools
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from importlib import resources
from pathlib import Path

from hsvit_jax import storage
from hsvit_jax.data.archives import SUFFIXES
from hsvit_jax.data.cache import scratch_folder
from hsvit_jax.data.decode import Progress
from hsvit_jax.data.listing import Tree, walk

PROBE_SECONDS = 10.0
_BLOCK = 1 << 20
_FAILURES = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ValueError)


class DataUnavailable(ValueError):
    """Reports a missing file that cannot be downloaded, and where to get and put it."""


@dataclass(frozen=True)
class RemoteFile:
    """Describes a published file by address, checksum ('sha256:…', 'md5:…') and largest size."""

    url: str
    checksum: str
    max_bytes: int = 1 << 30

    @property
    def name(self) -> str:
        """Returns the file's name, the last part of its address."""
        return self.url.rpartition("/")[2]


#: Set → the files it is published as.
PUBLISHED: dict[str, tuple[RemoteFile, ...]] = {}
#: Set → its forms: the usual folder, and the files in it with their checksums ('' for none).
FORMS: dict[str, list[tuple[str, dict[str, str]]]] = {}
_ARCHIVES: dict[str, str] = {}  # name of an archive → set


def _read_tables() -> None:
    text = (resources.files("hsvit_jax.data") / "published.txt").read_text("utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, place, file, checksum, mebibytes = line.split()
        checksum = checksum.removeprefix("-")
        forms = FORMS.setdefault(name, [])
        if "://" in place:
            remote = RemoteFile(f"{place}/{file}", checksum, int(mebibytes) << 20)
            PUBLISHED[name] = (*PUBLISHED.get(name, ()), remote)
        elif forms and forms[-1][0] == place and any(forms[-1][1].values()) == bool(checksum):
            forms[-1][1][file] = checksum
        else:
            forms.append((place, {file: checksum}))
        if file.endswith(SUFFIXES) and "/" not in name:  # a domain's archive has a common name
            _ARCHIVES[file] = name


_read_tables()


def fetch(
    remote: RemoteFile, data_dir: Path, name: str, progress: Progress = lambda *_: None
) -> Path:
    """Finds a verified copy of a file in ``data_dir/name`` or ``data_dir``, else downloads it.

    A copy with another checksum raises ValueError and stays as it was. A download that fails or has
    another checksum raises DataUnavailable.
    """
    if path := find_copy(remote, data_dir, name):
        verify(path, remote.checksum, f" (from {remote.url})")
        return path
    target = data_dir / name / remote.name
    with scratch_folder(target) as scratch:
        part = scratch / remote.name
        try:
            _receive(remote, part, progress)
        except _FAILURES as error:
            raise DataUnavailable(
                f"{remote.name} could not be downloaded: {error or type(error).__name__}.\n"
                f"Get it from   {remote.url}\n"
                f"and put it at {target}\n"
                "then start again, without a connection. The data set 'digits' is "
                "embedded and needs no download (the argument after the colon: ':digits')."
            ) from error
        os.replace(part, target)
    return target


def find_copy(remote: RemoteFile, data_dir: Path, name: str) -> Path | None:
    """Finds a file of this name in ``data_dir/name`` or ``data_dir``; does not check it."""
    places = (data_dir / name / remote.name, data_dir / remote.name)
    return next((path for path in places if path.is_file()), None)


def verify(path: Path, checksum: str, origin: str = "") -> None:
    """Raises ValueError unless a file has the published checksum, such as 'md5:…'."""
    if (digest := digest_of(path, checksum)) != checksum:
        raise ValueError(
            f"{path} is not the published file: its checksum is {digest}, expected {checksum}. "
            f"Remove it to have it downloaded again, or put a good copy there{origin}"
        )


def digest_of(path: Path, checksum: str) -> str:
    """Returns the checksum of a file by the algorithm of another, such as 'md5:…'."""
    algorithm = checksum.partition(":")[0]
    with open(path, "rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def probe(url: str) -> str | None:
    """Returns None if ``url`` answers within PROBE_SECONDS, else the reason why it does not."""
    try:
        _open(url).close()
    except _FAILURES as error:
        return str(error or type(error).__name__)
    return None


def _open(url: str) -> HTTPResponse:
    """Opens ``url`` under one deadline; name look-up alone can otherwise hang for minutes."""
    request = urllib.request.Request(url, headers={"User-Agent": "hsvit_jax"})
    how = {"timeout": PROBE_SECONDS}
    try:
        return storage.within(PROBE_SECONDS, urllib.request.urlopen, request, **how)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _receive(remote: RemoteFile, part: Path, progress: Progress) -> None:
    """Downloads a file to ``part``; raises ValueError for too many bytes or other ones."""
    with _open(remote.url) as response, open(part, "xb") as out:
        expected, received = int(response.headers.get("Content-Length") or 0), 0
        while block := response.read(_BLOCK):
            received += len(block)
            if max(received, expected) > remote.max_bytes:
                raise ValueError(f"the host offers more than {remote.max_bytes:,} bytes")
            out.write(block)
            progress(f"downloading {remote.name}", received, expected)
    if (digest := digest_of(part, remote.checksum)) != remote.checksum:
        raise ValueError(f"its {received:,} bytes have checksum {digest}, not {remote.checksum}")


@dataclass(frozen=True)
class Found:
    """Holds the folder of a named set in one of its `FORMS`, and its files with their checksums."""

    folder: Path
    checksums: Mapping[str, str]

    def paths(self) -> tuple[list[Path], bool]:
        """Returns the files, and whether all are as published.

        Archives and .gz files may have been packed anew; other wrong files raise ValueError.
        """
        published = True
        for name, checksum in self.checksums.items():
            path = self.folder / name
            published &= bool(checksum) and digest_of(path, checksum) == checksum
            if checksum and not published and not name.endswith((".gz", ".zip")):
                verify(path, checksum)
        return [self.folder / name for name in self.checksums], published

    def identity(self) -> list:
        """Returns place, sizes and times of the files, which differ once a file changes."""
        stats = [(self.folder / name).stat() for name in self.checksums]
        return [[str(self.folder.resolve())], *([s.st_size, s.st_ctime_ns] for s in stats)]

    def tree(self) -> Tree:
        """Returns all image and text files, named as in the archive."""
        tree = walk(self.folder, (".txt", ".json"))
        files = (file._replace(name=f"{self.folder.name}/{file.name}") for file in tree.files)
        return dataclasses.replace(tree, files=tuple(files))


def find(name: str, data_dir: Path) -> Found | None:
    """Finds a named set in `data_dir/name` or `data_dir`, or in the usual folder of either."""
    for usual, checksums in FORMS.get(name, ()):
        for folder in (data_dir / name / usual, data_dir / usual, data_dir / name, data_dir):
            if all((folder / file).is_file() for file in checksums):
                return Found(folder, checksums)
    return None


def refuse_named(root: Path) -> None:
    """Raises ValueError, with the set's name, for a folder or archive that is a named set."""
    root = root.absolute()
    name, data_dir = _ARCHIVES.get(root.name, ""), root.parent
    for base, known in itertools.product((*reversed(root.parents[:2]), root), FORMS):
        found = None if name else find(known, base)
        if found and root in (found.folder, *found.folder.parents):
            name, data_dir = known, base
    if name:
        where = "" if find(name, Path(os.devnull)) else f", with --config.data.dir={data_dir}"
        raise ValueError(
            f"folder={root.name}: this is {name}, which has a name of its own: use :{name} after "
            f"the colon{where}"
        )
