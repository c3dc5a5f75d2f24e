"""Multi-process jobs: finds the job that this process belongs to, and joins it.

`auto` asks jax's own cluster classes (SLURM, Open MPI, TPU pods, Kubernetes); only where they count
more than one process is anything started, so a laptop, a notebook, a job of one task and a single
TPU VM stay as they are.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax._src import clusters

from hsvit_jax.runtime import coordination, signals, watchdog


class Job(NamedTuple):
    """A process's place in its job: address of process 0, number of processes, own index."""

    address: str
    count: int
    index: int
    local_devices: list[int] | None = None  # accelerators of this process, where a host has several


def find(setting: str) -> Job | None:
    """Finds the job that `--distributed` names or, for auto, the scheduler's.

    Args:
      setting: auto, off or host:port,n,i.

    Returns:
      the job; None for a single process.

    Raises:
      ValueError: a setting of another form, or a scheduler's job that cannot be read.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return _from_scheduler()
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s,:\[\]]+):(\d+),(\d+),(\d+)", setting)
    if match is None:
        raise ValueError(
            f"--distributed={setting}: expected auto, off or host:port,n,i (the address of process "
            "0, how many, which one), for example 10.0.0.1:8476,4,0"
        )
    host, port, count, index = match[1], *(int(match[i]) for i in (2, 3, 4))
    if not 0 < port < 65536:
        raise ValueError(f"--distributed={setting}: port {port}, expected 1 to 65535")
    if not index < count:
        raise ValueError(
            f"--distributed={setting}: process {index} of {count}; they are numbered from 0, so "
            f"i must be less than n"
        )
    return Job(f"{host}:{port}", count, index) if count > 1 else None


def _from_scheduler() -> Job | None:
    for name, local_count in _SCHEDULERS.items():
        kind = next(k for k in clusters.ClusterEnv._cluster_types if k.__name__ == name)
        if name == "K8sCluster" and not _is_indexed_pod():
            continue
        try:
            if not kind.is_env_present():
                continue
            if kind.get_process_count() < 2:
                if name in ("GceTpuCluster", "GkeTpuCluster"):
                    return None  # a slice of one host, in whatever job
                continue
            port = os.environ.get("JAX_COORDINATOR_PORT")
            return Job(
                kind.get_coordinator_address(timeout_secs=300, override_coordinator_port=port),
                kind.get_process_count(),
                kind.get_process_id(),
                # jax would give a process one device even where it is alone on its host.
                [kind.get_local_process_id()] if local_count() > 1 else None,
            )
        except Exception as error:  # of a metadata server or the cluster's interface
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"this may be a process of a {name.removesuffix('Cluster')} job, which cannot be "
                f"read ({reason}): give --distributed=host:port,n,i, "
                "or --distributed=off if this process is alone"
            ) from error
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:  # Open MPI 5 names no address
        raise ValueError(
            "Open MPI started several processes but does not say where the first one is: give "
            "--distributed=host:port,$OMPI_COMM_WORLD_SIZE,$OMPI_COMM_WORLD_RANK, or off"
        )
    return None


def _slurm_local_count() -> int:
    """Tasks that share a view of this host's GPUs; with --gpus-per-task each sees its own alone."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal():
        return 1
    counts = []  # from '2(x3),1': two on each of three hosts, then one on the last
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts[min(int(os.environ.get("SLURM_NODEID", "0")), len(counts) - 1)]


# jax's classes → how many processes share this host's accelerators.
_SCHEDULERS: dict[str, Callable[[], int]] = {
    "SlurmCluster": _slurm_local_count,
    "OmpiCluster": lambda: int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")),
    "GceTpuCluster": lambda: 1,
    "GkeTpuCluster": lambda: 1,
    "K8sCluster": lambda: 1,
}


def _is_indexed_pod() -> bool:
    """Whether this pod is one of an indexed job; a pod without an index (a notebook) is alone."""
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(os.environ):
        return False
    if importlib.util.find_spec("kubernetes") is None:
        raise ValueError(  # else each would run as the whole job
            "this is a pod of an indexed Kubernetes job, but the kubernetes package is missing, so "
            "the other pods cannot be counted: install jax[k8s], or give "
            "--distributed=host:port,n,i, or --distributed=off if this pod is alone"
        )
    return True


