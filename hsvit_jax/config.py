"""Configurations: what the argument after the colon means, recipes, durations, cross-field checks.

A config file calls `base` with its network's sizes and the argument after the colon, such as
`configs/c4a8.py:cifar100,paper`. What is left empty there (image size, classes, mean, std, pool
strides) follows from the data set once it is known: see `resolve`.
"""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import ml_collections

from hsvit_jax import config_keys, recipes

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
#: optim.warmup_epochs that is not set by hand: see `with_warmup`.
AUTOMATIC = -1.0
RECIPES = ("strong", "paper")
SWITCHES = ("tiny", "bf16", "conv_only", "attention_only")
_ABLATIONS = ("conv_only", "attention_only")  # of hsvit

# Settings that are in a run's folder name already, or that leave its results as they are.
_NO_OTHER_RUN = (
    "seed",
    "init.cache",
    "data.name",
    "data.dir",
    "mesh.data",
    "mesh.group",
    "train.log_every",
    "eval.batch",
    "checkpoint.every",
    "checkpoint.keep_best",
    "checkpoint.keep_latest",
)

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


def nearest(word: str, known: tuple[str, ...] | list[str]) -> str:
    """' Did you mean …?' for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f" Did you mean {close[0]}?" if close else ""


#: What an HSViT's sizes rarely change; other families say all of theirs.
_HSVIT = {
    "family": "hsvit",
    "ablation": "none",
    "pool_strides": (),
    "trunk": "replicated",
    "towers": 1,
    "group_dropout": 0.0,
    "convolution": "dense",
    "tiles": (1, 1),
    "votes": "equal",
}


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
    usual = _HSVIT if model.get("family", "hsvit") == "hsvit" else {}
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
    config.eval = ml_collections.ConfigDict({"batch": 0})  # 0: see `eval_batch`
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
    """What a data set changes in the strong recipe, and a family's own paper recipe."""
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
    if config.recipe == "strong":
        _update(config, recipes.strong(config.model.family, data))


def _apply_switch(config: ml_collections.ConfigDict, switch: str) -> None:
    family = config.model.family
    if switch in _ABLATIONS and family != "hsvit":
        raise ValueError(
            f"{switch} is an ablation of hsvit, and {family} has no such part: leave it out"
        )
    if switch == "tiny":
        if family == "hsvit":
            blocks = len(config.model.conv_channels)
            config.model.update({"groups": 4, "depth": 2, "embed_dim": 16, "heads": 2})
            config.model.conv_channels = (8,) * (blocks - 1) + (16,)
        _update(config, recipes.tiny(config.model))
        config.train.update({"batch": 32, "epochs": 0.0, "steps": 8, "log_every": 1})
        config.optim.warmup_epochs = 0.0
        config.init.freeze = ""  # nobody has trained weights for so small a network
        if family == "hsvit" and config.model.ablation == "attention_only":
            config.data.image_size = (4, 4)
    elif switch == "bf16":
        config.model.dtype = "bfloat16"
    else:
        config.model.ablation = switch
        if switch == "attention_only":  # a colour plane is a token of embed_dim pixels
            side = math.isqrt(config.model.embed_dim)
            config.data.image_size = (side, side)
            config.augment.update({"crop_padding": 0, "erasing": 0.0})


def resolve(config: ml_collections.ConfigDict, info: Any) -> ml_collections.ConfigDict:
    """A copy in which everything that follows from the data set is filled in, and checked.

    info: the data set's `DataInfo` (image_size, channels, num_classes, mean, std). Raises
    ValueError naming the key, what was given and what fits.
    """
    config = config.copy_and_resolve_references()
    data = config.data
    size = tuple(data.image_size) or tuple(info.image_size)
    data.image_size = size * 2 if len(size) == 1 else size
    if len(data.image_size) != 2:
        raise ValueError(f"data.image_size needs rows and columns; got {data.image_size}")
    data.channels = data.channels or info.channels
    if data.channels not in (1, 3):  # only a converted network may have others
        raise ValueError(f"data.channels must be 1 (grey) or 3 (colour); got {data.channels}")
    data.num_classes = data.num_classes or info.num_classes
    if data.num_classes < info.num_classes:
        raise ValueError(
            f"data.num_classes={data.num_classes}, but {data.name} has {info.num_classes} classes"
        )
    data.mean = _per_channel("data.mean", data.mean or info.mean, data.channels)
    data.std = _per_channel("data.std", data.std or info.std, data.channels)
    config.augment.flip = config.augment.flip and info.flip  # a mirrored digit is another digit
    validate(config)
    return config.lock()


