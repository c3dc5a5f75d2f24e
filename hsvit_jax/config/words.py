"""The words after the colon: data sets, recipes and switches, as in `c4a8:cifar100,paper`."""

import os
from collections.abc import Iterable, Mapping

from hsvit_jax.config import synonyms
from hsvit_jax.text import few, nearest

#: Data sets with a name of their own, beside those of `DATA_KINDS`.
DATA_SETS = (
    *("digits", "cifar10", "cifar100", "fashion_mnist", "tiny_imagenet", "food101"),
    *("domainnet/clipart", "domainnet/infograph", "domainnet/painting"),
    *("domainnet/quickdraw", "domainnet/real", "domainnet/sketch", "imagenet"),
)
#: Data sets that an argument names.
DATA_KINDS = ("folder=<path>", "csv=<path>", "hf=<name or path>", "tfds=<name>")
#: Recipes, each in a phrase.
RECIPES: Mapping[str, str] = {
    "strong": "the default: 100 epochs (digits 12), with much augmentation",
    "fast": "a dozen epochs, with crop and flip alone",
    "paper": "the recipe of the network's paper, often 300 epochs",
    "small": "the default for few custom images; their number sets the length",
    "finetune": "for the weights of init.from: a low rate and a new classifier",
}
ABLATIONS = {"conv_only": "HSViT without attention", "attention_only": "without convolutions"}
#: Switches, each in a phrase.
SWITCHES: Mapping[str, str] = {
    "tiny": "a smoke run of a tiny network and eight steps: its accuracy means nothing",
    "bf16": "computation in bfloat16",
    **ABLATIONS,
}
COMMON = (*DATA_SETS, *DATA_KINDS, *RECIPES, *SWITCHES)


def names_kind(word: str) -> bool:
    """Whether a word names a data set by a kind and an argument, as 'folder=photos'."""
    kind, _, argument = word.partition("=")
    return bool(argument) and kind in [known.partition("=")[0] for known in DATA_KINDS]


def _is_data(word: str) -> bool:
    return word in DATA_SETS or names_kind(word)


def is_word(word: str) -> bool:
    """Whether a word after the colon is a data set, a recipe or a switch."""
    return _is_data(word) or word in (*RECIPES, *SWITCHES)


def split(argument: str | None) -> list[str]:
    """Splits the text after the colon into words."""
    return [word.strip() for word in (argument or "").split(",") if word.strip()]


def hint(word: str, known: Iterable[str], family: str = "") -> str:
    """Returns ' Did you mean …?' for an unknown word.

    It proposes the kind of a path, other programs' words, a variant of `family`, or a near word.
    """
    if os.path.exists(word):
        return f" Did you mean {'csv' if word.endswith('.csv') else 'folder'}={word}?"
    network = synonyms.network(f"{family} {word}".lstrip())
    network = network if ":" in network or not family else ""
    near = synonyms.meant(word, known) or [network] * bool(network)
    return f" Did you mean {' or '.join(near)}?" if near else nearest(word, known)


def parse_argument(argument: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Parses the text after the colon into (data set, recipe, switches), in any order.

    The defaults are cifar10 and strong. Raises ValueError for an unknown word, and for a second
    data set or recipe.
    """
    words = split(argument)
    for word in words:
        if not is_word(word):
            raise unknown(word, COMMON)
    data = [word for word in words if _is_data(word)] or ["cifar10"]
    recipe = [word for word in words if word in RECIPES] or ["strong"]
    for kind, given in (("data set", data), ("recipe", recipe)):
        if len(given) > 1:
            raise ValueError(f"one {kind} at a time; got {' and '.join(given)}: remove one of them")
    return data[0], recipe[0], tuple(word for word in words if word in SWITCHES)


def unknown(word: str, known: Iterable[str], family: str = "") -> ValueError:
    """Returns the error for an unknown word, with the known ones."""
    return ValueError(
        f"unknown word {word!r} after the colon.{hint(word, known, family)} Known: {few(known)} "
        "(a path with a comma: --config.data.name=KIND=PATH)"
    )
