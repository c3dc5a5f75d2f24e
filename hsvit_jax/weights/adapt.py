"""A trained network's weights for other classes, image channels or another image size.

Only what is asked for is done, and it is said. Classifier: fresh, or without the first class, which
some networks keep for the background. First convolution or patches: each new channel gets an equal
share of the sum of the old channels' kernels, so that a grey picture gives the same map, whether it
is seen as one channel or three. Positions: interpolated over the grid of patches by Keys' cubic
kernel, a CLS's kept; the weights of an HSViT's projection, a picture of the map, likewise, and
scaled to its new area.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hsvit_jax.models.network import Network

Array = jax.Array
Leaves = dict[tuple[str, ...], Any]


class Refitted(NamedTuple):
    """The trees for the new sizes, names of the leaves that are `fresh`, and what was done."""

    params: dict
    stats: dict
    fresh: tuple[str, ...]
    said: tuple[str, ...]


def refit(
    params: dict,
    stats: dict,
    old: Network,
    new: Network,
    how: Mapping[str, str],
    key: Array,
) -> Refitted:
    """The (params, stats) of `old` as those of `new`, a network of the same architecture.

    how: 'classifier' ('keep', 'new', 'drop_first'), 'stem' ('keep', 'refit'), 'positions' ('keep',
    'resize'). key draws what is fresh. Returns NumPy arrays. Raises ValueError, naming the setting
    that would do it, for a difference that is not asked for, and for one that cannot be made up.
    """
    leaves = _flat({"params": params, "stats": stats})
    said = []
    now = old
    sizes = {"image_size": "positions", "image_channels": "stem", "num_classes": "classifier"}
    fresh: Leaves = {}
    for name, setting in sizes.items():
        size, mode = getattr(new.config, name), how[setting]
        after = now.resized(**{name: size})
        if getattr(now.config, name) != size:
            wanted = _changed(now, after)
        elif mode == "new":
            wanted = _changed(now.resized(num_classes=size + 1), after)
        else:
            continue
        if mode == "new":
            fresh = drawn(after, wanted.__contains__, key)
            leaves |= fresh
            said.append(f"fresh for {size} classes: {_names(fresh)}")
        elif wanted:
            change = _CHANGES.get(mode)
            if change is None:
                raise ValueError(_refusal(name, setting, getattr(now.config, name), size))
            for path, shape in wanted.items():
                leaves[path] = change(path, np.asarray(leaves[path]), shape, now, after)
            said.append(f"{_DONE[mode]} {_figures(size)}: {_names(wanted)}")
        now = after
    tree = nested(leaves)
    names = tuple(".".join(path) for path in fresh)
    return Refitted(tree.get("params", {}), tree.get("stats", {}), names, tuple(said))


def _refusal(name: str, setting: str, there: Any, wanted: Any) -> str:
    what = {
        "image_size": ("images of", "resizes its positions", "resize"),
        "image_channels": ("image channels:", "refits its first kernels", "refit"),
        "num_classes": ("classes:", "starts with a fresh classifier", "new"),
    }
    label, does, mode = what[name]
    extra = ""
    if name == "num_classes" and there == wanted + 1:
        extra = ", and init.classifier=drop_first leaves out the first class (the background)"
    return (
        f"{label} it has {_figures(there)}, this configuration {_figures(wanted)}; "
        f"init.{setting}={mode} {does}{extra}"
    )


def _figures(size: Any) -> str:
    return "×".join(map(str, size)) if isinstance(size, tuple) else str(size)


def _names(leaves: Leaves) -> str:
    return ", ".join(".".join(path[1:]) for path in leaves)


# --- What is done to a leaf ----------------------------------------------------------------------


def _one_axis(path: tuple[str, ...], x: np.ndarray, shape: tuple[int, ...]) -> int:
    """The only axis along which a leaf must change."""
    axes = [i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b]
    if len(axes) != 1:
        raise ValueError(
            f"{'.'.join(path[1:])} is {_figures(x.shape)} and should be {_figures(shape)}: it "
            "cannot be made to fit; train with the old size"
        )
    return axes[0]


def _without_first(
    path: tuple[str, ...], x: np.ndarray, shape: tuple[int, ...], old: Network, new: Network
) -> np.ndarray:
    axis = _one_axis(path, x, shape)
    if x.shape[axis] != shape[axis] + 1:
        raise ValueError(
            f"init.classifier=drop_first leaves out one class of {x.shape[axis]}, which is not "
            f"{shape[axis]}: say init.classifier=new, or give data of {x.shape[axis] - 1} classes"
        )
    return np.delete(x, 0, axis)


def _other_channels(
    path: tuple[str, ...], x: np.ndarray, shape: tuple[int, ...], old: Network, new: Network
) -> np.ndarray:
    """Channels are the last of what an axis runs over: a patch's pixels, or channels alone."""
    axis = _one_axis(path, x, shape)
    before, after = old.config.image_channels, new.config.image_channels
    pixels = x.shape[axis] // before
    if pixels * before != x.shape[axis] or pixels * after != shape[axis]:
        raise ValueError(
            f"{'.'.join(path[1:])} is {_figures(x.shape)} and should be {_figures(shape)}: it "
            f"cannot be refitted from {before} image channels to {after}"
        )
    apart = x.reshape(*x.shape[:axis], pixels, before, *x.shape[axis + 1 :])
    share = apart.sum(axis + 1, keepdims=True) / np.float32(after)
    return np.repeat(share, after, axis + 1).reshape(shape)


