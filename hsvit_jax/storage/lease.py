"""A lease in an object store, where no file can be locked: one run at a time writes in a folder.

The run that holds it changes the object every few seconds. An object that does not change is of a
run that has died; no clock is compared with another.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

from hsvit_jax.storage import stores

_RENEW, _DEAD = 6.0, 24.0  # seconds between two renewals, and after which a lease is free
_ANSWER = 20.0  # seconds for an answer of the store


class Lease:
    """Context in which this process alone holds the lease of a folder.

    Args:
      url: of the folder.
      store: fsspec's file system.
      path: of the lease in it.

    Raises:
      StorageError: another run holds it, or the object cannot be written.
    """

    def __init__(self, url: str, store: Any, path: str) -> None:
        self._url, self._store, self._path = url, store, path
        self._about = {"run": secrets.token_hex(8), "host": socket.gethostname()}
        self._about |= {"pid": os.getpid(), "machine": _machine()}
        self._ended = threading.Event()
        #: Why this run no longer holds the lease.
        self.failure: stores.StorageError | None = None

    def __enter__(self) -> Self:
        try:
            self._take()
        except stores.StorageError:
            raise
        except Exception as error:  # a library's own, of any kind
            raise stores.explain(self._url, error) from error
        threading.Thread(target=self._renew, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(Exception):  # it frees itself
            self.check()
            stores.within(_ANSWER, self._store.rm_file, self._path)

    def check(self) -> None:
        """Raises StorageError where another run holds the lease by now."""
        found = self._read()
        if found.get("run") != self._about["run"]:
            self.failure = stores.StorageError(
                f"{_name(found)} has taken the lease of {self._url}: let one run end, then start "
                "the other again"
            )
            raise self.failure

    def _take(self) -> None:
        first, since = None, time.monotonic()
        while True:
            with contextlib.suppress(FileExistsError):
                return self._write(0, mode="create")
            found = self._read()
            if found.get("run") == self._about["run"]:  # written by a request that was repeated
                return None
            first = first or found
            if found != first:
                raise stores.StorageError(
                    f"{_name(found)} is using {self._url}: wait for it to end, or choose another "
                    "--workdir"
                )
            if _has_died(found) or time.monotonic() - since > _DEAD:
                with contextlib.suppress(FileNotFoundError):
                    stores.within(_ANSWER, self._store.rm_file, self._path)
            else:
                time.sleep(0.5)

    def _renew(self) -> None:
        beat = 0
        while not self._ended.wait(_RENEW):
            beat += 1
            try:
                self.check()
                self._write(beat)
            except stores.StorageError:
                return
            except Exception:  # an outage, which uploads report
                continue

    def _write(self, beat: int, **options: Any) -> None:
        content = json.dumps(self._about | {"beat": beat}).encode()
        stores.within(_ANSWER, self._store.pipe_file, self._path, content, **options)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(stores.within(_ANSWER, self._store.cat_file, self._path))
            return found if isinstance(found, dict) else {}
        except (FileNotFoundError, ValueError, RecursionError):
            return {}


def _machine() -> str:
    """Names this start of the machine and the container; '' where the system has no names."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _has_died(found: dict[str, Any]) -> bool:
    """Whether the process of a lease was one of this machine, and is gone."""
    here = _machine()
    if not here or found.get("machine") != here or not isinstance(found.get("pid"), int):
        return False
    try:
        os.kill(found["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _name(found: dict[str, Any]) -> str:
    return f"another run, process {found.get('pid')} of {found.get('host')}," if found else "nobody"
