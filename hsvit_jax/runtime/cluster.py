"""Multi-process jobs: finds the job that this process belongs to, and joins it.

Schedulers' variables decide whether there may be more than one process, so a laptop, a notebook, a
job of one task and a single TPU VM stay as they are. Where the others are is found out by
`jax.distributed.initialize` itself.
"""

import contextlib
import ctypes
import glob
import importlib.util
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

from hsvit_jax.runtime import coordination, signals, watchdog

_MOST_HELD = 1 << 20  # bytes
_errors = [2]  # descriptors of standard error: the real one is the last


class Job(NamedTuple):
    """A process's place in its job; jax finds out what is None.

    Attributes:
      address: of process 0.
      count: the number of processes.
      index: this process's number.
      local_devices: the accelerators of this process, where a host has several; [] for all.
      scheduler: jax's name of it, None for the first that jax knows.
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    local_devices: list[int] | None = None
    scheduler: str | None = None

    def __str__(self) -> str:
        return "a process" if self.count is None else f"process {self.index} of {self.count}"


def find(setting: str) -> Job | None:
    """Finds the job that `--distributed` names or, for auto, the scheduler's.

    Args:
      setting: auto, off or host:port,n,i.

    Returns:
      the job; None for a single process.

    Raises:
      ValueError: a setting of another form, or a scheduler's job that jax cannot join.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return _from_scheduler()
    match = re.fullmatch(r"((?:\[[0-9A-Fa-f:.]+\]|[^\s,:\[\]]+):(\d+)),(\d+),(\d+)", setting)
    port, count, index = map(int, match.groups()[1:]) if match else (0, 0, 0)
    if not (match and 0 < port < 65536 and index < count):
        raise ValueError(
            f"--distributed={setting}: expected auto, off or host:port,n,i (the address of process "
            "0, how many, and which one from 0 to n-1), for example 10.0.0.1:8476,4,0"
        )
    return Job(match[1], count, index, scheduler="deactivate") if count > 1 else None


def _from_scheduler() -> Job | None:
    def number(name: str) -> int:
        return int(os.environ.get(name, "1"))

    def job(count: str, index: str, local: str, here: int, scheduler: str) -> Job:
        # jax would give a process one device even where it is alone on its host.
        devices = [int(os.environ[local])] if here > 1 else []
        devices = None if "JAX_LOCAL_DEVICE_IDS" in os.environ else devices
        return Job(None, number(count), int(os.environ[index]), devices, scheduler)

    # A batch script knows the number of tasks, but is one process until it calls srun.
    if "SLURM_STEP_NODELIST" in os.environ and number("SLURM_NTASKS") > 1:
        here = _slurm_local_count()
        return job("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", here, "slurm")
    mpi = "OMPI_COMM_WORLD_"
    if "OMPI_MCA_orte_hnp_uri" in os.environ and number(f"{mpi}SIZE") > 1:
        here = number(f"{mpi}LOCAL_SIZE")
        return job(f"{mpi}SIZE", f"{mpi}RANK", f"{mpi}LOCAL_RANK", here, "ompi")
    for count, index in ((f"{mpi}SIZE", f"{mpi}RANK"), ("PMI_SIZE", "PMI_RANK")):
        if number(count) > 1:
            raise ValueError(
                f"this is one of {number(count)} processes of MPI, which does not say where the "
                f"first one is: pass --distributed=host:port,${count},${index}, or off"
            )
    pod = "KUBERNETES_SERVICE_HOST" in os.environ
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if _has_tpu() and (hosts or not pod):
        several = hosts is None or "," in hosts or number("MEGASCALE_NUM_SLICES") > 1
        return Job() if several else None  # a slice of one host, in whatever job
    if not pod or "JOB_COMPLETION_INDEX" not in os.environ:  # as a notebook in a pod
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise ValueError(  # else each would run as the whole job
            "this is a pod of an indexed Kubernetes job, but the kubernetes package is missing, so "
            "the other pods cannot be counted: install jax[k8s], or give "
            "--distributed=host:port,n,i, or --distributed=off if this pod is alone"
        )
    return Job()


def _has_tpu() -> bool:
    devices = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(devices) and importlib.util.find_spec("libtpu") is not None


