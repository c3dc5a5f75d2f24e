"""PyTorch state dicts: a table names the reference's module for each module of ours.

A `Table` maps the path of a module, such as 'encoder/blocks/{i}/norm1', to its name in a state
dict, 'blocks.{i}.norm1'. A word in braces stands for any part of a path. A kernel is the
reference's `weight` with its axes reversed, a scale its `weight`, and statistics are its
`running_mean` and `running_var`. Shapes are those of the network's own arrays. Furthermore:

- several names are parts of one array of ours along its last axis, as queries, keys and values;
- 'name[:,:,1,1]' has axes of length 1 in the reference (here after a kernel's two);
- the path of an array, such as 'embedding/cls', may be mapped to a tensor's name;
- a `Placed` describes any other layout.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from hsvit_jax.models.family import Family
from hsvit_jax.models.network import Network
from hsvit_jax.weights.files import Tensors

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
    """Tensors with another layout than an array of ours, or stacked along its first axis.

    Attributes:
      shape: from the shape of the array, or of one layer of the stack, to a tensor's.
      ours: from a tensor and that shape to the array.
    """

    names: tuple[str, ...]
    shape: Callable[[Shape], Shape]
    ours: Callable[[np.ndarray, Shape], np.ndarray]
    stacked: bool = False


Table = Mapping[str, str | tuple[str, ...] | Placed]


class Entry(NamedTuple):
    """One tensor of a state dict and its place in our trees.

    Attributes:
      path: 'params' or 'stats', then our names.
      ours: from the reference's layout to ours.
      whole: the shape of our array.
      place: the index of the tensor's part in it.
    """

    key: str
    shape: Shape
    path: tuple[str, ...]
    ours: Callable[[np.ndarray], np.ndarray]
    whole: Shape
    place: Any


def names(ours: str, theirs: str, words: str, parts: str = "=") -> Table:
    """Builds a table of modules below a path of ours and a name of theirs.

    Args:
      words: 'our path=their name' each, '=' for the module itself; 'norm' is 'norm=norm'. Names
        that differ in one word are written '{query,key,value}'.
      parts: the same for the modules below each of these.
    """
    table: dict[str, str | tuple[str, ...]] = {}
    for both in product(words.split(), parts.split()):
        pairs = [word.split("=") if "=" in word else (word, word) for word in both]
        path = "/".join(filter(None, (ours, *(own for own, _ in pairs))))
        name = ".".join(filter(None, (theirs, *(other for _, other in pairs))))
        several = re.search(r"\{(\w+(,\w+)+)\}", name)
        choices = several[1].split(",") if several else ()
        table[path] = tuple(name.replace(several[0], word) for word in choices) or name
    return table


def kernel_shape(shape: Shape) -> Shape:
    """(…, in, out) as PyTorch has it: (out, in, …)."""
    return (shape[-1], shape[-2], *shape[:-2])


def kernel(tensor: np.ndarray, shape: Shape) -> np.ndarray:
    """(out, in, …) as ours, of this shape: (…, in, out)."""
    return tensor.transpose(*range(2, tensor.ndim), 1, 0)


#: A pre-norm block of attention and feed-forward in timm's names.
TIMM_BLOCK = (
    "norm1 norm2 mixer/qkv=attn.qkv mixer/out=attn.proj"
    " feed_forward/up=mlp.fc1 feed_forward/down=mlp.fc2"
)


def _entries(
    path: tuple[str, ...], shape: Shape, plain: Table, rows: list[tuple[re.Pattern, Any]]
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
            part = (..., slice(number * own[-1], (number + 1) * own[-1]))
            part = number if placed.stacked else part
            yield Entry(key, placed.shape(own), path, partial(placed.ours, shape=own), shape, part)
        return
    raise ValueError(
        f"the reference's network has no {'.'.join(path[1:])}: choose settings that it knows"
    )


def _placed(name: str | tuple[str, ...], leaf: str) -> Placed:
    """Returns the usual layout of an array called `leaf`, with the name's axes of length 1."""
    parts = [one.partition("[") for one in ((name,) if isinstance(name, str) else name)]
    axes = re.findall(r"[:1]", parts[0][2])
    reverse = leaf == "kernel"

    def theirs(shape: Shape) -> Shape:
        sizes = kernel_shape(shape) if reverse else shape
        if axes.count(":") != len(sizes):  # a kernel's axes, and this is its bias
            return sizes
        rest = iter(sizes)
        return tuple(next(rest) if axis == ":" else 1 for axis in axes)

    def ours(tensor: np.ndarray, shape: Shape) -> np.ndarray:
        tensor = tensor.reshape(kernel_shape(shape) if reverse else shape)
        return kernel(tensor, shape) if reverse else tensor

    return Placed(tuple(one for one, *_ in parts), theirs, ours)


