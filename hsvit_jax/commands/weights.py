"""The commands that read and write weight files: hsvit export, convert."""

import json
from pathlib import Path

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Command, Request, define_numbers
from hsvit_jax.commands.trained import RUN
from hsvit_jax.text import printable

_FORMATS = ["file", "hub", "reference", "stablehlo", "onnx", "tflite"]
_FORMAT = "Defaults to OUT's suffix. hub: a folder; reference: the authors' PyTorch names."
_TOLERANCE = "Share of the largest logit; default: 1e-9 for logits_f64 (rotary 1e-6), else 1e-5."


@Command(
    "Writes a trained network as one file, for the hub, under other names, or as programs.",
    "$ runs/c2a2-digits-strong-seed0 model.safetensors\n"
    "$ runs/c2a2-digits-strong-seed0 model.onnx\n"
    "$ runs/c2a2-digits-strong-seed0 four --format=stablehlo --parts=4",
    (
        *RUN,
        (flags.DEFINE_enum, "format", None, _FORMATS, _FORMAT),
        (flags.DEFINE_integer, "parts", None, "Export N group programs plus a head.", 1),
        (flags.DEFINE_enum, "quantize", None, ["int8"], "Quantise an ONNX program."),
        (flags.DEFINE_bool, "fused", False, "Merge a FastViT's branches into single convolutions."),
    ),
    words="OUT",
)
def export(request: Request) -> None:
    """Writes the network of a run to OUT, and prints what was written."""
    import jax

    from hsvit_jax import export, tasks
    from hsvit_jax.weights.stored import fuse, of_survivors, stored_network

    values, source = request.flags, request.source
    out = Path(*request.words)
    form = values.format or {".safetensors": "file"}.get(out.suffix, out.suffix[1:])
    if values.quantize and form != "onnx":
        raise cli.Misuse(f"--quantize={values.quantize} needs a file that ends in .onnx")
    form = values.quantize or form
    if values.parts is not None and form not in export.PROGRAMS:
        raise cli.Misuse(f"--parts={values.parts} needs --format={'|'.join(export.PROGRAMS[:3])}")
    if form not in export.FORMATS:
        raise cli.Misuse(
            f"the suffix of {out} names no format: use .safetensors, .onnx, .tflite or .stablehlo, "
            "or set --format (hub: a folder)"
        )
    if values.parts is None:
        cli.ending(out, export.FORMATS[form].ending, "OUT")
    stored = of_survivors(stored_network(source, values.which))
    stored = fuse(stored) if values.fused else stored
    lines = export.write(stored, export.describe(stored, source), out, form, values.parts)
    print(printable("\n".join(lines)))
    count = sum(x.size for x in jax.tree.leaves(stored.params))
    cli.note(
        f"{config_lib.title(stored.config.model)}, {count:,} parameters, "
        f"{len(stored.class_names)} {tasks.of(stored.config).noun}, "
        f"step {stored.step:,} of {source}"
    )


@Command(
    "Converts PyTorch weights to a run's folder.",
    "$ weights.safetensors\n"
    "$ last.ckpt runs/converted --config=c2a2 --config.data.image_size=32,48\n"
    "FILE is a state dict (.npz, .safetensors; with torch installed .ckpt, .pt, .pth, .bin).\n"
    "OUT is the folder to write: <stem>-jax beside FILE by default. Prints one line of JSON.",
    (
        (define_numbers, "mean", None, "Mean of pixels in [0, 1]; default: 0.5."),
        (define_numbers, "std", None, "Their deviation; default: 0.5."),
        (flags.DEFINE_string, "data", None, "Data set of the configuration; default: cifar10."),
        (flags.DEFINE_list, "class_names", None, "Classes in the order of the logits, as cat,dog."),
        (flags.DEFINE_float, "tolerance", None, _TOLERANCE, 0.0, 0.1),
    ),
    config="model data",
    words="FILE [OUT]",
)
def convert(request: Request) -> None:
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
