"""hsvit export: a trained network as a file, a folder for the hub, or programs."""

from pathlib import Path

import jax

from hsvit_jax import cli, export
from hsvit_jax.text import printable


def run(request: cli.Request) -> None:
    """Writes the network of a run to OUT, and prints what was written."""
    values, source = request.flags, request.source
    out = Path(request.words[0])
    form = values.format or {".safetensors": "file"}.get(out.suffix, out.suffix[1:])
    if values.parts is not None and form not in export.programs.FORMATS:
        formats = "|".join(export.programs.FORMATS)
        raise cli.Misuse(f"--parts={values.parts} needs --format={formats}")
    if form not in export.ENDINGS:
        raise cli.Misuse(
            f"the ending of {out} names no format: write .safetensors, .onnx or .stablehlo, or "
            "give --format (hub: a folder)"
        )
    if values.parts is None:
        cli.ending(out, export.ENDINGS[form], "OUT")
    how = {"parts": values.parts, "fused": values.fused}
    stored, lines = export.write(source, values.which, out, form, **how)
    print(printable("\n".join(lines)))
    count = sum(x.size for x in jax.tree.leaves(stored.params))
    cli.note(
        f"{stored.config.model.variant}, {count:,} parameters, {len(stored.class_names)} classes, "
        f"step {stored.step:,} of {source}"
    )
