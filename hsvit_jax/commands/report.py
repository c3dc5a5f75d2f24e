"""hsvit report: one self-contained HTML file on a run."""

from pathlib import Path

from hsvit_jax import classifier, run_report
from hsvit_jax.cli import Request
from hsvit_jax.text import printable


def run(request: Request) -> int:
    """Writes the report and prints its path."""
    values, source = request.flags, request.source
    folder = Path(source)
    if folder.resolve().name == "checkpoints":
        folder = folder.parent if folder.name else folder / ".."
    name = Path(source.rpartition(":")[2]).stem  # of a file, the zoo or the hub
    own = folder / "report.html" if folder.is_dir() else f"{name}-report.html"
    path = Path(values.out or own)
    if path.suffix.lower() != ".html" or path.is_dir():
        raise ValueError(f"--out={path}: expected the name of an HTML file, such as report.html")
    trained = classifier.load(source, values.which)
    print(printable(str(run_report.write(trained, folder, path, split=values.split))))
    return 0
