"""hsvit report: one self-contained HTML file on a run."""

from pathlib import Path

from absl import flags

from hsvit_jax.cli import Command, Request, define_path
from hsvit_jax.commands.trained import RUN
from hsvit_jax.text import printable

COMMAND = Command(
    "Writes a run's curves, figures by class, calibration and hardest images as one HTML file.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 --split=test",
    (
        *RUN,
        (flags.DEFINE_enum, "split", "val", ["train", "val", "test"], "Which images."),
        (define_path, "out", None, "Default: report.html of the run, or NAME-report.html."),
    ),
)


def run(request: Request) -> int:
    """Writes the report and prints its path."""
    from hsvit_jax import classifier, run_report

    values, source = request.flags, request.source
    folder = Path(source)
    if folder.resolve().name == "checkpoints":
        folder = folder.parent if folder.name else folder / ".."
    name = Path(source.rpartition(":")[2]).stem  # of a file, the zoo or the hub
    own = folder / "report.html" if folder.is_dir() else f"{name}-report.html"
    path = Path(values.out or own)
    if path.suffix.lower() != ".html" or path.is_dir():
        raise ValueError(f"--out={path}: set the name of an HTML file, such as report.html")
    trained = classifier.load(source, values.which)
    print(printable(str(run_report.write(trained, folder, path, split=values.split))))
    return 0
