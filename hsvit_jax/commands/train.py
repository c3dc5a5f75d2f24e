"""hsvit train: trains a network, resuming a run that was stopped."""

import shlex
from pathlib import Path

from hsvit_jax import train
from hsvit_jax.cli import Request
from hsvit_jax.commands import report
from hsvit_jax.runtime import cluster, coordination


def run(request: Request) -> int:
    """Trains, and prints the result and the commands that use it."""
    job = cluster.find(request.flags.distributed)
    if job is not None:
        cluster.start(job, recoverable=request.flags.recoverable)
    result = train.train(
        request.config,
        request.workdir,
        stall_timeout=request.flags.stall_timeout,
        recoverable=request.flags.recoverable,
    )
    if not coordination.is_lead():
        return 0
    test, folder = result.test, shlex.quote(request.workdir)
    top5 = f", top-5 {test.top5:.2%}" if "top5" in test.figures else ""
    page = request.flags.report and report.write_after_training(Path(request.workdir))
    print(
        f"done: test {test}{top5}, {test.examples:,} "
        f"images, checkpoint of step {result.best_step:,}, {result.parameters:,} parameters, "
        f"{result.seconds:.0f} s\n"
        f"  curves    {result.curves}\n"
        f"  report    {page or 'none'}\n"
        f"  evaluate  {request.program} eval --checkpoint={folder}\n"
        f"  predict   {request.program} predict --checkpoint={folder} IMAGE ..."
    )
    return 0
