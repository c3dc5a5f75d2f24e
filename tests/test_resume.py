"""A run that is cut short and started again is the run that was not, bit for bit."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import conftest
import numpy as np
import pytest
from small_runs import digest, metric_lines, small_config, small_dataset

from hsvit_jax import checkpoint, loop, train

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def command():
    """Starts a process of `python -m hsvit_jax.main`; none outlives the test."""
    started = []
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"} | {
        "XLA_FLAGS": conftest.QUICK_FLAGS,
        "JAX_PLATFORMS": "cpu",
    }

    def start(workdir, *settings):
        words = ["--config=configs/c2a2.py:digits,tiny", f"--workdir={workdir}"]
        words += [f"--config.{setting}" for setting in settings]
        process = subprocess.Popen(
            [sys.executable, "-m", "hsvit_jax.main", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process):
    """(exit code, standard error)"""
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def wait_for_step(process, workdir, step):
    """Until the metrics tell of a step; fails when the process ends before."""
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + 240
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        if lines and max(json.loads(line)["step"] for line in lines) >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    raise AssertionError(f"no step {step} in time")


LENGTH = ("train.steps=90", "train.batch=64")  # epochs of 22 steps


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

    # A finished run is not trained again; another network is refused, in words.
    before = digest(cut)
    assert finish(command(cut, *LENGTH))[0] == 0
    assert digest(cut) == before
    assert metric_lines(cut) == metric_lines(whole)
    code, errors = finish(command(cut, *LENGTH, "model.embed_dim=8"))
    assert code == 1
    assert "model.embed_dim: checkpoint 16, config 8" in errors
    assert "params.head.linear.kernel: checkpoint '16×10', config '8×10'" in errors
    assert "Traceback" not in errors
    assert digest(cut) == before


def test_divergence_ends_the_command_with_3(tmp_path, command):
    settings = ("optim.learning_rate=1e38", "optim.weight_decay=1e30", "train.bad_steps_limit=2")
    code, errors = finish(command(tmp_path / "run", *settings))
    assert code == 3, errors
    assert "not finite for 2 steps in a row" in errors
    assert "Traceback" not in errors


def test_a_second_signal_ends_at_once():
    script = (
        "import time\nfrom hsvit_jax import signals\n"
        "with signals.StopRequests():\n    print('ready', flush=True)\n    time.sleep(120)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"
        assert "second signal" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()


# --- In one process ------------------------------------------------------------------------------


def run(workdir, dataset=None, **settings):
    """A quiet run of 3 steps, one short of an epoch, or as the settings say."""
    config = small_config(**{"train__steps": 3, **settings})
    return train.train(config, workdir, dataset=dataset or small_dataset(), verbose=False)


def losses(workdir):
    return {line["step"]: line["loss"] for line in metric_lines(workdir) if "split" not in line}


@pytest.mark.parametrize("shape", [pytest.param((1, 8), marks=pytest.mark.slow), (4, 2)])
def test_a_run_goes_on_on_other_devices(tmp_path, shape):
    """From one device to eight: the same losses."""
    long = {"train__steps": 8, "optim__cosine_per": "step"}
    run(tmp_path / "whole", **long)
    interrupt_after(tmp_path / "moved", 3, **long)
    run(tmp_path / "moved", mesh__group=shape[0], mesh__data=shape[1], **long)
    whole, moved = losses(tmp_path / "whole"), losses(tmp_path / "moved")
    assert list(moved) == list(range(1, 9))
    np.testing.assert_allclose(list(moved.values()), list(whole.values()), rtol=1e-5)


def interrupt_after(workdir, step, **settings):
    """Runs until SIGTERM comes during a step."""
    from hsvit_jax import metrics, signals

    write = metrics.MetricLog.write

    def signalled(self, number, values):
        write(self, number, values)
        if number == step and "split" not in values:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_WINDOW", 0)  # each step is told as soon as it is taken
        patch.setattr(metrics.MetricLog, "write", signalled)
        with pytest.raises(signals.Interrupted) as caught:
            run(workdir, **settings)
    assert caught.value.step == step


@pytest.mark.parametrize("step", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_every_place_in_an_epoch_resumes_to_the_same_bits(tmp_path, step):
    """In the middle, at the end, and just after it; epochs of 4 steps, sums of 3."""
    long = {"train__steps": 8, "train__log_every": 3}
    run(tmp_path / "whole", **long)
    told = {"train__log_every": 1}  # so that the signal can be placed; a sum that goes on is next
    interrupt_after(tmp_path / "cut", step, **long | told)
    run(tmp_path / "cut", **long | told)
    run(tmp_path / "every", **long | told)
    assert metric_lines(tmp_path / "cut") == metric_lines(tmp_path / "every")
    assert digest(tmp_path / "cut") == digest(tmp_path / "every")
    assert losses(tmp_path / "whole").keys() == {3, 6, 8}


def test_a_changed_learning_rate_is_allowed_and_told(tmp_path, capsys):
    run(tmp_path)
    config = small_config(train__steps=5, optim__learning_rate=0.5)
    train.train(config, tmp_path, dataset=small_dataset())
    said = capsys.readouterr().out
    assert "resuming with changed settings" in said
    assert "optim.learning_rate" in said and "0.001" in said and "0.5" in said
    assert "train.steps" in said
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]


NAMES = small_dataset().info.class_names


def renamed(names):
    """The data set under other class names."""
    dataset = small_dataset()
    return dataclasses.replace(
        dataset, info=dataclasses.replace(dataset.info, class_names=tuple(names))
    )


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (
            None,
            {"model__embed_dim": 4},
            ["params.head.linear.kernel", "8×7", "4×7", "model.embed_dim"],
        ),
        (renamed([*NAMES[:-1], "a stranger"]), {}, ["class_names", "row 6", "a stranger"]),
        (renamed(NAMES[::-1]), {}, ["class_names", "another order"]),
        (small_dataset(seed=4), {}, ["fingerprint", "rows-3", "rows-4"]),
    ],
)
def test_another_network_or_other_data_are_refused(tmp_path, dataset, settings, words):
    run(tmp_path)
    before, lines = digest(tmp_path), metric_lines(tmp_path)
    written = (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError) as caught:
        run(tmp_path, dataset, train__steps=5, **settings)
    for word in [*words, "--workdir"]:
        assert word in str(caught.value)
    assert (digest(tmp_path), metric_lines(tmp_path)) == (before, lines)
    assert (tmp_path / "config.json").read_text() == written
