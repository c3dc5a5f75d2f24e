"""Weights & Biases and MLflow; their own environment variables say where and as whom."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsvit_jax import report

_PROJECT = "hsvit_jax"


class WeightsAndBiases:
    """A run of wandb, the same one when the training is resumed in its folder.

    Steps are a figure like the others: the test split's come after later steps, and wandb drops
    what comes for a step of its own count that is over.
    """

    def __init__(self, workdir: Path, start_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        known = workdir / "wandb" / "run-id"
        if start_step == 0 or not known.is_file():
            known.parent.mkdir(exist_ok=True)
            report.write_file(known, secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=workdir.name,
            id=known.read_text(),
            resume="allow",
            dir=os.fspath(workdir),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows figures of a step."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow, with the configuration as an artefact."""

    def __init__(self, workdir: Path, start_step: int, config: Mapping[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run = self._client.create_run(number, run_name=workdir.name).info.run_id
        self._client.log_dict(self._run, dict(config), "config.json")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows figures of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run)
