"""hsvit benchmark: speed and memory, in one line of JSON."""

import json
import sys

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import EVERYTHING, Command, Request, define_path

_WORK = ["train", "infer", "input", "eval"]


@Command(
    "Measures speed and memory, in one line of JSON.",
    "$ --config=configs/c2a2.py --batch=128 --work=train\n"
    "$ --config=configs/c2a2.py --vs='COMMAND THAT PRINTS A JSON LINE'\n"
    "$ --peak",
    (
        (flags.DEFINE_enum, "work", "train", _WORK, "Work to time."),
        (flags.DEFINE_integer, "batch", None, "Images per step.", 1),
        (flags.DEFINE_integer, "steps", 10, "Timed steps.", 1),
        (flags.DEFINE_integer, "warmup", 2, "Steps before the timed ones.", 1),
        (flags.DEFINE_bool, "no_augment", False, "train, input: only normalise the images."),
        (flags.DEFINE_bool, "data", False, "Use the config's data set, not random images."),
        (define_path, "trace", None, "Folder for a profile of up to three more steps."),
        (flags.DEFINE_bool, "peak", False, "Time only a large product and convolution."),
        (flags.DEFINE_string, "vs", None, "Shell command to alternate with."),
        (flags.DEFINE_integer, "rounds", 5, "--vs: runs of each.", 1),
    ),
    config=EVERYTHING,
    exclusive=("vs peak", "batch train.batch"),
    remember=False,
)
def benchmark(request: Request) -> None:
    """Prints the measurement as a line of JSON."""
    from hsvit_jax.benchmark import machine, measure, versus

    values, config = request.flags, request.config
    if values.peak:
        record = {"peak": machine.measure_peak("float32"), **machine.description()}
    elif config is None:
        raise cli.Misuse("benchmark needs --config=FILE")
    elif values.vs:  # the empty --vs at the end makes the command an ordinary run
        ours = [sys.executable, "-m", "hsvit_jax", request.name, *request.argv, "--vs="]
        record = versus.compare(ours, values.vs, values.rounds)
    else:
        batch = [f"train.batch={values.batch}"] if values.batch else []
        record = measure.measure(
            config_lib.override(config, batch),
            values.work,
            steps=values.steps,
            warmup=values.warmup,
            augmented=not values.no_augment,
            real_data=values.data,
            trace=values.trace,
        )
        record = {"config": request.spec or None, **record}
    print(json.dumps(record))
