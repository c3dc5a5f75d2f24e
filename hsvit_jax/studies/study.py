"""The papers' tables and figures as grids of runs: `hsvit study fig5`.

A study is a Python file, as those of configs/studies: its `get_study()` returns a `Study`.
"""

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsvit_jax.studies import engine
from hsvit_jax.text import few, nearest

_FILES = Path(__file__).parent / "papers"


@dataclass(frozen=True)
class Cell:
    """A network of a study and its place on the axes.

    Attributes:
      x, line: values of the axes, as printed.
      network: the network as --config takes it, without data set and recipe ('vix:vin,hybrid').
      settings: KEY=VALUE texts.
    """

    x: str | int
    line: str | int
    network: str
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Study:
    """A table or figure as a grid of runs.

    Attributes:
      title: title of the plot, with the source.
      x, line: names of the axis across and of the axis whose values are the lines.
      cells: the networks, in the table's order.
      data: data set and recipe, as after the colon of --config.
    """

    title: str
    x: str
    line: str
    cells: Sequence[Cell]
    data: str = "cifar10,paper"

    def systems(self, data: str = "") -> list[engine.System]:
        """Returns the cells' networks on a data set; it defaults to the study's."""
        found = []
        for cell in self.cells:
            file, _, words = cell.network.partition(":")
            spec = f"{file}:{','.join(filter(None, [words, data or self.data]))}"
            x, line, settings = str(cell.x), str(cell.line), tuple(cell.settings)
            found.append(engine.System(f"{line}, {x}", spec, settings, x, line))
        return found


def find(name: str) -> Path:
    """Returns the file of a study. Raises ValueError if there is none."""
    path = Path(name) if name.endswith(".py") else _FILES / f"{name}.py"
    if not path.is_file():
        near = nearest(name, names())
        raise ValueError(f"there is no study {name!r}.{near} Known: {few(names())}")
    return path


def load(path: Path) -> Study:
    """Loads a study from its file. Raises ValueError if the file fails or has no study."""
    try:
        study = runpy.run_path(str(path))["get_study"]()
    except Exception as error:  # the file may raise anything
        raise ValueError(f"the study {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study) or not study.cells:
        raise ValueError(f"get_study() of {path} must return a Study with cells")
    return study


def names() -> list[str]:
    """Lists the studies that come with the package."""
    return sorted(path.stem for path in _FILES.glob("*.py"))
