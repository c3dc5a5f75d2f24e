"""hsvit train: trains a network, resuming a run that was stopped."""

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Any

import ml_collections

from hsvit_jax import train
from hsvit_jax.cli import Request
from hsvit_jax.commands.report import write_after_training
from hsvit_jax.runtime import cluster, coordination, signals
from hsvit_jax.text import few

_LONGEST_REPORT = 6 * 3600.0  # seconds
_OF_LOADING = {f"data.{key}" for key in ("fraction", "val_fraction", "fit", "on_bad_image", "dir")}


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
      ValueError: as `train.train`; or the configuration says how to load data that are given.
      KeyboardInterrupt: as `train.train`.
    """
    given = getattr(config, "user", ()) if options.get("dataset") is not None else ()
    unused = sorted(_OF_LOADING.intersection(given))
    if unused:
        raise ValueError(
            f"{few(unused)} would change how a data set is loaded, and this one is loaded already: "
            "give the arguments to hsvit_jax.from_arrays, take dataset.subset(fraction), or leave "
            "the settings out"
        )
    started, result = time.monotonic(), train.train(config, workdir, **options)
    if report and coordination.is_lead():
        page = write_after_training(result.workdir, options.get("dataset"))
        result = dataclasses.replace(result, report=page, seconds=time.monotonic() - started)
    if report:  # jax ends a job five minutes after the first of its processes
        coordination.wait_for_lead("report", _LONGEST_REPORT)
    return result


def run(request: Request) -> int:
    """Trains, and prints the result and the commands that use it."""
    with signals.nothing_to_save():  # until the run itself listens for them
        job = cluster.find(request.flags.distributed)
        if job is not None:
            cluster.start(job, recoverable=request.flags.recoverable)
        result = fit(
            request.config,
            request.workdir,
            report=request.flags.report,
            stall_timeout=request.flags.stall_timeout,
            recoverable=request.flags.recoverable,
        )
    if not coordination.is_lead():
        return 0
    test, folder = result.test, shlex.quote(request.workdir)
    top5 = f", top-5 {test.top5:.2%}" if "top5" in test.figures else ""
    files = {"curves": result.curves, "report": result.report}
    print(
        f"done: test {test}{top5}, {test.examples:,} "
        f"images, checkpoint of step {result.best_step:,}, {result.parameters:,} parameters, "
        f"{result.seconds:.0f} s\n"
        + "".join(f"  {name}    {path}\n" for name, path in files.items() if path)
        + f"  evaluate  {request.program} eval {folder}\n"
        f"  predict   {request.program} predict {folder} IMAGE ..."
    )
    return 0
