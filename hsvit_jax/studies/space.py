"""Spaces of settings: which values a search may give to a key of the configuration.

optim.learning_rate=1e-4..1e-2:log    any number between, even in its logarithm
model.depth=1..4                      any whole number between
optim.name={adamw,muon}               one of them; shells repeat the setting for each
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_NUMBER = r"[-+]?[.\d][-+.\de]*?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?", re.IGNORECASE)
_BRACES = re.compile(r"(.*)\{([^{}]*)\}(.*)", re.DOTALL)


class Span(NamedTuple):
    """The values of a key, as texts: all of an enumeration, or the ends of a range."""

    values: tuple[str, ...]
    is_range: bool = False
    log: bool = False


def split(settings: Sequence[str]) -> tuple[list[str], dict[str, Span]]:
    """Separates KEY=VALUE texts into those of one value, and the spans of all other keys."""
    given: dict[str, dict[str, None]] = {}  # in order, each once
    for key, _, text in (setting.partition("=") for setting in settings):
        braces = _BRACES.fullmatch(text)
        inner = braces[2].split(",") if braces else ()
        texts = [braces[1] + x + braces[3] for x in inner] or [text]
        given.setdefault(key, {}).update(dict.fromkeys(texts))
    fixed, spans = [], {}
    for key, (first, *others) in given.items():
        if others:
            spans[key] = Span((first, *others))
        elif found := _RANGE.fullmatch(first):
            spans[key] = Span((found[1], found[2]), True, bool(found[3]))
        else:
            fixed += [f"{key}={first}"]
    return fixed, spans