def _finite(tensor: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # a float64 beyond float32's range
        return bool(np.isfinite(tensor.astype(np.float32)).all())


def misfits(tensors: Tensors, expected: Mapping[str, Shape]) -> list[tuple[str, str, str]]:
    """Lists (what is wrong, key, figures) of all tensors of a file that do not fit.

    These are missing, extra, misshapen, non-float and non-finite ones, and negative variances.
    """
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
    return problems


# --- Families ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TorchWeights:
    """How a family's PyTorch files are read.

    Attributes:
      markers: every file has one of these keys, after an optional prefix.
      fields: the settings that a constructor's arguments hold, see `read`.
      table: the names of its tensors, or a function to them from the network's config and the
        file's keys.
      more: from the tensors, the arguments and the settings read to further settings. A `family`
        in these is a sibling's.
      like: the variant with the constructor's own defaults; defaults to the family's defaults.
      usual: other defaults of the constructor.
      only: argument → the values that we have a network for, the default first.
      ignored: a regular expression of keys that are no weights.
      known: setting → its values in the reference, for settings that no tensor shows.
    """

    markers: tuple[str, ...]
    fields: str
    table: Table | Callable[[Any, Collection[str]], Table]
    more: Callable[[Tensors, Given, Given], Given] | None = None
    like: str = ""
    usual: Given = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    ignored: str = r"\Z"
    known: Mapping[str, tuple] = dataclasses.field(default_factory=dict)

    def settings(self, family: Family, tensors: Tensors, given: Given) -> dict[str, Any]:
        """Returns the settings that a file holds.

        Raises:
          KeyError: a required argument is missing.
          ValueError: an argument has a value that no network of ours has.
        """
        for name, values in self.only.items():
            only(given, name, *values)
        usual = {**family.defaults, **family.variants.get(self.like, {}), **self.usual}
        model = read(given, self.fields, usual)
        return model if self.more is None else {**model, **self.more(tensors, given, model)}

    def check_known(self, config: Any) -> None:
        """Raises ValueError for a network that the reference's code would compute differently."""
        for name, values in self.known.items():
            given = getattr(config, name, values[0])  # a table may serve two families
            if given not in values:
                raise ValueError(
                    f"the authors' code has no network with {name}={given!r}; export another format"
                )

    def entries(self, network: Network, keys: Collection[str] = ()) -> list[Entry]:
        """Lists every tensor that the reference saves of a network, in a file with these keys.

        Raises:
          ValueError: the table has no name for a part of the network.
        """
        table = self.table(network.config, keys) if callable(self.table) else self.table
        plain = {path: name for path, name in table.items() if "{" not in path}
        rows = [
            (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)), name)
            for path, name in table.items()
            if "{" in path
        ]
        leaves = flatten_dict(dict(zip(("params", "stats"), network.init_shapes(), strict=True)))
        found = (_entries(path, leaf.shape, plain, rows) for path, leaf in leaves.items())
        return list(chain.from_iterable(found))

    def misfits(self, tensors: Tensors, network: Network) -> list[tuple[str, str, str]]:
        """Lists what is wrong with a file's tensors, see `misfits`; skips what is no weight."""
        expected = {entry.key: entry.shape for entry in self.entries(network, tensors)}
        weights = {k: v for k, v in tensors.items() if not re.match(self.ignored, k)}
        return misfits(weights, expected)

    def load(self, tensors: Tensors, network: Network) -> tuple[dict, dict]:
        """Loads tensors without `misfits` as (params, stats), nested dicts of float32 arrays."""
        arrays: dict[tuple[str, ...], np.ndarray] = {}
        for entry in self.entries(network, tensors):
            array = arrays.setdefault(entry.path, np.empty(entry.whole, np.float32))
            array[entry.place] = entry.ours(tensors[entry.key])
        trees = unflatten_dict(arrays)
        return trees.get("params", {}), trees.get("stats", {})

    def dump(self, params: dict, stats: dict, network: Network) -> Tensors:
        """Names the network's arrays as the reference does, float32; raises as `entries`."""
        arrays, tensors = flatten_dict({"params": params, "stats": stats}), {}
        for entry in self.entries(network):
            # `ours` only moves numbers, so their places show where each came from.
            places = entry.ours(np.arange(math.prod(entry.shape)).reshape(entry.shape))
            tensor = np.empty(math.prod(entry.shape), np.float32)
            tensor[places.ravel()] = np.asarray(arrays[entry.path])[entry.place].ravel()
            tensors[entry.key] = tensor.reshape(entry.shape)
            if entry.key.endswith(".running_mean"):  # PyTorch requires its counter
                count = entry.key.removesuffix("running_mean") + "num_batches_tracked"
                tensors[count] = np.zeros((), np.int64)
        return tensors

    def prefix(self, keys: Collection[str]) -> str | None:
        """Returns what a wrapper (Lightning, DataParallel, compile) adds before every key.

        None means that no key of the family is there.
        """
        found = (k.removesuffix(m) for m in self.markers for k in keys if f".{k}".endswith(f".{m}"))
        return next(found, None)


