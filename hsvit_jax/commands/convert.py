"""Converts PyTorch weights to a checkpoint: `hsvit convert FILE [OUT]`."""

import json

from absl import flags

from hsvit_jax import cli
from hsvit_jax.cli import Command, Numbers, Request

_TOLERANCE = "Share of the largest logit; default: 1e-9 for logits_f64 (rotary 1e-6), else 1e-5."

COMMAND = Command(
    "Converts PyTorch weights to a run's folder.",
    __name__,
    "$ weights.safetensors\n"
    "$ last.ckpt runs/converted --config=c2a2 --config.data.image_size=32,48\n"
    "FILE is a state dict (.npz, .safetensors; with torch installed .ckpt, .pt, .pth, .bin).\n"
    "OUT is the folder to write: <stem>-jax beside FILE by default. Prints one line of JSON.",
    (
        (flags.DEFINE, Numbers(float), "mean", None, "Mean of pixels in [0, 1]; default: 0.5."),
        (flags.DEFINE, Numbers(float), "std", None, "Their deviation; default: 0.5."),
        (flags.DEFINE_string, "data", None, "Data set of the configuration; default: cifar10."),
        (flags.DEFINE_list, "class_names", None, "Classes in the order of the logits, as cat,dog."),
        (flags.DEFINE_float, "tolerance", None, _TOLERANCE, 0.0, 0.1),
    ),
    config="model data",
    words="FILE [OUT]",
)


def run(request: Request) -> None:
    """Converts the file that the words name, and prints a line of JSON."""
    from hsvit_jax.weights.convert import Disagreement, convert

    try:
        report = convert(*request.words, config=request.config, **request.flags.flag_values_dict())
    except Disagreement as error:
        print(json.dumps(error.report))
        raise
    print(json.dumps(report))
    if report.get("tolerance", 0) >= 1e-6:
        cli.note(
            f"note: errors below {report['tolerance']:g} of the largest logit go unseen; add "
            "`logits_f64`, logits in float64, to lower that to 1e-9"
        )
    if report.get("batch_coupling"):
        cli.note(
            "note: an image's answer depends on the other images of its batch, as in the reference "
            "(model.batch_coupling=True)"
        )
