"""Tests jobs of several processes on this machine: faults of one process, seen by all."""

import fcntl
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support.faulty_process import asking
from support.processes import environment, finish, free_port
from support.small_runs import digest, losses, metric_lines, small_dataset

from hsvit_jax import checkpoint, train
from hsvit_jax import config as config_lib
from hsvit_jax.weights import files
from hsvit_jax.weights.stored import stored_network

SPEC = "configs/c2a2.py:digits,tiny"
# Four groups on four devices, added in their order: the same bits in any number of processes.
GROUPS = (
    *("train.steps=26", "model.depth=1", "train.eval_every=9", "checkpoint.every=9"),
    *("mesh.group=4", "mesh.aggregate=ordered"),
)
RECOVERABLE = ("--recoverable", "--stall_timeout=400")


@pytest.fixture
def job(command):
    """Runs a job of processes to its end: [(exit code, standard error)]."""

    def run(
        workdir,
        settings,
        *,
        count,
        devices,
        twist=("none", 0, 0),
        flags=(),
        port=None,
        told=None,
        **variables,
    ):
        port = port or free_port()
        options = {"twist": twist, "JAX_NUM_CPU_DEVICES": str(devices), **variables}
        told = told or [count] * count  # how many processes there are
        places = [f"--distributed=127.0.0.1:{port},{n},{index}" for index, n in enumerate(told)]
        started = [
            command(workdir, *settings, flags=(place, *flags), **options) for place in places
        ]
        return [finish(process) for process in started]

    return run


