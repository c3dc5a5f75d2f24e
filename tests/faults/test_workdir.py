"""A work folder that somebody else has prepared: no link in it is followed, and nothing waits."""

import errno
import os
import shutil
import time

import pytest
from orbax.checkpoint import JsonCheckpointHandler
from support.small_runs import small_config, small_dataset

from hsvit_jax import main, train
from hsvit_jax.train import loop, workdir

RUN = ("--config=c2a2:digits,tiny", "--config.train.steps=2", "--config.model.depth=1")
RUN += ("--config.mesh.data=1",)
NAMES = (".lock", ".job", "config.json", "metrics.jsonl", "metrics.damaged", "curves.png")


@pytest.fixture(params=["link", "dangling link", "fifo", "folder"])
def plant(request, tmp_path):
    """Puts something of this kind where a name says, which leads to tmp_path/precious or waits."""
    if request.param == "link":
        (tmp_path / "precious").write_text("precious")

    def put(path):
        path.parent.mkdir(exist_ok=True)
        if request.param == "fifo":
            os.mkfifo(path)
        elif request.param == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "precious")
        return path

    yield put
    if request.param == "link":
        assert (tmp_path / "precious").read_text() == "precious"
    else:
        assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_a_run_is_looked_at_before_any_is_written(tmp_path, plant, name):
    path = plant(tmp_path / "run" / name)
    with pytest.raises(ValueError, match=f"{name} is a link or no regular file, .*: remove it"):
        workdir.opened(tmp_path / "run", None).__enter__()
    assert list((tmp_path / "run").iterdir()) == [path]


@pytest.mark.parametrize("plant", ["link"], indirect=True)
def test_a_run_in_such_a_folder(tmp_path, plant, capfd):
    """In one line, at once; a name that no run uses any more is left as it is."""
    plant(tmp_path / "run" / ".probe-0")
    lock = plant(tmp_path / "run" / ".lock")
    assert main.main(["hsvit", *RUN, f"--workdir={tmp_path}/run"]) == 1
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("fitting images")]
    assert out == "" and len(lines) == 1
    assert lines[0].startswith(f"{lock} is a link or no regular file, and nothing is written ")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", ".probe-0"]


@pytest.mark.parametrize("how", ["removed", "moved", "emptied"])
def test_a_folder_that_goes_away_in_mid_run(tmp_path, how):
    """The run ends at the next line or checkpoint: nobody would find what it wrote on."""
    folder = tmp_path / "run"

    class Vandal(train.Callback):
        def on_step(self, step, figures):
            if step == 3 and how == "moved":
                folder.rename(tmp_path / "elsewhere")
            elif step == 3:
                shutil.rmtree(folder)
                if how == "emptied":
                    folder.mkdir()
            assert step < 5

    config = small_config(train__steps=12)
    with pytest.raises(ValueError, match=f"{folder} was removed or moved while the run was in it"):
        train.train(config, folder, dataset=small_dataset(), verbose=False, callbacks=[Vandal()])


def test_a_save_that_fails_in_the_background_ends_the_run_before_the_next(tmp_path, monkeypatch):
    seen = []

    class Watcher(train.Callback):
        def on_step(self, step, figures):
            seen.append(step)
            time.sleep(0.5 if step > 4 else 0)

    async def full(self, item, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(JsonCheckpointHandler, "_save_fn", full)
    monkeypatch.setattr(loop.Loop, "in_flight", 0)  # each step is seen as soon as it is taken
    config = small_config(train__steps=100, train__eval_every=1)
    config.checkpoint.every = 1
    with pytest.raises(ValueError, match=r"the last save in .* failed: No space left on device"):
        train.train(config, tmp_path, dataset=small_dataset(), verbose=False, callbacks=[Watcher()])
    assert max(seen) < 8  # the next save
