"""The configuration of a network on a data set by a recipe, with all that its name decides.

A config file calls `base` with its network's sizes and the argument after the colon, such as
`configs/c4a8.py:cifar100,paper`. What is left empty there (image size, classes, mean, std, pool
strides) follows from the data set once it is known: see `derived.resolve`.
"""

import math
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

import ml_collections

from hsvit_jax.config import recipes
from hsvit_jax.config.keys import nearest
from hsvit_jax.models import FAMILIES

#: How CLS tokens are reduced over the `group` axis, and how gradients are sent over `data`.
AGGREGATES = ("psum", "ordered", "bf16")
GRADIENTS = ("float32", "bf16")

#: Data sets with a name of their own; `folder=<path>` and `tfds=<name>` come beside them.
DATA_SETS = (
    "digits",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "tiny_imagenet",
    "food101",
    "imagenet",
)
#: optim.warmup_epochs that is not set by hand: see `derived.with_warmup`.
AUTOMATIC = -1.0
RECIPES = ("strong", "fast", "paper")
SWITCHES = ("tiny", "bf16", "conv_only", "attention_only")
_ABLATIONS = ("conv_only", "attention_only")  # of hsvit

_EXAMPLE = "for example configs/c4a8.py:cifar100,paper or configs/c2a2.py:folder=my_images"


def is_word(word: str) -> bool:
    """Whether a word after the colon is a data set, a recipe or a switch."""
    return word in (*DATA_SETS, *RECIPES, *SWITCHES) or word.startswith(("folder=", "tfds="))


def parse_argument(argument: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Splits the text after the colon into (data set, recipe, switches).

    The order of words does not matter; no word means cifar10 by the strong recipe. Raises
    ValueError for a word that is unknown (naming the nearest) or a second data set or recipe.
    """
    data, recipe, switches = [], [], []
    for word in filter(None, (w.strip() for w in (argument or "").split(","))):
        if word in DATA_SETS or word.startswith(("folder=", "tfds=")):
            data.append(word)
        elif word in RECIPES:
            recipe.append(word)
        elif word in SWITCHES:
            switches.append(word)
        else:
            known = (*DATA_SETS, "folder=<path>", "tfds=<name>", *RECIPES, *SWITCHES)
            raise ValueError(
                f"unknown word {word!r} after the colon.{nearest(word, known)} Known: "
                f"{', '.join(known)} ({_EXAMPLE})"
            )
    for kind, words in (("data set", data), ("recipe", recipe)):
        if len(words) > 1:
            raise ValueError(f"one {kind} at a time; got {' and '.join(words)} ({_EXAMPLE})")
    return (data or ["cifar10"])[0], (recipe or ["strong"])[0], tuple(switches)


def base(argument: str | None, model: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The configuration of a network on the data set and recipe that `argument` names.

    model: the sizes of the `model` section. Returns a locked ConfigDict in which every key that any
    part of the program reads is present. Raises ValueError for an unknown argument, or a
    switch that the network's family does not have.
    """
    data, recipe, switches = parse_argument(argument)
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.recipe = recipe
    family = model.get("family", "hsvit")
    usual = {"family": family, **(FAMILIES[family].defaults if family == "hsvit" else {})}
    config.model = ml_collections.ConfigDict({"dtype": "float32", **usual, **model})
    config.data = ml_collections.ConfigDict(
        {
            "name": data,
            "dir": "",  # empty: $HSVIT_DATA_DIR, or a folder in the user's cache
            "image_size": (),  # the next five follow from the data set when left empty
            "channels": 0,
            "num_classes": 0,
            "mean": (),
            "std": (),
            "val_fraction": 0.1,
            "on_bad_image": "error",  # or 'skip', with a warning
        }
    )
    config.augment = ml_collections.ConfigDict(_augment(recipe, data))
    config.train = ml_collections.ConfigDict(
        {
            "batch": 512 if recipe == "paper" else 128,
            "epochs": 300.0 if recipe == "paper" else 100.0,
            "steps": 0,  # instead of epochs (then epochs is 0)
            "log_every": 10,
            "eval_every": 1,  # epochs
            "ema_decay": 0.0 if recipe == "paper" else 0.999,
            "bad_steps_limit": 3,  # non-finite steps in a row before stopping
            "select_on": "val",  # split that chooses the best checkpoint; 'test' only when told to
        }
    )
    config.eval = ml_collections.ConfigDict(
        {
            "batch": 0,  # see `derived.eval_batch`
            "tta": "none",  # or 'flip'
        }
    )
    config.optim = ml_collections.ConfigDict(_optim(recipe))
    config.init = ml_collections.ConfigDict(
        {
            "from": "",  # a run's or checkpoint folder, or a file of weights, to start from
            "classifier": "keep",  # or 'new' for other classes, 'drop_first' for a background class
            "stem": "keep",  # or 'refit' for other image channels
            "positions": "keep",  # or 'resize' for another image size
            "freeze": "",  # parts of the network that are not trained, separated by commas
            "cache": "",  # a folder for what the frozen parts make of each image, computed once
        }
    )
    config.mesh = ml_collections.ConfigDict(
        {
            "group": 1,
            "data": -1,
            "aggregate": "psum",  # of CLS tokens over group; or 'ordered', 'bf16'
            "gradients": "float32",  # on their way over data; or 'bf16'
        }
    )
    config.checkpoint = ml_collections.ConfigDict(
        {"every": 1, "keep_latest": 2, "keep_best": 1}  # every: epochs
    )
    _apply_data(config, data)
    for switch in switches:
        _apply_switch(config, switch)
    config.lock()
    return config


def _update(config: ml_collections.ConfigDict, values: Mapping[str, Any]) -> None:
    """Sets values by 'section.key', in a section of a section by 'section.section.key'."""
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, config)[name] = value


