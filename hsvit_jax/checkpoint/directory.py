"""The directory of checkpoints: its entries, their size, a probe write and the clean-up."""

import re
import shutil
import tempfile
import time
from pathlib import Path

import jax

from hsvit_jax.checkpoint.record import CheckpointError, Damage

_TEMPORARY = ".orbax-checkpoint-tmp"


def probe(directory: Path) -> None:
    """Makes a directory and writes to it, so that a read-only one shows before the first epoch.

    Raises:
      CheckpointError: it cannot be made or written, or Orbax would not find its own files in it.
    """
    if re.search(r"\[.*\]|\\|[\ud800-\udfff]", directory.absolute().as_posix()):
        raise CheckpointError(
            f"cannot write checkpoints in {directory}: Orbax takes brackets and backslashes in a "
            "path for patterns, and no name that is not UTF-8; choose another folder"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
            file.write(b"0")
    except OSError as error:
        raise CheckpointError(
            f"cannot write to the work folder {directory}: {error.strerror or error}; choose "
            "another, or make this one a writable folder"
        ) from error


def clear_cut_short(directory: Path) -> None:
    """Removes the temporary directories of interrupted saves.

    Orbax's own clean-up stops at a directory into which the threads of a save that has just failed
    still write, and they make it anew, so this one comes back until it stays away.
    """
    left = [path for path in entries(directory) if _TEMPORARY in path.name]
    for path in left if jax.process_index() == 0 else []:
        for pause in (0.0, 0.1, 0.3, 1.0):
            time.sleep(pause)
            if not path.exists():
                break
            shutil.rmtree(path, ignore_errors=True)


def size(directory: Path) -> int:
    """Bytes of all files below; raises Damage where something is neither a file nor a folder."""
    total = 0
    for path in directory.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
        elif not path.is_dir():
            raise Damage(f"{path} is neither a file nor a folder")
    return total


def entries(directory: Path) -> list[Path]:
    """Lists the entries of a directory; none where there is no directory."""
    return list(directory.iterdir()) if directory.is_dir() else []


def is_step(path: Path) -> bool:
    """Whether the path is the directory of a step that was saved to its end."""
    return re.fullmatch("0|[1-9][0-9]*", path.name) is not None and path.is_dir()
