"""Other programs' names for the keys, flags, words, networks and commands of this one.

`synonyms.toml` beside this file holds them; they take precedence over near spellings.
"""

import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

_QUALIFYING = ("num", "nb", "n", "max", "total", "per", "device", "global", "train", "use", "do")
# timm names data sets so; other marks are accepted too.
_KINDS = r"(folder|csv|tfds|hf)(?:ds)?[:/](.+)"


def _plain(word: str, without: Iterable[str] = ()) -> str:
    """Removes capitals and marks, which differ between programs."""
    words = re.split(r"[\W_]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", word).lower())
    return "".join(part for part in words if part not in without)


@functools.cache
def _table(name: str) -> dict[str, list[str]]:
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return {ours: theirs.split() for ours, theirs in tomllib.loads(text)[name].items()}


def meant(word: str, known: Iterable[str]) -> list[str]:
    """Returns the `known` names that another program's word stands for, else advice.

    Args:
      word: a key with its sections, of which the last counts too, a flag or any other word.
    """
    known, words = list(known), re.split(r"[\W_]+", word.lower())
    if kind := re.fullmatch(_KINDS, word):
        return [f"{kind[1]}={kind[2]}"]
    for text in dict.fromkeys((word, word.rpartition(".")[2])):
        forms = {_plain(text), _plain(text, _QUALIFYING)} - {""}
        same = [x for x in known if forms & {_plain(x), _plain(x.rpartition(".")[2])}]
        found = [ours for ours, theirs in _table("words").items() if not forms.isdisjoint(theirs)]
        found = [x for x in found if x in known] or [x for x in found if " " in x or "=" in x]
        found = (same or found) if "." in word else (found or same)
        if found:  # 'train.batch_size' and 'train_batch_size' name a section
            return [x for x in found if x.partition(".")[0] in words] or found
    return []


def network(name: str) -> str:
    """Returns our name of another program's network, as 'resnet:18' for 'resnet18', or ''."""
    text, networks = _plain(name), _table("networks")
    found = {part: ours for ours, parts in networks.items() for part in parts if part in text}
    return found[max(found, key=len)] if found else ""