def start(job: Job, *, timeout: float = 300.0, recoverable: bool = False) -> None:
    """Joins the job: afterwards `jax.devices()` are those of all processes.

    To be called before anything that touches jax's devices. From here on an uncaught exception in
    one process ends all of them: see `coordination.install_excepthook`.

    Args:
      timeout: seconds to wait for the other processes; this process then ends as stalled.
      recoverable: let the other processes live on when one dies.

    Raises:
      ValueError: the port of process 0 is taken, it was told of another number of processes or
        otherwise whether one may be lost, or this machine's name has no address.
    """
    # With jax's service only jax notices a SIGTERM; `coordination.StopTogether` asks for it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", recoverable)
    patience = threading.Timer(10, _say_waiting, [job])
    late = f"process {job.index} of {job.count} waited {timeout:.0f} s for the others: start all, "
    late += "each with a number of its own in --distributed=host:port,n,i, or give "
    late += "--distributed=off if this process is alone"
    end = threading.Timer(timeout, _end, [watchdog.EXIT_CODE, late])
    patience.daemon = end.daemon = True
    patience.start()
    joined = threading.Event()

    def leave() -> None:
        stopped = signals.Interrupted(stop.signum, 0)
        _end(stopped.exit_code, f"{stopped} before the other processes came")

    stop = signals.StopRequests(leave)
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)
    try:
        with stop:  # jax waits in a call that hears no signal
            if job.index:  # jax's wait for process 0 never ends if a stranger has its port
                refusal = threading.Thread(target=_await_refusal, args=(job.address, joined))
                refusal.daemon = True
                refusal.start()
                _wait_for(job.address, timeout)
            else:
                _check_free(job)
            end.start()
            jax.distributed.initialize(
                job.address,
                job.count,
                job.index,
                local_device_ids=job.local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=int(timeout) + 60,  # after which jax aborts
                heartbeat_timeout_seconds=coordination.SILENCE if recoverable else 100,
            )
    finally:
        patience.cancel()
        end.cancel()
        joined.set()
    signals.divert_output()
    coordination.install_excepthook()
    coordination.check_count(job.count, recoverable)
    listened = coordination.listening()
    try:
        jax.devices()
    except RuntimeError as error:
        if not re.search(r"gloo/transport/\w+/device\.cc", str(error)):
            raise
        name = socket.gethostname()
        raise ValueError(
            f"process {job.index} of {job.count} finds no address of this machine by its name, "
            f"{name}, through which CPUs exchange sums: add a line to /etc/hosts, '127.0.0.1 "
            f"{name}' where all processes are here, or else the address that the others reach"
        ) from error
    coordination.meet(coordination.listening() - listened)


def _say_waiting(job: Job) -> None:
    what = f"process 0 at {job.address}" if job.index else f"{job.count - 1} other processes"
    print(f"process {job.index} of {job.count} waits for {what}", file=sys.stderr, flush=True)


def _end(code: int, text: str) -> None:
    """Ends this process at once, as its main thread may be in a call of jax that would abort."""
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(signum: int) -> None:
    """Ends this process as stalled where jax aborts it, which takes no Python function to call."""
    os.write(2, b"jax has ended this process, as it says above: start all again\n")
    os._exit(watchdog.EXIT_CODE)


def _wait_for(address: str, timeout: float) -> None:
    """Tries the port of process 0 until it answers: jax would abort without an exception."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                _end(
                    watchdog.EXIT_CODE,
                    f"process 0 does not answer at {address} after {timeout:.0f} s "
                    f"({error.strerror or error}): is it running, is this its address, and is the "
                    "port open?",
                )
            time.sleep(0.2)


def _check_free(job: Job) -> None:
    """Raises ValueError for a port in use: jax would abort, or join another job."""
    port = int(job.address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            _report_refusal(job)
            raise ValueError(
                f"process 0 cannot listen on port {port} ({error.strerror}): choose another port "
                "in --distributed=host:port,n,i, or set JAX_COORDINATOR_PORT"
            ) from error


def _report_port(address: str) -> tuple[str, int, bytes]:
    """(host, port, message) by which process 0 reports that the port of `address` is taken."""
    host, _, port = address.rpartition(":")
    message = f"hsvit_jax: no port {port}".encode()
    return host.strip("[]"), int(port) + (1 if int(port) < 65535 else -1), message


def _report_refusal(job: Job) -> None:
    """Reports to the other processes on the next port, unless that is taken or closed too."""
    _, port, message = _report_port(job.address)
    deadline = time.monotonic() + 10
    with contextlib.suppress(OSError), socket.create_server(("", port)) as server:
        for _ in range(job.count - 1):
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            with server.accept()[0] as other:
                other.sendall(message)


def _await_refusal(address: str, joined: threading.Event) -> None:
    """Ends this process when process 0 reports that it cannot listen, until the job is joined."""
    host, port, message = _report_port(address)
    while not joined.wait(0.5):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 2) as other:
            if other.recv(64) == message:
                _end(1, f"process 0 cannot listen at {address}, as it says itself")
