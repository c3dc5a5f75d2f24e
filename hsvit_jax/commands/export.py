"""hsvit export: a trained network as a file, a folder for the hub, or programs."""

from pathlib import Path

from absl import flags

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Command, Request
from hsvit_jax.commands.trained import RUN
from hsvit_jax.text import printable

_FORMATS = ["file", "hub", "reference", "stablehlo", "onnx"]
_FORMAT = "Defaults to OUT's suffix. hub: a folder; reference: the authors' PyTorch names."

COMMAND = Command(
    "Writes a trained network as one file, for the hub, under other names, or as programs.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 model.safetensors\n"
    "$ runs/c2a2-digits-strong-seed0 model.onnx\n"
    "$ runs/c2a2-digits-strong-seed0 four --format=stablehlo --parts=4",
    (
        *RUN,
        (flags.DEFINE_enum, "format", None, _FORMATS, _FORMAT),
        (flags.DEFINE_integer, "parts", None, "Export N group programs plus a head.", 1),
        (flags.DEFINE_bool, "fused", False, "Merge a FastViT's branches into single convolutions."),
    ),
    words="OUT",
)


def run(request: Request) -> None:
    """Writes the network of a run to OUT, and prints what was written."""
    import jax

    from hsvit_jax import export
    from hsvit_jax.weights.stored import fuse, of_survivors, stored_network

    values, source = request.flags, request.source
    out = Path(*request.words)
    form = values.format or {".safetensors": "file"}.get(out.suffix, out.suffix[1:])
    if values.parts is not None and form not in export.PROGRAMS:
        raise cli.Misuse(f"--parts={values.parts} needs --format={'|'.join(export.PROGRAMS)}")
    if form not in export.FORMATS:
        raise cli.Misuse(
            f"the suffix of {out} names no format: use .safetensors, .onnx or .stablehlo, or set "
            "--format (hub: a folder)"
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
        f"{len(stored.class_names)} classes, step {stored.step:,} of {source}"
    )
