"""Studies of the papers as grids of runs: `hsvit study fig5`.

A study is a file that names its axes (configs/studies); runs that are done are found again.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.commands.studies import grid, systems

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
    settings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of a paper as a grid of runs.

    Attributes:
      title: and source.
      x: the axis across.
      line: the axis whose values are the lines of the plot and the rows of the table.
      cells: the networks, in the table's order.
      data: the data set and recipe of the paper, as after the colon of --config.
    """

    title: str
    x: str
    line: str
    cells: Sequence[Cell]
    data: str = "cifar10,paper"


def run(request: cli.Request) -> None:
    """Trains the networks of a study that are not trained yet; prints and writes the table."""
    values = request.flags
    if len(request.words) != 1:
        raise cli.Misuse(f"study takes one name or file; known are {config_lib.few(names())}")
    if request.spec:
        raise cli.Misuse(f"study does not use --config: give {request.spec}'s data set as --data")
    study, name = load(request.words[0])
    settings = list(request.settings)
    if values.epochs is not None:
        settings = [f"train.epochs={values.epochs:g}", *settings]
    cells = {system(cell, values.data or study.data): cell for cell in study.cells}
    out = Path(values.out or f"runs/study-{name}")
    trained = systems.train_all(
        list(cells), out, settings=settings, seeds=systems.seeds_of(values.seeds), equal="data"
    )
    points = [
        systems.point(one, str(cells[one.system].x), str(cells[one.system].line)) for one in trained
    ]
    labels = grid.Labels(study.title, study.x, study.line)
    print(*grid.write(points, labels, out, name, request.line), sep="\n")


def system(cell: Cell, data: str) -> systems.System:
    """A cell's network on a data set."""
    file, _, words = cell.network.partition(":")
    spec = f"{file}:{','.join(filter(None, [words, data]))}"
    return systems.System(f"{cell.line}, {cell.x}", spec, cell.settings)


def load(name: str) -> tuple[Study, str]:
    """Loads a study by its name or its file; returns it with its name."""
    path = Path(name) if name.endswith(".py") else _FILES / f"{name}.py"
    if not path.is_file():
        near = config_lib.nearest(name, names())
        raise cli.Misuse(f"there is no study {name!r}.{near} Known: {config_lib.few(names())}")
    spec = importlib.util.spec_from_file_location(f"study_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make: Callable[[], Study] | None = getattr(module, "get_study", None)
    if make is None:
        raise ValueError(f"{path} has no function get_study(), which returns the Study")
    return make(), path.stem


def names() -> list[str]:
    """Lists the studies that come with the package."""
    return sorted(path.stem for path in _FILES.glob("*.py"))
