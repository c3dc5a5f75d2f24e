"""Adapts trained weights to other classes, image channels or another image size.

Only the settings that request it change a leaf, and a note reports each change. The classifier is
fresh, or loses its first class, which some networks keep for the background. In the first
convolution or the patches, each new channel gets an equal share of the sum of the old channels'
kernels. A grey picture then gives the same map as one channel or as three, except in a DHVT: its
factors and offsets of each channel, before the convolution, become their means. Positions are
interpolated over the grid of patches by Keys' cubic kernel, and a CLS keeps its own. So are the
weights of an HSViT's projection, a picture of the map, which are also scaled to its new area.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

from hsvit_jax.config import Contradiction
from hsvit_jax.models.family import misfits
from hsvit_jax.models.network import Network

Array = jax.Array
Path = tuple[str, ...]
Leaves = dict[Path, Any]
Shape = tuple[int, ...]


class Refitted(NamedTuple):
    """Weights for the new sizes.

    Attributes:
      params: a tree of NumPy arrays, as `stats`.
      fresh: the names of fresh leaves.
      notes: log lines.
      origin: a digest of the weights before.
      grown: the names of leaves that are new or larger in a grown network.
    """

    params: dict
    stats: dict
    fresh: tuple[str, ...]
    notes: tuple[str, ...]
    origin: str = ""
    grown: tuple[str, ...] = ()


#: Size → the setting for it, and for messages: a label, the mode that adapts to it and its effect.
_SIZES = {
    "image_size": ("positions", "image size:", "resize", "resizes its positions"),
    "image_channels": ("stem", "image channels:", "refit", "refits its first kernels"),
    "num_classes": ("classifier", "classes:", "new", "starts with a fresh classifier"),
}


def refit(
    params: dict,
    stats: dict,
    old: Network,
    new: Network,
    how: Mapping[str, str],
    key: Array,
    rows: Sequence[int] = (),
) -> Refitted:
    """Adapts the weights of `old` to `new`, a network of the same architecture.

    Args:
      how: 'classifier' ('match', 'keep', 'new', 'drop_first'), 'stem' ('keep', 'refit'),
          'positions' ('keep', 'resize').
      key: draws fresh leaves.
      rows: for each new class its row in the old classifier, if the names are known.

    Raises:
      Contradiction: no setting allows a difference; holds the settings that would.
      ValueError: a difference cannot be adapted.
    """
    leaves = traverse_util.flatten_dict({"params": params, "stats": stats})
    fresh: Leaves = {}
    notes, problems, changes = [], [], {}
    network = old
    for name, (setting, label, request, effect) in _SIZES.items():
        mode = how[setting]
        before, after = (getattr(net.config, name) for net in (network, new))
        resized = network.resized(**{name: after})
        if mode == "match" and not rows:  # the names are not known
            mode = "keep" if before in (after, after + 1) else "new"
        if name == "num_classes" and rows and mode in ("match", "keep"):
            more = network.resized(num_classes=before + 1)
            for path, shape in _changed(network, more).items():
                x = np.asarray(leaves[path])
                leaves[path] = x.take(rows, _one_axis(path, x, shape))
            notes.append(f"the classifier's {after} classes are matched by name")
        elif mode == "new":  # other classes, even if they are as many
            other = network if before != after else network.resized(num_classes=after + 1)
            fresh = drawn(resized, _changed(other, resized).__contains__, key)
            leaves |= fresh
            notes.append(f"fresh for {after} classes: {_names(fresh)}")
        elif mode == "drop_first" and before != after + 1:
            raise Contradiction(
                f"init.classifier=drop_first removes one class of {before}, and this configuration "
                f"has {after}",
                {"init.classifier": "keep" if before == after else "new"},
            )
        elif before != after and (shapes := _changed(network, resized)):
            sizes = f"it has {_figures(before)}, this configuration {_figures(after)}"
            if mode not in _CHANGES:
                background = name == "num_classes" and before == after + 1
                extra = ", and init.classifier=drop_first removes the first class (the background)"
                extra = extra if background else ""
                problems.append(f"{label} {sizes}; init.{setting}={request} {effect}{extra}")
                changes[f"init.{setting}"] = request
                continue
            change, words = _CHANGES[mode]
            for path, shape in shapes.items():
                leaves[path] = change(path, np.asarray(leaves[path]), shape, network, resized)
            notes.append(f"{words} {_figures(after)}: {_names(shapes)}")
        elif name == "image_size" and before != after and (turned := _turned(network, resized)):
            raise Contradiction(
                f"image size: it has {_figures(before)}, this configuration {_figures(after)}: "
                f"{_names(turned)} would mean other places",
                {"data.image_size": before},
            )
        network = resized
    if problems:
        raise Contradiction("; ".join(problems), changes)
    tree = nested(leaves)
    names = tuple(map(".".join, fresh))
    return Refitted(tree.get("params", {}), tree.get("stats", {}), names, tuple(notes))


def _figures(size: Any) -> str:
    return "×".join(map(str, size)) if isinstance(size, tuple) else str(size)


def _names(leaves: Leaves) -> str:
    return ", ".join(".".join(path[1:]) for path in leaves)


def fit(
    params: dict,
    stats: dict,
    old: Any,
    new: Any,
    how: Mapping[str, str],
    key: Array,
    rows: Sequence[int] = (),
) -> Refitted:
    """Refits weights to new classes, channels and image size, then grows them; raises ValueError
    for what does not fit."""
    if old.config == new.config and how["classifier"] in ("match", "keep") and not rows:
        return Refitted(params, stats, (), ())
    between = at_sizes_of(old, new)
    check(between.config, new.config)
    refitted = refit(params, stats, old, between, how, key, rows)
    if between.config == new.config:
        return refitted
    params, stats = new.grown(refitted.params, refitted.stats, between, key)
    before = traverse_util.flatten_dict(refitted.params)
    grown = tuple(
        ".".join(("params", *path))
        for path, leaf in traverse_util.flatten_dict(params).items()
        if path not in before or before[path].shape != leaf.shape
    )
    note = f"grown: {len(grown)} tensors are new or larger than there, with fresh parts"
    notes = (*refitted.notes, *((note,) if grown else ()))
    return refitted._replace(params=params, stats=stats, notes=notes, grown=grown)


def check(old: Any, new: Any) -> None:
    """Raises Contradiction with every difference if a network of config `new` cannot continue from
    one of config `old`; see `family.misfits`."""
    if found := misfits(old, new):
        settings = {f"model.{k}": v for one in found for k, v in one.settings.items()}
        text = "; ".join(dict.fromkeys(one.text for one in found))
        raise Contradiction(f"the sizes are neither the network's own nor larger: {text}", settings)


def at_sizes_of(old: Network, new: Network) -> Network:
    """Returns the network `old` with the classes, image channels and image size of `new`."""
    return old.resized(**{name: getattr(new.config, name) for name in _SIZES})


def fit_backbone(
    params: dict, stats: dict, old: Any, model: Network, how: Mapping[str, str], key: Array
) -> Refitted:
    """Takes the backbone from `old`, a classifier of the backbone's family; the rest is fresh."""
    base = model.feature_network()[1].resized(num_classes=old.config.num_classes)
    refitted = fit(params, stats, old, base, {**how, "classifier": "keep"}, key)
    fresh = drawn(model, lambda path: path[1] != "backbone", key)
    trees = nested(fresh)
    params, stats = (
        {"backbone": getattr(refitted, kind)["backbone"], **trees.get(kind, {})}
        for kind in ("params", "stats")
    )
    notes = (*refitted.notes, f"fresh: {', '.join(sorted({path[1] for path in fresh}))}")
    return Refitted(params, stats, tuple(map(".".join, fresh)), notes)


