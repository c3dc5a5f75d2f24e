"""What other programs call the keys, flags, words, networks and commands of this one.

The table is `synonyms.toml` beside this file; it is asked before near spellings.
"""

import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from hsvit_jax.models import FAMILIES

_QUALIFYING = set("num nb n max total per device global train training use do top k".split())
_KINDS = r"(folder|csv|tfds|hf)(?:ds)?[:/](.+)"  # as timm names data sets, or with another mark
_SIZES = {"ti": "tiny", "t": "tiny", "s": "small", "b": "base", "l": "large"}
_SIZES |= {"xs": "xsmall", "xxs": "xxsmall"}


def _plain(word: str, leave_out: Iterable[str] = ()) -> str:
    """A word without capitals and marks, in which programs differ."""
    words = re.split(r"[\W_]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", word).lower())
    return "".join(part for part in words if part not in leave_out)


@functools.cache
def _theirs() -> dict[str, list[str]]:
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return {ours: theirs.split() for ours, theirs in tomllib.loads(text).items()}


def meant(word: str, known: Iterable[str]) -> list[str]:
    """What of ours a word of another program means: of `known`, else advice.

    Args:
      word: a key with its sections, of which the last counts too, a flag or any other word.
    """
    known, words = list(known), re.split(r"[\W_]+", word.lower())
    if kind := re.fullmatch(_KINDS, word):
        return [f"{kind[1]}={kind[2]}"]
    for text in dict.fromkeys((word, word.rpartition(".")[2])):
        forms = {_plain(text), _plain(text, _QUALIFYING)} - {""}
        same = [x for x in known if forms & {_plain(x), _plain(x.rpartition(".")[2])}]
        found = [ours for ours, theirs in _theirs().items() if not forms.isdisjoint(theirs)]
        found = [x for x in found if x in known] or [x for x in found if " " in x or "=" in x]
        found = (same or found) if "." in word else (found or same)
        if found:  # 'train.batch_size' and 'train_batch_size' name a section
            return [x for x in found if x.partition(".")[0] in words] or found
    return []


def network(name: str) -> str:
    """The network that other programs call `name`, as 'resnet:18' for 'resnet18'; '' for none."""
    families = {_plain(family): family for family in FAMILIES}
    hsvits = FAMILIES["hsvit"].variants
    found = (re.search(rf"(?<![a-z]){'[_.-]?'.join(x)}", name.lower()) for x in families | hsvits)
    match = max(filter(None, found), key=lambda match: len(match[0]), default=None)
    if match is None or _plain(match[0]) in hsvits:
        return match[0] if match else ""
    family = families[_plain(match[0])]
    ending = _plain(name[match.end() :]).replace("patch", "").removeprefix("vit")

    def form(variant: str) -> str:
        """The variant as `ending` would have it."""
        size, *rest = re.split("[-_]", variant.replace("patch", "").replace(".", ""))
        forms = ["".join((x, *rest)) for x in (_SIZES.get(size, size), size)]
        return next((x for x in forms if ending.startswith(x)), forms[0])

    variants = FAMILIES[family].variants if ending else ()
    whole = max((x for x in variants if ending.startswith(form(x))), key=len, default="")
    variant = whole or next((x for x in variants if form(x).startswith(ending)), "")
    if family == "hsvit":
        return variant or FAMILIES[family].default_variant
    file = FAMILIES[family].config_file or family
    return f"{file}:{variant}" if variant else file
