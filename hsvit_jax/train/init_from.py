"""What a run's network starts from, when `init.from` names something."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections

from hsvit_jax import checkpoint, growth, models, pretrained, refit, weight_files
from hsvit_jax import config as config_lib
from hsvit_jax.train import step


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
        if weight_files.is_weights(path):
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
    return Start(params, stats, (loaded, *made.said))


def _own(
    path: Path, config: ml_collections.ConfigDict, model: Any
) -> tuple[dict, dict, Any, bool, str]:
    """(params, stats) of a checkpoint of ours, its network, whether that is of the configured
    family rather than of its backbone's, and where it is from."""
    number, state, meta = checkpoint.load_tree(path, "best")
    stored = config_lib.from_json(json.dumps(meta["config"]))
    base = model.feature_network()
    whole = stored.model.family == config.model.family
    if not whole and (base is None or base[0] != stored.model.family):
        raise ValueError(
            f"it holds a network of the family {stored.model.family!r}; this configuration's is "
            f"{config.model.family!r}"
        )
    old = models.build(
        stored.model.to_dict(),
        image_size=tuple(stored.data.image_size),
        channels=stored.data.channels,
        num_classes=stored.data.num_classes,
    )
    return *step.averaged(state), old, whole, f"step {number} of {path}"


def _refitted(
    params: dict, stats: dict, old: Any, new: Any, how: dict[str, str], key: jax.Array
) -> refit.Refitted:
    """To the new classes, channels and image size first, then grown."""
    sizes = ("num_classes", "image_channels", "image_size")
    if old.config == new.config and how["classifier"] != "new":
        return refit.Refitted(params, stats, (), ())
    between = old.resized(**{name: getattr(new.config, name) for name in sizes})
    growth.check(between.config, new.config)
    made = refit.refit(params, stats, old, between, how, key)
    if between.config == new.config:
        return made
    params, stats = growth.grow(made.params, made.stats, between, new, key)
    return made._replace(params=params, stats=stats)


def _backbone(
    params: dict, stats: dict, old: Any, model: Any, how: dict[str, str], key: jax.Array
) -> refit.Refitted:
    """`old` is a classifier of the backbone's family: its backbone, and the rest fresh."""
    base = model.feature_network()[1].resized(num_classes=old.config.num_classes)
    made = _refitted(params, stats, old, base, {**how, "classifier": "keep"}, key)
    fresh = refit.drawn(model, lambda path: path[1] != "backbone", key)
    trees = {kind: {"backbone": getattr(made, kind)["backbone"]} for kind in ("params", "stats")}
    for kind, tree in refit.nested(fresh).items():
        trees[kind] |= tree
    parts = sorted({path[1] for path in fresh})
    said = (*made.said, f"fresh: {', '.join(parts)}")
    return refit.Refitted(trees["params"], trees["stats"], tuple(map(".".join, fresh)), said)


def _check_frozen(fresh: tuple[str, ...], model: Any) -> None:
    lost = [name for name in fresh if name.split(".")[1] in model.frozen]
    if lost:
        raise ValueError(
            f"init.freeze={','.join(sorted(model.frozen))} would keep fresh random weights as they "
            f"are: {', '.join(lost)}; freeze other parts"
        )
