"""Networks that were stored: a run's checkpoint, an exported file, one of the zoo."""

import hashlib
import operator
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from hsvit_jax import checkpoint
from hsvit_jax import config as config_lib
from hsvit_jax.models import UnknownFamily
from hsvit_jax.text import few
from hsvit_jax.weights import files, sources


class Stored(NamedTuple):
    """A network from a checkpoint or an exported file.

    Attributes:
      params: NumPy arrays that fit `model`, averaged if the run averaged them, as is `stats`.
      meta: all that was written about it.
    """

    step: int
    config: ml_collections.ConfigDict
    model: Any
    params: dict
    stats: dict
    class_names: tuple[str, ...]
    fingerprint: str | None
    meta: dict


def stored_network(path: str | Path, which: str | int = "best") -> Stored:
    """Reads a network from an untrusted checkpoint or exported file.

    Groups that were lost in training are fresh and vote; see `of_survivors`.

    Args:
        path: a run's folder, a folder of checkpoints, or a source of `sources.locate`.
        which: 'best', 'latest' or a step, for checkpoints.

    Raises:
        ValueError: there is no good checkpoint or file, or its metadata and arrays do not describe
            one network and its classes.
    """
    place, where, tensors = sources.locate(path), str(path), None
    which = int(which) if str(which).isdecimal() else which
    if files.is_weights(place):
        tensors, meta = files.read(place)
        if not files.is_release(meta):
            raise ValueError(
                f"{path} holds weights without their network: start a run with init.from={path}, "
                "or read the authors' files with the command convert"
            )
    else:
        number, state, meta = checkpoint.load_tree(place, which)
        where = f"step {number} of {path}"
    try:
        config = _config(meta)
        model = config_lib.build_model(config)
        names, count = meta["class_names"], config.data.num_classes
        if not 1 <= len(names) <= count or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{len(names)} class names for {count} classes")
        if lost := [operator.index(number) for number in meta.get("lost_groups", ())]:
            model.without(lost)  # raises for groups that it cannot lose
        wanted = dict(zip(("params", "stats"), model.init_shapes(), strict=True))
        if tensors is not None:
            number, tree = operator.index(meta["step"]), files.unpack(tensors, meta, wanted)
        else:
            tree = dict(zip(("params", "stats"), averaged(state), strict=True))
            if wrong := checkpoint.misfits(tree, wanted):
                raise ValueError(few(wrong, "; "))
    except UnknownFamily as error:
        raise ValueError(f"{where}: {error}") from error
    except files.FOREIGN as error:
        raise ValueError(
            f"{where} does not describe a network ({checkpoint.brief(error)}): this version did "
            "not write it, or it was changed"
        ) from error
    if tensors is not None and which not in ("best", "latest", number):
        raise ValueError(f"{path} holds one network, of step {number}: remove which={which}")
    names = for_all(names, count)
    fingerprint = meta.get("fingerprint")
    return Stored(number, config, model, tree["params"], tree["stats"], names, fingerprint, meta)


def _config(meta: dict) -> ml_collections.ConfigDict:
    config = config_lib.completed(meta["config"])
    config_lib.validate(config)
    return config


def for_all(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns a name for each class; classes beyond the names are numbered."""
    return (*names, *(f"unnamed {i}" for i in range(len(names), count)))


def of_survivors(stored: Stored) -> Stored:
    """Returns the network with which a run continued after it had lost groups.

    Warns of lost groups, which do not vote. Other networks are returned unchanged.
    """
    lost = stored.meta.get("lost_groups")
    if not lost:
        return stored
    model = stored.model.silencing(lost)
    groups = model.config.groups
    warnings.warn(
        f"step {stored.step} was saved after groups or towers {few(map(str, lost))} were lost: "
        f"the other {groups - len(model.silent)} of {groups} groups vote, as in the run then; "
        "start it again with all processes to train them all",
        stacklevel=2,
    )
    return stored._replace(model=model)


def fuse(stored: Stored) -> Stored:
    """Returns the network for inference; raises ValueError as `Network.fused`."""
    model, params, stats = stored.model.fused(stored.params, stored.stats)
    config = stored.config.copy_and_resolve_references()
    config.model.fused = True
    return stored._replace(config=config, model=model, params=params, stats=stats)


def stored_config(source: str) -> ml_collections.ConfigDict | None:
    """Returns the configuration of our network that a source holds; None for other weights."""
    place = sources.locate(source)
    if files.is_weights(place):
        described = files.read(place)[1]
    else:
        inner = place / "checkpoints"
        folder = inner if inner.is_dir() else place
        described = checkpoint.Checkpoints(folder, read_only=True).meta("best") or {}
    try:
        return _config(described)
    except files.FOREIGN:
        return None


def origin_of(
    stored: Stored, config: ml_collections.ConfigDict, source: str, fingerprint: str | None
) -> str:
    """Says which network was stored, and how its images were others or seen otherwise."""
    data = stored.config.data
    side = "×".join(map(str, (*data.image_size, data.channels)))
    origin = f"step {stored.step} of {source} (images of {side})"
    if lost := stored.meta.get("lost_groups"):
        names = few(lost)
        origin += f", whose groups or towers {names} were lost in training and start afresh"
    origin += trained_on(config, data)
    # Read otherwise, the same images have another fingerprint anyway.
    read_alike = ("name", "image_size", "channels", "fit", "fraction")
    alike = all(data[key] == config.data[key] for key in read_alike)
    known = None not in (fingerprint, stored.fingerprint)
    if alike and known and fingerprint != stored.fingerprint:
        origin += (
            f", when {config.data.name} was another or split otherwise: it may have been trained "
            "on images that are held out now"
        )
    return origin


def trained_on(config: ml_collections.ConfigDict, was: Mapping[str, Any]) -> str:
    """Says how the pixels that the weights were trained on were normalised otherwise."""
    before = [tuple(was[key]) for key in ("mean", "std")]
    if before == [tuple(config.data[key]) for key in ("mean", "std")]:
        return ""
    return f", which saw pixels normalised by data.mean={before[0]} and data.std={before[1]}"


def digest(*trees: dict) -> str:
    """Returns the SHA-256 of trees of arrays, their names included."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        found.update(jax.tree_util.keystr(path).encode())
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def averaged(state: dict) -> tuple[dict, dict]:
    """Returns the (params, stats) to evaluate: moving averages, and leaves that have none."""
    average = state.get("ema", {})
    params, stats = ({**state.get(k, {}), **average.get(k, {})} for k in ("params", "stats"))
    return params, stats
