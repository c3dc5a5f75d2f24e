"""A run's folder in an object store and its copy here, with files that stand for a run's."""

import json
import warnings

import fsspec
import pytest

from hsvit_jax import storage
from hsvit_jax.storage import lease, mirror

URL = "memory://bucket/run"


@pytest.fixture
def store(monkeypatch, tmp_path):
    """fsspec's store in memory, empty; copies lie below `tmp_path`, and nothing waits for long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lease, "_RENEW", 0.1)
    monkeypatch.setattr(lease, "_DEAD", 0.5)
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    mirror._mirrors.clear()
    store.store.clear()


def other() -> storage.Mirror:
    """A mirror as another process has it."""
    mirror._mirrors.clear()
    return storage.Mirror(URL)


def add_step(copy: storage.Mirror, step: int, content: bytes = b"arrays") -> None:
    folder = copy.folder / "checkpoints" / str(step)
    for name, text in (("meta/metadata", b"{}"), ("state/d/1", content)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(text)
    copy.offer(steps(copy))


def steps(copy: storage.Mirror) -> list[int]:
    return sorted(int(path.name) for path in (copy.folder / "checkpoints").iterdir())


def names(store) -> list[str]:
    return [name.removeprefix("/bucket/run/") for name in store.find("/bucket/run")]


def test_what_is_in_the_copy_comes_to_the_store_and_back(store):
    copy = other()
    with copy.owned():
        copy.pull()
        add_step(copy, 8)
        (copy.folder / "config.json").write_text("1")
        (copy.folder / ".lock").write_text("")
        copy.flush()
        (copy.folder / "config.json").write_text("22")
        add_step(copy, 9)
    at = [f"checkpoints/{n}/{x}" for n in (8, 9) for x in ("commit.json", "meta/metadata")]
    at += [f"checkpoints/{n}/state/d/1" for n in (8, 9)]
    assert names(store) == sorted([*at, "config.json"])
    other()
    run = storage.local(URL)
    assert run.name == "run" and (run / "config.json").read_text() == "22"
    assert sorted(p.name for p in run.rglob("*") if p.is_file()) == [
        "config.json",
        *["metadata"] * 2,
    ]
    storage.of(run).fetch(9)
    assert (run / "checkpoints/9/state/d/1").read_bytes() == b"arrays"
    assert storage.shown(run / "checkpoints") == f"{URL}/checkpoints"
    assert storage.local(f"{URL}/checkpoints") == run / "checkpoints"


def test_steps_that_go_in_the_copy_go_in_the_store(store):
    copy = other()
    with copy.owned():
        for step in (1, 2, 3):
            add_step(copy, step)
        copy.flush()
        at = copy.folder / "checkpoints"
        for name in ("state/d/1", "meta/metadata"):
            (at / "1" / name).unlink()
        for name in ("state/d", "state", "meta", ""):
            (at / "1" / name).rmdir()
        (at / "2").rename(at / "2.damaged")
        copy.set_aside(2, "2.damaged")
        add_step_again = at / "2"
        (at / "3").rename(add_step_again)  # saved anew under the number of the damaged one
        copy.offer([2])
    found = names(store)
    assert "checkpoints/2/commit.json" in found and "checkpoints/2.damaged/state/d/1" in found
    assert not [name for name in found if name.startswith(("checkpoints/1/", "checkpoints/3/"))]
    assert "checkpoints/2.damaged/commit.json" not in found


@pytest.mark.parametrize("damage", ["flip", "remove", "marker", "outside"])
def test_a_damaged_step_is_noticed(store, damage, tmp_path):
    copy = other()
    with copy.owned():
        add_step(copy, 5)
    path, marker = "/bucket/run/checkpoints/5/state/d/1", "/bucket/run/checkpoints/5/commit.json"
    match damage:
        case "flip":
            store.pipe_file(path, b"Arrays")
        case "remove":
            store.rm_file(path)
        case "marker":
            store.pipe_file(marker, b"{")
        case "outside":
            store.pipe_file("/bucket/evil", b"evil")
            files = {"../../../../evil": [4, "0" * 64]}
            store.pipe_file(marker, json.dumps({"files": files}).encode())
    other()
    run = storage.local(URL)
    if damage in ("flip", "remove"):
        with pytest.raises(storage.Mismatch, match=r"memory://bucket/run/checkpoints/5"):
            storage.of(run).fetch(5)
    else:
        storage.of(run).fetch(5)
    assert not (run / "checkpoints/5/state/d/1").exists()
    assert not list(tmp_path.rglob("evil"))


def test_a_step_without_its_marker_does_not_exist_and_is_sent_anew(store):
    store.pipe_file("/bucket/run/checkpoints/5/state/d/cut", b"short")
    copy = other()
    with copy.owned():
        copy.pull()
        assert not (copy.folder / "checkpoints").exists()
        add_step(copy, 5)
    assert "checkpoints/5/state/d/cut" not in names(store)


def test_two_runs_in_a_folder_are_refused_and_a_dead_one_frees_itself(store, monkeypatch):
    first = other()
    refused = pytest.raises(storage.StorageError, match=r"another run, process \d+ .* --workdir")
    with first.owned(), refused, other().owned():
        pass
    lock = {"run": "1", "host": "elsewhere", "pid": 1, "machine": "another", "beat": 7}
    store.pipe_file("/bucket/run/.lease", json.dumps(lock).encode())
    with other().owned():
        assert json.loads(store.cat_file("/bucket/run/.lease"))["run"] != "1"
    assert names(store) == []


def test_a_run_whose_lease_was_taken_ends(store):
    copy = other()
    with pytest.raises(storage.StorageError, match="has taken the lease"), copy.owned():
        taken = json.dumps({"run": "another", "host": "h", "pid": 3}).encode()
        store.pipe_file("/bucket/run/.lease", taken)
        add_step(copy, 1)
        copy.flush()
    assert store.cat_file("/bucket/run/.lease") == taken
    assert "checkpoints/1/commit.json" not in names(store)


def fail_puts(monkeypatch, store, times: float, error: Exception) -> list[int]:
    """Lets the next uploads fail."""
    calls, real = [], type(store).put

    def put(self, *args, **kwargs):
        calls.append(1)
        if len(calls) <= times:
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(store), "put", put)
    return calls


def test_a_short_outage_is_one_warning(store, monkeypatch):
    copy = other()
    with warnings.catch_warnings(record=True) as said, copy.owned():
        warnings.simplefilter("always")
        fail_puts(monkeypatch, store, 2, ConnectionError("reset by peer"))
        add_step(copy, 4)
        copy.flush()
    assert [str(w.message) for w in said if "does not answer" in str(w.message)] == [
        "memory://bucket does not answer (ConnectionError: reset by peer): check the network and "
        "the store's endpoint; training goes on, no step is saved there, and "
        "uploads are tried again"
    ]
    assert "checkpoints/4/commit.json" in names(store)


@pytest.mark.filterwarnings("ignore:memory")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("reset"), "does not answer"),
        (PermissionError("Forbidden"), "refuses this account"),
    ],
)
def test_a_long_outage_names_the_last_good_step(store, monkeypatch, error, words):
    monkeypatch.setattr(mirror, "PATIENCE", 0.1)
    copy = other()
    ended = pytest.raises(storage.StorageError, match=f"{words}.*the last step there is 3")
    with ended, copy.owned():
        add_step(copy, 3)
        copy.flush()
        fail_puts(monkeypatch, store, 99, error)
        add_step(copy, 4)
        copy.flush()


def test_copies_of_killed_processes_are_removed(store, tmp_path):
    left = tmp_path / "hsvit_jax/runs/tmpleft"
    left.mkdir(parents=True)
    left.with_suffix(".lock").touch()
    kept, copy = other(), other()
    assert not left.exists() and kept.folder.parent.exists() and copy.folder.parent.exists()