def _resized(
    path: tuple[str, ...], x: np.ndarray, shape: tuple[int, ...], old: Network, new: Network
) -> np.ndarray:
    axis = _one_axis(path, x, shape)
    grids = old.grid(x.shape[axis]), new.grid(shape[axis])
    if None in grids or grids[0][0] != grids[1][0]:
        raise ValueError(
            f"{'.'.join(path[1:])} of {x.shape[axis]} places cannot be resized to {shape[axis]}: "
            "they are no grid of the image's proportions; train at the old image size"
        )
    (before, *from_grid), (_, *to_grid) = grids
    flat = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    places = flat[before:].reshape(*from_grid, -1)
    made = jax.image.resize(places, (*to_grid, flat.shape[1]), "cubic", antialias=False)
    made = np.asarray(made).reshape(math.prod(to_grid), -1)
    if path[-1] == "kernel":  # a sum over places, which are more or fewer now
        made = made * np.float32(math.prod(from_grid) / math.prod(to_grid))
    whole = np.concatenate([flat[:before], made])
    rest = x.shape[:axis] + x.shape[axis + 1 :]
    return np.moveaxis(whole.reshape(shape[axis], *rest), 0, axis)


_CHANGES = {"drop_first": _without_first, "refit": _other_channels, "resize": _resized}
_DONE = {
    "drop_first": "the first class left out, for",
    "refit": "refitted to image channels",
    "resize": "resized for images of",
}


# --- Trees ---------------------------------------------------------------------------------------


def _flat(tree: Any) -> Leaves:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(str(k.key) for k in path): leaf for path, leaf in leaves}


def nested(leaves: Leaves) -> dict:
    """Leaves by path as nested dicts of NumPy arrays."""
    tree: dict = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = np.asarray(leaf)
    return tree


def _trees(network: Network, key: Array) -> dict:
    params, stats = network.init(key)
    return {"params": params, "stats": stats}


def _shapes(network: Network) -> dict[tuple[str, ...], tuple[int, ...]]:
    trees = jax.eval_shape(lambda: _trees(network, jax.random.key(0)))
    return {path: leaf.shape for path, leaf in _flat(trees).items()}


def _changed(old: Network, new: Network) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shapes in `new` of the leaves that have others in `old`."""
    before, after = _shapes(old), _shapes(new)
    if before.keys() != after.keys():
        names = {".".join(path[1:]) for path in before.keys() ^ after.keys()}
        raise ValueError(f"the networks have other parts: {', '.join(sorted(names))}")
    return {path: shape for path, shape in after.items() if shape != before[path]}


def drawn(network: Network, wanted: Callable[[tuple[str, ...]], bool], key: Array) -> Leaves:
    """Some leaves of a fresh network, by their paths; the others are not even computed."""
    order = [path for path in _flat(jax.eval_shape(lambda: _trees(network, key))) if wanted(path)]

    def draw(key: Array) -> list[Array]:
        fresh = _flat(_trees(network, key))
        return [fresh[path] for path in order]

    return dict(zip(order, map(np.asarray, jax.jit(draw)(key)), strict=True))
