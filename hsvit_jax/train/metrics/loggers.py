"""Shows a run's figures by `train.loggers`, each logger in its own thread.

A logger that is slow, dead or full costs its figures, never the run: nothing waits for it. The
environment variables of Weights & Biases and MLflow say where a run belongs, and as whom.
"""

import importlib.util
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from flax import traverse_util

from hsvit_jax import artifacts

_MOST_WAITING = 10_000  # lines of a logger
_PATIENCE = 60.0  # seconds in which it takes the last ones: MLflow makes its database first
_PROJECT = "hsvit_jax"

#: Shows a step's figures; then the end of the logger.
Logger = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], object]]


def check(names: Collection[str]) -> None:
    """Raises ValueError for a logger whose library is not installed."""
    for name in names:
        if importlib.util.find_spec(KNOWN[name][0]) is None:
            raise ValueError(f"train.loggers={name} needs {name}: pip install 'hsvit_jax[{name}]'")


class Background(threading.Thread):
    """A thread that creates a logger, passes it each step's figures, and ends it.

    Args:
        arguments: of the logger's function: the work folder, the step to continue from,
            whether another training of the folder begins, and the configuration as a dict.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        super().__init__(name=name, daemon=True)
        self._arguments, self._error = arguments, None
        self._lines: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MOST_WAITING)
        self.start()

    def put(self, line: tuple[int, dict[str, float]] | None) -> None:
        """Queues a step's figures, or None for the end.

        Raises:
            Exception: the logger's, where it has failed; TimeoutError where too many lines wait.
        """
        if self._error is not None:
            raise self._error
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            raise TimeoutError("it is too slow") from None

    def close(self) -> None:
        """Waits `_PATIENCE` for what is queued; raises as `put` does."""
        self.put(None)
        self.join(_PATIENCE)
        if self.is_alive() or self._error is not None:
            raise self._error or TimeoutError("it is too slow")

    def run(self) -> None:
        """Shows figures until the end is queued, or the logger fails."""
        try:
            log, close = KNOWN[self.name][1](*self._arguments)
            while (line := self._lines.get()) is not None:
                log(*line)
            close()
        except Exception as error:  # a library's own, of any kind
            self._error = error


def _tensorboard(workdir: Path, start_step: int, anew: bool, config: Mapping) -> Logger:
    """Opens a new file of events in the run's folder.

    tensorboardX's SummaryWriter blocks its caller for ever once its thread has died of a full disk.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    folder = workdir / "tensorboard"
    folder.mkdir(exist_ok=True)
    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
    file = RecordWriter(str(folder / f"{name}.{time.monotonic_ns()}"))

    def log(step: int, scalars: Mapping[str, float], **fields: Any) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary={"value": values}, **fields)
        file.write(event.SerializeToString())
        file.flush()

    log(0, {}, file_version="brain.Event:2")
    # TensorBoard hides what a run that was killed had written from this step on.
    log(start_step + 1, {}, session_log={"status": 1})
    return log, file.close


def _wandb(workdir: Path, start_step: int, anew: bool, config: Mapping) -> Logger:
    """Opens a run of wandb, the same one when the training is resumed in its folder.

    Steps are a figure like the others: the test split's come after later steps, and wandb drops
    what comes for a step of its own count that is over.
    """
    import wandb

    known = workdir / "wandb" / "run-id"
    if anew or not known.is_file():
        artifacts.write_file(known, secrets.token_hex(8))
    about = {"project": os.environ.get("WANDB_PROJECT", _PROJECT), "name": workdir.name}
    about |= {"id": known.read_text(), "resume": "allow", "dir": os.fspath(workdir)}
    about |= {"config": dict(config)}
    try:
        run = wandb.init(**about)
    except wandb.errors.UsageError:  # nobody has logged in: `wandb sync` sends them later
        run = wandb.init(**about, mode="offline")
    run.define_metric("*", step_metric="step")
    return lambda step, scalars: run.log({**scalars, "step": step}), run.finish


def _mlflow(workdir: Path, start_step: int, anew: bool, config: Mapping) -> Logger:
    """Opens a run of MLflow, the same one when the training is resumed in its folder.

    Settings are its parameters, which MLflow does not let change: a new value is a tag.
    """
    import mlflow
    from mlflow.entities import Metric, Param, RunTag

    uri, known = os.environ.get("MLFLOW_TRACKING_URI"), workdir / "mlflow" / "run-id"
    if not (uri or importlib.util.find_spec("sqlalchemy")):  # which MLflow's own default needs
        uri = os.path.abspath("mlruns")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(uri)
    try:
        if anew:
            raise FileNotFoundError
        run = client.get_run(known.read_text()).info.run_id
        client.update_run(run, status="RUNNING")
    except (FileNotFoundError, mlflow.MlflowException):  # none, or not in this store
        shared = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = client.get_experiment_by_name(shared)
        number = found.experiment_id if found else client.create_experiment(shared)
        run = client.create_run(number, run_name=workdir.name).info.run_id
        artifacts.write_file(known, run)
    data, fresh = client.get_run(run).data, []
    for key, setting in traverse_util.flatten_dict(dict(config), sep=".").items():
        value = str(setting)[:500]  # the most that every version of MLflow takes
        if key not in data.params:
            fresh.append(Param(key, value))
        elif data.tags.get(key, data.params[key]) != value:
            client.log_batch(run, tags=[RunTag(key, value)])
    for first in range(0, len(fresh), 100):  # the most that MLflow takes
        client.log_batch(run, params=fresh[first : first + 100])
    client.log_dict(run, dict(config), "config.json")

    # What a run that was killed had sent after its last checkpoint comes again.
    histories = (client.get_metric_history(run, key) for key in data.metrics)
    sent = {(one.key, one.step): one.value for history in histories for one in history}

    def log(step: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        known = {key: sent[key, step] for key in scalars if (key, step) in sent}
        client.log_batch(
            run,
            metrics=[
                Metric(key, value, now, step)
                for key, value in scalars.items()
                if key not in known or not (key.startswith("train/") or known[key] == value)
            ],
        )

    return log, lambda: client.set_terminated(run)


#: Name of train.loggers → (the library that it needs, what opens it).
KNOWN: dict[str, tuple[str, Callable[..., Logger]]] = {
    "tensorboard": ("tensorboardX", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
}
