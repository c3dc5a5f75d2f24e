"""Compiled programs of a run, kept for the next start of the same run.

JAX's own cache spares compiling, but finds a program by its text, and to trace and lower a training
step takes longer than to read it. Here a program is found by everything that it is made of: the
sources of this package, the versions of what they stand on, the settings of JAX and XLA, the
configuration, the devices, and shapes and shardings of its arguments.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from hsvit_jax import host
from hsvit_jax.halves import Halves

# Packages whose code makes up a program, besides Python's and this one's.
_LIBRARIES = ("flax", "jax", "jaxlib", "ml_collections", "numpy", "optax")

# What JAX tells when a program was found in its own cache, and when it was not and was put there.
_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

# How the names of what XLA and its back ends read in the environment begin.
_READ_BY_COMPILERS = ("CUDA_", "LIBTPU_", "NVIDIA_", "TF_", "TPU_", "XLA_")

# Bytes that the folder may hold: beyond them, what was not used for longest goes.
_LIMIT = 2**30


@dataclasses.dataclass(frozen=True)
class Programs:
    """folder: where they are kept, None: nowhere. made_of: what all of them have in common."""

    folder: Path | None = None
    made_of: str = ""
    devices: tuple[jax.Device, ...] = ()

    def get(self, name: str, arguments: Sequence[Any], compiled: Callable[[], Any]) -> Any:
        """The program `name` for these arguments: as it was kept, or made by `compiled`, and kept.

        compiled: gives what `lower(*arguments).compile()` does, of a jitted function or of Halves.
        arguments: that were placed, were placed on all of the devices.
        """
        path = self.folder and self.folder / self._key(name, arguments)
        found = path and self._read(path)
        if found is None:
            with host.compiling(), _watched() as events:
                found = compiled()
            if path and _HIT not in events and _sources():  # the files did not change meanwhile
                _write(path, found, events.count(_MISS))
        return found

    def _key(self, name: str, arguments: Sequence[Any]) -> str:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [(jax.typeof(x).str_short(), jax.typeof(x).weak_type, _place(x)) for x in leaves]
        text = "\n".join((self.made_of, name, str(tree), repr(shapes)))
        return hashlib.sha256(text.encode()).hexdigest()

    def _read(self, path: Path) -> Any:
        """None where there is none, or none that can be used here."""
        try:
            body = path.read_bytes()
        except OSError:
            return None
        digest, body = body[:32], body[32:]
        if hashlib.sha256(body).digest() != digest:
            return None
        try:
            halves = [
                serialize_executable.deserialize_and_load(
                    *half, backend=self.devices[0].client, execution_devices=self.devices
                )
                for half in pickle.loads(body)
            ]
        except Exception:  # of another build of XLA, or of a device's driver: it says what it likes
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return halves[0] if len(halves) == 1 else Halves(*halves)


#: Keeps nothing.
NONE = Programs()


def of_run(config: dict, mesh: jax.sharding.Mesh, *facts: Any) -> Programs:
    """The programs of a run, in the folder that HSVIT_PROGRAMS_DIR names; none without it.

    config: a resolved configuration as a dict. facts: whatever else goes into a program. None are
    kept for several processes, who must all compile or none, or of a package whose files were
    changed since this process began, which may run their old text.
    """
    folder = os.environ.get("HSVIT_PROGRAMS_DIR")
    if not folder or not jax.config.jax_enable_compilation_cache or jax.process_count() > 1:
        return NONE
    sources = _sources()
    if sources is None or not host.is_private(folder):
        return NONE
    devices = tuple(mesh.devices.flat)
    made_of = {
        "sources": sources,
        "versions": [sys.version, *map(version, _LIBRARIES), devices[0].client.platform_version],
        "settings": sorted(f"{k}={v}" for k, v in jax.config.values.items()),
        "environment": sorted(
            f"{k}={v}" for k, v in os.environ.items() if k.startswith(_READ_BY_COMPILERS)
        ),
        "processor": host.processor(),
        "devices": [(d.id, d.platform, d.device_kind) for d in devices],
        "mesh": dict(mesh.shape),
        "config": config,
        "facts": facts,
    }
    return Programs(Path(folder), json.dumps(made_of, sort_keys=True, default=str), devices)


def _place(x: Any) -> str:
    """Where an argument lies, if it may not be moved."""
    return repr(x.sharding) if getattr(x, "committed", False) else ""


def _sources() -> str | None:
    """A digest of this package's files; None if one is younger than this process."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    files = sorted(package.rglob("*.py"))
    for file in files:
        if file.stat().st_mtime > host.STARTED:
            return None
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest() if files else None


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """The events that JAX tells of meanwhile."""
    events: list[str] = []

    def note(event: str, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(note)


def _write(path: Path, program: Any, compiled: int) -> None:
    """Keeps a program, if that can be done: all of it was compiled just now.

    One that came from JAX's cache cannot be written again: on CPUs its code is lost.
    """
    halves = (program.gradients, program.update) if isinstance(program, Halves) else (program,)
    if compiled != len(halves):
        return
    try:
        body = pickle.dumps([serialize_executable.serialize(half) for half in halves])
    except Exception:  # whatever a back end without this says: then it is made anew each time
        return
    part = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(path)
        _prune(path.parent)


def _prune(folder: Path) -> None:
    """Removes what was not used for longest, beyond the limit."""
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    room = _LIMIT
    for file in files:
        room -= file.stat().st_size
        if room < 0:
            file.unlink(missing_ok=True)
