"""Settings derived from the data set and from the run's length, and checks across settings."""

import math
import warnings
from typing import Any

import ml_collections

from hsvit_jax import models
from hsvit_jax.config import recipes, schema, words
from hsvit_jax.models import FAMILIES


def for_few_images(
    config: ml_collections.ConfigDict, examples: int, classes: int
) -> ml_collections.ConfigDict:
    """Fits the recipe, in a copy, to the number of images: see `recipes.small`.

    The recipe `small` is for fewer than `recipes.FEW` training images of a data set without a name
    of its own, where no other recipe is named. What was set by hand stays: all values but those of
    the recipe, and those in `by_hand`. No recipe's own batch is larger than the training split.
    With trained weights (`init.from`), and with an optimizer by hand that is not Muon, a recipe of
    Muon has AdamW's settings (`recipes.without_muon`).
    """
    plain = dict(schema.leaves(words.plain(config.data.name, config.recipe, config.model)))
    changed = (key for key, value in schema.leaves(config) if plain.get(key, value) != value)
    by_hand = {*config.by_hand, *changed}
    if by_hand & {"train.epochs", "train.steps"}:
        by_hand |= {"train.epochs", "train.steps"}
    named = "recipe" in by_hand or config.data.name in words.DATA_SETS
    values: dict[str, Any] = {}
    if config.recipe == "small" or (examples < recipes.FEW and not named):
        epochs = config.train.epochs if "train.epochs" in by_hand else 0.0
        values = recipes.small(examples, classes, config.model, epochs)
        if config.train.steps:  # its evaluations are counted in epochs
            batch = config.train.batch if "train.batch" in by_hand else values["train.batch"]
            epochs = config.train.steps / max(examples // batch, 1)
            values = recipes.small(examples, classes, config.model, epochs)
        if config.init.cache:
            by_hand.add("eval.tta")
        if config.train.patience:  # which counts evaluations
            by_hand.add("train.eval_every")
    config = config.copy_and_resolve_references()
    if values:
        config.recipe = "small"
    if config.init["from"] or config.optim.name != plain["optim.name"] == "muon":
        values = {k: v for k, v in values.items() if not k.startswith(("optim.", "init."))}
        if plain["optim.name"] == "muon":
            values = recipes.without_muon(config.model) | values
    words.update(config, {key: v for key, v in values.items() if key not in by_hand})
    if not config.augment.flip and "eval.tta" not in by_hand:  # they are other images
        config.eval.tta = "none"
    if config.train.batch > examples and "train.batch" not in config.by_hand:
        lowered = 2 ** int(math.log2(examples))
        if "train.batch" in by_hand and config.train.batch != words.TINY_BATCH:
            text = f"train.batch={config.train.batch} is more than the {examples} training images"
            warnings.warn(f"{text}: {lowered} is used", stacklevel=2)
        config.train.batch = lowered
    return config.lock()


def refuse_unread(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for a setting given by hand that another one leaves without effect.

    Args:
      config: after `for_few_images`, which may choose the recipe.
    """
    if reason := schema.unread(config, config.by_hand):
        raise ValueError(reason)


def resolve(config: ml_collections.ConfigDict, info: Any) -> ml_collections.ConfigDict:
    """Fills in a copy what follows from the data set, and validates it.

    Args:
      config: as `get_config` returns it; what is set there stays.
      info: the data set's `DataInfo` (image_size, channels, num_classes, mean, std, flip).

    Raises:
      ValueError: a value does not fit the data set, or its key's range.
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
            f"data.num_classes={data.num_classes}, but {data.name} has {info.num_classes} classes: "
            "raise it, or leave it out"
        )
    data.mean = per_channel("data.mean", data.mean or info.mean, data.channels)
    data.std = per_channel("data.std", data.std or info.std, data.channels)
    if not info.flip:
        _unmirror(config)
    validate(config)
    return config.lock()


def _unmirror(config: ml_collections.ConfigDict) -> None:
    """Switches off what mirrors images, as a mirrored digit is another digit; warns of what is set
    by hand."""
    for section, key, off in (("augment", "flip", False), ("eval", "tta", "none")):
        if config[section][key] != off and f"{section}.{key}" in config.by_hand:
            warnings.warn(
                f"{section}.{key}={config[section][key]} is not used: it mirrors images, and "
                f"those of {config.data.name} mean something else then",
                stacklevel=2,
            )
        config[section][key] = off


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

    Raises ValueError for more than can be counted.
    """
    total = config.train.steps or round(config.train.epochs * steps_per_epoch)
    if total > schema.MOST_STEPS:
        raise ValueError(
            f"train.epochs={config.train.epochs:g} are {total:,} steps, and at most "
            f"{schema.MOST_STEPS:,} can be counted: lower it"
        )
    return total


def with_warmup(
    config: ml_collections.ConfigDict, total: int, steps_per_epoch: int
) -> ml_collections.ConfigDict:
    """Sets optim.warmup_epochs in a copy, unless it was set by hand.

    Args:
      total: steps of the run, of which warm-up takes at most a tenth.
    """
    if config.optim.warmup_epochs != words.AUTOMATIC:
        return config
    recipe = recipes.values(config.recipe, config.model, config.data.name)
    config = config.copy_and_resolve_references()
    most = total // 10 / steps_per_epoch
    config.optim.warmup_epochs = min(recipe["optim.warmup_epochs"], most)
    return config.lock()


def build_model(config: ml_collections.ConfigDict) -> Any:
    """Builds the network of a resolved configuration."""
    return models.build(
        config.model.to_dict(),
        image_size=tuple(config.data.image_size),
        channels=config.data.channels,
        num_classes=config.data.num_classes,
    )
