"""A run's folder in an object store, and its copy on this machine, in which all work is done.

    config.json, metrics.jsonl, …   as in the copy, sent again once they have changed
    checkpoints/1200/…              the files of a step, as in the copy
    checkpoints/1200/commit.json    written last: size and SHA-256 of each file of the step
    .lease                          the run that writes here, renewed every few seconds

A step without `commit.json` does not exist. The copy gets a step's record at once and its arrays
when they are asked for.
"""

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hsvit_jax.storage import stores
from hsvit_jax.storage.lease import Lease

#: Seconds of an outage after which a run ends.
PATIENCE = 300.0
_FIRST = 12.0  # seconds without an answer to the first request
_SILENCE = 60.0  # seconds without an answer, or a byte of a transfer
_LOGS_EVERY = 30.0  # seconds between two uploads of files that grow
_COMMIT = "commit.json"
_STEP = re.compile(r"checkpoints/(0|[1-9][0-9]*)/(.+)")
_mirrors: dict[str, "Mirror"] = {}


class Mismatch(Exception):
    """A step's files in the store are not those that were committed; the message names one."""


def local(place: str | os.PathLike) -> Path:
    """Returns the local path of a place; of a URL the copy, brought up to date.

    Raises:
      StorageError: the store cannot be read, or holds nothing there.
    """
    if not stores.is_url(place):
        return Path(os.path.expanduser(place))
    url = stores.whole_url(place)
    run = url.removesuffix("/checkpoints")
    mirror = _mirrors.get(run) or Mirror(run)
    if not mirror.pull():
        raise stores.StorageError(f"{url} holds nothing: correct the URL of the run")
    return mirror.folder / "checkpoints" if run != url else mirror.folder


def of(path: Path) -> "Mirror | None":
    """Returns the mirror in whose copy a path lies."""
    found = (m for m in _mirrors.values() if path.absolute().is_relative_to(m.folder))
    return next(found, None)


def shown(path: Path) -> str:
    """Returns a path as users know it: in the copy of a mirror, the URL."""
    mirror = of(path)
    if mirror is None:
        return str(path)
    return "/".join([mirror.url, *path.absolute().relative_to(mirror.folder).parts])


def publish(path: Path) -> None:
    """Sends the small files of the copy in which a path lies; does nothing for another path."""
    if (mirror := of(path)) is not None:
        mirror.ask(mirror.send_files)


