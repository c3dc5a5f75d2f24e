"""Loads the weights that `init.from` names, and networks from checkpoints of this program."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import config as config_lib
from hsvit_jax.models import FAMILIES
from hsvit_jax.text import few
from hsvit_jax.train import step
from hsvit_jax.weights import adapt, files, read, sources
from hsvit_jax.weights.stored import (
    digest,
    for_all,
    origin_of,
    stored_config,
    stored_network,
    trained_on,
)

#: Keys of `init` that fit the weights of `init.from` to other sizes.
_FITTING = ("classifier", "stem", "positions")


def frozen_parts(freeze: str) -> frozenset[str]:
    """The parts of the network that `init.freeze` names."""
    return frozenset(word.strip() for word in freeze.split(",") if word.strip())


def refuse_random(config: config_lib.Settings) -> None:
    """Raises ValueError where a fresh start would freeze or fine-tune weights that nothing has
    trained."""
    init = config.init
    fitting = {name: init[name] for name in _FITTING if init[name] not in ("match", "keep")}
    fitting |= {"freeze": init.freeze} if frozen_parts(init.freeze) else {}
    needy = [f"init.{name}={value}" for name, value in fitting.items()]
    needy += ["the recipe finetune"] * (config.recipe == "finetune")
    if needy and not init["from"]:
        raise ValueError(
            f"{' and '.join(needy)} would need trained weights: name them with "
            "--config.init.from=PATH, or leave that out"
        )


_OF_IMAGES = ("image_size", "channels", "mean", "std")
_OF_NUMBERS = ("target_mean", "target_std")


def of_weights(
    config: ml_collections.ConfigDict, workdir: Path | None = None
) -> config_lib.Weights:
    """Reads what goes with the weights of init.from.

    Args:
        workdir: of a run that may have begun; its config.json has what its start read, and the
            weights may be gone.

    Raises:
        ValueError: the source cannot be read.
    """
    source = config.init["from"]
    if not source:
        return config_lib.Weights()
    if workdir and (begun := _of_begun(source, workdir)):
        return begun
    try:
        source = sources.pinned(source)
        stored = stored_config(source)
        found = sources.pixels(source)
    except ValueError as error:
        raise ValueError(f"init.from={source}: {error}") from error
    pixels = {"data.mean": found.mean, "data.std": found.std} if found else {}
    fills, family = {}, config.model.family
    if stored is None:
        record = FAMILIES[family]
        side = record.native_sizes.get(config.model.variant, record.native_size)
        fills = {"data.image_size": (side, side)} if side else {}
        stated = config.data.mean or config.data.std
        return config_lib.Weights({}, fills if stated else fills | pixels, source)
    if stored.model.family == family:
        sizes = config_lib.build_model(stored).config
        fills = {f"model.{key}": getattr(sizes, key) for key in FAMILIES[family].automatic}
    settings = {f"data.{key}": stored.data[key] for key in _OF_IMAGES}
    if stored.data.task == config.data.task and config.init.classifier != "new":
        fills |= {f"data.{key}": stored.data[key] for key in _OF_NUMBERS}
    return config_lib.Weights(settings | pixels, fills, source)


def sizes(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the sizes of our network in init.from that differ here, by 'section.key'."""
    stored = stored_config(config.init["from"])
    if stored is None or stored.model.family != config.model.family:
        return {}
    keys = [f"model.{key}" for key in FAMILIES[config.model.family].keys if "drop" not in key]
    ours, theirs = (dict(config_lib.leaves(one)) for one in (config, stored))
    both = [key for key in (*keys, "data.image_size") if key in ours and key in theirs]
    return {key: theirs[key] for key in both if ours[key] != theirs[key]}


def with_weights(config: ml_collections.ConfigDict) -> config_lib.Settings:
    """Returns a configuration with what goes with the weights of init.from, to load data by."""
    return config_lib.resolve(config, weights=of_weights(config))


def _of_begun(source: str, workdir: Path) -> config_lib.Weights | None:
    """Returns what a run's start read from the same source, by its config.json."""
    path = workdir / "config.json"
    if not ((workdir / "checkpoints").is_dir() and path.is_file()):
        return None
    try:
        saved = config_lib.from_json(path.read_text("utf-8"))
        begun = saved.init["from"]
        settings = {f"data.{key}": saved.data[key] for key in _OF_IMAGES}
        automatic = FAMILIES[saved.model.family].automatic
        fills = {f"model.{key}": saved.model[key] for key in automatic}
        fills |= {f"data.{key}": saved.data.get(key, ()) for key in _OF_NUMBERS}
        same = without_commit(begun) == without_commit(source)
    except (OSError, *files.FOREIGN):
        return None  # somebody changed it; the run writes it anew
    return config_lib.Weights(settings, fills, begun) if same else None


def without_commit(source: str) -> str:
    """Returns a source without the commit to which a network of the hub was pinned."""
    return source.partition("@")[0] if source.startswith("hub:") else source


