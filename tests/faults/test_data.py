"""Faulty data through the real command line: refused in one line, or dropped on request."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.data_files import class_folders
from support.processes import COMMAND, ROOT, environment, run_main

CONFIG = f"--config={ROOT / 'configs/c2a2.py'}"
SHORT = ("--config.train.steps=2", "--config.model.depth=1", "--config.mesh.data=1")


@pytest.fixture
def train(tmp_path):
    """Trains on a folder or archive: (exit code, standard output, standard error)."""

    def run(path: Path, *words: str, workdir: str = "run", **variables: str):
        done = run_main(
            *(f"{CONFIG}:folder={path},tiny", f"--workdir={tmp_path / workdir}", *SHORT, *words),
            cwd=tmp_path,
            HSVIT_DATA_DIR=str(tmp_path / "data"),
            **variables,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def spoil(root: Path) -> None:
    """Eight files that are no images, in the order of their names."""
    good = (root / "cat/0.png").read_bytes()
    (root / "cat/b1-cut.png").write_bytes(good[: len(good) // 2])
    (root / "cat/b2-empty.png").touch()
    (root / "cat/b3-text.jpg").write_bytes(b"not an image")
    (root / "cat/b4-html.jpg").write_bytes(b"<!DOCTYPE html><html>404</html>")
    os.mkfifo(root / "cat/b5-pipe.jpg")
    (root / "cat/b6-device.jpg").symlink_to("/dev/zero")
    (root / "cat/b7-itself.jpg").symlink_to("b7-itself.jpg")
    (root / "cat/b8-nowhere.jpg").symlink_to("nowhere.jpg")


def test_files_that_are_no_images(tmp_path, train):
    """13: fatal before training by default, dropped with a warning on request."""
    root = class_folders(tmp_path / "set", ("cat", "dog"), 20)
    spoil(root)
    code, _, err = train(root)
    assert code == 1
    message = err[err.index("8 of 48 images") :].splitlines()
    assert [line.split("/cat/")[-1].split(":")[0] for line in message[1:6]] == [
        *("b1-cut.png", "b2-empty.png", "b3-text.jpg", "b4-html.jpg", "b5-pipe.jpg")
    ]
    assert message[6:] == [
        "  … and 3 more",
        "Repair or remove them, or drop them with on_bad_image='skip' (config key "
        "data.on_bad_image).",
    ]
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_files_that_are_no_images_are_dropped_on_request(tmp_path, train):
    spoil(class_folders(tmp_path / "set", ("cat", "dog"), 20))
    code, out, err = train(tmp_path / "set", "--config.data.on_bad_image=skip")
    assert code == 0, err
    assert "warning: 8 of 48 images cannot be used and are dropped" in err
    assert "24 training, 8 validation and 8 test images" in out + err
    bad = [f"set/cat/{name}.jpg" for name in ("b5-pipe", "b6-device")]
    for mode, written in (("predict", "set/cat/0.png  "), ("visualize", "views/")):
        words = (f"--mode={mode}", f"--checkpoint={tmp_path / 'run'}", *bad, "set/cat/0.png")
        done = run_main(*words, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr == "".join(f"{x}: cannot be read: not a regular file\n" for x in bad)
        assert done.stdout.startswith(written)


@pytest.mark.slow
def test_a_killed_decode_leaves_nothing_for_long(tmp_path, train):
    """Its scratch folder is removed at the next start; that of a living process is not."""
    root = class_folders(tmp_path / "set", ("cat", "dog"), 400)
    words = [*COMMAND, f"{CONFIG}:folder={root},tiny", f"--workdir={tmp_path / 'run'}", *SHORT]
    variables = environment(HSVIT_DATA_DIR=str(tmp_path / "data"))
    (tmp_path / "data/cache").mkdir(parents=True)

    def scratch() -> list[Path]:
        return list((tmp_path / "data/cache").glob(".*.part-*"))

    process = subprocess.Popen(words, env=variables, stderr=subprocess.DEVNULL)
    try:
        while not any(any(folder.iterdir()) for folder in scratch()):  # it is locked by then
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        live = scratch()
        assert live
        other = class_folders(tmp_path / "other", ("cat", "dog"), 20)
        code, _, err = train(other, workdir="beside")
        assert code == 0, err
        assert scratch() == live
    finally:
        process.kill()
        process.wait()
    code, _, err = train(root)
    assert code == 0, err
    assert not scratch()
