"""The default configuration of a network, a data set and a recipe.

A config file calls `base` with its network's sizes and the argument after the colon, such as
`configs/c4a8.py:cifar100,paper`. Values that are empty here (image size, classes, mean, std, pool
strides) follow from the data set once it is known: see `resolution.resolve`.
"""

import math
import os
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import ml_collections
from flax import traverse_util

from hsvit_jax.config import recipes, schema, synonyms
from hsvit_jax.models import FAMILIES
from hsvit_jax.text import few, nearest

#: Data sets with a name of their own, beside those of `DATA_KINDS`.
DATA_SETS = (
    *("digits", "cifar10", "cifar100", "fashion_mnist", "tiny_imagenet", "food101"),
    *("domainnet/clipart", "domainnet/infograph", "domainnet/painting"),
    *("domainnet/quickdraw", "domainnet/real", "domainnet/sketch", "imagenet"),
)
#: Data sets that are named by an argument.
DATA_KINDS = ("folder=<path>", "csv=<path>", "hf=<name or path>", "tfds=<name>")
#: Recipes, each in a phrase.
RECIPES: Mapping[str, str] = {
    "strong": "the default: 100 epochs (digits 12), with much augmentation",
    "fast": "a dozen epochs, with crop and flip alone",
    "paper": "that of the network's own paper, often 300 epochs",
    "small": "the default for few images of one's own, from whose number the length follows",
    "finetune": "for the weights of init.from: a low rate and a new classifier",
}
_ABLATIONS = {"conv_only": "HSViT without attention", "attention_only": "without convolutions"}
#: Switches, each in a phrase.
SWITCHES: Mapping[str, str] = {
    "tiny": "a smoke run of a tiny network and eight steps: its accuracy means nothing",
    "bf16": "computation in bfloat16",
    **_ABLATIONS,
}

#: optim.warmup_epochs that is not set by hand: see `resolution.with_warmup`.
AUTOMATIC = -1.0

_EXAMPLE = "for example configs/c4a8.py:cifar100,paper or configs/c2a2.py:folder=my_images"


def names_kind(word: str) -> bool:
    """Whether a word names a data set by a kind and an argument, as 'folder=photos'."""
    kind, _, argument = word.partition("=")
    return bool(argument) and kind in [known.partition("=")[0] for known in DATA_KINDS]


def _is_data(word: str) -> bool:
    return word in DATA_SETS or names_kind(word)


def is_word(word: str) -> bool:
    """Whether a word after the colon is a data set, a recipe or a switch."""
    return _is_data(word) or word in (*RECIPES, *SWITCHES)


def hint(word: str, known: Iterable[str], family: str = "") -> str:
    """' Did you mean …?' of an unknown word: a path by its kind, what other programs mean by it, of
    a `family` a variant, or the closest known word."""
    if os.path.exists(word):
        return f" Did you mean {'csv' if word.endswith('.csv') else 'folder'}={word}?"
    network = synonyms.network(f"{family} {word}".lstrip())
    network = network if ":" in network or not family else ""
    near = synonyms.meant(word, known) or [network] * bool(network)
    return f" Did you mean {' or '.join(near)}?" if near else nearest(word, known)


def parse_argument(argument: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Splits the text after the colon into (data set, recipe, switches).

    The order of words does not matter; no word means cifar10 by the strong recipe.

    Raises:
      ValueError: a word is unknown, or there is a second data set or recipe.
    """
    words = list(filter(None, (word.strip() for word in (argument or "").split(","))))
    for word in words:
        if not is_word(word):
            known = (*DATA_SETS, *DATA_KINDS, *RECIPES, *SWITCHES)
            raise ValueError(
                f"unknown word {word!r} after the colon.{hint(word, known)} Known: "
                f"{few(known)} ({_EXAMPLE}; a path with a comma: --config.data.name=KIND=PATH)"
            )
    data = [word for word in words if _is_data(word)] or ["cifar10"]
    recipe = [word for word in words if word in RECIPES] or ["strong"]
    for kind, given in (("data set", data), ("recipe", recipe)):
        if len(given) > 1:
            raise ValueError(f"one {kind} at a time; got {' and '.join(given)} ({_EXAMPLE})")
    return data[0], recipe[0], tuple(word for word in words if word in SWITCHES)


def base(argument: str | None, model: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Makes the configuration of a network on the data set and recipe that `argument` names.

    Args:
      argument: the words after the colon, see `parse_argument`.
      model: the sizes of the `model` section.

    Returns:
      a locked configuration with every key that any part of the program reads.

    Raises:
      ValueError: an unknown word, or a switch that the network's family does not have.
    """
    data, recipe, switches = parse_argument(argument)
    config = plain(data, recipe, model)
    if recipe in map(str.strip, (argument or "").split(",")):
        config.by_hand = ("recipe",)
    for switch in switches:
        apply_switch(config, switch)
    return config.lock()


def plain(data: str, recipe: str, model: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The configuration of a data set, a recipe and a `model` section, before any switch."""
    strong = {path: key.initial for path, key in schema.KEYS.items()}
    config = ml_collections.ConfigDict(traverse_util.unflatten_dict(strong, sep="."))
    config.recipe, config.data.name = recipe, data
    family = model.get("family", "hsvit")
    sizes = FAMILIES[family].defaults if family == "hsvit" else {}
    config.model = ml_collections.ConfigDict(
        {"dtype": "float32", "family": family, **sizes, **model}
    )
    update(config, recipes.values(recipe, config.model, data))
    config.optim.warmup_epochs = AUTOMATIC
    return config


def update(config: ml_collections.ConfigDict, values: Mapping[str, Any]) -> None:
    """Sets values by 'section.key', in a section of a section by 'section.section.key'."""
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, config)[name] = value


#: Images of a step of a smoke run, or all that there are.
TINY_BATCH = 32


def apply_switch(config: ml_collections.ConfigDict, switch: str) -> None:
    """Makes a configuration of `plain` that of one of `SWITCHES`.

    Raises ValueError for an ablation that the network's family does not have.
    """
    family = config.model.family
    if switch in _ABLATIONS and family != "hsvit":
        raise ValueError(
            f"{switch} is an ablation of hsvit, and {family} has no such part: leave it out"
        )
    if switch == "tiny":
        sizes = FAMILIES[family].tiny(config.model)
        update(config, {f"model.{key}": value for key, value in sizes.items()})
        if family != "hsvit":
            config.data.image_size = (32, 32)
        elif config.model.ablation == "attention_only":
            config.data.image_size = (4, 4)
        config.train.update({"batch": TINY_BATCH, "epochs": 0.0, "steps": 8, "log_every": 1})
        config.optim.warmup_epochs = 0.0
        config.init.freeze = ""  # nobody has trained weights for so small a network
        config.by_hand = (*config.by_hand, "tiny")  # to be told
    elif switch == "bf16":
        config.model.dtype = "bfloat16"
    else:
        config.model.ablation = switch
        config.init.whiten = config.init.whiten and switch != "attention_only"
        if switch == "attention_only":  # a colour plane is a token of embed_dim pixels
            side = math.isqrt(config.model.embed_dim)
            config.data.image_size = (side, side)
            config.augment.update({"crop_padding": 0, "erasing": 0.0})
