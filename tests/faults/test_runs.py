"""One process and what befalls it: signals, kill -9, a full disk."""

import json
import os
import re
import signal
import subprocess
import time

import jax
import pytest
from support.processes import COMMAND, PATIENCE, ROOT, environment, finish, script
from support.small_runs import digest, metric_lines

from hsvit_jax import checkpoint, train
from hsvit_jax import config as config_lib


def wait_for_step(process, workdir, step):
    """Until the metrics tell of a step; fails when the process ends before."""
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        if lines and max(json.loads(line)["step"] for line in lines) >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    raise AssertionError(f"no step {step} in time")


# Epochs of 22 steps.
LENGTH = ("train.steps=90", "train.batch=64", "model.depth=1", "mesh.data=1")


@pytest.mark.slow
def test_kill_and_signals_leave_the_same_run(tmp_path, command):
    """Killed in the second epoch; SIGTERM in the third, Ctrl-C in the fourth, then to the end."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finish(command(whole, *LENGTH))[0] == 0

    process = command(cut, *LENGTH)
    wait_for_step(process, cut, 26)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL

    for signum, step, code in ((signal.SIGTERM, 47, 42), (signal.SIGINT, 69, 130)):
        process = command(cut, *LENGTH)
        wait_for_step(process, cut, step)
        process.send_signal(signum)
        got, errors = finish(process)
        assert got == code, errors
        stopped = int(re.search(r"after step (\d+)", errors)[1])
        assert step <= stopped < step + 19  # within the epoch
        assert "To go on, give the same command again" in errors and str(cut) in errors
        assert checkpoint.load_tree(cut)[0] == stopped

    code, errors = finish(command(cut, *LENGTH))
    assert code == 0, errors
    assert f"from step {stopped}" in errors
    assert metric_lines(cut) == metric_lines(whole)
    steps = [line["step"] for line in metric_lines(cut) if "split" not in line]
    assert steps == list(range(1, 91))
    assert digest(cut) == digest(whole)
    saved = [checkpoint.Checkpoints(w / "checkpoints", read_only=True) for w in (cut, whole)]
    assert saved[0].best_step() == saved[1].best_step()

    # A finished run is not trained again.
    before = digest(cut)
    assert finish(command(cut, *LENGTH))[0] == 0
    assert digest(cut) == before
    assert metric_lines(cut) == metric_lines(whole)


SHORT = ("train.steps=12", "train.batch=256", "model.depth=1", "mesh.data=1")  # epochs of 5 steps


def here(workdir):
    """The short run, or the rest of it, in this process."""
    config = config_lib.get_config("c2a2:digits,tiny", *SHORT)
    train.train(config, workdir, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the short run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    here(folder)
    return folder


@pytest.mark.slow
def test_kill_while_a_checkpoint_is_written(tmp_path, whole, command, capsys):
    """The one before it is used, and what was written of it is removed."""
    cut = tmp_path / "cut"
    process = command(cut, *SHORT, twist=("kill_saving", 0, 10))
    assert finish(process)[0] == -signal.SIGKILL
    assert sorted(os.listdir(cut / "checkpoints")) == ["10.orbax-checkpoint-tmp", "5"]
    here(cut)
    assert "from step 5" in capsys.readouterr().err
    assert metric_lines(cut) == metric_lines(whole)
    assert digest(cut) == digest(whole)
    assert all(name.isdigit() for name in os.listdir(cut / "checkpoints"))


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_a_line(tmp_path, whole, command):
    """From step 7 on; a file-size limit stands for it. Nothing half written is left behind."""
    full = tmp_path / "full"
    code, errors = finish(command(full, *SHORT, twist=("full", 0, 7)))
    assert code == 1, errors
    told = errors.splitlines()
    usual = ("data ", "network ", "length ", "folder ", "step ", "compil", "about ", "warning: ")
    last = [line for line in told if not line.startswith(usual)]
    assert len(last) == 1 and "File too large. Earlier steps are untouched" in last[0], errors
    warned = [line for line in told if line.startswith("warning: ")]  # of each file, once
    assert [("metrics" in line, "tensorboard" in line) for line in warned[:1]] == [(True, False)]
    assert len(warned) == 2 and "no more figures for tensorboard" in warned[1], errors
    assert os.listdir(full / "checkpoints") == ["5"]

    code, errors = finish(command(full, *SHORT))  # with space again
    assert code == 0, errors
    assert metric_lines(full) == metric_lines(whole)
    assert digest(full) == digest(whole)


def test_a_disk_that_is_full_from_the_start(tmp_path):
    words = ("--config=c2a2:digits,tiny", f"--workdir={tmp_path}/run")
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *COMMAND, *words],
        cwd=ROOT,
        env=environment() | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (1, "")
    told = f"cannot write to the work folder {tmp_path}/run: File too large; choose another, or"
    lines = [line for line in done.stderr.splitlines() if not line.startswith("fitting images")]
    assert lines == [f"{told} make this one a writable folder"]


@pytest.mark.slow
def test_a_clock_set_back_changes_nothing(tmp_path, whole, command):
    code, errors = finish(command(tmp_path / "run", *SHORT, twist=("clock", 0, 3)))
    assert code == 0, errors
    assert "warning" not in errors
    assert metric_lines(tmp_path / "run") == metric_lines(whole)
    sizes = [
        sum(file.stat().st_size for file in (folder / "tensorboard").iterdir())
        for folder in (tmp_path / "run", whole)
    ]
    assert abs(sizes[0] - sizes[1]) < 100, "events are missing"


@pytest.mark.slow
def test_a_request_to_stop_before_there_is_anything_to_save(tmp_path, command):
    code, errors = finish(command(tmp_path / "run", twist=("term_loading", 0, 0)))
    assert code == 42 and "Traceback" not in errors
    assert "stopped by SIGTERM; there was nothing left to save" in errors


def test_a_request_to_stop_is_heard_in_a_call_that_hangs():
    """The main thread locks a mutex twice, in C, where no handler of Python's ever runs."""
    code = """
        import ctypes
        from hsvit_jax.runtime import signals, watchdog
        watchdog.GRACE = 1.0
        with watchdog.Watchdog(0.0) as dog, signals.StopRequests(dog.hurry):
            print("ready", flush=True)
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
    """
    with script(code) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert "nothing has moved for 1 s" in errors
    assert "most recent call first" in errors


