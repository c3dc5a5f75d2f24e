"""What the commands that read a run share: their flags, and the network they load."""

import dataclasses
import json
import re
from typing import TYPE_CHECKING

from absl import flags

from hsvit_jax import config as config_lib
from hsvit_jax.cli import Request, define_path

if TYPE_CHECKING:
    from hsvit_jax.classifier import Classifier

RUN = (
    (define_path, "checkpoint", None, "RUN: a run or checkpoint, exported file, or zoo:NAME."),
    (define_path, "workdir", None, "RUN: the folder of a run."),
    (flags.DEFINE_string, "which", "best", "Checkpoint: 'best', 'latest' or a step."),
)
_DISTRIBUTED = "auto, off, or COORDINATOR:PORT,PROCESSES,INDEX."
JOB = (flags.DEFINE_string, "distributed", "auto", _DISTRIBUTED)
DATA = "data.name data.dir"


def load_classifier(request: Request) -> "Classifier":
    """Loads the network of the run named, or of the configuration's default folder."""
    from hsvit_jax import classifier
    from hsvit_jax.runtime import cluster, coordination

    values = request.flags
    job = cluster.find(values.distributed)
    if job is not None:
        cluster.start(job)
        given = "\n".join([request.name, *request.argv])
        own = r"^--?distributed[=\n].*$"  # of each process
        coordination.check_same("command line", re.sub(own, "", given, flags=re.MULTILINE))
    mesh = (request.config or config_lib.get_config("c2a2", *request.settings)).mesh
    devices = {name: mesh[name] for name in ("group", "data", "aggregate")}
    network = classifier.load(request.source, values.which, **devices)
    if "calibrated" in values and values.calibrated:
        temperature = _temperature(request.source, network.step)
        return dataclasses.replace(network, temperature=temperature)
    return network


def _temperature(source: str, step: int) -> float:
    """The temperature that a report has fitted to a step of a run."""
    from hsvit_jax.run_report.measures import CALIBRATION
    from hsvit_jax.weights import sources

    try:
        found = json.loads((sources.run_folder(source) / CALIBRATION).read_bytes())
        if found["step"] == step and 0.01 < found["temperature"] < 100:
            return float(found["temperature"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ValueError(
        f"{source} has no calibration of step {step:,}: run hsvit report {source} first"
    )
