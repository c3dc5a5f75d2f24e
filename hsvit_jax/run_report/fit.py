"""A run with its report: what `hsvit train` and `hsvit_jax.fit` do."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import ml_collections

from hsvit_jax import run_report, train
from hsvit_jax.runtime import coordination

_LONGEST_REPORT = 6 * 3600.0  # seconds


def fit(
    config: ml_collections.ConfigDict, workdir: str | Path, *, report: bool = True, **options: Any
) -> train.Result:
    """Trains as `hsvit_jax.train.train` does, and writes the run's report.

    Args:
      config, workdir, options: of `train.train`.
      report: whether to write it.

    Returns:
      the finished run.

    Raises:
      ValueError: as `train.train`.
      KeyboardInterrupt: as `train.train`.
    """
    started, result = time.monotonic(), train.train(config, workdir, **options)
    if report and coordination.is_lead():
        page = run_report.write_after_training(result.workdir, options.get("dataset"))
        result = dataclasses.replace(result, report=page, seconds=time.monotonic() - started)
    if report:  # jax ends a job five minutes after the first of its processes
        coordination.wait_for_lead("report", _LONGEST_REPORT)
    return result
