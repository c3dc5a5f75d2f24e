"""The one function that decides every setting's value, and checks across settings."""

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import ml_collections
from flax import traverse_util

from hsvit_jax import models
from hsvit_jax.config import recipes, schema, words
from hsvit_jax.config.layers import Settings, Words, make
from hsvit_jax.models import DEFAULT, FAMILIES

#: optim.warmup_epochs until the steps of the run are known.
AUTOMATIC = -1.0

#: Images of a step of a smoke run, or all that there are.
_TINY = {
    "train.batch": 32,
    "train.epochs": 0.0,
    "train.steps": 8,
    "train.log_every": 1,
    "optim.warmup_epochs": 0.0,
    "init.freeze": "",  # nobody has trained weights for so small a network
}
#: Sections of the recipe small that go with Muon and random weights.
_OF_MUON = ("optim.", "init.")


class Weights(NamedTuple):
    """What init.from names.

    Attributes:
      settings: of the network that is there, in place of the recipe's.
      fills: settings that go with the weights, where no layer has a value.
      source: init.from, with the commit of a network of the hub.
    """

    settings: Mapping[str, Any] = {}
    fills: Mapping[str, Any] = {}
    source: str = ""


NO_WEIGHTS = Weights()


def base(argument: str | None, model: Mapping[str, Any]) -> Settings:
    """Makes the configuration of a network on the data set and recipe that `argument` names.

    Args:
      argument: the words after the colon, see `words.parse_argument`.
      model: the sizes of the `model` section.

    Returns:
      a locked configuration with every key that any part of the program reads.

    Raises:
      ValueError: an unknown word, or a switch that the network's family does not have.
    """
    data, recipe, switches = words.parse_argument(argument)
    family = model.get("family", DEFAULT.name)
    sizes = DEFAULT.defaults if family == DEFAULT.name else {}
    named = Words({"dtype": "float32", "family": family, **sizes, **model}, switches)
    given = [word.strip() for word in (argument or "").split(",")]
    user = {k: v for k, v in (("data.name", data), ("recipe", recipe)) if v in given}
    return make(_layered(user, named), user, named)


def resolve(
    config: ml_collections.ConfigDict,
    info: Any = None,
    *,
    images: int = 0,
    given: Mapping[str, Any] | None = None,
    weights: Weights = NO_WEIGHTS,
) -> Settings:
    """Decides every value. A later layer wins, and what the user set is never changed.

    The layers are the keys' defaults, the family and variant, the recipe, the network of init.from,
    the switches, the data set that is given, and the user. What they leave empty follows from the
    data and the weights.

    Args:
      config: as `get_config` returns it, perhaps with keys assigned since. One that was read from a
        run has its values from there.
      info: the data set's `DataInfo`, where it is known.
      images: the number of training images, where they are counted.
      given: settings by which a data set was made that is not loaded by its name.
      weights: of init.from.

    Raises:
      ValueError: a value contradicts another one, the data or its key's range.
    """
    config = config if isinstance(config, Settings) else Settings(config)
    user, given = config.user, given or {}
    _check_given(user, given)
    classes = info.num_classes if info else 0
    if config.words:
        values = _layered(user, config.words, given, weights.settings, images, classes)
        kept: Collection[str] = user
    else:
        values = {**dict(schema.leaves(config)), **given}
        kept = values.keys()
    values["init.from"] = weights.source or values["init.from"]
    if images and values["train.batch"] > images:
        if "train.batch" in kept:
            raise ValueError(
                f"train.batch={values['train.batch']} is larger than the training split of "
                f"{images} images: lower train.batch or give more images"
            )
        values["train.batch"] = 2 ** int(math.log2(images))
    if not values["augment.flip"] and "eval.tta" not in kept:  # mirrored images are other images
        values["eval.tta"] = "none"
    for key, value in weights.fills.items():
        values[key] = values[key] or value
    if info:
        _fill(values, info, kept)
    found = make(values, user, config.words)
    validate(found)
    if images and found.optim.warmup_epochs == AUTOMATIC:
        found = found.filled({"optim.warmup_epochs": _warmup(found, images)})
    return found


def _layered(
    user: Mapping[str, Any],
    named: Words,
    given: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    images: int = 0,
    classes: int = 0,
) -> dict[str, Any]:
    """Puts the layers on one another; the recipe follows from what the layers above it have."""
    family = user.get("model.family", named.network["family"])
    if family != named.network["family"] and family in FAMILIES:  # a whole section of the user's
        named = named._replace(network={"dtype": "float32", **FAMILIES[family].settings()})
    asked = {**_switched(named), **user, **(given or {})}
    if "train.epochs" in user and "train.steps" not in user:
        asked["train.steps"] = 0
    elif user.get("train.steps") and "train.epochs" not in user:
        asked["train.epochs"] = 0.0
    network = {"model": named.network}
    model = {**named.network, **_section(asked, "model.")}
    if model["family"] not in FAMILIES:
        raise models.UnknownFamily(model["family"])
    data, recipe = user.get("data.name", "cifar10"), user.get("recipe", "strong")
    own = "recipe" not in user and asked.get("data.name", data) not in words.DATA_SETS
    if own and 0 < images < recipes.FEW:
        recipe = "small"
    return {
        **{key: entry.initial for key, entry in schema.KEYS.items()},
        **traverse_util.flatten_dict(network, sep="."),
        **_recipe(recipe, data, model, asked, images, classes),
        "optim.warmup_epochs": AUTOMATIC,
        **(weights or {}),
        "recipe": recipe,
        "data.name": data,
        **asked,
    }


