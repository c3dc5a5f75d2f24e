"""Gets one file: from the data folder if it is there, else from its host; always checked.

A host that cannot be reached is reported within ``PROBE_SECONDS``. A download goes to a scratch
folder and takes its name only once its checksum is right.
"""

import hashlib
import os
import queue
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from hsvit_jax.data.cache import scratch_folder
from hsvit_jax.data.decode import Progress

PROBE_SECONDS = 10.0
_BLOCK = 1 << 20


class DataUnavailable(ValueError):
    """A file that is not here and cannot be had; the message says where to get and put it."""


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its name, address, and checksum as 'sha256:…' or 'md5:…'."""

    file: str
    url: str
    checksum: str
    max_bytes: int


def fetch(remote: RemoteFile, data_dir: Path, name: str, progress: Progress | None = None) -> Path:
    """The path of a verified copy of ``remote``, downloaded to ``data_dir/name`` if need be.

    A copy already in ``data_dir/name/`` or ``data_dir/`` is used.

    Raises:
      DataUnavailable: no copy and no connection, or the download is not what it should be.
      ValueError: a copy is there whose checksum is wrong; it is left alone.
    """
    for path in (data_dir / name / remote.file, data_dir / remote.file):
        if path.is_file():
            found = _digest(path, remote.checksum)
            if found != remote.checksum:
                raise ValueError(
                    f"{path} is not the published file: its checksum is {found}, expected "
                    f"{remote.checksum}. Remove it to have it downloaded again, or put a good "
                    f"copy there (from {remote.url})"
                )
            return path
    target = data_dir / name / remote.file
    with _open(remote, target) as response, scratch_folder(target) as scratch:
        part = scratch / target.name
        _receive(response, part, remote, target, progress)
        found = _digest(part, remote.checksum)
        if found != remote.checksum:
            raise _unavailable(
                remote, target, f"what came has checksum {found}, expected {remote.checksum}"
            )
        os.replace(part, target)
    return target


def probe(url: str) -> str | None:
    """None when ``url`` answers within PROBE_SECONDS, else what went wrong."""
    outcome = _request(url)
    if isinstance(outcome, str):
        return outcome
    outcome.close()
    return None


def _open(remote: RemoteFile, target: Path) -> HTTPResponse:
    outcome = _request(remote.url)
    if isinstance(outcome, str):
        raise _unavailable(remote, target, outcome)
    return outcome


def _request(url: str) -> "HTTPResponse | str":
    """Opens ``url`` under one deadline; name look-up alone can otherwise hang for minutes."""
    answers: queue.Queue[HTTPResponse | str] = queue.Queue()
    given_up = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "hsvit_jax"})
            response = urllib.request.urlopen(request, timeout=PROBE_SECONDS)
        except urllib.error.HTTPError as error:
            answers.put(f"the host answers {error.code} {error.reason}")
            error.close()
        except (OSError, HTTPException, ValueError) as error:
            answers.put(str(getattr(error, "reason", None) or error or type(error).__name__))
        else:
            answers.put(response)
            if given_up.is_set():
                response.close()

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=PROBE_SECONDS)
    except queue.Empty:
        given_up.set()
        return f"no answer within {PROBE_SECONDS:g} seconds"


def _receive(
    response: HTTPResponse, part: Path, remote: RemoteFile, target: Path, progress: Progress | None
) -> None:
    expected = int(response.headers.get("Content-Length") or 0)
    if expected > remote.max_bytes:
        raise _unavailable(remote, target, f"the host offers {expected:,} bytes, too many")
    received = 0
    with open(part, "xb") as out:
        while True:
            try:
                block = response.read(_BLOCK)
            except (OSError, HTTPException) as error:
                raise _unavailable(
                    remote, target, f"the connection failed after {received:,} bytes ({error})"
                ) from error
            if not block:
                break
            received += len(block)
            if received > remote.max_bytes:
                raise _unavailable(remote, target, f"more than {remote.max_bytes:,} bytes came")
            out.write(block)
            if progress is not None:
                progress(f"downloading {remote.file}", received, expected or received)
    if received < expected:
        raise _unavailable(
            remote, target, f"the connection ended after {received:,} of {expected:,} bytes"
        )


def _unavailable(remote: RemoteFile, target: Path, why: str) -> DataUnavailable:
    return DataUnavailable(
        f"{remote.file} could not be downloaded: {why}.\n"
        f"Get it from   {remote.url}\n"
        f"and put it at {target}\n"
        "then start again; it is then used without a connection. The data set 'digits' is "
        "embedded and needs no download (the argument after the colon: ':digits')."
    )


def _digest(path: Path, checksum: str) -> str:
    kind = checksum.partition(":")[0]
    with open(path, "rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"