def load(
    config: ml_collections.ConfigDict,
    model: Any,
    fingerprint: str | None = None,
    class_names: tuple[str, ...] = (),
) -> adapt.Refitted | None:
    """Loads the weights for `model` that `config.init` names.

    A run's folder gives its best checkpoint, averaged as it would be evaluated, and so does an
    exported file or a network of the zoo; a smaller network is grown. Another file of weights, or
    a folder with a `model.safetensors`, is read in the layout it has. Other classes, image channels
    and sizes are refitted as `init.classifier`, `init.stem` and `init.positions` ask.

    Args:
        model: the network to start.
        fingerprint: of the data to train on; a note reports splits that may have moved.
        class_names: of these data; a note reports a classifier kept for others.

    Returns:
        the weights, with notes on how they were made to fit; None where `init.from` is empty.

    Raises:
        Contradiction: a setting does not fit the weights; holds what does.
        ValueError: there are no good weights, or they are another architecture's.
    """
    refuse_random(config)
    source = config.init["from"]
    if not source:
        return None
    if config.init.whiten and "init.whiten" in config.user:
        text = "init.whiten is a start from random weights, and init.from one from trained ones"
        raise config_lib.Contradiction(text, {"init.whiten": False})
    key, theirs = step.run_key(config.seed, step.INIT), ()
    how = {name: config.init[name] for name in _FITTING}
    try:
        path = sources.locate(source)
        tensors, description = files.read(path) if files.is_weights(path) else ({}, {})
        if tensors and not files.is_release(description):
            found = read.read(
                *(path, tensors, description, model, config.model.family),
                fresh_classifier=how["classifier"] == "new",
            )
            params, stats, old, family, origin, was, theirs = found
            if was is not None and "config" in description:
                origin += trained_on(config, was.data)
        else:
            stored = stored_network(path)
            params, stats, old = stored.params, stored.stats, stored.model
            family, theirs = stored.config.model.family, stored.class_names
            origin = origin_of(stored, config, source, fingerprint)
        base = model.feature_network()
        same_family = family == config.model.family
        if not same_family and (base is None or base[0] != family):
            raise ValueError(
                f"it holds a network of the family {family!r}; this configuration's is "
                f"{config.model.family!r}: name that network by --config"
            )
        origin_digest = digest(params, stats)
        if same_family:
            ours = for_all(class_names, model.config.num_classes) if class_names else ()
            how["classifier"], rows = _matched(theirs, ours, how["classifier"])
            refitted = adapt.fit(params, stats, old, model, how, key, rows)
        else:
            refitted = adapt.fit_backbone(params, stats, old, model, how, key)
        if theirs and how["classifier"] == "new":
            origin += f", whose classes are {few(theirs)}"
        _check_frozen((*refitted.fresh, *refitted.grown), model)
    except config_lib.Contradiction:
        raise
    except ValueError as error:
        unread = Path(source).is_file() and not files.is_weights(Path(source))
        hint = "; weights are read from .npz, .safetensors, .ckpt, .pt, .pth and .bin" * unread
        raise ValueError(f"init.from={source}: {error}{hint}") from error
    total = len(jax.tree.leaves((refitted.params, refitted.stats)))
    notes = [f"{total - len(refitted.fresh)} of {total} tensors are from {origin}"]
    if found := sources.pixels(source):
        said = [config_lib.per_channel(found.file, x, config.data.channels) for x in found[:2]]
        as_said = [tuple(config.data.mean), tuple(config.data.std)] == said
        notes.append(f"pixels are {'' if as_said else 'not '}normalised as {found.file} says")
        if found.blue_first:
            notes.append("the first convolution's channels are reversed: published for blue first")
    return refitted._replace(notes=(*notes, *refitted.notes), origin=origin_digest)


def _matched(theirs: Sequence[str], ours: Sequence[str], mode: str) -> tuple[str, tuple[int, ...]]:
    """Matches the classes of a classifier, where their names are known, to those of the images.

    Returns the mode of init.classifier that this comes to, and the row that each of our classes
    has in the classifier; none where it is not taken apart.
    """
    row_of = {name: row for row, name in enumerate(theirs)}
    if mode not in ("match", "keep") or not theirs or not ours or [*theirs] == [*ours]:
        return mode, ()
    if row_of.keys() >= {*ours} and (mode == "match" or len(theirs) == len(ours)):
        return mode, tuple(row_of[name] for name in ours)
    if mode == "match" and len(theirs) == len(ours):
        raise config_lib.Contradiction(
            f"its classifier is for {few(theirs)}, and the images are of as many other "
            f"classes, {few(ours)}; init.classifier=keep fits the same classes in this order, new "
            "trains a new classifier",
            {"init.classifier": "new"},
        )
    return ("new" if mode == "match" else mode), ()


def _check_frozen(fresh: tuple[str, ...], model: Any) -> None:
    """Refuses fresh tensors, such as params.head.linear.bias, in the network's frozen parts."""
    lost = [name for name in fresh if name.split(".")[1] in model.frozen]
    if lost:
        parts = model.frozen - {name.split(".")[1] for name in lost}
        raise config_lib.Contradiction(
            f"init.freeze={','.join(sorted(model.frozen))} would keep fresh random weights as they "
            f"are: {', '.join(lost)}",
            {"init.freeze": ",".join(sorted(parts))},
        )
