"""Who may import whom: one table, which every room of the package is in."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import hsvit_jax

PACKAGE = Path(hsvit_jax.__file__).resolve().parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = {"fsspec", "tensorflow_datasets", "PIL", "matplotlib", "orbax", "tensorboardX", "torch"}

BELOW_TRAIN = "artifacts augment checkpoint config data mesh models runtime tasks weights"
#: Floor, its rooms (folders or files at the top of the package), and the rooms that each of them
#: may import beside `text`; "*" is every room of a lower floor.
FLOORS = (
    (0, "text", ""),
    (1, "artifacts augment mesh ops runtime storage tasks", ""),
    (2, "checkpoint data", "storage"),
    (2, "models", "ops"),
    (3, "config", "models tasks"),
    (4, "planner", "artifacts config mesh models ops"),
    (4, "weights", "artifacts checkpoint config models ops storage"),
    (5, "train", f"{BELOW_TRAIN} storage"),
    (6, "classifier", f"{BELOW_TRAIN} train"),
    (7, "cli", "artifacts config runtime storage"),
    (7, "benchmark export run_report serve studies", "*"),
    (8, "commands", "*"),
    (9, "main", "cli commands runtime"),
    (9, "__init__", "augment classifier config data models run_report tasks train"),
)
FLOOR = {room: floor for floor, rooms, _ in FLOORS for room in rooms.split()}
MAY_IMPORT = {
    room: {"text", *(others.split() if others != "*" else (r for r in FLOOR if FLOOR[r] < floor))}
    for floor, rooms, others in FLOORS
    for room in rooms.split()
}
#: Folders of models' families → the other ones each may import.
FAMILIES = {"hsvit": "convnets", "vix": "", "vit": "", "convnets": "", "conv_transformers": ""}


def room_of(module: str) -> str:
    """The room of a module by its dotted name below the package; fronts are of `main`'s."""
    if module in ("convert", "compare") or module.split(".")[-1] == "__main__":
        return "main"
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
    names = {n.removeprefix("hsvit_jax.") for n in imports(tree) if n.startswith("hsvit_jax.")}
    tops = {name.split(".")[0] for name in FILES}
    lazy = {"__init__" for n in imports(tree) if n == "hsvit_jax"}
    return {name if name.split(".")[0] in tops else "__init__" for name in names} | lazy


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
        for name in names:
            other = room_of(name)
            if other not in {room, *MAY_IMPORT[room]}:
                wrong.append(f"{module} imports {name}")
        parts = module.split(".")
        if room == "models" and len(parts) > 2:
            others = set(FAMILIES) - {parts[1], *FAMILIES[parts[1]].split()}
            closed = tuple(f"models.{family}." for family in others)
            wrong += [f"{module} imports {name}" for name in names if name.startswith(closed)]
    return wrong


def test_the_walk_sees_what_it_must():
    tree = ast.parse(
        "import os\nfrom hsvit_jax import mesh\nif TYPE_CHECKING:\n    import PIL\n"
        "def f():\n    from hsvit_jax.data import cache\nclass A:\n    import orbax\n"
    )
    assert own(tree) == {"mesh", "data.cache"}
    assert sorted(at_import_time(tree)) == ["hsvit_jax.mesh", "orbax", "os"]
    assert upward({"models.vit.vit": {"mesh"}}) == ["models.vit.vit imports mesh"]
    assert upward({"models.vit.vit": {"models.convnets.resnet"}})
    assert upward({"attic": set()}) == ["attic is in no room of the table"]
    assert not upward({"models.hsvit.backbone": {"models.convnets.resnet", "ops.conv"}})


def test_imports_go_down():
    """To lower floors alone, also those for type checkers: no circle, and no arrow upwards."""
    for room, others in MAY_IMPORT.items():
        assert all(FLOOR[other] < FLOOR[room] for other in others - {room}), room
    assert {*range(10)} == {*FLOOR.values()}
    assert not upward({module: own(tree) for module, tree in trees().items()})


def test_no_module_imports_itself_by_a_detour():
    """Also inside a room: `prepare` raises CycleError, which names the modules."""

    def module(name: str) -> str:
        return max((m for m in FILES if f"{name}.".startswith(f"{m}.")), key=len, default="")

    graph = {m: {module(name) for name in own(tree)} - {m} for m, tree in trees().items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_rooms_are_few_and_none_is_crowded():
    """But for commands, a file for each."""
    folders = [path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "commands"]
    assert not [str(f) for f in folders if len(list(f.glob("*.py"))) > 14]  # 13 and __init__


def test_heavy_libraries_wait_until_needed():
    """And data can be read, as in another program's loader, before jax is loaded."""
    heavy = {
        module: {name.split(".")[0] for name in at_import_time(tree)}
        & (HEAVY | ({"jax"} if room_of(module) == "data" else set()))
        for module, tree in trees().items()
    }
    assert not {module: names for module, names in heavy.items() if names}


def test_orbax_and_what_jax_does_not_publish_have_one_user_each():
    names = {m: imports(tree) for m, tree in trees().items()}
    users = [
        [m for m in names if any(name.startswith(library) for name in names[m])]
        for library in ("orbax", "jax._src", "jaxlib")
    ]
    assert users == [["checkpoint.orbax_arrays"], ["runtime.coordination"], []]


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
    """The list of commands is told before jax is loaded; `load` is there before Flax is.

    A training's first step waits for no library of pictures, statistics or checkpoints.
    """
    code = (
        "import sys, hsvit_jax.main; hsvit_jax.main.main(['hsvit', '--help']); "
        "print(*sys.modules); hsvit_jax.load; print(*sys.modules); "
        "hsvit_jax.fit; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    listed, loadable, trains = (set(line.split()) for line in done.stdout.splitlines()[-3:])
    assert "absl.flags" in listed and not listed & {*HEAVY, "jax", "numpy", "flax", "optax"}
    assert "jax" in loadable and not loadable & {*HEAVY, "flax", "optax", "grain"}
    assert "optax" in trains and not trains & {*HEAVY, "scipy.special", "scipy.optimize"}
