"""Caches decoded and unpacked data in folders, which are checked whenever they are read.

A folder's name has a digest of everything its content depends on. It is written under another name
and moved into place. On reading, the CRC-32 of every ``.npy`` array and the SHA-256 of the notes
must agree, or the folder is built again. Nothing in it can run code.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_DAY = 86400.0  # seconds
_FORMAT = 5  # raise it when the image rules or the layout change; older folders are then unused


def cache_folder(data_dir: Path, name: str, key: dict[str, Any]) -> Path:
    """Returns the path of the cached arrays of ``name`` with exactly this ``key``."""
    body = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    slug = "".join(c if c.isalnum() and c.isascii() else "-" for c in name)[:40]
    return data_dir / "cache" / f"{slug}-{hashlib.sha256(body.encode()).hexdigest()[:24]}"


_OTHER_FOLDER = (
    "choose another data folder with data_dir (config key data.dir) or the variable HSVIT_DATA_DIR"
)


def read_or_build(
    folder: Path, build: Callable[[Path], dict[str, Any]], advice: str = _OTHER_FOLDER
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the arrays, memory-mapped, and the notes of a folder from `cache_folder`.

    If it is missing or damaged, ``build`` first writes files to a scratch folder, arrays as
    ``.npy``, and returns the notes, JSON. ``advice`` is the fix if the folder cannot be written.
    """
    cached = _read(folder)
    if cached is None:
        with scratch_folder(folder, advice) as scratch:
            notes = build(scratch)
            crc32 = {path.stem: _crc(path) for path in sorted(scratch.glob("*.npy"))}
            body = json.dumps({"crc32": crc32, "notes": notes})
            sealed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}
            (scratch / "notes.json").write_text(json.dumps(sealed), encoding="utf-8")
            try:
                os.replace(scratch, folder)
            except OSError:
                if not folder.is_dir():  # another process was first, and its folder stays
                    raise
        cached = _read(folder)
    if cached is None:
        raise OSError(f"the files just written to {folder} cannot be read back")
    return cached


def _read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Reads a folder; returns None if there is none, or removes a damaged one."""
    if not folder.is_dir():
        return None
    try:
        sealed = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
        if hashlib.sha256(sealed["body"].encode()).hexdigest() != sealed["sha256"]:
            raise ValueError("notes.json does not match its checksum")
        body = json.loads(sealed["body"])
        arrays = {}
        for name, crc in body["crc32"].items():
            path = folder / f"{name}.npy"
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            if _crc(path) != crc:
                raise ValueError(f"{path.name} does not match its checksum")
        return arrays, body["notes"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        warnings.warn(
            f"the cached files in {folder} are damaged ({error}); they are built again",
            stacklevel=3,
        )
        shutil.rmtree(folder, ignore_errors=True)
        return None


def new_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Makes a writable memory-mapped ``.npy`` file of zeros, and reserves its space on the disk.

    Otherwise a full disk ends the process by SIGBUS. macOS has no such call.
    """
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array


@contextlib.contextmanager
def scratch_folder(target: Path, advice: str = _OTHER_FOLDER) -> Iterator[Path]:
    """Makes an empty folder beside ``target``, which a rename can put in place.

    It is locked while this process lives, and removed at the end unless it was renamed. A folder
    that cannot be written and a full disk raise ValueError.
    """
    scratch = lock = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent)
        scratch, lock = _locked_folder(target)
        yield scratch
    except OSError as error:
        if scratch is not None and error.errno not in _DISK_FULL:
            raise
        raise ValueError(f"cannot write to {target.parent} ({error.strerror}); {advice}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked_folder(target: Path) -> tuple[Path, int | None]:
    while True:
        scratch = target.parent / f".{target.name}.part-{_HOST}-{secrets.token_hex(6)}"
        scratch.mkdir()
        try:
            return scratch, _lock(scratch)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process removed it as abandoned before it was locked
        except OSError:  # on a file system without locks nothing counts as abandoned
            return scratch, None


def remove_abandoned(folder: Path) -> None:
    """Removes scratch folders of killed processes from ``folder``; live ones are locked.

    Some network file systems do not show other hosts' locks, so their folders stay for a day.
    """
    for path in folder.glob(".*.part-*"):
        with contextlib.suppress(OSError):
            own = f".part-{_HOST}-" in path.name
            if not own and time.time() - path.stat().st_mtime < _DAY:
                continue
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed; raises OSError if it cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
