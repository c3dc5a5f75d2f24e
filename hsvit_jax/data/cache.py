"""Decoded arrays on disk: a folder of ``.npy`` files that is whole and right, or not used at all.

A folder's name holds a digest of everything its content depends on. It is written under another
name and moved into place; on reading, a CRC-32 of every array and a SHA-256 of the notes must
agree, or the folder is removed and built again. Nothing in it can run code.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_FORMAT = 1  # raise it when the image rules or the layout change: older folders are then unused


def cache_folder(data_dir: Path, name: str, key: dict[str, Any]) -> Path:
    """Where the arrays of ``name`` made under exactly these conditions lie."""
    body = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    slug = "".join(c if c.isalnum() and c.isascii() else "-" for c in name)[:40]
    return data_dir / "cache" / f"{slug}-{hashlib.sha256(body.encode()).hexdigest()[:24]}"


def read_cache(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Memory-mapped arrays and notes, or None where there are none that can be trusted."""
    if not folder.is_dir():
        return None
    try:
        wrapped = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
        body = wrapped["body"]
        if hashlib.sha256(body.encode()).hexdigest() != wrapped["sha256"]:
            raise ValueError("notes.json does not match its checksum")
        notes = json.loads(body)
        arrays = {}
        for name, crc in notes["crc32"].items():
            array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            if _crc(folder / f"{name}.npy") != crc:
                raise ValueError(f"{name}.npy does not match its checksum")
            arrays[name] = array
        return arrays, notes["notes"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        warnings.warn(
            f"the cached arrays in {folder} are damaged ({error}); they are built again",
            stacklevel=2,
        )
        shutil.rmtree(folder, ignore_errors=True)
        return None


@contextlib.contextmanager
def building(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Gives a scratch folder for ``.npy`` files and a dict for notes; publishes both on success.

    Raises:
      ValueError: the data folder cannot be written.
    """
    scratch = scratch_folder(folder)
    try:
        notes: dict[str, Any] = {}
        yield scratch, notes
        crc32 = {path.stem: _crc(path) for path in sorted(scratch.glob("*.npy"))}
        body = json.dumps({"crc32": crc32, "notes": notes})
        wrapped = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}
        (scratch / "notes.json").write_text(json.dumps(wrapped), encoding="utf-8")
        publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def scratch_folder(target: Path) -> Path:
    """A new empty folder beside ``target``, so that a rename can put it in place."""
    scratch = target.parent / f".{target.name}.part-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"cannot write to {target.parent} ({error.strerror}); choose another data folder "
            "with data_dir (config key data.dir) or the variable HSVIT_DATA_DIR"
        ) from error
    return scratch


def publish(scratch: Path, target: Path) -> None:
    """Renames a finished folder into place; one that another process put there first stays."""
    try:
        os.replace(scratch, target)
    except OSError:
        if not target.is_dir():
            raise


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
