"""Fetches data from object stores into the cache, once per host.

A fetch resumes where an earlier one was cut off. The size and the checksum that the store states
must agree, and a record beside the file names the version of the object.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hsvit_jax import storage
from hsvit_jax.data.decode import Progress
from hsvit_jax.text import few

_BLOCK = 8 << 20
_TRIES = 5
_ANSWER_SECONDS, _BLOCK_SECONDS = 25.0, 120.0


def fetch(
    url: str, data_dir: Path, progress: Progress = lambda *_: None, root: str = ""
) -> tuple[Path, list]:
    """Fetches an object into the cache, unless this version of it is there.

    Returns the local file and what identifies the version: its size, and a checksum or a time.
    Files below ``root``, the URL of a folder, keep their places. StorageError names what fails.
    """
    root = root or url.rpartition("/")[0]
    target = local_folder(root, data_dir) / url.removeprefix(f"{root}/")
    record = target.with_name(f".{target.name}.json")
    kept = _read_version(target, record)
    try:
        store, path, info = _ask(url, "info")
    except Exception as error:
        if kept and not storage.is_final(error):
            warnings.warn(f"{url} does not answer; its copy, {target}, is used", stacklevel=2)
            return target, kept
        raise _explained(url, error) from None
    if info["type"] != "file" or info["size"] is None:
        raise storage.StorageError(f"{url} is no object of known size: name an archive or a table")
    checksum = "" if "http" in store.protocol else _checksum(info)
    times = (info[name] for name in ("ETag", "mtime", "created") if info.get(name))
    version = [info["size"], checksum or str(next(times, ""))]
    if kept == version:
        return target, version
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr(version).encode()).hexdigest()[:12]
    part = target.with_name(f".{target.name}.{digest}.part")
    with open(part, "ab") as out:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(out, fcntl.LOCK_EX)
        if _read_version(target, record) != version:  # no other process was first
            _receive(url, store, path, out, version[0], progress)
            if (found := _digest(part, checksum)) != checksum and _has_md5(store, path):
                part.unlink()
                raise storage.StorageError(f"{url} has checksum {found}, not {checksum}: try again")
            os.replace(part, target)
            record.write_text(json.dumps(version))
    for name in os.listdir(target.parent):
        if name.startswith(f".{target.name}.") and name.endswith(".part"):  # an old version
            (target.parent / name).unlink(missing_ok=True)
    return target, version


def fetch_files(
    root: str, names: Iterable[str], data_dir: Path, progress: Progress = lambda *_: None
) -> None:
    """Fetches files below a folder of a store into its `local_folder`."""
    names = sorted({*names})
    if outside := [n for n in names if n.startswith("/") or ".." in n.split("/") or "://" in n]:
        raise ValueError(f"{few(outside)}: name images relative to {root}, and below it")
    with ThreadPoolExecutor(16) as pool:
        each = pool.map(lambda name: fetch(f"{root}/{name}", data_dir, root=root), names)
        for i, _ in enumerate(each):
            progress(f"fetching the files of {root}", i + 1, len(names))


def fetch_folder(root: str, data_dir: Path, name: str) -> Path:
    """Fetches all files below a name in a folder of a store; returns its `local_folder`."""
    try:
        _, path, found = _ask(f"{root}/{name}", "find")
        if not found:
            raise FileNotFoundError(path)
    except Exception as error:
        raise _explained(f"{root}/{name}", error) from None
    fetch_files(root, [f"{name}/{file.removeprefix(f'{path}/')}" for file in found], data_dir)
    return local_folder(root, data_dir)


def local_folder(url: str, data_dir: Path) -> Path:
    """Returns the folder in the cache for the files of a folder of a store."""
    slug = re.sub(r"\W+", "-", url)[-40:].strip("-")
    return data_dir / "remote" / f"{slug}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _ask(url: str, method: str) -> tuple[Any, str, Any]:
    """Calls a method of a URL's store within one deadline: the store, the path, the answer."""
    begun = time.monotonic()
    store, path = storage.filesystem(url)
    store.invalidate_cache()
    left = max(3.0, _ANSWER_SECONDS - (time.monotonic() - begun))
    return store, path, storage.within(left, getattr(store, method), path)


def _read_version(target: Path, record: Path) -> list | None:
    """Returns the version of a whole local copy, or None."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        version = json.loads(record.read_text())
        return version if target.stat().st_size == version[0] else None
    return None


def _receive(url: str, store: Any, path: str, out: Any, size: int, progress: Progress) -> None:
    """Appends the rest of an object to a file, in blocks that are requested up to five times."""
    while (done := out.seek(0, os.SEEK_END)) < size:
        limits = {"start": done, "end": min(done + _BLOCK, size)}
        for tries in range(1, _TRIES + 1):
            try:
                block = storage.within(_BLOCK_SECONDS, store.cat_file, path, **limits)
                break
            except Exception as error:
                if tries == _TRIES or storage.is_final(error):
                    raise _explained(url, error) from None
                time.sleep(2 ** (tries - 1))
        if done + len(block) != limits["end"]:
            raise storage.StorageError(f"{url} was replaced while it was fetched: start again")
        out.write(block)
        out.flush()
        os.fsync(out.fileno())  # so that a part has no holes after a crash
        progress(f"fetching {url}", limits["end"], size)


def _explained(url: str, error: Exception) -> storage.StorageError:
    if isinstance(error, FileNotFoundError):
        return storage.StorageError(f"{url}: no such bucket or object; correct the URL")
    return error if isinstance(error, storage.StorageError) else storage.explain(url, error)


def _checksum(info: dict[str, Any]) -> str:
    """Returns a store's checksum as 'md5:…' or 'crc32c:…' in hex, '' if it states none."""
    for name, kind in (("md5Hash", "md5"), ("crc32c", "crc32c")):
        if value := info.get(name):
            return f"{kind}:{base64.b64decode(value).hex()}"
    etag = str(info.get("ETag", "")).strip('"')  # an upload in one piece has its MD5
    return f"md5:{etag}" if re.fullmatch("[0-9a-f]{32}", etag) else ""


def _digest(path: Path, checksum: str) -> str:
    """Returns a file's checksum of the same kind, or the same one if no library computes it."""
    kind = checksum.partition(":")[0]
    with open(path, "rb") as file, contextlib.suppress(ImportError):
        if kind == "md5":
            return f"md5:{hashlib.file_digest(file, 'md5').hexdigest()}"
        if kind == "crc32c":
            import google_crc32c  # gcsfs installs it

            value = google_crc32c.Checksum()
            while block := file.read(_BLOCK):
                value.update(block)
            return f"crc32c:{value.digest().hex()}"
    return checksum


def _has_md5(store: Any, path: str) -> bool:
    """Returns False for an object on S3 that a key of KMS or of the user encrypts."""
    if not hasattr(store, "call_s3"):
        return True
    name, key, _ = store.split_path(path)
    head = storage.within(_ANSWER_SECONDS, store.call_s3, "head_object", Bucket=name, Key=key)
    kms = str(head.get("ServerSideEncryption", "")).startswith("aws:kms")
    return not kms and not head.get("SSECustomerAlgorithm")
