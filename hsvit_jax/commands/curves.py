"""hsvit curves: validation accuracy and training loss of several runs."""

from pathlib import Path

from hsvit_jax import cli
from hsvit_jax.cli import Command, Request, define_path

COMMAND = Command(
    "Draws accuracy and loss of several runs in one plot.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 runs/c3a4-digits-strong-seed0",
    ((define_path, "out", "curves.png", "A PNG to draw."),),
    words="RUN RUN ...",
)


def run(request: Request) -> None:
    """Draws the curves of the runs that the words name."""
    from hsvit_jax.studies import curves

    out, folders = cli.ending(request.flags.out), list(map(Path, request.words))
    if out.name == "curves.png" and (out.parent / "metrics.jsonl").exists():
        raise cli.Misuse(f"--out={out} is the plot of a run: choose another name")
    curves.draw(curves.read(folders), out)
    print(out)
