"""Weights & Biases and MLflow; their own environment variables say where and as whom."""

import importlib.util
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hsvit_jax import artifacts

_PROJECT = "hsvit_jax"


class WeightsAndBiases:
    """A run of wandb, the same one when the training is resumed in its folder.

    Steps are a figure like the others: the test split's come after later steps, and wandb drops
    what comes for a step of its own count that is over.
    """

    def __init__(self, workdir: Path, start_step: int, anew: bool, config: Mapping) -> None:
        import wandb

        known = workdir / "wandb" / "run-id"
        if anew or not known.is_file():
            artifacts.write_file(known, secrets.token_hex(8))
        run = {
            "project": os.environ.get("WANDB_PROJECT", _PROJECT),
            "name": workdir.name,
            "id": known.read_text(),
            "resume": "allow",
            "dir": os.fspath(workdir),
            "config": dict(config),
        }
        try:
            self._run = wandb.init(**run)
        except wandb.errors.UsageError:  # nobody has logged in: `wandb sync` sends them later
            self._run = wandb.init(**run, mode="offline")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows figures of a step."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow, the same one when the training is resumed in its folder.

    Settings are its parameters, which MLflow does not let change: a new value is a tag.
    """

    def __init__(self, workdir: Path, start_step: int, anew: bool, config: Mapping) -> None:
        import mlflow
        from mlflow.entities import Param, RunTag

        uri, known = os.environ.get("MLFLOW_TRACKING_URI"), workdir / "mlflow" / "run-id"
        if not (uri or importlib.util.find_spec("sqlalchemy")):  # which MLflow's own default needs
            uri = os.path.abspath("mlruns")
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(uri)
        try:
            if anew:
                raise FileNotFoundError
            self._run = self._client.get_run(known.read_text()).info.run_id
            self._client.update_run(self._run, status="RUNNING")
        except (FileNotFoundError, mlflow.MlflowException):  # none, or not in this store
            self._run = self._create(workdir.name)
            artifacts.write_file(known, self._run)
        settings, data = dict(_flat(config)), self._client.get_run(self._run).data
        shown = data.params | {key: data.tags[key] for key in data.tags if key in data.params}
        changed = [RunTag(*pair) for pair in settings.items() if shown.get(*pair) != pair[1]]
        self._client.log_batch(self._run, tags=changed)
        fresh = [Param(*pair) for pair in settings.items() if pair[0] not in shown]
        for first in range(0, len(fresh), 100):  # the most that MLflow takes
            self._client.log_batch(self._run, params=fresh[first : first + 100])
        self._client.log_dict(self._run, dict(config), "config.json")

    def _create(self, name: str) -> str:
        """A new run's identifier."""
        of_all = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(of_all)
        number = experiment.experiment_id if experiment else self._client.create_experiment(of_all)
        return self._client.create_run(number, run_name=name).info.run_id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows figures of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run)


def _flat(config: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every setting as ('section.key', its value as text)."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)[:500]  # the most that every version of MLflow takes