# --- Changes of a leaf ---------------------------------------------------------------------------


def _one_axis(path: Path, x: np.ndarray, shape: Shape) -> int:
    axes = [i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b]
    if len(axes) != 1:
        raise ValueError(
            f"{'.'.join(path[1:])} is {_figures(x.shape)} and cannot become {_figures(shape)}; "
            "train with the old size"
        )
    return axes[0]


def _without_first(
    path: Path, x: np.ndarray, shape: Shape, old: Network, new: Network
) -> np.ndarray:
    return np.delete(x, 0, _one_axis(path, x, shape))


def _other_channels(
    path: Path, x: np.ndarray, shape: Shape, old: Network, new: Network
) -> np.ndarray:
    """Refits an axis that runs over a patch's pixels and then channels, or over channels alone.

    A kernel keeps its sum over channels; a factor or an offset of each channel becomes the mean.
    """
    axis = _one_axis(path, x, shape)
    before, after = old.config.image_channels, new.config.image_channels
    apart = x.reshape(*x.shape[:axis], -1, before, *x.shape[axis + 1 :])
    count = before if path[-1] in ("scale", "bias") else after
    share = apart.sum(axis + 1, keepdims=True) / np.float32(count)
    return np.repeat(share, after, axis + 1).reshape(shape)


