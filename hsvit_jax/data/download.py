"""Published files: the copy in the data folder, else a download; always checked.

A host that cannot be reached is reported within ``PROBE_SECONDS``. A download goes to a scratch
folder and takes its name only once its checksum is right.
"""

import hashlib
import os
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from hsvit_jax.data.cache import scratch_folder
from hsvit_jax.data.decode import Progress

PROBE_SECONDS = 10.0
_BLOCK = 1 << 20
_FAILURES = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ValueError)


class DataUnavailable(ValueError):
    """A missing file that cannot be downloaded; the message says where to get and put it."""


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its address, its checksum as 'sha256:…' or 'md5:…', its largest size."""

    url: str
    checksum: str
    max_bytes: int = 1 << 30

    @property
    def name(self) -> str:
        """The file's name, the last part of its address."""
        return self.url.rpartition("/")[2]


def fetch(
    remote: RemoteFile, data_dir: Path, name: str, progress: Progress = lambda *_: None
) -> Path:
    """Finds a verified copy of a file in ``data_dir/name`` or ``data_dir``, else downloads it.

    Args:
      name: of the data set; its folder takes the download.
      progress: called with (stage, bytes received, bytes expected).

    Raises:
      DataUnavailable: no copy and no connection, or the download is not what it should be.
      ValueError: a copy is there whose checksum is wrong; it is left alone.
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
                "then start again; it is then used without a connection. The data set 'digits' is "
                "embedded and needs no download (the argument after the colon: ':digits')."
            ) from error
        os.replace(part, target)
    return target


def find_copy(remote: RemoteFile, data_dir: Path, name: str) -> Path | None:
    """Finds a copy of a file in ``data_dir/name`` or ``data_dir``, of whatever content."""
    places = (data_dir / name / remote.name, data_dir / remote.name)
    return next((path for path in places if path.is_file()), None)


def verify(path: Path, checksum: str, origin: str = "") -> None:
    """Raises ValueError unless a file has the checksum, such as 'md5:…', of the published one."""
    if (digest := digest_of(path, checksum)) != checksum:
        raise ValueError(
            f"{path} is not the published file: its checksum is {digest}, expected {checksum}. "
            f"Remove it to have it downloaded again, or put a good copy there{origin}"
        )


def probe(url: str) -> str | None:
    """Returns None when ``url`` answers within PROBE_SECONDS, else the reason why it does not."""
    try:
        _open(url).close()
    except _FAILURES as error:
        return str(error or type(error).__name__)
    return None


def _open(url: str) -> HTTPResponse:
    """Opens ``url`` under one deadline; name look-up alone can otherwise hang for minutes."""
    answer: Future[HTTPResponse] = Future()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "hsvit_jax"})
            answer.set_result(urllib.request.urlopen(request, timeout=PROBE_SECONDS))
        except Exception as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(PROBE_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"no answer within {PROBE_SECONDS:g} seconds") from None


def _receive(remote: RemoteFile, part: Path, progress: Progress) -> None:
    """Downloads a file to ``part``. Raises ValueError for too many bytes or other ones."""
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


def digest_of(path: Path, checksum: str) -> str:
    """Returns the checksum of a file by the algorithm of another, such as 'md5:…'."""
    algorithm = checksum.partition(":")[0]
    with open(path, "rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
