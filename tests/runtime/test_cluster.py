"""Which job a process belongs to, from flags and simulated environments; nothing is started here
but ports that do not answer. Real processes: test_processes.py."""

import socket
import subprocess
import sys
import threading
import types

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
    "JAX_COORDINATOR_PORT": "1234",
}
PODS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture
def around(monkeypatch):
    """Sets the variables of a scheduler, where there were none."""

    def put(variables):
        for name in (*SLURM, *OPEN_MPI, *PODS, "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    put({})
    return put


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),  # a laptop
        # Port: 61440 + the job's number modulo 4096, as jax has it.
        (SLURM, ("node007:61441", 6, 3, [1])),
        (SLURM | {"SLURM_NODEID": "2"}, ("node007:61441", 6, 3, None)),  # alone on its host
        (SLURM | {"JAX_COORDINATOR_PORT": "1234"}, ("node007:1234", 6, 3, [1])),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, ("node007:61441", 6, 3, [1])),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, ("node007:61441", 6, 3, None)),  # --gpus-per-task
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),  # without srun
        (OPEN_MPI, ("10.96.0.1:1234", 2, 1, None)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("10.96.0.1:1234", 2, 1, [0])),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a pod
    ],
)
def test_schedulers(around, variables, expected):
    around(variables)
    assert cluster.find("auto") == expected
    assert cluster.find("off") is None


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},  # and no address
            r"--distributed=host:port,\$OMPI_COMM_WORLD_SIZE",
        ),
        (PODS, r"install jax\[k8s\]"),
    ],
)
def test_jobs_that_cannot_be_counted(around, monkeypatch, variables, told):
    around(variables)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=told):
        cluster.find("auto")


def scheduler(name, **answers):
    """One of jax's cluster classes, found by its name."""
    methods = {key: staticmethod(lambda *a, _v=value, **k: _v) for key, value in answers.items()}
    return type(name, (), methods)


@pytest.mark.parametrize("name", ["GceTpuCluster", "GkeTpuCluster", "K8sCluster"])
@pytest.mark.parametrize("count", [1, 4])
def test_pods(around, monkeypatch, name, count):
    answers = {
        "is_env_present": True,
        "get_process_count": count,
        "get_process_id": 2,
        "get_coordinator_address": "worker-0:8476",
    }
    others = [c for c in cluster.clusters.ClusterEnv._cluster_types if c.__name__ != name]
    monkeypatch.setattr(
        cluster.clusters.ClusterEnv, "_cluster_types", [*others, scheduler(name, **answers)]
    )
    if name == "K8sCluster" or count == 1:  # a slice of one host may be an indexed job too
        around(PODS)
    if name == "K8sCluster":
        monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
        monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name)
    expected = None if count == 1 else ("worker-0:8476", 4, 2, None)
    assert cluster.find("auto") == expected


def test_a_job_that_cannot_be_read(monkeypatch):
    """As of a metadata server that does not answer, or an account without rights."""

    def unreachable():
        raise ConnectionError(f"metadata.google.internal\n{'said ' * 60}\nstart the server")

    kind = scheduler("GkeTpuCluster", is_env_present=True)
    kind.get_process_count = staticmethod(unreachable)
    others = [c for c in cluster.clusters.ClusterEnv._cluster_types if c.__name__ != kind.__name__]
    monkeypatch.setattr(cluster.clusters.ClusterEnv, "_cluster_types", [*others, kind])
    with pytest.raises(ValueError, match=r"GkeTpu job.*ConnectionError: metadata.*server\).*=off"):
        cluster.find("auto")


def test_explicit_places():
    assert cluster.find("10.0.0.1:8476,4,3") == ("10.0.0.1:8476", 4, 3, None)
    assert cluster.find("[fe80::1]:99,2,0").address == "[fe80::1]:99"
    assert cluster.find("host:8476,1,0") is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("on", "expected auto, off or host:port,n,i"),
        ("host,2,0", "expected auto, off or host:port,n,i"),
        ("host:80,2", "expected auto, off or host:port,n,i"),
        ("host:80,2,-1", "expected auto, off or host:port,n,i"),
        ("host:80,2,2", "process 2 of 2; they are numbered from 0"),
        ("host:80,0,0", "process 0 of 0"),
        ("host:0,2,1", "port 0, expected 1 to 65535"),
        ("host:70000,2,1", "port 70000"),
    ],
)
def test_malformed_places(setting, words):
    with pytest.raises(ValueError, match=f"--distributed={setting}.*{words}"):
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
            cluster.start(cluster.Job(address, 2, 1), timeout=0.0)
    assert f"process 0 does not answer at {address} after 0 s" in capfd.readouterr().err


def test_a_machine_whose_name_has_no_address(untouched, monkeypatch):
    def devices():
        raise RuntimeError("[enforce fail at third_party/gloo/gloo/transport/tcp/device.cc:99]")

    monkeypatch.setattr(cluster.jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(cluster.jax, "devices", devices)
    monkeypatch.setattr(coordination, "install_excepthook", lambda: None)
    monkeypatch.setattr(coordination, "check_count", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "nameless")
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=r"add a line to /etc/hosts, '127\.0\.0\.1 nameless'"):
        cluster.start(cluster.Job(address, 2, 0))


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
