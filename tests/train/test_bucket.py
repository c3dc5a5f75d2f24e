"""Runs whose folder is in an object store: what comes there, and how they go on from it."""

import json
import signal

import fsspec
import numpy as np
import pytest
from support.processes import script
from support.small_runs import small_config, small_dataset

from hsvit_jax import checkpoint, run_report, train
from hsvit_jax.storage import mirror

URL, EPOCH = "memory://bucket/run", 4  # steps
# A run of four epochs, which the first line of its arguments may cut off in an upload.
RUN = """
import os, signal, sys
from hsvit_jax import train
from hsvit_jax.storage import mirror
from support.small_runs import small_config, small_dataset

url, cut = sys.argv[1], sys.argv[2]
real, before = mirror.Mirror._move, []

def move(self, verb, sources, targets):
    before.append(verb)
    steps = [x for x in map(str, targets) if "/checkpoints/" in x]
    if verb == "put" and steps and cut == "upload" and before.count("steps") == 1:
        real(self, verb, sources[:3], targets[:3])
        os.kill(os.getpid(), signal.SIGKILL)
    before.extend(["steps"] * bool(verb == "put" and steps))
    real(self, verb, sources, targets)
    if verb == "put" and steps and cut == "marker" and before.count("steps") == 2:
        os.kill(os.getpid(), signal.SIGKILL)

mirror.Mirror._move = move
config = small_config(train__steps=16, checkpoint__keep_latest=9)
train.train(config, url, dataset=small_dataset(), verbose=False)
"""


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    mirror._mirrors.clear()
    store.store.clear()


def run(url=URL, **settings):
    mirror._mirrors.clear()  # as another process
    config = small_config(**settings)
    return train.train(config, url, dataset=small_dataset(), verbose=False)


def saved(url) -> tuple[int, dict]:
    """The last step of a run, and its state as bytes by name."""
    mirror._mirrors.clear()
    step, state, _ = checkpoint.load_tree(url)
    leaves = checkpoint.record.flatten(state)[0]
    return step, {path: np.asarray(leaf).tobytes() for path, leaf in leaves.items()}


def test_a_run_goes_on_from_the_store_as_from_a_folder(store, tmp_path):
    run(train__steps=EPOCH)
    result = run(train__steps=2 * EPOCH)
    run_report.write_after_training(result.workdir, small_dataset())
    run(tmp_path / "folder", train__steps=EPOCH)
    run(tmp_path / "folder", train__steps=2 * EPOCH)
    assert saved(URL) == saved(tmp_path / "folder")
    top = {name.split("/")[3] for name in store.find("/bucket/run")}
    assert top == {"calibration.json", "checkpoints", "config.json", "curves.png"} | {
        *("environment.json", "metrics.jsonl", "report.html", "report-wrong.csv", "tensorboard")
    }
    assert store.cat("/bucket/run/metrics.jsonl").count(b'"test"') == 2


def test_a_damaged_step_in_the_store_is_skipped_and_set_aside(store):
    run(train__steps=2 * EPOCH, checkpoint__keep_latest=2)
    first, last = sorted({int(x.split("/")[4]) for x in store.find("/bucket/run/checkpoints")})
    name = max(store.find(f"/bucket/run/checkpoints/{last}/state"), key=store.size)
    raw = bytearray(store.cat(name))
    raw[len(raw) // 2] ^= 1
    store.pipe_file(name, bytes(raw))
    with pytest.warns(checkpoint.CheckpointWarning, match=rf"{URL}/checkpoints is damaged"):
        assert saved(URL)[0] == first
    with pytest.warns(checkpoint.CheckpointWarning, match=f"step {last} .* passed over"):
        run(train__steps=2 * EPOCH, checkpoint__keep_latest=2)
    assert saved(URL)[0] == last
    assert store.exists(f"/bucket/run/checkpoints/{last}.damaged/meta/metadata")


def test_another_networks_run_is_refused_and_stays_as_it_is(store):
    run(train__steps=EPOCH)
    before = {name: store.cat(name) for name in store.find("/bucket/run")}
    with pytest.raises(ValueError, match=rf"another network .*--config.init.from={URL} "):
        run(train__steps=EPOCH, model__embed_dim=16)
    assert {name: store.cat(name) for name in store.find("/bucket/run")} == before


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["upload", "marker"])
def test_a_run_killed_in_an_upload_ends_with_the_same_bits(cut, tmp_path):
    whole, killed = f"file://{tmp_path}/whole", f"file://{tmp_path}/killed"
    with script(RUN, whole, "") as process:
        assert process.wait(300) == 0
    with script(RUN, killed, cut) as process:
        assert process.wait(300) == -signal.SIGKILL
    found = [*(tmp_path / "killed/checkpoints").glob("*/commit.json")]
    assert len(found) == 1 and len([*(tmp_path / "killed/checkpoints").iterdir()]) == 2
    with script(RUN, killed, "") as process:
        assert process.wait(300) == 0
    assert saved(killed) == saved(whole)
    lines = [
        [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    timeless = [[x | {"images_per_second": 0} for x in some] for some in lines]
    assert timeless[0] == timeless[1]
