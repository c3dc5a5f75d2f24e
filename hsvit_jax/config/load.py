"""Reads a configuration: `FILE:words` or `NAME:words`, with `KEY=VALUE` overrides.

A configuration file is Python that defines `get_config(argument)` or registers one family of
networks (`models.register`). It is executed, so use only files you trust. The named networks
(`c2a2`, `c3a4`, `c4a8`) and the sibling families (`vix:vin,hybrid`) need no file.
"""

import difflib
import math
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_collections

from hsvit_jax.config import resolution, schema, synonyms, variants, words
from hsvit_jax.config.layers import Settings
from hsvit_jax.models import DEFAULT, FAMILIES
from hsvit_jax.text import few

_EXAMPLE = "for example configs/c4a8.py:cifar100,paper or c2a2:digits"


def get_config(spec: str, *settings: str) -> ml_collections.ConfigDict:
    """Reads and validates a configuration.

    Args:
      spec: file or name, and words, such as 'configs/c4a8.py:cifar100' or 'c2a2:digits,tiny'.
      settings: 'KEY=VALUE' texts, see `override`.

    Raises:
      ValueError: the file or name does not exist, the file fails, or a word, key or value does not
        fit.
    """
    place, _, argument = spec.partition(":")
    if not place:
        raise ValueError(f"--config names no file; {_EXAMPLE}")
    if "/" in place or place.endswith(".py") or os.path.isfile(place):
        config = _from_file(Path(os.path.expanduser(place)), argument or None)
    else:
        config = for_network(place)(argument)
    return override(config, settings)


def for_network(name: str) -> Callable[[str | None], ml_collections.ConfigDict]:
    """Returns the `get_config(argument)` of an HSViT or of a sibling family.

    The function raises ValueError if the name is unknown.
    """
    name = variants.OF_FILE.get(name, name)
    if name in variants.siblings():
        return partial(variants.get_config, name)
    return lambda argument=None: resolution.base(argument, named_model(name))


def named_model(name: str) -> dict[str, Any]:
    """Returns the `model` section of an HSViT, or of a sibling family's default variant.

    Raises ValueError for an unknown name.
    """
    if name in variants.siblings():
        return FAMILIES[name].settings()
    known = (*DEFAULT.variants, *variants.siblings())
    if name not in known:
        raise ValueError(
            f"unknown network {name!r}.{words.hint(name, known)} Known: {few(known)} (hsvit list), "
            f"or a file ending in .py ({_EXAMPLE})"
        )
    return DEFAULT.settings(name)


def _from_file(path: Path, argument: str | None) -> ml_collections.ConfigDict:
    """Runs the file and its `get_config`; errors name the line."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe could hang
            raise OSError(0, "a directory, pipe or device, not a regular file")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"{getattr(error, 'strerror', None) or error}."
        name = variants.OF_FILE.get(path.stem, path.stem)
        if name in (*DEFAULT.variants, *variants.siblings()):
            named = ":".join(filter(None, (path.stem, argument)))
            why += f" The network needs no file: --config={named}"
        elif not path.exists():
            why += words.hint(str(path), ())
        raise ValueError(f"cannot read the config file {path}: {why}") from None
    module = ModuleType(f"hsvit_config_{path.stem}")
    module.__file__ = str(path)
    before = dict(FAMILIES)
    try:
        sys.modules[module.__name__] = module  # where dataclasses look up their annotations
        exec(compile(text, str(path), "exec"), vars(module))
        registered = [name for name, family in FAMILIES.items() if before.get(name) is not family]
        if not hasattr(module, "get_config") and len(registered) == 1:
            return variants.get_config(registered[0], argument)
        config = module.get_config(argument)
    except Exception as error:  # the file may raise anything
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        package = frame.f_globals.get("__name__", "").startswith("hsvit_jax.")
        if isinstance(error, ValueError) and package:
            raise
        if isinstance(error, AttributeError) and error.obj is module:
            raise ValueError(
                f"the config file {path} needs a get_config(argument), or must register one family"
            ) from None
        raise ValueError(
            f"the config file {path} failed{_line_of(error, path)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, Settings):
        raise ValueError(
            f"get_config of {path} returned {type(config).__name__}; return a configuration as "
            "hsvit_jax.config.base makes it"
        )
    return config


def _line_of(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""


def override(config: Settings, settings: Sequence[str]) -> Settings:
    """Returns a configuration with overrides, and with what follows from them.

    Args:
      settings: 'KEY=VALUE' texts, parsed by `schema.Key.parse`; the last one of a key counts.
        Setting only one of train.epochs and train.steps makes the other 0.

    Raises:
      ValueError: an unknown key, a value outside its range, or a key that only --config sets.
    """
    known, given = dict(schema.leaves(config)), dict[str, Any]()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key not in known:
            raise ValueError(_unknown(key, list(known)))
        shown = schema.shown(known[key])
        if not equals:
            raise ValueError(f"{key} needs a value, as in --config.{key}={shown}")
        if key in schema.LABELS or (key == "data.name" and not words.names_kind(text)):
            raise ValueError(
                f"{key} cannot be set to {text!r} alone: name the network by its file, the data "
                f"set and recipe after the colon ({_EXAMPLE})"
            )
        entry = schema.of(key, config.model)
        try:
            value = entry.parse(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not entry.fits(value):
            raise ValueError(
                f"{key} must be {entry.expected}; got {reprlib.repr(text)} (it was "
                f"{shown or 'empty'})"
            )
        given[key] = value
    user = config.user
    for one, other in (("train.epochs", "train.steps"), ("train.steps", "train.epochs")):
        if one in given and (given[one] or one == "train.epochs"):  # 0 steps are the default
            user.pop(other, None)
    return resolution.resolve(config.with_user(user | given))


def _unknown(key: str, known: list[str]) -> str:
    """Suggests known keys for an unknown one: another program's meaning, or the closest."""
    if section := [k for k in known if k.startswith(f"{key}.")]:
        return f"{key} is a section; its keys are {few(section)}"
    near = synonyms.meant(key, [*known, "--workdir"])
    if not near and (others := synonyms.meant(key, schema.all_keys())):
        return f"unknown configuration key {key!r}: no {others[0]} in this network"
    near = near or difflib.get_close_matches(key, known, 1, 0.6)
    if not near:
        last = {k.rpartition(".")[2]: k for k in reversed(known)}
        found = difflib.get_close_matches(key.rpartition(".")[2], last, 1, 0.6)
        near = [last[name] for name in found]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {few(known)}"
    return f"unknown configuration key {key!r}; {hint}"
