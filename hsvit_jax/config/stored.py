"""Configurations on disk: the name of a run's folder, and JSON."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from flax import traverse_util

from hsvit_jax.config import schema, words
from hsvit_jax.config.layers import Settings
from hsvit_jax.models import DEFAULT, FAMILIES, UnknownFamily

# Settings that the folder's name holds already, or that do not change a run's results.
_SAME_RUN = (
    *("seed", "init.cache", "data.name", "data.dir", "mesh.data", "mesh.group"),
    *("train.log_every", "train.loggers", "eval.batch"),
    *("checkpoint.every", "checkpoint.keep_best", "checkpoint.keep_latest"),
)
_SECTIONS = {"model", *(key.partition(".")[0] for key in schema.KEYS)}
_LONGEST = 180  # bytes of a folder's name before its seed


def names_run(key: str) -> bool:
    """Whether the name of `default_workdir` depends on a key."""
    return key in ("seed", "data.name") or key not in _SAME_RUN


def default_workdir(config: Settings, spec: str, settings: Sequence[str] = ()) -> str:
    """Names a run's folder by configuration, data set, recipe, switches, overrides and seed.

    The same command gives the same folder and resumes the run; another setting gives another.

    Args:
      config: the configuration of `spec` and `settings`.
      spec: its file or name, with the words after the colon.
      settings: the KEY=VALUE overrides.

    Returns:
      a path, such as 'runs/c2a2-digits-strong-seed0'.
    """
    file, _, argument = spec.partition(":")
    stem = file.rsplit("/", 1)[-1].removesuffix(".py")
    kind, _, path = config.data.name.partition("=")
    place, slash, last = os.path.normpath(path).rpartition("/")
    data = "-".join([kind, *[last] * bool(path), *[_digest(place)] * bool(slash)])
    given = words.split(argument)
    variant = [config.model.variant] if config.model.family != DEFAULT.name else []
    switches = [word for word in words.SWITCHES if word in given]
    named = "recipe" in config.user or config.data.name in words.DATA_SETS
    recipe = [config.recipe] if named else []  # else the number of images decides
    parts = [stem, *variant, data, *recipe, *switches]
    for key, value in sorted(dict(setting.partition("=")[::2] for setting in settings).items()):
        if key in ("init.from", "init.teacher"):
            place, _, stem = value.rstrip("/").rpartition("/")
            value = f"{stem}-{_digest(value)}" if place else stem
        if key not in _SAME_RUN:
            parts.append(key.partition(".")[2] + value)
    name = "-".join(parts)
    start = os.fsencode(name)[:_LONGEST]
    if os.fsdecode(start) != name:
        name = f"{os.fsdecode(start)}-{_digest(name)}"
    return "runs/" + re.sub(r"[^\w.=-]+", "_", f"{name}-seed{config.seed}")


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:6]


def to_tree(config: Settings) -> dict[str, Any]:
    """Returns a configuration as a dictionary, with the user's settings under 'user'."""
    return {**config.to_dict(), "user": config.user}


def to_json(config: Settings) -> str:
    """Writes a configuration as indented JSON."""
    return json.dumps(to_tree(config), indent=2, sort_keys=True)


def from_json(text: str) -> Settings:
    """Reads a configuration that `to_json` wrote; lists become tuples.

    Sections of older versions are dropped. Raises TypeError unless the text is a JSON object.
    """

    def tuples(section: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in section.items()}

    tree = json.loads(text, object_hook=tuples)
    if not isinstance(tree, dict):
        raise TypeError(f"a configuration is a JSON object; got {type(tree).__name__}")
    read = Settings({key: tree[key] for key in _SECTIONS & tree.keys()})
    return read.noted(tree.get("user", ())).lock()


def completed(stored: Mapping[str, Any]) -> Settings:
    """Reads a configuration from a checkpoint's metadata and adds newer keys.

    The defaults of these keys, also the network's, are what older versions did.
    """
    config = from_json(json.dumps(stored))
    model = config.model
    if model.family not in FAMILIES:
        raise UnknownFamily(model.family)
    family = FAMILIES[model.family]
    initial = {path: key.initial for path, key in schema.KEYS.items()}
    sections = traverse_util.unflatten_dict(initial, sep=".")
    sections["model"] = {**family.defaults, **family.variants.get(model.variant, {})}
    whole = ml_collections.ConfigDict(sections, type_safe=False)
    whole.update(config.to_dict())
    return Settings(whole.to_dict()).noted(config.user).lock()
