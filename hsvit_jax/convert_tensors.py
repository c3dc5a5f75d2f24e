"""Where a PyTorch state dict's tensors go: shared by all families' converters.

A converter yields one `Entry` for every tensor that its reference saves; `assemble` checks the
file's tensors against them, all of them, and builds the parameters and statistics.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Tensors = Mapping[str, np.ndarray]

_NOT_WEIGHTS = re.compile(
    r"(input|logits|logits_f64|config|labels|train_logits)$|loss|grad/|after/"
    r"|(.*\.)?num_batches_tracked$"
)


def same(tensor: np.ndarray) -> np.ndarray:
    """A tensor that is laid out as ours."""
    return tensor


def few(problems: Sequence[tuple[str, str, str]]) -> str:
    """The first five of `Misfits.problems` in one line, and how many more there are."""
    told = [f"{kind} {key}{figures}" for kind, key, figures in problems[:5]]
    return "; ".join(told) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


class Misfits(ValueError):
    """Tensors that are not those of a network: `problems`, each (what is wrong, key, figures), and
    the `expected` shape of every key."""

    def __init__(
        self, problems: Sequence[tuple[str, str, str]], expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.problems, self.expected = tuple(problems), dict(expected)
        super().__init__(f"{len(problems)} tensors do not fit these sizes: {few(problems)}")


class Entry(NamedTuple):
    """One tensor of the file and where it goes.

    path: 'params' or 'stats', then our names; None for a tensor that the reference saves and never
    uses. ours: from the reference's layout to ours. place, count: number along a new first axis of
    that length, for tensors that are stacked. beside: along the last axis instead, as the parts of
    one wide linear layer.
    """

    key: str
    shape: tuple[int, ...]
    path: tuple[str, ...] | None
    ours: Callable[[np.ndarray], np.ndarray] = same
    place: int | None = None
    count: int = 0
    beside: bool = False


def linear(
    key: str, fan_in: int, fan_out: int, path: tuple[str, ...], *, bias: bool = True
) -> Iterator[Entry]:
    """A linear layer: weight (fan_out, fan_in), bias (fan_out,)."""
    kernel = ("params", *path, "kernel")
    yield Entry(f"{key}.weight", (fan_out, fan_in), kernel, np.transpose)
    if bias:
        yield Entry(f"{key}.bias", (fan_out,), ("params", *path, "bias"))


def linears(
    keys: Sequence[str], fan_in: int, fan_out: int, path: tuple[str, ...], *, bias: bool = True
) -> Iterator[Entry]:
    """Linear layers of equal size that are one of ours, side by side: queries, keys and values."""
    for place, key in enumerate(keys):
        for entry in linear(key, fan_in, fan_out, path, bias=bias):
            yield entry._replace(place=place, count=len(keys), beside=True)


def conv(
    key: str,
    c_in: int,
    c_out: int,
    size: int,
    path: tuple[str, ...],
    *,
    groups: int = 1,
    bias: bool = True,
) -> Iterator[Entry]:
    """A convolution: weight (c_out, c_in/groups, size, size), bias (c_out,)."""
    shape = (c_out, c_in // groups, size, size)
    kernel = ("params", *path, "kernel")
    yield Entry(f"{key}.weight", shape, kernel, lambda t: t.transpose(2, 3, 1, 0))
    if bias:
        yield Entry(f"{key}.bias", (c_out,), ("params", *path, "bias"))


def pointwise(
    key: str, fan_in: int, fan_out: int, path: tuple[str, ...], *, bias: bool = True
) -> Iterator[Entry]:
    """A 1×1 convolution that is a linear layer of ours: weight (fan_out, fan_in, 1, 1)."""
    for entry in conv(key, fan_in, fan_out, 1, path, bias=bias):
        weight = entry.key.endswith(".weight")
        yield entry._replace(ours=lambda t: t[:, :, 0, 0].T) if weight else entry


def norm(key: str, features: int, path: tuple[str, ...]) -> Iterator[Entry]:
    """A LayerNorm's scale and bias."""
    for theirs, ours in (("weight", "scale"), ("bias", "bias")):
        yield Entry(f"{key}.{theirs}", (features,), ("params", *path, ours))


def batch_norm(key: str, features: int, path: tuple[str, ...]) -> Iterator[Entry]:
    """A BatchNorm's scale, bias and running statistics."""
    yield from norm(key, features, path)
    for theirs, ours in (("running_mean", "mean"), ("running_var", "var")):
        yield Entry(f"{key}.{theirs}", (features,), ("stats", *path, ours))


def conv_norm(
    key: str,
    c_in: int,
    c_out: int,
    size: int,
    path: tuple[str, ...],
    *,
    names: tuple[str, str] = ("convolution", "normalization"),
    groups: int = 1,
    bias: bool = False,
) -> Iterator[Entry]:
    """A `models.conv.ConvNorm`; names: of its two parts below `key`."""
    conv_key, norm_key = (f"{key}.{name}" if key else name for name in names)
    yield from conv(conv_key, c_in, c_out, size, (*path, "conv"), groups=groups, bias=bias)
    yield from batch_norm(norm_key, c_out, (*path, "norm"))


def assemble(tensors: Tensors, entries: Iterable[Entry], ignored: str = r"\Z") -> tuple[dict, dict]:
    """The file's tensors as (params, stats), nested dicts of float32 NumPy arrays.

    Entries of the file that are no weights (`input`, `loss`, `num_batches_tracked`, …) are passed
    over, and so are keys that the regular expression `ignored` matches. Raises `Misfits`, which
    lists every missing, extra, misshapen, non-float and non-finite tensor.
    """
    entries = list(entries)
    _check({k: v for k, v in tensors.items() if not re.match(ignored, k)}, entries)
    trees: dict[str, dict] = {"params": {}, "stats": {}}
    for entry in entries:
        if entry.path is None:
            continue
        *parents, leaf = entry.path
        node: dict = trees
        for name in parents:
            node = node.setdefault(name, {})
        ours = np.ascontiguousarray(entry.ours(tensors[entry.key]), np.float32)
        if entry.place is None:
            node[leaf] = ours
        elif entry.beside:
            *rest, width = ours.shape
            node.setdefault(leaf, np.empty((*rest, entry.count * width), np.float32))
            node[leaf][..., entry.place * width : (entry.place + 1) * width] = ours
        else:
            node.setdefault(leaf, np.empty((entry.count, *ours.shape), np.float32))
            node[leaf][entry.place] = ours
    return trees["params"], trees["stats"]


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
    if problems:
        raise Misfits(problems, expected)


def ints(name: str, value: Any) -> tuple[int, ...]:
    """A constructor argument that holds one or several integers; raises ValueError otherwise."""
    values = value if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ValueError(f"constructor argument {name} must hold integers; got {value!r}")
    return tuple(values)


def pair(size: Any) -> tuple[int, int]:
    """Rows and columns from one side or two; raises ValueError otherwise."""
    sides = ints("image_size", size)
    if len(sides) > 2:
        raise ValueError(f"image_size needs one side or rows and columns; got {size!r}")
    return (sides[0], sides[-1])
