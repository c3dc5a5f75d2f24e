"""A run's work folder: making it, checking that it is shared, and locking it for one run."""

import collections
import contextlib
import datetime
import fcntl
import hashlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import ml_collections

from hsvit_jax import artifacts, checkpoint, storage
from hsvit_jax.runtime import coordination

# The files of a run, which must not be links: one might lead out of the folder.
_FILES = (".lock", ".job", "config.json", "environment.json")
_FILES += ("metrics.jsonl", "metrics.damaged", "metrics.before")
_FILES += ("batch.png", "curves.png", "report.html", "report-wrong.csv", "calibration.json")


def environment() -> dict[str, str]:
    """The command, versions and devices of this process."""
    words = sys.argv if Path(*sys.argv[:1]).stem == "hsvit" else sys.orig_argv
    devices = collections.Counter(device.device_kind for device in jax.devices())
    packages = ("hsvit_jax", "jax", "jaxlib", "flax", "optax", "numpy")
    return {
        # No words where another program, such as R, embeds Python.
        "command": shlex.join([*(Path(program).name for program in words[:1]), *words[1:]]),
        "started": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "devices": ", ".join(f"{count} × {kind}" for kind, count in devices.items()),
        "processes": str(coordination.count()),
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: metadata.version(name) for name in packages},
    }


def programs() -> str:
    """Lists, by line, the code, versions and settings of jax that a step's programs follow from.

    Processes that differ in one compile other programs, and no step says so.
    """
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(file.read_bytes())
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    settings = ("enable_x64", "threefry_partitionable", "default_prng_impl")
    settings += ("default_matmul_precision", "numpy_dtype_promotion")
    found = {
        "hsvit_jax": code.hexdigest()[:12],
        **{name: metadata.version(name) for name in packages},
        **{f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in settings},
    }
    return "\n".join(f"{name}={value}" for name, value in found.items())


@contextlib.contextmanager
def staged(place: str | Path) -> Iterator[Path]:
    """Yields the folder in which a run works: of a URL each process's copy, which process 0 sends.

    Raises:
        ValueError: the object store cannot be written, or another run uses the folder.
    """
    if not storage.is_url(place):
        yield storage.local(place)
        return
    mirror = coordination.agree(lambda: storage.Mirror(storage.whole_url(place)))
    coordination.check_same("work folder", mirror.url)
    with contextlib.ExitStack() as stack:
        lead = coordination.is_lead()
        coordination.agree(lambda: lead and stack.enter_context(mirror.owned()))
        coordination.agree(lambda: mirror.pull(everything=lead))
        yield mirror.folder


@contextlib.contextmanager
def opened(workdir: Path, config: ml_collections.ConfigDict) -> Iterator[checkpoint.Checkpoints]:
    """Makes the folder, writes to it so that it fails now, and locks it for this run.

    Yields:
        its checkpoints.

    Raises:
        ValueError: it cannot be written, another run has it, or a file of the run is a link, a fifo
            or a folder there.
    """
    for name in _FILES:
        artifacts.refuse_special(workdir / name)
    checkpoint.probe(workdir)
    with (
        only_run_in(workdir, coordination.is_lead()),
        checkpoint.Checkpoints(
            workdir / "checkpoints",
            keep_latest=config.checkpoint.keep_latest,
            keep_best=config.checkpoint.keep_best,
        ) as checkpoints,
    ):
        yield checkpoints


def check_apart(data_name: str, folder: Path, flag: str = "--workdir") -> None:
    """Refuses a folder to write among class folders: it would be a class of the next run.

    Args:
        data_name: of the run's data set.
        flag: names the folder in the message.
    """
    kind, _, path = data_name.partition("=")
    images = Path(path).expanduser()
    if kind != "folder" or not images.is_dir():
        return
    classes = [one for one in images.iterdir() if one.name.lower() in ("train", "training")]
    for place in classes or [images]:
        if folder.resolve().is_relative_to(place.resolve()):
            raise ValueError(
                f"{flag}={folder} lies in the folder of the images, {place}, and would be taken "
                f"for a class: start from another folder, or set {flag} outside it"
            )


def check_shared(workdir: Path) -> None:
    """Checks that all processes see the same folder, where each writes its part of a checkpoint.

    Raises:
        ValueError: this process does not see process 0's.
    """
    if coordination.count() == 1 or storage.of(workdir):
        return
    token = coordination.from_lead(f"{os.getpid()}-{time.time_ns()}")
    mark = workdir / ".job"
    if coordination.is_lead():
        artifacts.write_file(mark, token)
    deadline = time.monotonic() + 90  # NFS may believe for a minute that a file is not there
    while not _holds(mark, token):
        if time.monotonic() > deadline:
            raise ValueError(
                f"the work folder {workdir.absolute()} is not the one of process 0: --workdir must "
                "be a URL such as gs://bucket/run, or on a file system that all processes share"
            )
        time.sleep(0.2)


def _holds(mark: Path, token: str) -> bool:
    try:
        os.listdir(mark.parent)  # upon which NFS asks its server again
        return mark.read_text("utf-8") == token
    except OSError:  # not there yet, or just replaced, so that its handle is stale
        return False


@contextlib.contextmanager
def only_run_in(workdir: Path, lead: bool = True) -> Iterator[None]:
    """Locks the folder while this process lives: two runs would overwrite each other."""
    if not lead:
        yield
        return
    with artifacts.append_to(workdir / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run is using the work folder {workdir}: wait for it to end, or choose "
                "another with --workdir"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