# --- Constructors and configurations -------------------------------------------------------------
# `config.validate` checks the configuration that is made of them.


def several(value: Any) -> tuple:
    """Returns the values of an argument that holds one or a list of them."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def pair(size: Any) -> tuple[int, int]:
    """Returns rows and columns from one side or two."""
    rows, *columns = several(size)
    (column,) = columns or [rows]
    return rows, column


def field(given: Given, name: str, default: Any) -> Any:
    """Returns an argument, or the default; an integer may stand for a float."""
    value = given.get(name)
    if value is None:
        return default
    if isinstance(default, tuple):
        kind = default[0] if default else None
        return tuple(field({name: x}, name, kind) for x in several(value))
    return float(value) if isinstance(default, float) and type(value) is int else value


def read(given: Given, fields: str, usual: Given) -> dict[str, Any]:
    """Reads settings from arguments.

    Args:
      fields: words such as 'depth', 'widths=embed_dims' (the argument's name), 'depth=depth|layers'
        (synonyms) and 'heads!' (required).
      usual: settings where the argument is missing.

    Raises:
      KeyError: a required argument is missing.
    """
    model = {}
    for word in fields.split():
        ours, _, theirs = word.rstrip("!").partition("=")
        synonyms = (theirs or ours).split("|")
        name = next((name for name in synonyms if given.get(name) is not None), synonyms[0])
        if word.endswith("!") and given.get(name) is None:
            raise KeyError(name)
        model[ours] = field(given, name, usual.get(ours))
    return model


def only(given: Given, name: str, *allowed: Any) -> None:
    """Raises ValueError for an argument that is neither missing nor among the allowed values."""
    value = given.get(name)
    value = tuple(value) if isinstance(value, list) else value
    if value is not None and value not in allowed:
        known = " or ".join(repr(v) for v in allowed)
        raise ValueError(f"{name}={value!r} is not supported; expected {known}")
