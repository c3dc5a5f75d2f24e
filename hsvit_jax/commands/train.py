"""hsvit train: trains a network, resuming a run that was stopped."""

import shlex

from absl import flags

from hsvit_jax import config as config_lib
from hsvit_jax.cli import EVERYTHING, Command, Request, define_path
from hsvit_jax.commands.trained import JOB

_WORKDIR = (define_path, "workdir", None, "Folder of the run; default: a name below runs/.")
_STALL = "Seconds without a step until exit 75; 0: never. Default: 600, for one process 3600."


@Command(
    "Trains a network, or resumes a run that was stopped.",
    "$ --config=configs/c4a8.py\n"
    "$ --config=c2a2:digits --config.train.epochs=5\n"
    "$ --config=c2a2:folder=my_images",
    (
        _WORKDIR,
        JOB,
        (flags.DEFINE_float, "stall_timeout", None, _STALL, 0.0),
        (
            flags.DEFINE_bool,
            "recoverable",
            False,
            "Continue with the groups of surviving processes.",
        ),
        (flags.DEFINE_bool, "report", True, "Write report.html at the end."),
    ),
    config=EVERYTHING,
    needs_config=True,
)
def train(request: Request) -> int:
    """Trains, and prints the result and the commands that use it."""
    from hsvit_jax.run_report import fit
    from hsvit_jax.runtime import cluster, coordination, signals

    values = request.flags
    with signals.nothing_to_save():  # until the run itself listens for them
        job = cluster.find(values.distributed)
        if job is not None:
            cluster.start(job, recoverable=values.recoverable)
        options = {name: values[name].value for name in ("report", "stall_timeout", "recoverable")}
        result = fit(request.config, request.workdir, **options)
    if not coordination.is_lead():
        return 0
    test, folder = result.test, shlex.quote(request.workdir)
    predict = f"predict {folder}"
    if config_lib.is_registered(request.config):
        folder += f" --config={shlex.quote(request.spec)}"
        predict = f"predict --checkpoint={folder}"
    top5 = f", top-5 {test.top5:.2%}" if "top5" in test.figures else ""
    files = {"curves": result.curves, "report": result.report}
    print(
        f"done: test {test}{top5}, {test.examples:,} "
        f"images, checkpoint of step {result.best_step:,}, {result.parameters:,} parameters, "
        f"{result.seconds:.0f} s\n"
        + "".join(f"  {name}    {path}\n" for name, path in files.items() if path)
        + f"  evaluate  {request.program} eval {folder}\n"
        f"  predict   {request.program} {predict} IMAGE ..."
    )
    return 0
