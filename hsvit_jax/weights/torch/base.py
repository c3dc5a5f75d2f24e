"""PyTorch state dicts: a table names the reference's module for each module of ours.

A `Table` maps the path of a module, such as 'encoder/blocks/{i}/norm1', to its name in a state
dict, 'blocks.{i}.norm1'; what stands in braces is taken over. A kernel is the reference's `weight`
with its axes reversed, a scale `weight`, statistics `running_mean` and `running_var`. Shapes are
those of the network's own arrays. Beside it:

- several names: parts of one array of ours along its last axis, as queries, keys and values;
- 'name [:,:,1,1]': the reference has axes of length 1 (here after a kernel's two);
- the path of an array, such as 'embedding/cls', to the name of a tensor, [1,1,:] likewise;
- `Placed`, where it lies otherwise.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np

from hsvit_jax.models.family import Family
from hsvit_jax.models.network import Network
from hsvit_jax.text import few

Tensors = Mapping[str, np.ndarray]
#: Arguments of a constructor, or settings of ours.
Given = Mapping[str, Any]
Shape = tuple[int, ...]

_NOT_WEIGHTS = re.compile(
    r"(input|logits|logits_f64|config|labels|train_logits)$|loss|grad/|after/"
    r"|(.*\.)?num_batches_tracked$"
)
_SUFFIX = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}

# --- Tables --------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """Tensors that lie otherwise than an array of ours, or are stacked along its first axis.

    shape: of a tensor, from the array's (of one layer of the stack); ours: from a tensor and the
    array's shape to the array.
    """

    names: tuple[str, ...]
    shape: Callable[[Shape], Shape]
    ours: Callable[[np.ndarray, Shape], np.ndarray]
    stacked: bool = False


Name = str | tuple[str, ...] | Placed
Table = Mapping[str, Name]


class Entry(NamedTuple):
    """One tensor of a state dict and its place in our trees.

    path: 'params' or 'stats', then our names. ours: from the reference's layout to ours.
    stack_index, stack_size: its number among tensors that are stacked along a new first axis, or,
    where `concat`, along the last axis.
    """

    key: str
    shape: Shape
    path: tuple[str, ...]
    ours: Callable[[np.ndarray], np.ndarray]
    stack_index: int = 0
    stack_size: int = 1
    concat: bool = True


def kernel_shape(shape: Shape) -> Shape:
    """(…, in, out) as PyTorch has it: (out, in, …)."""
    return (shape[-1], shape[-2], *shape[:-2])


def kernel(tensor: np.ndarray, shape: Shape) -> np.ndarray:
    """(out, in, …) as ours, of this shape: (…, in, out)."""
    return tensor.transpose(*range(2, tensor.ndim), 1, 0)


def timm_block(ours: str, theirs: str) -> Table:
    """A pre-norm block of attention and feed-forward at `ours`, in timm's names."""
    names = {"norm1": "norm1", "mixer/qkv": "attn.qkv", "mixer/out": "attn.proj", "norm2": "norm2"}
    names |= {"feed_forward/up": "mlp.fc1", "feed_forward/down": "mlp.fc2"}
    return {f"{ours}/{part}": f"{theirs}.{name}" for part, name in names.items()}


def tensor_table(network: Network, table: Table) -> list[Entry]:
    """Every tensor that the reference saves of such a network.

    Raises ValueError for a part of the network that the table has no name for.
    """
    plain = {path: name for path, name in table.items() if "{" not in path}
    rows = [
        (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)), name)
        for path, name in table.items()
        if "{" in path
    ]
    entries: list[Entry] = []
    trees = zip(("params", "stats"), network.init_shapes(), strict=True)
    for tree_name, tree in trees:
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            path = (tree_name, *(str(key.key) for key in keys))
            entries += _entries(path, leaf.shape, plain, rows)
    return entries


