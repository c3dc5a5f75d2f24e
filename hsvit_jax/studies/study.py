"""Studies of the papers as grids of runs: `hsvit study fig5`; runs that are done are found again.

A study is a file whose `get_study()` names its axes, as those of configs/studies do.
"""

import dataclasses
import runpy
from collections.abc import Sequence
from pathlib import Path

from hsvit_jax import cli
from hsvit_jax.studies import grid, systems
from hsvit_jax.text import few, nearest

_FILES = Path(__file__).parent / "papers"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A network of a study and its place on the axes.

    Attributes:
      x, line: values of the axes, as printed.
      network: as --config takes it, without data set and recipe, such as 'vix:vin,hybrid'.
      settings: KEY=VALUE texts.
    """

    x: str | int
    line: str | int
    network: str
    settings: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Study(grid.Labels):
    """A table or figure of a paper as a grid of runs.

    Attributes:
      title, x, line: of `grid.Labels`; the title names the source.
      cells: the networks, in the table's order.
      data: the data set and recipe of the paper, as after the colon of --config.
    """

    cells: Sequence[Cell]
    data: str = "cifar10,paper"


def run(request: cli.Request) -> None:
    """Trains the networks of a study that are not trained yet; prints and writes the table."""
    values = request.flags
    if len(request.words) != 1:
        raise cli.Misuse(f"study takes one name or file; known are {few(names())}")
    if request.spec:
        raise cli.Misuse(f"study does not use --config: give {request.spec}'s data set as --data")
    study, name = load(request.words[0])
    settings = list(request.settings)
    if values.epochs is not None:
        if any(s.startswith(("train.epochs=", "train.steps=")) for s in settings):
            raise cli.Misuse("--epochs and --config.train both say how long: leave one out")
        settings = [f"train.epochs={values.epochs:g}", *settings]
    cells = {system(cell, values.data or study.data): cell for cell in study.cells}
    out = Path(values.out or f"runs/study-{name}")
    trained = systems.train_all(
        list(cells), out, settings=settings, seeds=systems.seeds_of(values.seeds), equal="data"
    )
    points = [
        systems.point(one, str(cells[one.system].x), str(cells[one.system].line)) for one in trained
    ]
    print(*grid.write(points, study, out, name, request.line), sep="\n")
    systems.refuse_left_out(len(cells), len(points))


def system(cell: Cell, data: str) -> systems.System:
    """A cell's network on a data set."""
    file, _, words = cell.network.partition(":")
    spec = f"{file}:{','.join(filter(None, [words, data]))}"
    return systems.System(f"{cell.line}, {cell.x}", spec, tuple(cell.settings))


def load(name: str) -> tuple[Study, str]:
    """Loads a study by its name or its file; returns it with its name."""
    path = Path(name) if name.endswith(".py") else _FILES / f"{name}.py"
    if not path.is_file():
        near = nearest(name, names())
        raise cli.Misuse(f"there is no study {name!r}.{near} Known: {few(names())}")
    try:
        make = runpy.run_path(str(path)).get("get_study")
        study = make() if make else None
    except Exception as error:  # the file may raise anything
        raise ValueError(f"the study {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise ValueError(f"{path} has no function get_study(), which returns the Study")
    if not study.cells or not all(isinstance(cell, Cell) for cell in study.cells):
        raise ValueError(f"the study {path} needs cells, each a Cell; got {study.cells!r:.60}")
    return study, path.stem


def names() -> list[str]:
    """Lists the studies that come with the package."""
    return sorted(path.stem for path in _FILES.glob("*.py"))