class Mirror:
    """A folder in an object store with its copy on this machine.

    Args:
      url: of the folder.

    Raises:
      StorageError: as `filesystem`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store, self._root = stores.filesystem(url)
        self.folder = _place_for_copy() / url.rpartition("/")[2]
        self._commits: dict[int, dict[str, list]] = {}  # step → its files in the store
        self._sent: dict[str, tuple[int, int]] = {}  # small file → time and size when it was sent
        self._offered: set[int] = set()
        self._aside: dict[int, str] = {}  # damaged step → its folder's new name
        self._lease: Lease | None = None
        self._answered = False
        self._changed = threading.Condition()
        self._asked = self._done = 0  # requests to send everything
        self._failure: stores.StorageError | None = None
        self._notice = ""
        _mirrors[url] = self

    def ask(self, what: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the store; its errors become a StorageError."""
        limit = _SILENCE if self._answered else _FIRST
        try:
            answer = stores.within(limit, what, *args, **kwargs)
            self._answered = True
            return answer
        except (stores.StorageError, Mismatch):
            raise
        except Exception as error:  # a library's own, of any kind
            raise stores.explain(self.url, error) from error

    def pull(self, everything: bool = True) -> bool:
        """Copies small files and the records of steps here; steps that are gone go here too.

        Args:
          everything: False copies config.json alone of the small files.

        Returns:
          whether there is anything.
        """
        self._store.invalidate_cache()
        found = self.ask(self._store.find, self._root)
        names = [name[len(self._root) :].lstrip("/") for name in found]
        steps = {int(m[1]) for name in names if (m := _STEP.fullmatch(name)) and m[2] == _COMMIT}
        for step in {*self._commits} - steps:
            del self._commits[step]
            shutil.rmtree(self._step(step), ignore_errors=True)
        for step in sorted(steps - {*self._commits}):
            self._step(step).mkdir(parents=True, exist_ok=True)
            self._commits[step] = self._read_commit(step)
            with contextlib.suppress(Mismatch):  # the record is missing then
                self._get(step, [name for name in self._commits[step] if name.startswith("meta/")])
        wanted = ("wandb/run-id", "mlflow/run-id") if everything else ()
        small = [x for x in names if ("/" not in x and x != ".lease") or x in wanted]
        small = [name for name in small if everything or name == "config.json"]
        targets = [self.folder / name if name else self.folder for name in small]
        self._move("get", [self._at(name) for name in small], targets)
        self._sent |= {name: _stamp(path) for name, path in zip(small, targets, strict=True)}
        return bool(names)

    def fetch(self, step: int) -> None:
        """Copies the arrays of a step here, unless they are here already.

        Raises:
          Mismatch: the files in the store are not those that were committed.
        """
        if step not in self._commits and not self._step(step).exists():
            self.pull(everything=False)
        files = self._commits.get(step, {})
        self._get(step, [name for name in files if not (self._step(step) / name).exists()])

    def offer(self, steps: Sequence[int]) -> None:
        """Lets steps be sent that are complete here."""
        self._offered = {*steps}

    def set_aside(self, step: int, name: str) -> None:
        """Lets a damaged step be renamed in the store too, as it was here."""
        if step in self._commits:
            self._aside[step] = name

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Context in which this process alone writes here, and a thread sends what changes.

        Raises:
          StorageError: another run writes here, or this account cannot.
        """
        self._lease = Lease(self.url, self._store, self._at(".lease"))
        thread = threading.Thread(target=self._send_changes, name="uploads", daemon=True)
        self._ended, self._failure = threading.Event(), None
        with self._lease:
            thread.start()
            try:
                yield
                self.flush()
            finally:
                self._ended.set()
                with self._changed:
                    self._changed.notify_all()
                thread.join(_SILENCE)
                if not (thread.is_alive() or self._failure):
                    with contextlib.suppress(Exception):  # what ended the run is shown
                        stores.within(_SILENCE, self.send_files)
                self._lease = None

    def flush(self) -> None:
        """Waits until all that is in the copy is in the store; raises as `check` does."""
        if self._lease is None:
            return
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
        while self._done < asked:
            self.check()
            with self._changed:
                self._changed.wait_for(lambda: self._done >= asked, 1)
        self.check()

    def check(self) -> None:
        """Warns of an outage, and raises StorageError once it has lasted too long."""
        notice, self._notice = self._notice, ""
        if notice:
            warnings.warn(notice, stacklevel=2)
        failure = self._failure or (self._lease and self._lease.failure)
        if failure:
            raise failure

    def send_files(self) -> None:
        """Sends the small files that have changed since they were sent."""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        names = {str(path.relative_to(self.folder)): path for path in paths}
        small = {
            name: path
            for name, path in names.items()
            if not name.startswith((".", "checkpoints/")) and self._sent.get(name) != _stamp(path)
        }
        stamps = {name: _stamp(path) for name, path in small.items()}
        self._move("put", [*small.values()], [self._at(name) for name in small])
        self._sent |= stamps

    def _send_changes(self) -> None:
        """Sends what has changed, until the end: each new step at once, logs now and then."""
        since, pause, logs = None, 1.0, 0.0
        while not self._ended.is_set():
            with self._changed:
                if self._asked == self._done:
                    self._changed.wait(1)
                elif since:
                    self._changed.wait(pause)
                asked = self._asked
            try:
                steps = self._new_steps()
                if steps or asked > self._done or time.monotonic() - logs > _LOGS_EVERY:
                    logs = time.monotonic()
                    self.send_files()  # a step's line of the metrics before the step
                    for step in steps:
                        self._send_step(step)
                    for step in [one for one in self._commits if not self._step(one).exists()]:
                        self._remove(step)
                since, pause = None, 1.0
                with self._changed:
                    self._done = asked
                    self._changed.notify_all()
            except Exception as error:  # a library's own, of any kind
                begun, pause = since or time.monotonic(), min(2 * pause, 15.0)
                self._fail(error, time.monotonic() - begun if since else 0.0)
                since = begun
                if self._failure:
                    return

    def _fail(self, error: Exception, seconds: float) -> None:
        """Notes a warning of an outage, and once it is too long, its end."""
        if not isinstance(error, stores.StorageError):
            error = stores.explain(self.url, error)
        last = max(self._commits, default=None)
        kept = "no step is saved there" if last is None else f"the last step there is {last}"
        final = error is self._lease.failure or stores.is_final(error.__cause__ or error)
        if seconds > PATIENCE or final:
            self._failure = stores.StorageError(f"{error}; {kept}")
        elif not seconds:
            self._notice = f"{error}; training goes on, {kept}, and uploads are tried again"

    def _new_steps(self) -> list[int]:
        """Lists the steps to send."""
        here = {step for step in self._offered if self._step(step).exists()}
        return sorted(here - {*self._commits} | {*self._aside} & here)

    def _send_step(self, step: int) -> None:
        """Sends the files of a step, then the marker that makes it exist."""
        self._remove(step)
        folder = self._step(step)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(p.relative_to(folder)): [p.stat().st_size, _sha256(p)] for p in paths}
        at = f"checkpoints/{step}"
        self._move("put", paths, [self._at(f"{at}/{name}") for name in files])
        self._lease.check()
        marker = json.dumps({"files": files}).encode()
        self.ask(self._store.pipe_file, self._at(f"{at}/{_COMMIT}"), marker)
        self._commits[step] = files

    def _remove(self, step: int) -> None:
        """Removes what the store has of a step, the marker first; a damaged step is renamed."""
        at = self._at(f"checkpoints/{step}")
        self._store.invalidate_cache()
        names = self.ask(self._store.find, at)
        names.sort(key=lambda name: not name.endswith(f"/{_COMMIT}"))
        aside = self._aside.get(step)
        for name in names:
            if aside and not name.endswith(f"/{_COMMIT}"):
                self.ask(self._store.copy, name, self._at(f"checkpoints/{aside}{name[len(at) :]}"))
            self.ask(self._store.rm_file, name)
        self._commits.pop(step, None)
        self._aside.pop(step, None)

    def _read_commit(self, step: int) -> dict[str, list]:
        """Reads the marker of a step; one that is damaged names no file."""
        raw = self.ask(self._store.cat_file, self._at(f"checkpoints/{step}/{_COMMIT}"))
        try:
            listed = json.loads(raw)["files"].items()
            files = {name: [int(size), str(sha256)] for name, (size, sha256) in listed}
            inside = [not name.startswith("/") and ".." not in name.split("/") for name in files]
            return files if all(inside) else {}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return {}

    def _get(self, step: int, names: Sequence[str]) -> None:
        """Copies files of a step here, and checks them."""
        folder, files = self._step(step), self._commits.get(step, {})
        try:
            at = [self._at(f"checkpoints/{step}/{name}") for name in names]
            self._move("get", at, [folder / name for name in names])
        except stores.StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                at = f"{self.url}/checkpoints/{step}"
                raise Mismatch(f"{at} lacks a file: {error.__cause__}") from error
            raise
        for name in names:
            path = folder / name
            if [path.stat().st_size, _sha256(path)] != files[name]:
                path.unlink()
                raise Mismatch(f"{self.url}/checkpoints/{step}/{name} is not what was committed")

    def _move(self, verb: str, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Puts or gets files, several at a time, for as long as bytes move."""
        if not sources:
            return
        import fsspec

        moved = time.monotonic()

        class Moving(fsspec.Callback):
            def call(self, *_: Any, **__: Any) -> None:
                nonlocal moved
                moved = time.monotonic()

            def branched(self, *_: Any, **__: Any) -> "Moving":
                return self

        if verb == "get":
            for target in targets:
                target.parent.mkdir(parents=True, exist_ok=True)
        self._store.batch_size = 8
        function, pair = getattr(self._store, verb), ([*map(str, sources)], [*map(str, targets)])
        try:
            stores.within(_SILENCE, function, *pair, callback=Moving(), moved=lambda: moved)
        except Exception as error:  # a library's own, of any kind
            raise stores.explain(self.url, error) from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _step(self, step: int) -> Path:
        return self.folder / "checkpoints" / str(step)


def _stamp(path: Path) -> tuple[int, int]:
    """Time of the last change and size of a file."""
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place_for_copy() -> Path:
    """Makes a folder that this process locks and removes at its end.

    Those of processes that were killed are removed here.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(cache) / "hsvit_jax" / "runs"
    base.mkdir(parents=True, exist_ok=True)
    with (base / ".lock").open("a") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for lock in base.glob("*.lock"):
            with contextlib.suppress(OSError), lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
        place = Path(tempfile.mkdtemp(dir=base)).resolve()
        lock = os.open(place.with_suffix(".lock"), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place
