"""Loads the weights that `init.from` names, and any stored network of ours."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections

from hsvit_jax import checkpoint, models
from hsvit_jax import config as config_lib
from hsvit_jax.train import step
from hsvit_jax.weights import adapt, files, grow, pretrained

# What reading metadata raises where they are not as this program writes them.
_NOT_OURS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(MemoryError, RecursionError),
)


class Start(NamedTuple):
    """The weights a run starts from, NumPy arrays, and what was done to make them fit."""

    params: dict
    stats: dict
    said: tuple[str, ...]


def frozen_parts(freeze: str) -> frozenset[str]:
    """The parts of the network that `init.freeze` names."""
    return frozenset(word.strip() for word in freeze.split(",") if word.strip())


def refuse_random(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError where a fresh start would freeze weights that nothing has trained."""
    freeze = config.init.freeze
    if frozen_parts(freeze) and not config.init["from"]:
        raise ValueError(
            f"init.freeze={freeze} would keep random weights as they are: name trained ones with "
            "--config.init.from=PATH, or train the whole network with --config.init.freeze="
        )


def load(config: ml_collections.ConfigDict, model: Any) -> Start | None:
    """The weights for `model` that `config.init` names; None when it names nothing.

    A folder of ours gives its best checkpoint, averaged as it would be evaluated; a smaller network
    is grown. A file of weights, or a folder with a `model.safetensors`, is read in the layout it
    has. Other classes, image channels and sizes are refitted as `init.classifier`, `init.stem` and
    `init.positions` say. config: resolved. Raises ValueError where there is nothing good to start
    from, with the differences where the network is another, and where a frozen part would be fresh.
    """
    refuse_random(config)
    place = config.init["from"]
    if not place:
        return None
    path, key = Path(place).expanduser(), step.initial_key(config.seed)
    how = {
        "classifier": config.init.classifier,
        "stem": config.init.stem,
        "positions": config.init.positions,
    }
    if (path / "model.safetensors").is_file():
        path = path / "model.safetensors"
    try:
        if files.is_weights(path):
            fresh = how["classifier"] == "new"
            found = pretrained.load(path, config.model.family, model, fresh_classifier=fresh)
            params, stats, old, whole, source = found
        else:
            params, stats, old, whole, source = _own(path, config, model)
        if whole:
            made = _refitted(params, stats, old, model, how, key)
        else:
            made = _backbone(params, stats, old, model, how, key)
        _check_frozen(made.fresh, model)
    except ValueError as error:
        raise ValueError(f"init.from={place}: {error}") from error
    params, stats = made.params, made.stats
    total = len(jax.tree.leaves((params, stats)))
    loaded = f"{total - len(made.fresh)} of {total} tensors are from {source}"
    return Start(params, stats, (loaded, *made.notes))


class Stored(NamedTuple):
    """A network from a checkpoint of ours: NumPy arrays that fit `model`, averaged if they were."""

    step: int
    config: ml_collections.ConfigDict
    model: Any
    params: dict
    stats: dict
    class_names: tuple[str, ...]
    fingerprint: str | None


def stored_network(path: str | Path, which: str | int = "best") -> Stored:
    """Reads a network of ours, which anybody may have stored.

    Args:
        path: a run's folder, or a folder of checkpoints.
        which: 'best', 'latest' or a step.

    Raises:
        ValueError: there is no good checkpoint, or its metadata and arrays do not describe one
            network and its classes.
    """
    number, state, meta = checkpoint.load_tree(path, which)
    where = f"step {number} of {path}"
    try:
        config = config_lib.from_json(json.dumps(meta["config"]))
        config_lib.validate(config)
        model = models.build(
            config.model.to_dict(),
            image_size=tuple(config.data.image_size),
            channels=config.data.channels,
            num_classes=config.data.num_classes,
        )
        names, count = meta["class_names"], config.data.num_classes
        if not 1 <= len(names) <= count or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{len(names)} class names for {count} classes")
        names = [*names, *(f"unnamed {i}" for i in range(len(names), count))]
        params, stats = step.averaged(state)
        wanted = jax.eval_shape(model.init, jax.random.key(0))
        trees = ({"params": tree[0], "stats": tree[1]} for tree in ((params, stats), wanted))
        wrong = checkpoint.misfits(*trees)
        if wrong:
            raise ValueError(checkpoint.few(wrong))
    except _NOT_OURS as error:
        raise ValueError(
            f"{where} does not describe a network ({checkpoint.brief(error)}): it was not written "
            "by this version, or changed since"
        ) from error
    return Stored(number, config, model, params, stats, tuple(names), meta.get("fingerprint"))


def _own(
    path: Path, config: ml_collections.ConfigDict, model: Any
) -> tuple[dict, dict, Any, bool, str]:
    """(params, stats) of a checkpoint of ours, its network, whether that is of the configured
    family rather than of its backbone's, and where it is from."""
    stored = stored_network(path)
    base, family = model.feature_network(), stored.config.model.family
    whole = family == config.model.family
    if not whole and (base is None or base[0] != family):
        raise ValueError(
            f"it holds a network of the family {family!r}; this configuration's is "
            f"{config.model.family!r}"
        )
    where = f"step {stored.step} of {path}"
    return stored.params, stored.stats, stored.model, whole, where


def _refitted(
    params: dict, stats: dict, old: Any, new: Any, how: dict[str, str], key: jax.Array
) -> adapt.Refitted:
    """To the new classes, channels and image size first, then grown."""
    sizes = ("num_classes", "image_channels", "image_size")
    if old.config == new.config and how["classifier"] != "new":
        return adapt.Refitted(params, stats, (), ())
    between = old.resized(**{name: getattr(new.config, name) for name in sizes})
    grow.check(between.config, new.config)
    made = adapt.refit(params, stats, old, between, how, key)
    if between.config == new.config:
        return made
    params, stats = grow.grow(made.params, made.stats, between, new, key)
    return made._replace(params=params, stats=stats)


def _backbone(
    params: dict, stats: dict, old: Any, model: Any, how: dict[str, str], key: jax.Array
) -> adapt.Refitted:
    """`old` is a classifier of the backbone's family: its backbone, and the rest fresh."""
    base = model.feature_network()[1].resized(num_classes=old.config.num_classes)
    made = _refitted(params, stats, old, base, {**how, "classifier": "keep"}, key)
    fresh = adapt.drawn(model, lambda path: path[1] != "backbone", key)
    trees = {kind: {"backbone": getattr(made, kind)["backbone"]} for kind in ("params", "stats")}
    for kind, tree in adapt.nested(fresh).items():
        trees[kind] |= tree
    parts = sorted({path[1] for path in fresh})
    notes = (*made.notes, f"fresh: {', '.join(parts)}")
    return adapt.Refitted(trees["params"], trees["stats"], tuple(map(".".join, fresh)), notes)


def _check_frozen(fresh: tuple[str, ...], model: Any) -> None:
    lost = [name for name in fresh if name.split(".")[1] in model.frozen]
    if lost:
        raise ValueError(
            f"init.freeze={','.join(sorted(model.frozen))} would keep fresh random weights as they "
            f"are: {', '.join(lost)}; freeze other parts"
        )
