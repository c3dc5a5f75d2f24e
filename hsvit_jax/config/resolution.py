"""The one function that decides every setting's value, and checks across settings."""

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import ml_collections

from hsvit_jax import models, tasks
from hsvit_jax.config import recipes, schema, words
from hsvit_jax.config.layers import Settings, Words, make
from hsvit_jax.models import DEFAULT, FAMILIES

#: optim.warmup_epochs until the steps of the run are known.
AUTOMATIC = -1.0

#: Values of every recipe that a task has no use for.
_UNUSED = {"regress": {"augment.label_smoothing": 0.0}}
#: Settings of a smoke run.
_TINY = {
    "train.batch": 32,
    "train.epochs": 0.0,
    "train.steps": 8,
    "train.log_every": 1,
    "optim.warmup_epochs": 0.0,
    "init.freeze": "",  # no trained weights of so small a network exist
}
#: Sections of the recipe small that go with Muon and random weights.
_OF_MUON = ("optim.", "init.")


class Weights(NamedTuple):
    """What goes with the weights of init.from.

    Attributes:
      settings: of a stored network, which replace the recipe's.
      fills: settings that apply where no layer has a value.
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
      a locked configuration with every key.

    Raises:
      ValueError: an unknown word, or a switch that the network's family does not have.
    """
    data, recipe, switches = words.parse_argument(argument)
    family = model.get("family", DEFAULT.name)
    sizes = DEFAULT.defaults if family == DEFAULT.name else {}
    named = Words({"dtype": "float32", "family": family, **sizes, **model}, switches)
    given = words.split(argument)
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
    """Decides every value; a later layer wins, and the user's values never change.

    The layers are the keys' defaults, the family and variant, the recipe, the network of init.from,
    the switches, a given data set, and the user. Values that stay empty follow from the data and
    the weights.

    Args:
      config: as `get_config` returns it, perhaps with keys assigned since. A stored run's keeps its
        values.
      info: the data set's `DataInfo`, once it is known.
      images: the number of training images, once they are counted.
      given: settings of a data set that was not loaded by its name.
      weights: of init.from.

    Raises:
      ValueError: a value contradicts another one, the data or its key's range.
    """
    config = config if isinstance(config, Settings) else Settings(config)
    user, given = config.user, given or {}
    _check_given(user, given)
    if config.words:
        classes = info.num_classes if info else 0
        values = _layered(user, config.words, given, weights.settings, images, classes)
        kept: Collection[str] = user
    else:
        values = {**dict(schema.leaves(config)), **given}
        kept = values.keys()
    values["init.from"] = weights.source or values["init.from"]
    if images and (batch := values["train.batch"]) > images:
        if "train.batch" in kept:
            raise ValueError(
                f"train.batch={batch} is larger than the training split of {images} images: lower "
                "train.batch or add images"
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
    """Stacks the layers; the recipe follows from the values of the layers above it."""
    network = named.network
    family = user.get("model.family", network["family"])
    if family not in FAMILIES:
        raise models.UnknownFamily(family)
    if family != network["family"]:  # the user replaced the whole section
        network = {"dtype": "float32", **FAMILIES[family].settings()}
    asked = {**_switched(network, named.switches), **user, **(given or {})}
    if "train.epochs" in user and "train.steps" not in user:
        asked["train.steps"] = 0
    elif user.get("train.steps") and "train.epochs" not in user:
        asked["train.epochs"] = 0.0
    data, recipe = user.get("data.name", "cifar10"), user.get("recipe", "strong")
    custom = asked.get("data.name", data) not in words.DATA_SETS
    if custom and "recipe" not in user and 0 < images < recipes.FEW:
        recipe = "small"
    return {
        **{key: entry.initial for key, entry in schema.KEYS.items()},
        **dict(schema.leaves(ml_collections.ConfigDict({"model": network}))),
        **_recipe(recipe, data, {**network, **_model(asked)}, asked, images, classes),
        "optim.warmup_epochs": AUTOMATIC,
        **(weights or {}),
        **_UNUSED.get(asked.get("data.task", "classify"), {}),
        "recipe": recipe,
        "data.name": data,
        **asked,
    }


def _check_given(user: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses user's settings that a given data set was made without."""
    for key in (user.keys() & given.keys()) - {"data.name"}:
        wanted, value = user[key], given[key]
        square = isinstance(wanted, tuple) and len(wanted) == 1 and wanted * 2 == value
        empty = wanted == () or (key == "data.channels" and not wanted)
        if wanted != value and not square and not empty:
            raise ValueError(
                f"{key}={wanted}, but the data set that is given has {value}: remove the setting, "
                f"or pass {key.removeprefix('data.')}= where the data set is made"
            )


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the `model` section of values by 'section.key'."""
    return {k.removeprefix("model."): v for k, v in values.items() if k.startswith("model.")}


def _recipe(
    name: str,
    data: str,
    model: Mapping[str, Any],
    asked: Mapping[str, Any],
    images: int,
    classes: int,
) -> dict[str, Any]:
    """Returns a recipe's values.

    With trained weights, or another optimizer of the user's, AdamW's settings replace Muon's.
    """
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
    if asked.get("init.cache"):  # it holds no mirrored images
        del few["eval.tta"]
    if asked.get("train.patience"):  # it counts evaluations
        del few["train.eval_every"]
    return values | {k: v for k, v in few.items() if not (plain and k.startswith(_OF_MUON))}


def _switched(network: Mapping[str, Any], switches: Collection[str]) -> dict[str, Any]:
    """Returns the switches' values; raises ValueError for an ablation of another family."""
    values = dict[str, Any]()
    for switch in switches:
        model = {**network, **_model(values)}
        if switch in words.ABLATIONS and "ablation" not in model:
            raise ValueError(
                f"{switch} is an ablation of {DEFAULT.name}, and {network['family']} has no such "
                "part: remove it"
            )
        if switch == "tiny":
            sizes = FAMILIES[network["family"]].tiny(model)
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
    """Fills in what follows from the data set; switches mirroring off if images forbid it."""
    size = tuple(values["data.image_size"]) or tuple(info.image_size)
    values["data.image_size"] = size * 2 if len(size) == 1 else size
    stored = tuple(values.get("data.train_size", ()))
    values["data.train_size"] = stored * 2 if len(stored) == 1 else stored
    values["data.channels"] = channels = values["data.channels"] or info.channels
    values["data.num_classes"] = classes = values["data.num_classes"] or info.num_classes
    if len(values["data.image_size"]) != 2:
        raise ValueError(f"data.image_size needs rows and columns; got {size}")
    if channels not in (1, 3):  # only a converted network may have others
        raise ValueError(f"data.channels must be 1 (grey) or 3 (colour); got {channels}")
    if classes < info.num_classes or (classes > info.num_classes and info.task != "classify"):
        raise ValueError(
            f"data.num_classes={classes}, but {values['data.name']} has {info.num_classes} "
            f"{tasks.TASKS[info.task].noun}: {'raise it, or ' * (info.task == 'classify')}remove it"
        )
    for key in ("data.target_mean", "data.target_std") if info.task == "regress" else ():
        values[key] = values[key] or getattr(info, key.removeprefix("data."))
    for name in ("mean", "std"):
        key = f"data.{name}"
        values[key] = per_channel(key, values[key] or getattr(info, name), channels)
    for key, off in () if info.flip else (("augment.flip", False), ("eval.tta", "none")):
        if key not in kept:
            values[key] = off
        elif values[key] != off:
            warnings.warn(
                f"{key}={values[key]} mirrors images of {values['data.name']}, which changes their "
                "meaning",
                stacklevel=2,
            )


def _warmup(config: Settings, images: int) -> float:
    """Returns the recipe's epochs of warm-up, at most a tenth of the run."""
    recipe = recipes.values(config.recipe, config.model, config.data.name)
    steps_per_epoch = images // config.train.batch
    most = total_steps(config, steps_per_epoch) // 10 / steps_per_epoch
    return min(recipe["optim.warmup_epochs"], most)


def per_channel(key: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Returns statistics for each channel: grey is the mean of colours, colour repeats grey.

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
    data, train, init, model = config.data, config.train, config.init, config.model
    whitens = FAMILIES[model.family].network.whitens and model.get("ablation") != "attention_only"
    kernel = max(model.conv_kernels[:1], default=0) if init.whiten and whitens else 0
    small = kernel > min(data.image_size or (kernel,)) and not init["from"]
    held_out = data.val_fraction or data.name not in words.DATA_SETS  # perhaps in the data set
    outputs = data.num_classes
    for contradicts, reason in (
        (
            outputs and not {len(data.target_mean), len(data.target_std)} <= {0, outputs},
            f"data.target_mean and data.target_std need {outputs} values, one for each column",
        ),
        (
            outputs and len(config.eval.threshold) not in (1, outputs),
            f"eval.threshold needs one value, or one for each of {outputs} labels",
        ),
        (
            data.task == "regress" and train.select_on == "macro_f1",
            "train.select_on='macro_f1' needs classes or labels: set 'val' to select by R²",
        ),
        (
            config.eval.tta != "none" and init.cache,
            f"eval.tta={config.eval.tta!r} needs other views than init.cache holds: set "
            "eval.tta='none' or init.cache=''",
        ),
        (
            init.teacher and init.cache,
            "init.teacher sees images, and init.cache holds features instead: remove one of them",
        ),
        (
            data.repeats > 1 and data.balance == "sample",
            f"data.repeats={data.repeats} and data.balance='sample' both choose an epoch's images: "
            "set data.repeats=1 or another data.balance",
        ),
        (
            init.whiten and not whitens,
            f"init.whiten needs an HSViT's first convolution, and {model.variant} ({model.family}) "
            "has none: set it to false",
        ),
        (
            small,
            f"init.whiten needs patches as large as model.conv_kernels={kernel}, and "
            f"data.image_size={data.image_size} is smaller: set it to false, or a smaller kernel",
        ),
        (
            train.epochs and train.steps,
            f"train.epochs={train.epochs:g} and train.steps={train.steps} both set the length: set "
            "one of them to 0",
        ),
        (
            train.batch % train.accumulate,
            f"train.batch={train.batch} has no train.accumulate={train.accumulate} equal parts: "
            "set a multiple",
        ),
        (
            train.select_on in ("val", "macro_f1") and not held_out,
            f"train.select_on={train.select_on!r} needs a held-out validation split, but "
            "data.val_fraction=0: raise it, or set train.select_on='last'",
        ),
    ):
        if contradicts:
            raise ValueError(reason)


def selection(config: ml_collections.ConfigDict) -> tuple[str, str]:
    """Returns the split evaluated in training, and the selecting figure of `Evaluation` or ''."""
    select_on, metrics = config.train.select_on, config.train.metrics
    own = metrics[0] if metrics else tasks.TASKS[config.data.task].reported[0]
    figure = {"macro_f1": "macro_f1", "last": ""}.get(select_on, own)
    return "test" if select_on == "test" else "val", figure


def eval_batch(config: ml_collections.ConfigDict) -> int:
    """Returns eval.batch, or as many images as the training step computes at a time."""
    return config.eval.batch or config.train.batch // config.train.accumulate


def total_steps(config: ml_collections.ConfigDict, steps_per_epoch: int) -> int:
    """Counts the optimizer steps of a run: train.steps, or train.epochs converted.

    Raises ValueError for less than one step, and for too many to count.
    """
    train = config.train
    total = train.steps or round(train.epochs * steps_per_epoch)
    if not total and train.epochs:
        raise ValueError(
            f"train.epochs={train.epochs:g} is less than one step of {train.batch} images: raise "
            "it, or set train.epochs=0 and train.steps"
        )
    if total > schema.MOST_STEPS:
        raise ValueError(
            f"train.epochs={train.epochs:g} are {total:,} steps, above the limit of "
            f"{schema.MOST_STEPS:,}: lower it"
        )
    return total


def title(model: Mapping[str, Any]) -> str:
    """Returns the displayed name of a `model` section's network: 'c2a2', 'resnet 18'."""
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