def _per_channel(key: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Colour statistics for grey images and the reverse: the mean, or the same value thrice."""
    if len(values) == channels:
        return tuple(float(v) for v in values)
    if len(values) not in (1, 3):
        raise ValueError(f"{key} must hold one value per channel ({channels}); got {values}")
    return (float(sum(values)) / len(values),) * channels


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for a value outside its key's range (see `config_keys`), and for values
    that cannot work together."""
    config_keys.check(config)
    train = config.train
    if train.epochs and train.steps:
        raise ValueError(
            f"train.epochs={train.epochs:g} and train.steps={train.steps} both say how long to "
            "train: set one of them to 0"
        )
    if train.select_on == "val" and config.data.val_fraction == 0:
        raise ValueError(
            "train.select_on='val' needs a held-out validation split, but data.val_fraction=0: "
            "hold some out, or say train.select_on='test' and report it so"
        )


def eval_batch(config: ml_collections.ConfigDict) -> int:
    """Images in a batch of an evaluation: eval.batch, by default the training batch, whose forward
    pass is a part of the training step and needs less memory than it."""
    return config.eval.batch or config.train.batch


def total_steps(config: ml_collections.ConfigDict, steps_per_epoch: int) -> int:
    """How many optimizer steps a run has: the one place where epochs become steps.

    Raises ValueError for more than can be counted.
    """
    total = config.train.steps or round(config.train.epochs * steps_per_epoch)
    if total > config_keys.MOST_STEPS:
        raise ValueError(
            f"train.epochs={config.train.epochs:g} are {total:,} steps, and at most "
            f"{config_keys.MOST_STEPS:,} can be counted: lower it"
        )
    return total


def with_warmup(
    config: ml_collections.ConfigDict, total: int, steps_per_epoch: int
) -> ml_collections.ConfigDict:
    """A copy in which optim.warmup_epochs is a number: as set by hand, else the recipe's epochs,
    but at most a tenth of the run's `total` steps."""
    if config.optim.warmup_epochs != AUTOMATIC:
        return config
    own = 1.0 if config.data.name == "digits" else 5.0
    if config.recipe == "paper":
        recipe = recipes.paper(config.model.family, config.data.name, config.model.variant)
        own = recipe.get("optim.warmup_epochs", 0.0)
    config = config.copy_and_resolve_references()
    config.optim.warmup_epochs = min(own, total // 10 / steps_per_epoch)
    return config.lock()


def names_run(key: str) -> bool:
    """Whether a setting decides the name that `default_workdir` gives."""
    return key in ("seed", "data.name") or key not in _NO_OTHER_RUN


def default_workdir(
    config: ml_collections.ConfigDict, spec: str, settings: Sequence[str] = ()
) -> str:
    """A readable folder under runs/: configuration, data set, recipe, switches, changes and seed.

    spec: the configuration's file or name with the words after the colon; settings: the KEY=VALUE
    texts that changed it. The same command gives the same folder, so that a second run goes on
    where the first stopped, and another setting gives another, so that runs do not mix.
    """
    place, _, argument = spec.partition(":")
    stem = place.rsplit("/", 1)[-1].removesuffix(".py")
    kind, _, path = config.data.name.partition("=")
    data = f"{kind}-{path.rstrip('/').rsplit('/', 1)[-1]}" if path else kind
    given = [word.strip() for word in argument.split(",")]
    variant = [config.model.variant] if config.model.family != "hsvit" else []
    words = [stem, *variant, data, config.recipe, *(word for word in SWITCHES if word in given)]
    last = dict(setting.partition("=")[::2] for setting in settings)
    for key, value in sorted(last.items()):
        if key == "init.from":
            value = value.rstrip("/").rpartition("/")[2]
        if key not in _NO_OTHER_RUN:
            words.append(key.rpartition(".")[2] + value)
    name = "-".join([*words, f"seed{config.seed}"])
    return "runs/" + re.sub(r"[^\w.=-]+", "_", name)[:200]


def to_json(config: ml_collections.ConfigDict) -> str:
    """The configuration as indented JSON, to be read by people and by `from_json`."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True)


def from_json(text: str) -> ml_collections.ConfigDict:
    """A configuration written by `to_json`; lists come back as tuples.

    Raises ValueError if the text holds no JSON object.
    """

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: tuples(v) for k, v in value.items()}
        return tuple(tuples(v) for v in value) if isinstance(value, list) else value

    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError(f"a configuration is a JSON object; got {type(tree).__name__}")
    return ml_collections.ConfigDict(tuples(tree)).lock()
