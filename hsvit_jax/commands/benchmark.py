"""hsvit benchmark: speed and memory, in one line of JSON."""

import json
import sys

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import EVERYTHING, Command, Request, define_path

_WORK = ["train", "infer", "input", "eval"]

COMMAND = Command(
    "Measures speed and memory, in one line of JSON.",
    __name__,
    "$ --config=configs/c2a2.py --batch=128 --work=train\n"
    "$ --config=configs/c2a2.py --vs='COMMAND THAT PRINTS A JSON LINE'\n"
    "$ --peak",
    (
        (flags.DEFINE_enum, "work", "train", _WORK, "Work to time."),
        (flags.DEFINE_integer, "batch", None, "Images per step.", 1),
        (flags.DEFINE_integer, "steps", 10, "Steps that are timed.", 1),
        (flags.DEFINE_integer, "warmup", 2, "Steps before them.", 1),
        (flags.DEFINE_bool, "no_augment", False, "train, input: only normalise the images."),
        (flags.DEFINE_bool, "data", False, "The config's data set, not random images."),
        (define_path, "trace", None, "Write a profile of a few more steps here."),
        (flags.DEFINE_bool, "peak", False, "Time a large product and convolution, no more."),
        (flags.DEFINE_string, "vs", None, "Shell command to alternate with."),
        (flags.DEFINE_integer, "rounds", 5, "--vs: runs of each.", 1),
    ),
    config=EVERYTHING,
    exclusive=("vs peak", "batch train.batch"),
    remember=False,
)


def run(request: Request) -> None:
    """Measures what the command line asks for, and prints a line of JSON."""
    print(json.dumps(_record(request)))


def _record(request: Request) -> dict:
    from hsvit_jax.benchmark import machine, measure, versus

    values, config = request.flags, request.config
    if values.peak:
        return {"peak": machine.measure_peak("float32"), **machine.description()}
    if config is None:
        raise cli.Misuse("benchmark needs --config=FILE")
    if values.vs:  # an empty --vs after the first one makes the command an ordinary run
        ours = [sys.executable, "-m", "hsvit_jax", request.name, *request.argv, "--vs="]
        return versus.compare(ours, values.vs, values.rounds)
    if values.batch:
        config = config_lib.override(config, [f"train.batch={values.batch}"])
    record = measure.measure(
        config,
        values.work,
        steps=values.steps,
        warmup=values.warmup,
        augmented=not values.no_augment,
        real_data=values.data,
        trace=values.trace,
    )
    return {"config": request.spec or None, **record}
