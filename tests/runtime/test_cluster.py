"""Which job a process belongs to, from flags and simulated environments; nothing is started here
but ports that do not answer. Real processes: test_processes.py."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.processes import environment, free_port, script

from hsvit_jax.runtime import cluster, coordination
from hsvit_jax.train import loop

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-010]",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
PODS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture
def around(monkeypatch):
    """Sets the variables of a scheduler, where there were none."""

    def put(variables):
        others = ("CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "TPU_WORKER_HOSTNAMES")
        for name in (*SLURM, *OPEN_MPI, *PODS, *others, "TPU_PROCESS_ADDRESSES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    put({})
    return put


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),  # a laptop
        (SLURM, (6, 3, [1], "slurm")),
        (SLURM | {"SLURM_NODEID": "2"}, (6, 3, [], "slurm")),  # alone on its host
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, (6, 3, [1], "slurm")),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, (6, 3, [], "slurm")),  # --gpus-per-task
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0"}, (6, 3, None, "slurm")),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (SLURM | {"SLURM_NTASKS": "1", "PMI_SIZE": "1"}, None),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),  # without srun
        (OPEN_MPI, (2, 1, [], "ompi")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 1, [0], "ompi")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a pod
    ],
)
def test_schedulers(around, variables, expected):
    around(variables)
    assert cluster.find("auto") == (expected and cluster.Job(None, *expected))
    assert cluster.find("off") is None


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        # Open MPI 5 and MPICH name no address.
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"--distributed=host:port,\$OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, r"--distributed=host:port,\$PMI_SIZE,\$PMI_RANK"),
        (PODS, r"install jax\[k8s\]"),
    ],
)
def test_jobs_that_cannot_be_counted(around, monkeypatch, variables, told):
    around(variables)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=told):
        cluster.find("auto")


@pytest.mark.parametrize(
    ("variables", "tpu", "expected"),
    [
        (PODS, False, cluster.Job()),
        ({}, True, cluster.Job()),  # whose metadata server knows
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True, cluster.Job()),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True, cluster.Job()),
        (PODS | {"TPU_WORKER_HOSTNAMES": "a"}, True, None),  # a slice of one host
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, False, None),
    ],
)
def test_pods(around, monkeypatch, variables, tpu, expected):
    around(variables)
    monkeypatch.setattr(cluster, "_has_tpu", lambda: tpu)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name)
    assert cluster.find("auto") == expected


def test_a_job_that_cannot_be_read(monkeypatch):
    """As of a metadata server that does not answer, or an account without rights."""

    def unreachable(*_, **__):
        raise ConnectionError(f"metadata.google.internal\n{'said ' * 60}\nstart the server")

    monkeypatch.setattr(cluster.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(cluster.jax.distributed, "initialize", unreachable)
    with pytest.raises(ValueError, match=r"ConnectionError: metadata.*server\).*=off"):
        cluster.start(cluster.Job())


def test_explicit_places():
    assert cluster.find("10.0.0.1:8476,4,3")[:4] == ("10.0.0.1:8476", 4, 3, None)
    assert cluster.find("[fe80::1]:99,2,0").address == "[fe80::1]:99"
    assert cluster.find("host:8476,1,0") is None


WRONG = "on host,2,0 host:80,2 host:80,2,-1 host:80,2,2 host:80,0,0 host:0,2,1 host:70000,2,1"


@pytest.mark.parametrize("setting", WRONG.split())
def test_malformed_places(setting):
    with pytest.raises(ValueError, match=f"--distributed={setting}: expected auto, off or host"):
        cluster.find(setting)


@pytest.fixture
def untouched(monkeypatch):
    """jax must not be told to wait for anybody."""
    monkeypatch.setattr(cluster.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(cluster.jax.distributed, "initialize", lambda *_, **__: 1 / 0)


def test_a_process_0_that_does_not_answer(untouched, monkeypatch, capfd):
    monkeypatch.setattr(cluster.os, "_exit", sys.exit)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SystemExit, match="75"):
            cluster.start(cluster.Job(address, 2, 1, scheduler="deactivate"), timeout=0.0)
    assert f"process 0 does not answer at {address} after 0 s" in capfd.readouterr().err


def test_a_machine_whose_name_has_no_address(untouched, monkeypatch):
    def devices():
        raise RuntimeError("[enforce fail at third_party/gloo/gloo/transport/tcp/device.cc:99]")

    monkeypatch.setattr(cluster.jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(cluster.jax, "devices", devices)
    monkeypatch.setattr(coordination, "install_excepthook", lambda: None)
    monkeypatch.setattr(coordination, "check_count", lambda *_: None)
    monkeypatch.setattr(coordination, "count", lambda: 2)
    monkeypatch.setattr(socket, "gethostname", lambda: "nameless")
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=r"add a line to /etc/hosts, '127\.0\.0\.1 nameless'"):
        cluster.start(cluster.Job(address, 2, 0))


JOIN = """
import sys
import jax
from hsvit_jax.runtime import cluster, coordination
job = cluster.find("auto") or cluster.Job(None, 1, 0, [], "slurm")
cluster.start(job)
print(coordination.from_lead(str(coordination.index())), jax.process_count(), coordination.count())
sys.exit(coordination.leave(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_tasks_of_slurm_find_each_other(count):
    """By jax's public detection; where it finds a job of one, the process stays alone."""
    place = {"SLURM_STEP_NODELIST": "127.0.0.1", "JAX_COORDINATOR_PORT": str(free_port())}
    place |= {"SLURM_NTASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    with contextlib.ExitStack() as stack:
        tasks = [
            stack.enter_context(script(JOIN, **SLURM | place | {"SLURM_PROCID": str(i)}))
            for i in range(count)
        ]
        ends = [task.communicate(timeout=300) for task in tasks]
    assert [out for out, _ in ends] == [f"0 {count} {count}\n"] * count, ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeout", "code", "told"),
    [
        (1.0, 75, "process 0 of 2 waited 1 s for the others: start all"),
        (50.0, 42, "stopped by SIGTERM before the other processes came"),
    ],
)
def test_a_job_that_does_not_become_complete(timeout, code, told):
    """Its process 0 ends by itself, and at a signal while jax waits in C++."""
    address = f"127.0.0.1:{free_port()}"
    start = f"cluster.start(cluster.Job({address!r}, 2, 0), timeout={timeout})"
    signalled = "import os, threading; threading.Timer(5, os.kill, [os.getpid(), 15]).start()"
    words = f"{signalled}; from hsvit_jax.runtime import cluster; {start}"
    done = subprocess.run(
        [sys.executable, "-c", words], env=environment(), capture_output=True, text=True, timeout=45
    )
    assert done.returncode == code, done.stderr
    assert told in done.stderr


def test_an_abort_by_jax_ends_as_a_stall_does():
    """As where process 0 is lost: another start helps."""
    code = """
        import os
        import jax
        from hsvit_jax.runtime import cluster
        jax.distributed.initialize = lambda *_, **__: os.abort()
        cluster.start(cluster.Job("127.0.0.1:0", 2, 0))
    """
    with script(code) as process:
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 75
    assert errors == "jax has ended this process, as it says above: start all again\n"


def test_two_processes_of_one_number():
    """jax ends the first of them with a trace, in whose place one line says what to change."""
    port = free_port()
    code = f"""
        from hsvit_jax.runtime import cluster
        cluster.start(cluster.Job("127.0.0.1:{port}", 3, {{}}), timeout=60)
    """
    with script(code.format(0)), script(code.format(1)) as one, script(code.format(1)) as other:
        while one.poll() is None and other.poll() is None:
            time.sleep(0.1)
        ended = one if one.poll() is not None else other
        errors = ended.communicate()[1]
        assert ended.returncode == 75
        for process in (one, other):
            process.kill()
    lines = [line for line in errors.splitlines() if "waits for" not in line]
    assert len(lines) == 1 and "each with a number of its own and the same n" in lines[0]


def test_a_port_that_is_taken(untouched, monkeypatch, capfd):
    """By a stranger, who answers: process 0 tells process 1, which would wait for five minutes."""
    ended, codes = threading.Event(), []
    monkeypatch.setattr(cluster.os, "_exit", lambda code: (codes.append(code), ended.set()))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        other = threading.Thread(target=cluster._await_refusal, args=(address, ended))
        other.start()
        with pytest.raises(ValueError, match=f"process 0 cannot listen on port {port}"):
            cluster.start(cluster.Job(address, 2, 0))
        other.join(60)
    assert codes == [1]
    assert capfd.readouterr().err == f"process 0 cannot listen at {address}, as it says itself\n"


def test_nobody_is_past_the_step_at_which_all_stop():
    assert loop.Loop.in_flight + 2 < coordination.LEAD