def _check_given(user: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses settings of the user that a data set was not made by."""
    for key in (user.keys() & given.keys()) - {"data.name"}:
        wanted, value = user[key], given[key]
        square = isinstance(wanted, tuple) and len(wanted) == 1 and wanted * 2 == value
        empty = wanted == () or (key == "data.channels" and not wanted)
        if wanted != value and not square and not empty:
            raise ValueError(
                f"{key}={wanted}, but the data set that is given has {value}: leave the setting "
                f"out, or give {key.removeprefix('data.')}= where the data set is made"
            )


def _section(values: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}


def _recipe(
    name: str,
    data: str,
    model: Mapping[str, Any],
    asked: Mapping[str, Any],
    images: int,
    classes: int,
) -> dict[str, Any]:
    """Returns a recipe's values. With trained weights, or an optimizer of the user's that is not
    Muon, a recipe of Muon has AdamW's settings."""
    values = recipes.values(name, model, data)
    plain = asked.get("init.from") or asked.get("optim.name", "muon") != "muon"
    if plain and values.get("optim.name") == "muon":
        values |= recipes.without_muon(model)
    if name != "small" or not images:
        return values
    few = recipes.small(images, classes, model, asked.get("train.epochs", 0.0))
    if steps := asked.get("train.steps"):  # evaluations are counted in epochs
        epochs = steps / max(images // asked.get("train.batch", few["train.batch"]), 1)
        few = recipes.small(images, classes, model, epochs)
    if asked.get("init.cache"):  # which holds no mirrored images
        del few["eval.tta"]
    if asked.get("train.patience"):  # which counts evaluations
        del few["train.eval_every"]
    return values | {k: v for k, v in few.items() if not (plain and k.startswith(_OF_MUON))}


def _switched(named: Words) -> dict[str, Any]:
    """Returns the values of the switches.

    Raises ValueError for an ablation that the network's family does not have.
    """
    family, values = named.network["family"], dict[str, Any]()
    for switch in named.switches:
        model = {**named.network, **_section(values, "model.")}
        if switch in words.ABLATIONS and "ablation" not in model:
            raise ValueError(
                f"{switch} is an ablation of {DEFAULT.name}, and {family} has no such part: "
                "leave it out"
            )
        if switch == "tiny":
            sizes = FAMILIES[family].tiny(model)
            values |= {f"model.{key}": value for key, value in sizes.items()} | _TINY
            if "ablation" not in model:
                values["data.image_size"] = (32, 32)
            elif model["ablation"] == "attention_only":
                values["data.image_size"] = (4, 4)
        elif switch == "bf16":
            values["model.dtype"] = "bfloat16"
        else:
            values["model.ablation"] = switch
        if switch == "attention_only":  # a colour plane is a token of embed_dim pixels
            side = math.isqrt(model["embed_dim"])
            values |= {"data.image_size": (side, side), "init.whiten": False}
            values |= {"augment.crop_padding": 0, "augment.erasing": 0.0}
    return values


def _fill(values: dict[str, Any], info: Any, kept: Collection[str]) -> None:
    """Fills in what follows from the data set, and does not mirror images that must not be."""
    size = tuple(values["data.image_size"]) or tuple(info.image_size)
    values["data.image_size"] = size * 2 if len(size) == 1 else size
    if len(values["data.image_size"]) != 2:
        raise ValueError(f"data.image_size needs rows and columns; got {size}")
    values["data.channels"] = channels = values["data.channels"] or info.channels
    if channels not in (1, 3):  # only a converted network may have others
        raise ValueError(f"data.channels must be 1 (grey) or 3 (colour); got {channels}")
    values["data.num_classes"] = classes = values["data.num_classes"] or info.num_classes
    if classes < info.num_classes:
        raise ValueError(
            f"data.num_classes={classes}, but {values['data.name']} has {info.num_classes} "
            "classes: raise it, or leave it out"
        )
    for name in ("mean", "std"):
        key = f"data.{name}"
        values[key] = per_channel(key, values[key] or getattr(info, name), channels)
    for key, off in () if info.flip else (("augment.flip", False), ("eval.tta", "none")):
        if key not in kept:
            values[key] = off
        elif values[key] != off:
            warnings.warn(
                f"{key}={values[key]} mirrors images, and those of {values['data.name']} mean "
                "something else then",
                stacklevel=2,
            )


def _warmup(config: Settings, images: int) -> float:
    """Returns the recipe's epochs of warm-up, at most a tenth of the run."""
    recipe = recipes.values(config.recipe, config.model, config.data.name)
    steps_per_epoch = images // config.train.batch
    most = total_steps(config, steps_per_epoch) // 10 / steps_per_epoch
    return min(recipe["optim.warmup_epochs"], most)


def refuse_unread(config: Settings, own: Collection[str] | None = None) -> None:
    """Raises ValueError for a setting of the user that another one leaves without effect.

    Args:
      config: resolved, as the number of images may choose the recipe.
      own: keys of the settings to check; all of the user's by default.
    """
    if reason := schema.unread(config, config.user if own is None else own):
        raise ValueError(reason)


def per_channel(key: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Statistics for each channel: grey from colour is the mean, colour from grey three copies.

    Raises ValueError, with the name `key`, for values of another number of channels.
    """
    if len(values) == channels:
        return tuple(float(v) for v in values)
    if len(values) not in (1, 3):
        raise ValueError(f"{key} must hold one value per channel ({channels}); got {values}")
    return (float(sum(values)) / len(values),) * channels


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for a value outside its key's range, and for values that contradict."""
    schema.check(config)
    if config.eval.tta != "none" and config.init.cache:
        raise ValueError(
            "init.cache holds features of the images as they are, none of the others that "
            f"eval.tta={config.eval.tta!r} needs: set eval.tta='none' or init.cache=''"
        )
    if config.data.repeats > 1 and config.data.balance == "sample":
        raise ValueError(
            f"data.repeats={config.data.repeats} and data.balance='sample' both say which images "
            "an epoch shows: set data.repeats=1 or another data.balance"
        )
    model = config.model
    whitens = FAMILIES[model.family].network.whitens
    if config.init.whiten and not (whitens and model.get("ablation") != "attention_only"):
        raise ValueError(
            "init.whiten is a start of the convolution that an HSViT sees an image with; "
            f"{model.variant} ({model.family}) has none: set it to false"
        )
    whitened, sides = config.init.whiten and not config.init["from"], config.data.image_size
    if whitened and sides and max(model.conv_kernels[:1], default=0) > min(sides):
        raise ValueError(
            "init.whiten takes image patches as large as the first kernel, and "
            f"model.conv_kernels={model.conv_kernels} has one larger than "
            f"data.image_size={sides}: set it to false, or a smaller kernel"
        )
    train = config.train
    if train.epochs and train.steps:
        raise ValueError(
            f"train.epochs={train.epochs:g} and train.steps={train.steps} both say how long to "
            "train: set one of them to 0"
        )
    if train.batch % train.accumulate:
        raise ValueError(
            f"train.batch={train.batch} cannot be computed in train.accumulate={train.accumulate} "
            "equal parts: set a multiple"
        )
    if train.select_on == "last" and train.patience:
        raise ValueError(
            "train.patience ends a run by what train.select_on measures, and 'last' measures "
            "nothing: set one of them to its default"
        )
    held_out = config.data.name not in words.DATA_SETS  # perhaps, in a part of its own
    if train.select_on in ("val", "macro_f1") and not (config.data.val_fraction or held_out):
        raise ValueError(
            f"train.select_on={train.select_on!r} needs a held-out validation split, but "
            "data.val_fraction=0: hold some out, or say train.select_on='last' to take the last "
            "checkpoint"
        )


def selection(config: ml_collections.ConfigDict) -> tuple[str, str]:
    """The split that is evaluated in training, and the figure of `Evaluation` that selects the best
    checkpoint, '' for none."""
    select_on = config.train.select_on
    figure = {"macro_f1": "macro_f1", "last": ""}.get(select_on, "accuracy")
    return "test" if select_on == "test" else "val", figure


def eval_batch(config: ml_collections.ConfigDict) -> int:
    """Batch size of evaluation: eval.batch, or what the training step computes at a time, which
    needs more memory."""
    return config.eval.batch or config.train.batch // config.train.accumulate


def total_steps(config: ml_collections.ConfigDict, steps_per_epoch: int) -> int:
    """Counts the optimizer steps of a run: train.steps, or train.epochs converted.

    Raises ValueError for less than one step, and for more than can be counted.
    """
    total = config.train.steps or round(config.train.epochs * steps_per_epoch)
    if not total and config.train.epochs:
        raise ValueError(
            f"train.epochs={config.train.epochs:g} is less than one step of {config.train.batch} "
            "images: raise it, or set train.epochs=0 and train.steps"
        )
    if total > schema.MOST_STEPS:
        raise ValueError(
            f"train.epochs={config.train.epochs:g} are {total:,} steps, and at most "
            f"{schema.MOST_STEPS:,} can be counted: lower it"
        )
    return total


def title(model: Mapping[str, Any]) -> str:
    """Returns the name of a `model` section's network for people: 'c2a2', 'resnet 18'."""
    own_name = model["family"] == DEFAULT.name
    return " ".join([*[model["family"]] * (not own_name), model["variant"]])


def build_model(config: ml_collections.ConfigDict) -> Any:
    """Builds the network of a resolved configuration."""
    return models.build(
        config.model.to_dict(),
        image_size=tuple(config.data.image_size),
        channels=config.data.channels,
        num_classes=config.data.num_classes,
    )