def _slurm_local_count() -> int:
    """Tasks that share a view of this host's GPUs; with --gpus-per-task each sees its own alone."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal():
        return 1
    counts = []  # from '2(x3),1': two on each of three hosts, then one on the last
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts[min(int(os.environ.get("SLURM_NODEID", "0")), len(counts) - 1)]


def start(job: Job, *, timeout: float = 300.0, recoverable: bool = False) -> None:
    """Joins the job: afterwards `jax.devices()` are those of all processes.

    To be called before anything that touches jax's devices. From here on an uncaught exception in
    one process ends all of them: see `coordination.install_excepthook`.

    Args:
      timeout: seconds to wait for the other processes; this process then ends as stalled.
      recoverable: let the other processes live on when one dies.

    Raises:
      ValueError: the port of process 0 is taken, it knows of another number of processes or of
        another --recoverable, jax finds no job, or this machine's name has no address.
    """
    # With jax's service only jax notices a SIGTERM; `coordination.StopTogether` asks for it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", recoverable)
    patience = threading.Timer(10, _say_waiting, [job])
    late = f"{job} waited {timeout:.0f} s for the others: start all, "
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
            if job.address and job.index:  # jax waits for ever if a stranger has its port
                refusal = threading.Thread(target=_await_refusal, args=(job.address, joined))
                refusal.daemon = True
                refusal.start()
                _wait_for(job.address, timeout)
            elif job.address:
                _check_free(job)
            end.start()
            with _held_errors():
                jax.distributed.initialize(
                    job.address,
                    job.count,
                    job.index,
                    local_device_ids=job.local_devices,
                    cluster_detection_method=job.scheduler,
                    initialization_timeout=int(timeout) + 60,  # after which jax aborts
                    heartbeat_timeout_seconds=coordination.SILENCE if recoverable else 100,
                )
    except Exception as error:  # of a metadata server or the cluster's interface
        if job.address:
            raise
        if _has_tpu() and "coordinator_address should be defined" in str(error):
            return  # no pod
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"jax cannot find the other processes of this job ({reason}): give "
            "--distributed=host:port,n,i, or --distributed=off if this process is alone"
        ) from error
    finally:
        patience.cancel()
        end.cancel()
        joined.set()
    job = job._replace(count=coordination.count(), index=coordination.index())
    if job.count == 1:
        jax.distributed.shutdown()
        return
    signals.divert_output()
    coordination.install_excepthook()
    coordination.check_count(recoverable)
    listened = coordination.listening()
    try:
        jax.devices()
    except RuntimeError as error:
        if not re.search(r"gloo/transport/\w+/device\.cc", str(error)):
            raise
        name = socket.gethostname()
        raise ValueError(
            f"{job} finds no address of this machine by its name, "
            f"{name}, through which CPUs exchange sums: add a line to /etc/hosts, '127.0.0.1 "
            f"{name}' where all processes are here, or else the address that the others reach"
        ) from error
    coordination.meet(coordination.listening() - listened)


def _say_waiting(job: Job) -> None:
    what = f"process 0 at {job.address}" if job.address and job.index else "the other processes"
    _tell(f"{job} waits for {what}")


def _end(code: int, text: str) -> None:
    """Ends this process at once, as its main thread may be in a call of jax that would abort."""
    _tell(text)
    os._exit(code)


def _tell(text: str) -> None:
    os.write(_errors[-1], f"{text}\n".encode())


@contextlib.contextmanager
def _held_errors() -> Iterator[None]:
    """Holds back what is written to standard error, as jax's trace of an abort, until the end."""
    with tempfile.TemporaryFile() as held:
        _errors.append(os.dup(2))
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(_errors[-1], 2)
            os.close(_errors.pop())
            os.write(2, os.pread(held.fileno(), _MOST_HELD, 0))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(signum: int) -> None:
    """Ends this process as stalled where jax aborts it, which takes no Python function to call."""
    held = os.pread(2, _MOST_HELD, 0).decode(errors="replace") if _errors[1:] else ""
    if "RegisterTask" in held:
        text = "process 0 refuses this process: start all again, each with a number of its own and "
        _tell(f"{text}the same n in --distributed=host:port,n,i")
    else:
        _tell(f"{held}jax has ended this process, as it says above: start all again")
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