def _entries(
    path: tuple[str, ...], shape: Shape, plain: Table, rows: list[tuple[re.Pattern, Name]]
) -> Iterator[Entry]:
    leaf = path[-1]
    for place, suffix in (("/".join(path[1:]), ""), ("/".join(path[1:-1]), _SUFFIX.get(leaf))):
        name, words = plain.get(place), {}
        for pattern, other in rows if name is None else ():
            if found := pattern.fullmatch(place):
                name, words = other, found.groupdict()
                break
        if name is None or suffix is None:
            continue
        placed = name if isinstance(name, Placed) else _placed(name, leaf)
        count = len(placed.names)
        own = shape[1:] if placed.stacked else (*shape[:-1], shape[-1] // count)
        for number, key in enumerate(placed.names):
            key = key.format(**words) + (f".{suffix}" if suffix else "")
            ours = partial(placed.ours, shape=own)
            yield Entry(key, placed.shape(own), path, ours, number, count, not placed.stacked)
        return
    raise ValueError(
        f"the reference's network has no {'.'.join(path[1:])}: choose settings that it knows"
    )


def _placed(name: str | tuple[str, ...], leaf: str) -> Placed:
    """The usual layout of an array called `leaf`, with the axes of length 1 that the name says."""
    names = [one.partition(" ") for one in ((name,) if isinstance(name, str) else name)]
    axes = re.findall(r"[:1]", names[0][2])
    reverse = leaf == "kernel"

    def theirs(shape: Shape) -> Shape:
        sizes = kernel_shape(shape) if reverse else shape
        if axes.count(":") != len(sizes):  # of a kernel, and this is its bias
            return sizes
        rest = iter(sizes)
        return tuple(next(rest) if axis == ":" else 1 for axis in axes)

    def ours(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        tensor = tensor.reshape(kernel_shape(shape) if reverse else shape)
        return kernel(tensor, shape) if reverse else tensor

    return Placed(tuple(one for one, *_ in names), theirs, ours)


# --- State dicts ---------------------------------------------------------------------------------


class Misfits(ValueError):
    """Tensors that are not those of a network: `problems`, each (what is wrong, key, figures), and
    the `expected` shape of every key."""

    def __init__(
        self, problems: Sequence[tuple[str, str, str]], expected: Mapping[str, Shape]
    ) -> None:
        self.problems, self.expected = tuple(problems), dict(expected)
        super().__init__(f"{len(problems)} tensors do not fit these sizes: {listed(problems)}")


def listed(problems: Sequence[tuple[str, str, str]]) -> str:
    """Joins the first five of `Misfits.problems` in one line."""
    return few((f"{kind} {key}{figures}" for kind, key, figures in problems), "; ")


def load_state_dict(
    tensors: Tensors, entries: Sequence[Entry], ignored: str = r"\Z"
) -> tuple[dict, dict]:
    """A file's tensors as (params, stats), nested dicts of float32 NumPy arrays.

    Entries of the file that are no weights (`input`, `loss`, `num_batches_tracked`, …) are passed
    over, and so are keys that the regular expression `ignored` matches.

    Raises:
        Misfits: lists every missing, extra, misshapen, non-float and non-finite tensor.
    """
    _check({k: v for k, v in tensors.items() if not re.match(ignored, k)}, entries)
    trees: dict[str, dict] = {"params": {}, "stats": {}}
    for entry in entries:
        *parents, leaf = entry.path
        node: dict = trees
        for name in parents:
            node = node.setdefault(name, {})
        ours = np.ascontiguousarray(entry.ours(tensors[entry.key]), np.float32)
        if entry.stack_size == 1 and entry.concat:
            node[leaf] = ours
        elif entry.concat:
            *rest, width = ours.shape
            node.setdefault(leaf, np.empty((*rest, entry.stack_size * width), np.float32))
            start = entry.stack_index * width
            node[leaf][..., start : start + width] = ours
        else:
            node.setdefault(leaf, np.empty((entry.stack_size, *ours.shape), np.float32))
            node[leaf][entry.stack_index] = ours
    return trees["params"], trees["stats"]


def state_dict(params: dict, stats: dict, entries: Sequence[Entry]) -> Tensors:
    """Our arrays as the reference's tensors, float32: the way back from `load_state_dict`."""
    trees, tensors = {"params": params, "stats": stats}, {}
    for entry in entries:
        array = np.asarray(reduce(getitem, entry.path, trees))
        if entry.concat:
            width = array.shape[-1] // entry.stack_size if entry.stack_size > 1 else 0
            start = entry.stack_index * width
            array = array[..., start : start + width] if width else array
        else:
            array = array[entry.stack_index]
        # `ours` only moves numbers: of their places it makes a list of where each came from.
        places = entry.ours(np.arange(math.prod(entry.shape)).reshape(entry.shape))
        tensor = np.empty(math.prod(entry.shape), np.float32)
        tensor[places.ravel()] = array.ravel()
        tensors[entry.key] = tensor.reshape(entry.shape)
        if entry.key.endswith(".running_mean"):  # PyTorch counts, and asks for it
            count = entry.key.removesuffix("running_mean") + "num_batches_tracked"
            tensors[count] = np.zeros((), np.int64)
    return tensors


def _finite(tensor: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # a float64 beyond float32's range is reported, not warned of
        return bool(np.isfinite(tensor.astype(np.float32)).all())


def _check(tensors: Tensors, entries: Sequence[Entry]) -> None:
    """Everything wrong with the file's tensors, in one error."""
    expected = {e.key: e.shape for e in entries}
    problems = [
        ("missing", key, f" {shape}") for key, shape in expected.items() if key not in tensors
    ]
    for key, tensor in tensors.items():
        if _NOT_WEIGHTS.match(key):
            continue
        if key not in expected:
            problems.append(("extra", key, f" {tensor.shape}"))
        elif tensor.shape != expected[key]:
            figures = f": {tensor.shape}, expected {expected[key]}"
            problems.append(("misshapen", key, figures))
        elif tensor.dtype.kind != "f" and tensor.dtype.name != "bfloat16":
            problems.append(("not floating point", key, f": {tensor.dtype}"))
        elif not _finite(tensor):
            problems.append(("not finite as float32", key, ""))
        elif key.endswith("running_var") and (tensor < 0).any():
            problems.append(("a negative variance", key, ""))
    if problems:
        raise Misfits(problems, expected)


@dataclasses.dataclass(frozen=True)
class TorchWeights:
    """How a family's PyTorch files are read.

    Attributes:
      markers: every file has one of these keys, after an optional prefix.
      settings: from the family's record, the tensors and the constructor's arguments to the section
        `model` of a configuration; raises ValueError. A `family` in it is that of a sibling.
      table: the names of its tensors, or a function to them from the network's config and the
        file's keys.
      ignored: a regular expression of keys that are no weights.
      known: setting → its values in the reference, of those that no tensor shows.
    """

    markers: tuple[str, ...]
    settings: Callable[[Family, Tensors, Given], Given]
    table: Table | Callable[[Any, Collection[str]], Table]
    ignored: str = r"\Z"
    known: Mapping[str, tuple] = dataclasses.field(default_factory=dict)

    def check_known(self, config: Any) -> None:
        """Raises ValueError for a network that the reference's code would compute differently."""
        for name, values in self.known.items():
            given = getattr(config, name, values[0])  # a table may serve two families
            if given not in values:
                raise ValueError(
                    f"the authors' code has no network with {name}={given!r}, though its tensors "
                    "have names there: export another format"
                )

    def entries(self, network: Network, keys: Collection[str] = ()) -> list[Entry]:
        """Lists every tensor of the network in a file with these keys; raises as `tensor_table`."""
        table = self.table(network.config, keys) if callable(self.table) else self.table
        return tensor_table(network, table)

    def load(self, tensors: Tensors, network: Network) -> tuple[dict, dict]:
        """Loads a file's weights as the network's (params, stats); raises as `load_state_dict`."""
        return load_state_dict(tensors, self.entries(network, tensors), self.ignored)

    def dump(self, params: dict, stats: dict, network: Network) -> Tensors:
        """Names the network's arrays as the reference does; raises as `tensor_table`."""
        return state_dict(params, stats, self.entries(network))

    def prefix(self, keys: Collection[str]) -> str | None:
        """Returns what a wrapper (Lightning, DataParallel, compile) puts before every key of a file
        of the family; None where it is no such file."""
        found = (k.removesuffix(m) for m in self.markers for k in keys if f".{k}".endswith(f".{m}"))
        return next(found, None)


# --- Constructors and configurations -------------------------------------------------------------
# The configuration that is made of them is checked by `config.validate`.


def several(value: Any) -> tuple:
    """Returns the values of an argument that holds one or a list of them."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def pair(size: Any) -> tuple[int, int]:
    """Returns rows and columns from one side or two."""
    rows, *columns = several(size)
    (column,) = columns or [rows]
    return rows, column


def needed(given: Given, *names: str) -> Any:
    """Returns the first of these arguments, which are synonyms; raises ValueError without any."""
    value = next((given[name] for name in names if given.get(name) is not None), None)
    if value is None:
        raise ValueError(f"its constructor lacks {names[0]}")
    return value


def field(given: Given, name: str, default: Any) -> Any:
    """Returns an argument, the default where it is left out; an integer may stand for a float."""
    value = given.get(name)
    if value is None:
        return default
    if isinstance(default, tuple):
        return tuple(field({name: x}, name, default[0] if default else None) for x in value)
    return float(value) if isinstance(default, float) and type(value) is int else value


def read(given: Given, names: Mapping[str, str], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of ours by their names in `given`, or as in `usual`, where left out."""
    return {ours: field(given, theirs, usual[ours]) for ours, theirs in names.items()}


def only(given: Given, name: str, *allowed: Any) -> Any:
    """Returns an argument, the first of `allowed` where it is left out; raises ValueError for
    others, which we have no network for."""
    value = given.get(name)
    value = allowed[0] if value is None else tuple(value) if isinstance(value, list) else value
    if value not in allowed:
        known = " or ".join(repr(v) for v in allowed)
        raise ValueError(f"{name}={value!r} is not supported; expected {known}")
    return value
