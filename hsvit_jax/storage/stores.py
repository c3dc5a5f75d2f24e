"""File systems behind URLs, as fsspec opens them, with a limit of time and errors in one line."""

import functools
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hsvit_jax.text import nearest, printable

T = TypeVar("T")

# Scheme → the extra of this package that brings its library.
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
_LOGIN = {
    "gcs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
_RIGHTS = {
    "gcs": "grant it the role Storage Object User on the bucket",
    "s3": "grant it ListBucket, GetObject, PutObject and DeleteObject on the bucket",
}
# Patterns of errors: missing credentials, missing rights, a missing bucket.
_ANONYMOUS = r"[Cc]redential|Anonymous|\b401\b|Unauthorized"
_FORBIDDEN = r"PermissionError|Forbidden|\b403\b|AccessDenied|InvalidAccessKey|SignatureDoesNot"
_MISSING = r"FileNotFoundError|NoSuchBucket|\b404\b"


class StorageError(ValueError):
    """A place in an object store cannot be used; the message names the bucket and the fix."""


def is_url(place: str | os.PathLike) -> bool:
    """Whether a place is a URL; a `Path` that was made of one has a single slash."""
    return re.match(r"[A-Za-z][\w.+-]+:/", os.fspath(place)) is not None


def whole_url(place: str | os.PathLike) -> str:
    """Returns a URL with its two slashes, and without one at its end."""
    return re.sub(":/(?!/)", "://", os.fspath(place), count=1).rstrip("/")


def bucket(url: str) -> str:
    """Returns scheme and bucket of a URL.

    >>> bucket("gs://runs/a/b")
    'gs://runs'
    """
    return "/".join(url.split("/")[:3])


def filesystem(url: str) -> tuple[Any, str]:
    """Opens the file system of a URL.

    Returns:
      fsspec's file system, and the path of the URL in it.

    Raises:
      StorageError: an unknown scheme, a missing library, credentials in the URL, or a store that
        cannot be opened.
    """
    import fsspec

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs what `explain` reports
    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0]:
        raise StorageError(
            f"the {scheme}:// URL holds credentials, which logs would repeat: "
            f"{_LOGIN.get(_EXTRAS.get(scheme, ''), 'set them in the environment')}"
        )
    try:
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        store = within(12, _opener(scheme), **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        install = f"'hsvit_jax[{extra}]'" if extra else "the library that fsspec names"
        raise StorageError(f"{url} needs a library ({error}): pip install {install}") from None
    except ValueError:
        near = nearest(scheme, fsspec.available_protocols())
        raise StorageError(f"{url}: fsspec has no scheme {scheme}://.{near}") from None
    except Exception as error:  # a library's own, of any kind
        raise explain(url, error) from None
    return store, store._strip_protocol(url)


def _opener(scheme: str) -> Callable[..., Any]:
    """Returns what opens a scheme's file systems."""
    import fsspec

    if _EXTRAS.get(scheme) != "gcs":
        return functools.partial(fsspec.filesystem, scheme)
    from gcsfs.core import GCSFileSystem  # fsspec's own looks up each bucket's kind, for seconds

    return GCSFileSystem


def within(
    seconds: float,
    function: Callable[..., T],
    *args: Any,
    moved: Callable[[], float] | None = None,
    **kwargs: Any,
) -> T:
    """Calls a function in a thread, which is given up after some seconds.

    Args:
      moved: returns when the function last made progress, from which the seconds count.

    Raises:
      TimeoutError: the function has not returned; its thread does not hold the process.
    """
    begun = time.monotonic()
    result: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def run() -> None:
        try:
            result.put((True, function(*args, **kwargs)))
        except BaseException as error:
            result.put((False, error))

    threading.Thread(target=run, daemon=True).start()
    while True:
        left = (moved() if moved else begun) + seconds - time.monotonic()
        try:
            good, value = result.get(timeout=max(left, 0.01))
            break
        except queue.Empty:
            if left <= 0:
                raise TimeoutError(f"no answer for {seconds:.0f} s") from None
    if not good:
        raise value
    return value


def is_final(error: Exception) -> bool:
    """Whether a later try of the same request cannot succeed."""
    text = f"{type(error).__name__}: {error}"
    return re.search(f"{_ANONYMOUS}|{_FORBIDDEN}|{_MISSING}", text) is not None


def explain(url: str, error: Exception) -> StorageError:
    """Makes an error of a store's library one line that names the bucket and the fix."""
    place, extra = bucket(url), _EXTRAS.get(url.partition(":")[0], "")
    text = f"{type(error).__name__}: {error}"
    if re.search(_ANONYMOUS, text):
        fix = _LOGIN.get(extra, "set them as its library asks")
        return StorageError(f"{place} needs credentials, and this machine has none: {fix}")
    if re.search(_FORBIDDEN, text):
        fix = _RIGHTS.get(extra, "grant it the right to list, read, write and remove files")
        return StorageError(f"{place} refuses this account ({url}): {fix}")
    if re.search(_MISSING, text):
        return StorageError(f"{place} is not there: create the bucket, or correct its name")
    reason = re.sub(r"\S{20,}", "…", " ".join(text.split()))  # long words may be keys
    login = f"; without credentials, {_LOGIN[extra]}" if extra else ""
    return StorageError(
        f"{place} does not answer ({printable(reason)[:200]}): check the network and the store's "
        f"endpoint{login}"
    )
