"""Who may import whom: one table, which every room of the package is in."""

import ast
import subprocess
import sys
from pathlib import Path

import hsvit_jax

PACKAGE = Path(hsvit_jax.__file__).resolve().parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = {"tensorflow_datasets", "PIL", "matplotlib", "orbax", "tensorboardX", "torch"}

_LEAVES = "ops data augment runtime checkpoint mesh report"
_ENGINE = f"{_LEAVES} models config weights train planner"
#: Room (a folder or file at the top of the package) → the rooms it may import beside `text`.
MAY_IMPORT = {
    "text": "",
    **dict.fromkeys(_LEAVES.split(), ""),
    "models": "ops",
    "config": "models",
    "weights": "models ops",
    "train": "augment checkpoint config data mesh models report runtime weights",
    "planner": "config mesh models ops report",
    "cli": "config report runtime",
    "classifier": "augment checkpoint config data mesh models report runtime train",
    "studies": f"{_ENGINE} cli",
    **dict.fromkeys(("serve", "export", "run_report"), f"{_ENGINE} classifier"),
    "commands": f"{_ENGINE} cli classifier export run_report serve studies",
    "main": "cli commands runtime",
    **dict.fromkeys(("__main__", "convert", "compare"), "main"),
    "benchmark": f"{_ENGINE} cli classifier main",
    "__init__": f"{_ENGINE} classifier commands",
}
#: Folders of models' families → the other ones each may import.
FAMILIES = {"hsvit": "convnets", "vix": "", "vit": "", "convnets": "", "conv_transformers": ""}


def room_of(module: str) -> str:
    """The room of a module by its dotted name below the package."""
    return module.split(".")[0] or "__init__"


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


def own(tree: ast.AST) -> set[str]:
    """Dotted names below the package of what it imports of itself; '' is its root's names."""
    names = [n.removeprefix("hsvit_jax.") for n in imports(tree) if n.startswith("hsvit_jax.")]
    tops = {name.split(".")[0] for name in FILES}
    return {name for name in names if name.split(".")[0] in tops}


def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree."""
    return {module: ast.parse(path.read_text("utf-8")) for module, path in FILES.items()}


def at_import_time(tree: ast.Module) -> list[str]:
    """Imports outside functions, and not just for type checkers."""
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


def upward(files: dict[str, set[str]]) -> list[str]:
    """'module imports module' for each import that the table has no place for."""
    wrong = []
    for module, names in files.items():
        room = room_of(module)
        if room not in MAY_IMPORT:
            wrong.append(f"{module} is in no room of the table")
            continue
        allowed = {room, "text", *MAY_IMPORT[room].split()}
        wrong += [f"{module} imports {name}" for name in names if room_of(name) not in allowed]
        parts = module.split(".")
        if room == "models" and len(parts) > 2:
            others = set(FAMILIES) - {parts[1], *FAMILIES[parts[1]].split()}
            closed = tuple(f"models.{family}." for family in others)
            wrong += [f"{module} imports {name}" for name in names if name.startswith(closed)]
    return wrong


def test_the_walk_sees_what_it_must():
    tree = ast.parse(
        "import os\nfrom hsvit_jax import mesh\nif TYPE_CHECKING:\n    import PIL\n"
        "def f():\n    from hsvit_jax.data import stream\nclass A:\n    import orbax\n"
    )
    assert own(tree) == {"mesh", "data.stream"}
    assert sorted(at_import_time(tree)) == ["hsvit_jax.mesh", "orbax", "os"]
    assert upward({"models.vit.vit": {"mesh"}}) == ["models.vit.vit imports mesh"]
    assert upward({"models.vit.vit": {"models.convnets.resnet"}})
    assert upward({"attic": set()}) == ["attic is in no room of the table"]
    assert not upward({"models.hsvit.backbone": {"models.convnets.resnet", "ops.conv"}})


def test_imports_go_down():
    assert not upward({module: own(tree) for module, tree in trees().items()})


def test_rooms_are_few_and_none_is_crowded():
    folders = [path for path in PACKAGE.rglob("*") if path.is_dir() and any(path.glob("*.py"))]
    assert not [str(f) for f in folders if len(list(f.glob("*.py"))) > 14]  # 13 and __init__


def test_heavy_libraries_wait_until_needed():
    """And data can be read, as in another program's loader, before jax is loaded."""
    heavy = {
        module: {name.split(".")[0] for name in at_import_time(tree)}
        & (HEAVY | ({"jax"} if room_of(module) == "data" else set()))
        for module, tree in trees().items()
    }
    assert not {module: names for module, names in heavy.items() if names}


def test_one_module_imports_orbax():
    users = [m for m, tree in trees().items() if any(n.startswith("orbax") for n in imports(tree))]
    assert users == ["checkpoint.orbax_arrays"]


def test_mesh_alone_names_axes_and_collectives():
    """A model is told the axes to reduce over; it never writes one, and shards nothing itself.

    A checksum takes any array apart as it lies, whatever the axes are called.
    """
    wrong = []
    for module, tree in trees().items():
        if module in ("mesh", "checkpoint.checksum"):
            continue
        names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        used = names & {"shard_map", "PartitionSpec", "NamedSharding", "make_mesh", "AxisType"}
        if room_of(module) in ("models", "ops"):
            text = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            used |= text & {"data", "group"}
        else:
            used |= names & {"psum", "pmean", "all_gather", "axis_index"}
        wrong += [f"{module}: {name}" for name in sorted(used)]
    assert not wrong


def test_heavy_parts_are_imported_when_used():
    """The list of commands is told before jax is loaded; `load` is there before Flax is."""
    code = (
        "import sys, hsvit_jax.main; hsvit_jax.main.main(['hsvit', '--help']); "
        "print(*sys.modules); hsvit_jax.load; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    listed, loadable = (set(line.split()) for line in done.stdout.splitlines()[-2:])
    assert "absl.flags" in listed and not listed & {*HEAVY, "jax", "numpy", "flax", "optax"}
    assert "jax" in loadable and not loadable & {*HEAVY, "flax", "optax", "grain"}