def test_the_watchdog_needs_no_reader_of_standard_error():
    """The main thread is stuck in a full pipe, and so is the watchdog's message."""
    code = """
        import os
        from hsvit_jax.runtime import watchdog
        watchdog._SLOW, watchdog._LAST_WORDS = 0.0, 1.0
        with watchdog.Watchdog(1.0):
            while True:
                os.write(2, bytes(4096))
    """
    with script(code) as process:
        assert process.wait(timeout=60) == 75


@pytest.mark.parametrize("session", ["sys.modules['ipykernel'] = sys", "sys.ps1 = '>>> '"])
def test_a_second_signal_ends_a_cell_and_not_the_session(session):
    code = f"""
        import sys, time
        from hsvit_jax.runtime import signals
        {session}
        try:
            with signals.StopRequests(lambda: print("hurry", flush=True)) as stop:
                print("ready", flush=True)
                while stop.due() is None:
                    time.sleep(0.1)
                print("asked to stop", flush=True)
                while True:
                    time.sleep(0.1)
        except KeyboardInterrupt:
            print("the session goes on", flush=True)
    """
    with script(code) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert "second signal" in process.stderr.readline()
        # Python calls a handler once for two signals that come before it runs.
        assert process.stdout.readline() == "asked to stop\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "the session goes on\n"
    assert process.returncode == 0


def test_a_second_signal_ends_at_once():
    code = """
        import time
        from hsvit_jax.runtime import signals
        with signals.StopRequests():
            print("ready", flush=True)
            time.sleep(120)
    """
    with script(code) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"
        assert "second signal" in process.stderr.readline()
        process.send_signal(signal.SIGHUP)  # a closing terminal sends two: one request
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