def here(workdir, settings, dataset=None, devices=4):
    """The same run in this process, on four devices."""
    config = config_lib.get_config(SPEC, *settings)
    train.train(config, workdir, dataset=dataset, devices=jax.devices()[:devices], verbose=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    here(folder, GROUPS)
    return folder


def stopped_at(ends, code):
    """Returns the step after which every process stopped; process 0 prints it once."""
    assert [end[0] for end in ends] == [code] * len(ends), ends
    assert "To go on, give the same command again" in ends[0][1]
    for _, errors in ends[1:]:
        assert "To go on" not in errors and "Traceback" not in errors
    return int(re.search(r"after step (\d+)", ends[0][1])[1])


def test_a_signal_to_one_of_two_processes_stops_both(tmp_path, job):
    cut = tmp_path / "cut"
    ends = job(cut, GROUPS, count=2, devices=2, twist=("term", 1, 3))
    step = stopped_at(ends, 42)
    assert 3 <= step < 26
    assert "stopping as soon as the state is saved" in ends[1][1]
    assert checkpoint.load_tree(cut)[0] == step
    assert list(losses(cut)) == list(range(1, step + 1))  # one line for each step


@pytest.mark.slow
def test_callbacks_act_on_both_processes_at_one_step(tmp_path, job):
    """As in one process, to the bit: epochs have four steps, and the run would take 26."""
    few = (*GROUPS, "data.fraction=0.1")
    config = config_lib.get_config(SPEC, *few)
    alone = {"devices": jax.devices()[:4], "verbose": False, "callbacks": [asking(6)]}
    done = train.train(config, tmp_path / "alone", **alone)
    assert done.step == 2 * (done.step // 2) and 6 <= done.step < 26
    ends = job(tmp_path / "both", few, count=2, devices=2, twist=("ask", 0, 6))
    assert [code for code, _ in ends] == [0, 0], ends
    assert digest(tmp_path / "both") == digest(tmp_path / "alone")
    assert metric_lines(tmp_path / "both") == metric_lines(tmp_path / "alone")


@pytest.mark.slow
def test_a_signal_to_one_while_it_loads_ends_both(tmp_path, job):
    """The code is 42, so that a scheduler starts them again, and no process waits."""
    began = time.monotonic()
    ends = job(tmp_path / "run", GROUPS, count=2, devices=2, twist=("term_loading", 1, 0))
    assert [code for code, _ in ends] == [42, 42], ends
    assert time.monotonic() - began < 45
    assert "stopped by SIGTERM; there was nothing left to save" in ends[1][1]
    assert "process 1 ended with exit code 42, so this one ends too" in ends[0][1]


@pytest.mark.slow
def test_any_number_of_processes_goes_on(tmp_path, job):
    """Ctrl-C to one of two; SIGTERM at the second start; then four processes to the end."""
    long = tuple(s.replace("steps=26", "steps=60") for s in GROUPS)
    here(tmp_path / "whole", long)
    cut = tmp_path / "cut"
    first = stopped_at(job(cut, long, count=2, devices=2, twist=("int", 0, 4)), 130)
    second = stopped_at(job(cut, long, count=2, devices=2, twist=("term", 1, first + 2)), 42)
    assert first < second < 60
    ends = job(cut, long, count=4, devices=1)
    assert [code for code, _ in ends] == [0, 0, 0, 0], ends
    assert f"from step {second}" in ends[0][1]
    assert metric_lines(cut) == metric_lines(tmp_path / "whole")
    assert digest(cut) == digest(tmp_path / "whole")


@pytest.mark.slow
def test_other_numbers_of_devices_go_on(tmp_path, whole, job):
    """With `ordered` the next loss has the same bits; later ones agree to rounding."""
    cut = tmp_path / "cut"
    step = stopped_at(job(cut, GROUPS, count=2, devices=2, twist=("term", 1, 3)), 42)
    one = losses(whole)
    for devices in (2, 1):
        other = tmp_path / f"on {devices}"
        shutil.copytree(cut, other)
        settings = [s.replace("mesh.group=4", f"mesh.group={devices}") for s in GROUPS]
        here(other, settings, devices=devices)
        again = losses(other)
        assert list(again) == list(one)
        assert again[step + 1] == one[step + 1]
        np.testing.assert_allclose(list(again.values()), list(one.values()), rtol=1e-5)


@pytest.mark.slow
def test_each_process_reads_its_own_images(tmp_path, job):
    """The batch split over two processes; the first two epochs of 4 steps."""
    settings = ("train.batch=16", "train.steps=8", "model.depth=1", "mesh.data=4")
    reads = tmp_path / "reads"
    ends = job(
        *(tmp_path / "streamed", settings),
        **{"count": 2, "devices": 2, "twist": ("stream", 0, 0), "READS": str(reads)},
    )
    assert [code for code, _ in ends] == [0, 0], ends
    here(tmp_path / "whole", settings, small_dataset())
    one, other = losses(tmp_path / "whole"), losses(tmp_path / "streamed")
    assert list(one) == list(other) == list(range(1, 9))
    np.testing.assert_allclose(list(other.values()), list(one.values()), rtol=1e-6)
    evaluations = [
        [line for line in metric_lines(tmp_path / run) if "split" in line]
        for run in ("whole", "streamed")
    ]
    for a, b in zip(*evaluations, strict=True):
        assert (a["accuracy"], a["examples"]) == (b["accuracy"], b["examples"])
    shares = [list(map(int, Path(f"{reads}-{i}").read_text().split())) for i in range(2)]
    drawn = 16  # the first batch, as process 0 draws it
    assert [len(share) for share in shares] == [drawn + 8 * 8, 8 * 8]


@pytest.mark.slow
def test_an_exception_in_one_ends_all(tmp_path, job):
    ends = job(tmp_path / "run", GROUPS, count=2, devices=2, twist=("raise", 1, 5))
    assert ends[1][0] == 1
    assert "process 1 of 2:" in ends[1][1]
    assert "RuntimeError: the fault that was asked for" in ends[1][1]
    assert ends[0][0] not in (0, -9), ends[0]  # -9: it had to be killed


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_others_as_a_stall_does(tmp_path, job, lost):
    """Schedulers start a stalled run again, unlike one with a mistake."""
    ends = job(tmp_path / "run", GROUPS, count=2, devices=2, twist=("kill", lost, 5))
    assert [code for code, _ in ends] == ([75, -9] if lost else [-9, 75]), ends
    told = "process 0 of 2:" if lost else "jax has ended this process|process 1 of 2:"
    assert re.search(told, ends[1 - lost][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("twist", "last"),
    [(("hang", 1, 5), "step 4"), (("hang_saving", 1, 26), "the start of saving step 26")],
)
def test_a_stall_prints_stacks(tmp_path, job, twist, last):
    """Process 1 hangs in a step or in the last checkpoint, and process 0 waits for it."""
    flags = ("--stall_timeout=25",)
    ends = job(tmp_path / "run", GROUPS, count=2, devices=2, twist=twist, flags=flags)
    assert [code for code, _ in ends] == [75, 75], ends
    for _, errors in ends:
        assert "nothing has moved for 25 s" in errors
        assert "most recent call first" in errors
    assert f"the last was {last}" in ends[1][1]
    assert "in fault" in ends[1][1]  # where it sleeps
    waits = "in process_oldest_step" if last == "step 4" else f"the last was {last}"
    assert waits in ends[0][1]


@pytest.mark.slow
def test_a_process_that_is_late_is_waited_for(tmp_path, job):
    """Gloo itself waits for half a minute. Process 0 alone writes a report at the end."""
    settings, flags = [s.replace("steps=26", "steps=3") for s in GROUPS], ("--report",)
    ends = job(tmp_path / "run", settings, count=2, devices=2, twist=("late", 1, 40), flags=flags)
    assert [code for code, _ in ends] == [0, 0], ends
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_all_processes_name_a_port_in_use(tmp_path, job):
    """Another program listens there, and answers."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ends = job(tmp_path / "run", GROUPS, count=2, devices=2, port=port)
    assert [code for code, _ in ends] == [1, 1], ends
    assert f"process 0 cannot listen on port {port} (Address already in use)" in ends[0][1]
    assert f"process 0 cannot listen at 127.0.0.1:{port}, as it says itself\n" in ends[1][1]
    assert not any("Traceback" in errors for _, errors in ends)


@pytest.mark.slow
def test_an_evaluation_is_of_one_network_with_one_command(tmp_path):
    stored = stored_network("zoo:c2a2-digits")
    for folder, factor in (("0", 1.0), ("1", 1.5)):
        params = jax.tree.map(lambda x, factor=factor: np.float32(factor) * x, stored.params)
        (tmp_path / folder).mkdir()
        packed = files.pack({"params": params, "stats": stored.stats}, stored.meta)
        (tmp_path / folder / "net.safetensors").write_bytes(packed)
    words = [sys.executable, "-m", "hsvit_jax.main", "eval", "--checkpoint=net.safetensors"]
    words += ["--config.mesh.group=2", "--distributed"]

    def ends(folders, lost):
        port = free_port()
        started = [
            subprocess.Popen(
                [*words, f"127.0.0.1:{port},2,{index}", f"--drop_groups={groups}"],
                cwd=tmp_path / folder,
                env=environment(JAX_NUM_CPU_DEVICES="1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, (folder, groups) in enumerate(zip(folders, lost, strict=True))
        ]
        return [finish(process) for process in started]

    assert [code for code, _ in ends("00", "22")] == [0, 0]
    for folders, lost, what in (("01", "22", "network"), ("00", "23", "command line")):
        found = ends(folders, lost)
        assert [code for code, _ in found] == [1, 1]
        assert f"process 1 has another {what} than process 0" in found[0][1] + found[1][1]


@pytest.mark.slow
def test_a_mistake_is_printed_once(tmp_path, job):
    """A mesh that does not fit, on both; a folder in use, which only process 0 sees."""
    ends = job(tmp_path / "run", ("mesh.group=3",), count=2, devices=2)
    assert [code for code, _ in ends] == [1, 1], ends
    assert "4 groups cannot split over 3 devices" in ends[0][1]
    assert ends[1][1] == ""
    assert not (tmp_path / "run").exists()

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ends = job(tmp_path / "run", GROUPS, count=2, devices=2)
    assert [code for code, _ in ends] == [1, 1], ends
    assert "process 0: another run is using the work folder" in ends[0][1]
    assert ends[1][1] == ""

    ends = job(tmp_path / "run", GROUPS, count=2, devices=2, told=[2, 3])
    assert [code for code, _ in ends] == [1, 1], ends
    assert (
        "process 1 was started as one of 3 processes, not recoverable; process 0 as one of 2"
        in ends[1][1]
    )


@pytest.mark.slow
def test_a_lost_process_takes_its_groups_and_no_more(tmp_path, job):
    """The second of three is killed: the other two finish with four of six groups."""
    settings = (
        *("model.groups=6", "model.conv_channels=(8,12)", "model.depth=1", "train.steps=50"),
        *("mesh.group=3", "mesh.data=1"),
    )
    options = {"flags": RECOVERABLE, "SILENCE": "10"}
    cut = tmp_path / "cut"
    ends = job(cut, settings, count=3, devices=1, twist=("kill", 1, 9), **options)
    assert [code for code, _ in ends] == [0, -9, 0], ends
    assert "lost process 1 and with it groups or towers 2, 3" in ends[0][1]
    lines = [line for line in metric_lines(cut) if "split" not in line]
    assert [line["step"] for line in lines] == list(range(1, 51))
    assert "lost_groups" not in lines[7]
    assert {tuple(line["lost_groups"]) for line in lines[9:]} == {(2, 3)}
    step, state, meta = checkpoint.load_tree(cut)
    assert (step, meta["lost_groups"]) == (50, [2, 3])
    assert state["params"]["groups"]["cls"].shape[0] == 6
    longer = (*settings, "train.steps=52")
    config = config_lib.get_config(SPEC, *longer)
    result = train.train(config, cut, devices=jax.devices()[:3], verbose=False)
    assert result.step == 52


@pytest.mark.slow
@pytest.mark.parametrize(
    ("twist", "lost"), [(("kill_giving", 2, 3), [2]), (("kill_testing", "1,3", 0), [1, 3])]
)
def test_processes_lost_in_a_save_and_in_an_evaluation(tmp_path, job, twist, lost):
    """One of four is lost in a save, or two at once in the final evaluation.

    The others notice together and evaluate the network that is left.
    """
    settings = ("train.steps=3", "model.depth=1", "mesh.group=4", "mesh.data=1")
    options = {"flags": RECOVERABLE, "SILENCE": "10"}
    ends = job(tmp_path / "cut", settings, count=4, devices=1, twist=twist, **options)
    assert [code for code, _ in ends] == [-9 if i in lost else 0 for i in range(4)], ends
    last = metric_lines(tmp_path / "cut")[-1]
    assert (last["split"], last["step"], last["lost_groups"]) == ("test", 3, lost)


@pytest.mark.slow
def test_a_process_lost_before_the_first_step(tmp_path, job):
    settings = ("train.steps=3", "model.depth=1", "mesh.group=2", "mesh.data=1")
    options = {"twist": ("kill_loading", 1, 0), "flags": RECOVERABLE, "SILENCE": "10"}
    ends = job(tmp_path / "cut", settings, count=2, devices=1, **options)
    assert [code for code, _ in ends] == [1, -9], ends
    assert "process 1 was lost before the first step: start all again" in ends[0][1]
