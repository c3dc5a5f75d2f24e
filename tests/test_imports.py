"""Imports go one way, and heavy libraries are only imported where they are needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hsvit_jax

PACKAGE = Path(hsvit_jax.__file__).resolve().parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = {"tensorflow_datasets", "grain", "PIL", "matplotlib", "orbax", "tensorboardX", "torch"}

# Module → the only parts of the package it may import (a name stands for all below it).
MAY_IMPORT = {
    "config": ("recipes",),
    "recipes": (),
    "systems": ("config", "models", "recipes"),
    "checksum": (),
    "host": (),
    "halves": ("host",),
    "signals": (),
    "watchdog": (),
    "recover": ("loop", "mesh", "signals", "step", "together"),
    "distributed": ("together",),
    "together": ("signals",),
    "metrics": (),
    "optim": (),
    "mesh": ("wire",),
    "wire": (),
    "checkpoint": ("checkpoint_arrays", "checkpoint_folder", "checkpoint_record", "checksum"),
    "checkpoint_arrays": ("checkpoint_record", "checksum"),
    "checkpoint_folder": ("checkpoint_record",),
    "checkpoint_record": ("checksum",),
    "augment": ("augment",),
    "data": ("data",),
    "models": ("models",),
    "configfile": ("config", "models", "systems"),
    "feature_cache": (
        *("augment", "checksum", "data", "evaluate", "loop", "mesh", "models", "step"),
    ),
    "growth": ("models",),
    "initial": (
        *("checkpoint", "config", "growth", "models", "pretrained", "refit", "step"),
        "weight_files",
    ),
    "layouts": (),
    "pretrained": ("convert", "convert_tensors", "layouts", "models", "weight_files"),
    "refit": ("models",),
    "weight_files": (),
    "evaluate": ("augment", "mesh"),
    "step": ("augment", "halves", "mesh"),
    "summary": ("models",),
    "reports": (),
    "restore": ("checkpoint", "config", "initial", "loop", "step"),
    "sequence": ("host", "models", "reports", "subcommand", "summary"),
    "subcommand": (),
    "visualize": ("augment", "data", "predict", "visualize_figure"),
    "visualize_figure": ("visualize",),
    "workdir": ("checkpoint", "together"),
    "votes": ("augment", "evaluate", "mesh"),
}


def _part(name: str) -> str:
    return name.split(".")[0]


def imports(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported below `tree`; `from a import b` gives 'a.b'."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own(path: Path) -> set[str]:
    """The parts of this package that a file imports, anywhere in it."""
    names = {name for name in imports(ast.parse(path.read_text())) if name.startswith("hsvit_jax.")}
    return {_part(name.removeprefix("hsvit_jax.")) for name in names}


def at_import_time(path: Path) -> list[str]:
    """What is imported outside functions, and not just for type checkers."""
    tree = ast.parse(path.read_text())
    todo, found = list(tree.body), []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += imports(node)
        todo += list(ast.iter_child_nodes(node))
    return found


def test_the_walk_sees_imports(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "import os\nfrom hsvit_jax import mesh\nif TYPE_CHECKING:\n    import PIL\n"
        "def f():\n    from hsvit_jax.data import stream\nclass A:\n    import grain\n"
    )
    assert own(file) == {"mesh", "data"}
    assert sorted(at_import_time(file)) == ["grain", "hsvit_jax.mesh", "os"]
    assert {"main", "mesh", "models.hsvit", "data"} <= set(FILES)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_one_way(module):
    part = _part(module)
    if part in MAY_IMPORT:
        assert own(FILES[module]) <= {*MAY_IMPORT[part]}


@pytest.mark.parametrize("module", [m for m in FILES if _part(m) not in ("main", "hsvit_jax")])
def test_nothing_below_imports_the_command_line(module):
    assert not own(FILES[module]) & ({"main"} | ({"commands"} - {module}))


@pytest.mark.parametrize("module", FILES)
def test_heavy_libraries_wait_until_needed(module):
    heavy = {_part(name) for name in at_import_time(FILES[module])} & HEAVY
    assert not heavy


@pytest.mark.parametrize("module", FILES)
def test_only_one_module_imports_orbax(module):
    names = imports(ast.parse(FILES[module].read_text()))
    assert module == "checkpoint_arrays" or not any(_part(name) == "orbax" for name in names)


@pytest.mark.parametrize("module", [m for m in FILES if m not in ("mesh", "checksum")])
def test_only_mesh_names_axes_and_collectives(module):
    """A model is told the axes to reduce over; it never writes one, and shards nothing itself.

    A checksum takes any array apart as it lies, whatever the axes are called.
    """
    tree = ast.parse(FILES[module].read_text())
    called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    called |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not called & {"shard_map", "PartitionSpec", "NamedSharding", "make_mesh", "AxisType"}
    if _part(module) != "models":
        assert not called & {"psum", "pmean", "all_gather", "axis_index"}
    else:
        text = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        assert not text & {"data", "group"}


def test_importing_the_command_line_is_light():
    """Usage and mistakes in flags are told before jax is loaded."""
    code = "import sys, hsvit_jax, hsvit_jax.main; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "'absl.flags'" in done.stdout
    assert not [name for name in ("jax", "flax", "matplotlib") if f"'{name}'" in done.stdout]
