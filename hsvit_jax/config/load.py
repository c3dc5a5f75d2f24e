"""From what a user writes to a configuration: `FILE:words`, `NAME:words`, and `KEY=VALUE`.

A configuration file is Python that defines `get_config(argument)`; it is run, so use only files you
trust. The named networks (`c2a2`, `c3a4`, `c4a8`) and the sibling families (`vix:vin,hybrid`, see
`variants`) need no file and work wherever the package is.
"""

import difflib
import math
import reprlib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from hsvit_jax.config import defaults, derived, keys, variants
from hsvit_jax.models import FAMILIES

_EXAMPLE = "for example configs/c4a8.py:cifar100,paper or c2a2:digits"


def get_config(spec: str, *settings: str) -> ml_collections.ConfigDict:
    """The configuration of `spec`, such as 'configs/c4a8.py:cifar100' or 'c2a2:digits,tiny'.

    settings: 'KEY=VALUE' texts, applied by `override`. Raises ValueError when there is no such file
    or name, when the file fails, or for a word, key or value that does not fit.
    """
    for text in (spec, *settings):
        if not isinstance(text, str):
            raise ValueError(f"a configuration is named by texts, {_EXAMPLE}; got {text!r}")
    place, _, argument = spec.partition(":")
    if not place:
        raise ValueError(f"--config names no file; {_EXAMPLE}")
    if "/" in place or place.endswith(".py") or Path(place).is_file():
        config = _from_file(Path(place), argument or None)
    else:
        config = _from_name(place, argument or None)
    config = override(config, settings)
    derived.validate(config)
    return config


def _from_name(name: str, argument: str | None) -> ml_collections.ConfigDict:
    """As the file of that name in configs/ has it."""
    name = variants.OF_FILE.get(name, name)
    if name in variants.SIBLINGS:
        return variants.get_config(name, argument)
    return defaults.base(argument, named_model(name))


def named_model(variant: str) -> dict[str, Any]:
    """The `model` section of a named network, or of a sibling family's default variant.

    Raises ValueError for an unknown name.
    """
    if variant in variants.SIBLINGS:
        return variants.model_section(variant)
    own = FAMILIES["hsvit"]
    if variant not in own.variants:
        known = (*own.variants, *variants.SIBLINGS)
        raise ValueError(
            f"unknown network {variant!r}.{keys.nearest(variant, known)} "
            f"Known: {', '.join(known)}, or a file ending in .py ({_EXAMPLE})"
        )
    return own.settings(variant)


def _from_file(path: Path, argument: str | None) -> ml_collections.ConfigDict:
    """Runs the file and its `get_config`; whatever goes wrong there is told with its line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        others = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f" {path.parent}/ has {', '.join(others)}." if others else ""
        raise ValueError(f"cannot read the config file {path}: {why}.{there}") from None
    module = {"__name__": f"hsvit_config_{path.stem}", "__file__": str(path)}
    try:
        exec(compile(text, str(path), "exec"), module)
        config = module["get_config"](argument)
    except Exception as error:  # the file may raise anything
        if _spoken_by(error).startswith("hsvit_jax.") and isinstance(error, ValueError):
            raise
        if isinstance(error, KeyError) and error.args == ("get_config",):
            raise ValueError(f"the config file {path} defines no get_config(argument)") from None
        raise ValueError(
            f"the config file {path} failed{_line_of(error, path)}: {type(error).__name__}: {error}"
        ) from error
    _check_keys(config, path)
    return config.copy_and_resolve_references().lock()


def _spoken_by(error: BaseException) -> str:
    """The name of the module that raised."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "")


def _line_of(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""


def _check_keys(config: Any, path: Path) -> None:
    """A file of one's own that forgets a key must not fail in the middle of a run."""
    if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(
            f"get_config of {path} returned {type(config).__name__}; expected a ConfigDict, as "
            "hsvit_jax.config.base makes it"
        )
    found = dict(keys.leaves(config))
    family = found.get("model.family", "hsvit")
    any_of = _any_of(family, found.get("model.variant", ""), path)
    wanted = set(dict(keys.leaves(defaults.base(None, any_of))))
    if wanted != set(found):
        missing, unknown = sorted(wanted - set(found)), sorted(set(found) - wanted)
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        hints = "".join(keys.nearest(key, sorted(wanted)) for key in unknown)
        raise ValueError(f"the configuration of {path} has other keys: {'; '.join(parts)}.{hints}")


def _any_of(family: str, variant: str, path: Path) -> dict[str, Any]:
    """The settings of the variant, or of some network of this family if it is none of them."""
    if family == "hsvit":
        return FAMILIES[family].settings()
    try:
        known = family in FAMILIES and variant in FAMILIES[family].variants
        return variants.model_section(family, variant if known else "")
    except ValueError as error:
        raise ValueError(f"the configuration of {path}: {error}") from None


def override(
    config: ml_collections.ConfigDict, settings: Sequence[str]
) -> ml_collections.ConfigDict:
    """A copy with 'KEY=VALUE' texts applied; the last one of a key counts.

    Values are read by `keys`; tuples as '64' or '64,32'. Setting only one of train.epochs
    and train.steps makes the other 0. Raises ValueError for an unknown key (naming the nearest), a
    value that does not fit its key, and keys that only name what was chosen.
    """
    config = config.copy_and_resolve_references()
    known = dict(keys.leaves(config))
    given = set()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key not in known:
            raise ValueError(_unknown(key, list(known)))
        if not equals:
            raise ValueError(f"{key} needs a value, as in --config.{key}={keys.shown(known[key])}")
        _refuse_label(key, text)
        section, _, name = key.rpartition(".")
        entry = keys.of(key, config.model)
        try:
            value = entry.parse(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not entry.fits(value):
            raise ValueError(
                f"{key} must be {entry.expected}; got {reprlib.repr(text)} "
                f"(it was {keys.shown(known[key])})"
            )
        (config[section] if section else config)[name] = value
        given.add(key)
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if f"train.{one}" in given and f"train.{other}" not in given and config.train[one]:
            config.train[other] = type(config.train[other])(0)
    return config.lock()


def _unknown(key: str, known: list[str]) -> str:
    """Names the key that was meant: the same last word elsewhere, or the closest spelling."""
    section = [k for k in known if k.startswith(f"{key}.")]
    if section:
        return f"{key} is a section; its keys are {', '.join(section)}"
    leaf = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(key, known, 1, 0.6)
    if not near:
        words = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in known], 1, 0.6)
        near = [k for k in known if words and k.rpartition(".")[2] == words[0]]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown configuration key {key!r}; {hint}"


def _refuse_label(key: str, text: str) -> None:
    """These decide many other settings, so changing the word alone would be a false label."""
    if key in ("recipe", "model.variant", "model.backbone") or (
        key == "data.name" and not text.startswith(("folder=", "tfds="))
    ):
        raise ValueError(
            f"{key} follows from --config and cannot be set to {text!r} alone: name the network by "
            f"its file, the data set and recipe after the colon ({_EXAMPLE})"
        )
