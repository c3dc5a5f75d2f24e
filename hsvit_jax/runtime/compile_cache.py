"""Compilation: the folder of JAX's cache, machine code that is run unchecked; XLA's alarm."""

import contextlib
import hashlib
import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path


def remember_compilations() -> None:
    """Sets the folder in which JAX keeps compiled programs, so that the next start is faster.

    For the command line only, before jax is imported; JAX_COMPILATION_CACHE_DIR names another
    folder and JAX_ENABLE_COMPILATION_CACHE=false turns it off. The programs are machine code that
    JAX runs unchecked, so a folder that others could write to is not used, and every kind of
    processor has its own, as a home folder may be shared by several.
    """
    # On a full disk one for each program; the run itself says what it cannot write.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    # The many small programs too, which take a second together.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named == "" or "://" in (named or ""):  # switched off, or a bucket with rights of its own
        return
    try:
        folder = trusted_folder(named or default_folder())
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    except (OSError, ValueError) as error:
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        if named or isinstance(error, ValueError):
            print(f"note: compiled programs are not kept: {error}", file=sys.stderr, flush=True)


def forget(warning: str) -> bool:
    """Removes the entries of a program that JAX warns of, as a full disk has cut one off.

    JAX writes a new one then, but never over one that is there. False for another warning.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder or not warning.startswith("Error reading persistent compilation cache entry"):
        return False
    program = warning.partition("'")[2].partition("'")[0]
    for entry in Path(folder).glob(f"{program}-*"):
        entry.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps XLA's "Very slow compile?" off the screen, which a CPU logs as an error."""
    import jax

    before, on_cpu = jax.config.jax_logging_level, jax.default_backend() == "cpu"
    jax.config.update("jax_logging_level", "CRITICAL" if on_cpu else before)
    try:
        yield
    finally:
        for level in ("WARNING", before) if on_cpu else ():  # XLA takes the former, Python both
            jax.config.update("jax_logging_level", level)


def default_folder() -> Path:
    """Returns the folder of compiled programs in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "hsvit_jax" / f"xla-{processor()}"


def processor() -> str:
    """Returns a name of this kind of processor, by the instructions that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def trusted_folder(folder: str | Path) -> str:
    """Makes a folder that only this user and root can write to or exchange.

    Args:
      folder: its path; what is missing of it is made with mode 0700.

    Returns:
      the path without links.

    Raises:
      ValueError: a folder on the way is another user's, or others may write to it (unless it is
        sticky, as /tmp is, and not the last).
      OSError: it cannot be made.
    """
    real = Path(os.path.realpath(folder))
    for place in (*reversed(real.parents), real):
        if not place.is_dir():
            place.mkdir(0o700, exist_ok=True)  # another process may be as quick
        status = place.stat()
        open_to_others = status.st_mode & 0o022 and (
            place == real or not status.st_mode & stat.S_ISVTX
        )
        if status.st_uid not in (0, os.getuid()) or open_to_others:
            raise ValueError(
                f"{place} is another user's or writable by others: take that right away (chmod "
                "go-w), or name another folder in JAX_COMPILATION_CACHE_DIR"
            )
    return str(real)