def _resized(path: Path, x: np.ndarray, shape: Shape, old: Network, new: Network) -> np.ndarray:
    axis = _one_axis(path, x, shape)
    grids = old.grid(x.shape[axis]), new.grid(shape[axis])
    if None in grids or grids[0][0] != grids[1][0]:
        raise Contradiction(
            f"{'.'.join(path[1:])} of {x.shape[axis]} places cannot be resized to {shape[axis]}: "
            "they form no grid of the image's proportions",
            {"data.image_size": old.config.image_size},
        )
    (before, *from_grid), (_, *to_grid) = grids
    flat = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    places = flat[before:].reshape(*from_grid, -1)
    resized = jax.image.resize(places, (*to_grid, flat.shape[1]), "cubic", antialias=False)
    resized = np.asarray(resized).reshape(math.prod(to_grid), -1)
    if path[-1] in ("kernel", "sequence_kernel"):  # a sum over more or fewer places
        resized = resized * np.float32(math.prod(from_grid) / math.prod(to_grid))
    rows = np.concatenate([flat[:before], resized])
    rest = x.shape[:axis] + x.shape[axis + 1 :]
    return np.moveaxis(rows.reshape(shape[axis], *rest), 0, axis)


#: Mode → the change, and the words that note it.
_CHANGES = {
    "drop_first": (_without_first, "the first class removed, for"),
    "refit": (_other_channels, "refitted to image channels"),
    "resize": (_resized, "resized for images of"),
}


# --- Trees ---------------------------------------------------------------------------------------


def nested(leaves: Leaves) -> dict:
    """Nests leaves by path as dicts of NumPy arrays."""
    return traverse_util.unflatten_dict({path: np.asarray(x) for path, x in leaves.items()})


def _shapes(network: Network) -> dict[Path, Shape]:
    kinds = network.shapes.items()
    return {(kind, *path): shape for kind, shapes in kinds for path, shape in shapes.items()}


def _changed(old: Network, new: Network) -> dict[Path, Shape]:
    before, after = _shapes(old), _shapes(new)
    if before.keys() != after.keys():
        names = {".".join(path[1:]) for path in before.keys() ^ after.keys()}
        raise ValueError(f"the networks have other parts: {', '.join(sorted(names))}")
    return {path: shape for path, shape in after.items() if shape != before[path]}


def _turned(old: Network, new: Network) -> dict[Path, Shape]:
    """Returns the leaves of as many places that a turned image has in other rows."""
    larger = old.resized(image_size=tuple(2 * side for side in old.config.image_size))
    before, turned = _shapes(old), {}
    for path, shape in _changed(old, larger).items():
        for places, more in zip(before[path], shape, strict=True):
            grids = old.grid(places), new.grid(places)
            if places != more and None not in grids and grids[0] != grids[1]:
                turned[path] = shape
    return turned


def drawn(network: Network, wanted: Callable[[Path], bool], key: Array) -> Leaves:
    """Draws the wanted leaves of a fresh network by path; does not compute the others."""
    order = [path for path in _shapes(network) if wanted(path)]

    def draw(key: Array) -> list[Array]:
        trees = dict(zip(("params", "stats"), network.init(key), strict=True))
        fresh = traverse_util.flatten_dict(trees)
        return [fresh[path] for path in order]

    return dict(zip(order, map(np.asarray, jax.jit(draw)(key)), strict=True))