def _augment(recipe: str, data: str) -> dict[str, Any]:
    paper = recipe == "paper"
    return {
        "crop_padding": 0 if paper else 4,
        "flip": not paper and data not in ("digits",),
        "rand_augment_ops": 2,
        "rand_augment_magnitude": 9,
        "trivial_augment": False,
        "random_resized_crop": (),  # or the least and largest share of the area, 0.08,1
        "erasing": 0.0 if paper else 0.25,
        "mixup": 1.0 if paper else 0.8,  # the paper names no alpha: torchvision's default
        "cutmix": 1.0,
        "mix_probability": 1.0 if paper else 0.5,
        "label_smoothing": 0.0 if paper else 0.1,
    }


def _optim(recipe: str) -> dict[str, Any]:
    paper = recipe == "paper"
    return {
        "name": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.01 if paper else 0.05,
        "decay_all": paper,  # the reference decays biases and norms too
        "warmup_epochs": AUTOMATIC,
        "cosine_per": "epoch" if paper else "step",
        "clip_norm": 0.01 if paper else 1.0,
        "beta1": 0.9,
        "beta2": 0.999,
    }


def _apply_data(config: ml_collections.ConfigDict, data: str) -> None:
    """What a data set changes in the strong recipe, what `fast` does, and a family's own paper
    recipe."""
    if config.recipe == "paper":
        recipe = recipes.paper(config.model.family, data, config.model.variant)
        _update(config, {**recipe, "optim.warmup_epochs": AUTOMATIC})
    elif data == "digits":
        # 1,437 training images: a short, light recipe that a laptop finishes in a minute or two.
        config.train.batch, config.train.epochs, config.train.ema_decay = 64, 12.0, 0.98
        config.augment.update({"crop_padding": 2, "rand_augment_ops": 0, "erasing": 0.0})
        config.augment.update({"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.05})
    elif data in ("food101", "imagenet"):
        config.augment.crop_padding = 16
    if config.recipe != "paper":
        _update(config, recipes.strong(config.model.family, data))
    if config.recipe == "fast":
        _update(config, recipes.fast(config.model))


def _apply_switch(config: ml_collections.ConfigDict, switch: str) -> None:
    family = config.model.family
    if switch in _ABLATIONS and family != "hsvit":
        raise ValueError(
            f"{switch} is an ablation of hsvit, and {family} has no such part: leave it out"
        )
    if switch == "tiny":
        sizes = FAMILIES[family].tiny(config.model)
        _update(config, {f"model.{key}": value for key, value in sizes.items()})
        if family != "hsvit":
            config.data.image_size = (32, 32)
        elif config.model.ablation == "attention_only":
            config.data.image_size = (4, 4)
        config.train.update({"batch": 32, "epochs": 0.0, "steps": 8, "log_every": 1})
        config.optim.warmup_epochs = 0.0
        config.init.freeze = ""  # nobody has trained weights for so small a network
    elif switch == "bf16":
        config.model.dtype = "bfloat16"
    else:
        config.model.ablation = switch
        if switch == "attention_only":  # a colour plane is a token of embed_dim pixels
            side = math.isqrt(config.model.embed_dim)
            config.data.image_size = (side, side)
            config.augment.update({"crop_padding": 0, "erasing": 0.0})
