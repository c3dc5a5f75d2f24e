"""hsvit export: a trained network as a file, a folder for the hub, or programs."""

from pathlib import Path

import jax

from hsvit_jax import cli, export
from hsvit_jax.text import printable
from hsvit_jax.weights.stored import fuse, of_survivors, stored_network


def run(request: cli.Request) -> None:
    """Writes the network of a run to OUT, and prints what was written."""
    values, source = request.flags, request.source
    if len(request.words) != 1:
        raise cli.Misuse(
            f"expected RUN OUT, as in export runs/c2a2-digits-strong-seed0 model.safetensors; got "
            f"{' '.join([source, *request.words])}"
        )
    out = Path(request.words[0])
    form = values.format or {".safetensors": "file"}.get(out.suffix, out.suffix[1:])
    if values.parts is not None and form not in export.PROGRAMS:
        raise cli.Misuse(f"--parts={values.parts} needs --format={'|'.join(export.PROGRAMS)}")
    if form not in export.FORMATS:
        raise cli.Misuse(
            f"the ending of {out} names no format: write .safetensors, .onnx or .stablehlo, or "
            "give --format (hub: a folder)"
        )
    if values.parts is None:
        cli.ending(out, export.FORMATS[form].ending, "OUT")
    stored = of_survivors(stored_network(source, values.which))
    stored = fuse(stored) if values.fused else stored
    lines = export.write(stored, export.describe(stored, source), out, form, values.parts)
    print(printable("\n".join(lines)))
    count = sum(x.size for x in jax.tree.leaves(stored.params))
    cli.note(
        f"{stored.config.model.variant}, {count:,} parameters, {len(stored.class_names)} classes, "
        f"step {stored.step:,} of {source}"
    )
