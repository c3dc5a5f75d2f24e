"""The folder of JAX's compilation cache: machine code that is run unchecked."""

import hashlib
import os
import platform
import stat
import sys
from pathlib import Path

# Flags that open a folder for inspection, without following a link.
_FOLDER = sum(getattr(os, f"O_{name}", 0) for name in ("PATH", "DIRECTORY", "NOFOLLOW", "CLOEXEC"))


def remember_compilations() -> None:
    """Sets the folder in which JAX keeps compiled programs, so that the next start is faster.

    For the command line only, before jax is imported; JAX_COMPILATION_CACHE_DIR names another
    folder and JAX_ENABLE_COMPILATION_CACHE=false turns it off. The programs are machine code that
    JAX runs unchecked, so a folder that others could write to is not used, and every kind of
    processor has its own, as a home folder may be shared by several.
    """
    # The many small programs too, which take a second together.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named == "" or "://" in (named or ""):  # switched off, or a bucket with rights of its own
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    try:
        folder = trusted_folder(named or Path(cache) / "hsvit_jax" / f"xla-{_processor()}")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    except (OSError, ValueError) as error:
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        if named or isinstance(error, ValueError):
            print(f"note: compiled programs are not kept: {error}", file=sys.stderr, flush=True)


def _processor() -> str:
    """A short name of the processor, unique to its instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def trusted_folder(folder: str | Path) -> str:
    """Makes a folder that only this user and root can write to or exchange.

    Each folder from the root down to it is opened below the one before and checked once it is
    open; links are followed where only this user or root can have made them.

    Args:
      folder: its path; what is missing of it is made with mode 0700.

    Returns:
      the path without links.

    Raises:
      ValueError: a folder on the way is another user's, or others may write to it (unless it is
        sticky, as /tmp is, and not the last).
      OSError: it cannot be made.
    """
    path = os.path.abspath(folder)
    if os.name != "posix":
        os.makedirs(path, exist_ok=True)
        return path
    names, real, links = list(filter(None, path.split("/"))), "/", 0
    descriptor = os.open(real, _FOLDER)
    try:
        while True:
            status = os.fstat(descriptor)
            sticky = names and status.st_mode & stat.S_ISVTX
            if not _mine(status) or (status.st_mode & 0o022 and not sticky):
                raise ValueError(
                    f"{real} is another user's or writable by others: take that right away (chmod "
                    "go-w), or name another folder in JAX_COMPILATION_CACHE_DIR"
                )
            if not names:
                return real
            name = names.pop(0)
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                os.mkdir(name, 0o700, dir_fd=descriptor)
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            real = os.path.join(real, name)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if not _mine(status) or links > 40:
                    raise ValueError(f"{real} is a link that another user made, or one of a loop")
                target = os.path.join(os.path.dirname(real), os.readlink(name, dir_fd=descriptor))
                names = [*filter(None, os.path.normpath(target).split("/")), *names]
                name = real = "/"
            below = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
    finally:
        os.close(descriptor)


def _mine(status: os.stat_result) -> bool:
    """Whether a folder or link belongs to this user or to root."""
    return status.st_uid in (0, os.getuid())
