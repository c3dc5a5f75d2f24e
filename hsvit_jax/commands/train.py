"""hsvit train: trains a network, resuming a run that was stopped."""

import shlex

from hsvit_jax.cli import Request
from hsvit_jax.run_report.fit import fit
from hsvit_jax.runtime import cluster, coordination, signals


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
