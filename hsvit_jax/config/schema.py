"""The schema of a configuration: meaning, type, range, default and condition of each key.

The networks' config dataclasses declare the keys of `model` (`models.settings`); the table below
declares all others. Defaults, validation, parsing, `--help`, the tables in docs/ and the error on a
setting without effect derive from both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import ml_collections

from hsvit_jax.models import FAMILIES, UnknownFamily
from hsvit_jax.models.settings import ON, Key

# The step is counted in 32 bits.
MOST_STEPS = 2**31 - 1

#: Keys that follow from --config and cannot be set alone.
LABELS = ("recipe", "model.family", "model.variant", "model.backbone")

#: Keys that --help shows; --helpfull shows all.
FIRST = (
    *("train.epochs", "train.batch", "train.patience", "train.eval_every", "train.select_on"),
    *("optim.learning_rate", "optim.weight_decay", "data.image_size", "data.val_fraction"),
    *("data.balance", "data.on_bad_image", "augment.flip", "augment.mixup", "augment.cutmix"),
    *("model.dropout", "eval.tta", "init.from", "init.freeze", "data.fit", "seed"),
)

_whole = partial(Key, kind=int)
_number = partial(Key, kind=float)
_positive = partial(Key, kind=float, above=0.0)
_rate = partial(Key, kind=float, low=0.0, below=1.0)
_flag = partial(Key, kind=bool)
_text = partial(Key, kind=str)


def _choice(meaning: str, *choices: Any, **more: Any) -> Key:
    return Key(meaning, kind=type(choices[0]), choices=choices, **more)


# Reasons of keys, see `Key.fixed`.
_PIXELS = "the network learned from pixels normalised so"
_MEANING = "the network's outputs mean it"
_CHOSEN = "the best checkpoint so far was chosen by it"
#: A run that resumes from a checkpoint may leave these out.
STARTED = "the training started with it and resumes from its checkpoint"
_MOMENTS = "the optimizer's moments are part of the training state"
_AVERAGE = "whether there is a moving average is part of the training state"
_TRAINED = "what is trained is part of the training state"
_TAUGHT = "a run has one teacher from its start to its end"
# Conditions of keys, see `Key.when`.
_MIXES = {"mix_probability": ON}
_MIXING = {"mixup": ON, "cutmix": ON}
_RAND_AUGMENT = {"rand_augment_ops": ON}
_SECOND_MOMENT = ("adamw", "nadamw", "lamb", "lion", "muon")
_TEACHER = {"init.teacher": ON}
_SELECTS = {"train.select_on": ("val", "test", "macro_f1")}
_CLASSES = {"data.task": ("classify",)}
_LABELS = {"data.task": ("classify", "multilabel")}
_MULTILABEL = {"data.task": ("multilabel",)}
_COLUMNS = {"several": True, "when": [{"data.task": ("regress",)}], "fixed": _MEANING}

#: Keys outside `model`. Recipes start from their defaults, most of which are the strong recipe's.
KEYS: Mapping[str, Key] = {
    "seed": _whole("seed of every random number of the run", 0, 2**32 - 1),
    "recipe": _choice(
        "recipe of training and augmentation, named after the colon",
        *("strong", "fast", "paper", "small", "finetune"),
    ),
    "data.name": _text(
        "data set: a name, folder=PATH, csv=PATH, hf=NAME or tfds=NAME", default="cifar10"
    ),
    "data.task": _choice(
        "what is learned: a class, several labels, or numbers of an image",
        *("classify", "multilabel", "regress"),
        fixed=_MEANING,
    ),
    "data.target_mean": _number(
        "mean of each column of numbers; empty: the training images'", -1e15, 1e15, **_COLUMNS
    ),
    "data.target_std": _positive(
        "deviation of each column of numbers; empty: the training images'", high=1e15, **_COLUMNS
    ),
    "data.dir": _text("directory of data sets; empty: $HSVIT_DATA_DIR, or the user's cache"),
    "data.fit": _choice("fitting of photos to the image size", "crop", "pad", "stretch"),
    "data.image_size": _whole(
        "image height,width in pixels; empty: the data set's", 1, 2**13, several=True
    ),
    "data.train_size": _whole(
        "height,width of training photos that random resized crops are cut from; empty: image_size",
        1,
        2**13,
        several=True,
        when=[{"augment.random_resized_crop": ON}],
        off=(),
    ),
    "data.channels": _whole("image channels, 1 or 3; 0: the data set's", 0, 1024),
    "data.num_classes": _whole("number of classes; 0: the data set's", 0, 2**16),
    "data.mean": _number(
        "mean of each channel in [0, 1]; empty: the data set's", 0, 1, several=True, fixed=_PIXELS
    ),
    "data.std": _positive(
        "standard deviation of each channel; empty: the data set's",
        high=1.0,
        several=True,
        fixed=_PIXELS,
    ),
    "data.val_fraction": _number(
        "fraction of the training images held out for validation", 0.0, 0.8, default=0.1
    ),
    "data.fraction": _positive(
        "fraction of each class's training and validation images in use", high=1.0, default=1.0
    ),
    "data.balance": _choice(
        "balance of uneven classes: by weights in the loss, or by equally many draws",
        *("none", "weights", "sample"),
        when=[_CLASSES],
        off="none",
    ),
    "data.repeats": _whole("repeated augmentation: views of an image in an epoch", 1, 64),
    "data.on_bad_image": _choice("reaction to an unreadable image", "error", "skip"),
    "augment.crop_padding": _whole("padding in pixels before a random crop", 0, 4096, default=4),
    "augment.crop_reflect": _flag(
        "padding that mirrors the image, rather than black", when=[{"crop_padding": ON}], off=False
    ),
    "augment.random_resized_crop": _positive(
        "smallest and largest area of a random resized crop; empty: none", high=1, several=True
    ),
    "augment.flip": _flag("random horizontal flips", default=True),
    "augment.flip_alternate": _flag(
        "flips in every other epoch of an image, rather than at random",
        when=[{"flip": ON}],
        off=False,
    ),
    "augment.rand_augment_ops": _whole("RandAugment operations of an image", 0, 64, default=2),
    "augment.rand_augment_magnitude": _whole(
        "RandAugment magnitude", 0, 30, default=9, when=[_RAND_AUGMENT]
    ),
    "augment.rand_augment_kind": _choice(
        "RandAugment's operations and ranges; timm: as m9-mstd0.5-inc1",
        *("torchvision", "timm"),
        when=[_RAND_AUGMENT],
    ),
    "augment.trivial_augment": _flag("TrivialAugment instead of RandAugment"),
    "augment.transforms": Key(
        "transforms of each image in turn, as NAME or NAME:NUMBER; hsvit_jax.augment.transforms",
        kind=str,
        several=True,
    ),
    "augment.erasing": _number("probability of random erasing", 0.0, 1.0, default=0.25),
    "augment.erasing_noise": _flag(
        "fill erased boxes with noise, not the mean", when=[{"erasing": ON}], off=False
    ),
    "augment.mixup": _number(
        "alpha of MixUp; 0: none", 0.0, 1000.0, default=0.8, when=[_MIXES], off=0.0
    ),
    "augment.cutmix": _number(
        "alpha of CutMix; 0: none", 0.0, 1000.0, default=1.0, when=[_MIXES], off=0.0
    ),
    "augment.mix_probability": _number(
        "probability of mixing a batch", 0.0, 1.0, default=0.5, when=[_MIXING], off=0.0
    ),
    "augment.mix_until": _positive(
        "share of the run that mixes batches",
        high=1.0,
        default=1.0,
        when=[_MIXING, _MIXES],
        off=1.0,
    ),
    "augment.label_smoothing": _rate("label smoothing", default=0.1, when=[_LABELS], off=0.0),
    "train.batch": _whole("global batch size of training", 1, 2**20, default=128),
    "train.epochs": _number(
        "length of the run in epochs, where train.steps is 0", 0.0, 1e6, default=100.0
    ),
    "train.steps": _whole("length of the run in steps, where train.epochs is 0", 0, MOST_STEPS),
    "train.loss": _text("loss, by name; empty: that of data.task"),
    "train.metrics": _text(
        "registered metrics of an evaluation; val and test select by the first", several=True
    ),
    "train.accumulate": _whole("parts of a batch whose gradients are averaged", 1, 2**16),
    "train.log_every": _whole("steps between lines of metrics", 1, MOST_STEPS, default=10),
    "train.loggers": _choice(
        "services that show the metrics",
        *("tensorboard", "wandb", "mlflow"),
        several=True,
        default=("tensorboard",),
    ),
    "train.eval_every": _whole("epochs between evaluations", 1, MOST_STEPS),
    "train.ema_decay": _rate(
        "decay of the weights' moving average; 0: none", default=0.999, fixed=_AVERAGE
    ),
    "train.bad_steps_limit": _whole(
        "consecutive non-finite steps that end the run", 1, MOST_STEPS, default=3
    ),
    "train.select_on": _choice(
        "selection of the best checkpoint: accuracy (mAP, R²) on val or test, or macro F1 on val",
        *("val", "test", "macro_f1", "last"),
        fixed=_CHOSEN,
    ),
    "train.patience": _whole(
        "early stopping: evaluations without a better one that end the run; 0: none",
        0,
        MOST_STEPS,
        when=[_SELECTS],
        off=0,
    ),
    "train.distill_weight": _number(
        "weight of the teacher's answers in the loss", 0.0, 1.0, default=0.5, when=[_TEACHER]
    ),
    "train.distill_temperature": _positive(
        "temperature of the answers in that part", high=100.0, default=2.0, when=[_TEACHER]
    ),
    "eval.batch": _whole("batch size of evaluation; 0: train.batch / train.accumulate", 0, 2**20),
    "eval.tta": _choice(
        "test-time augmentation, mean logits; shift: flips and moves by one pixel",
        *("none", "flip", "shift"),
        fixed=_CHOSEN,
    ),
    "eval.threshold": _number(
        "probability from which a label counts, one or one for each",
        0.0,
        1.0,
        several=True,
        default=(0.5,),
        when=[_MULTILABEL],
        fixed=_CHOSEN,
    ),
    "optim.name": _choice(
        "optimizer, with decoupled weight decay; muon: on kernels, Adam elsewhere",
        *("adamw", "nadamw", "sgd", "lamb", "lion", "muon"),
        fixed=_MOMENTS,
    ),
    "optim.learning_rate": _positive("peak learning rate", high=1e3, default=1e-3),
    "optim.weight_decay": _number("decoupled weight decay", 0.0, 1e3, default=0.05),
    "optim.decay_all": _flag(
        "weight decay on biases, norms and positions too", when=[{"weight_decay": ON}], off=False
    ),
    "optim.warmup_epochs": _number(
        "epochs of warm-up; -1: the recipe's, at most a tenth of the run",
        0.0,
        1e6,
        besides=(-1.0,),
        default=-1.0,
    ),
    "optim.schedule": _choice(
        "decay of the rate to zero after warm-up",
        *("cosine", "linear"),
        when=[{"cosine_per": ("epoch", "step")}],
    ),
    "optim.cosine_per": _choice(
        "granularity of the schedule; never: a constant rate",
        *("epoch", "step", "never"),
        default="step",
    ),
    "optim.layer_decay": _positive(
        "factor of the learning rate from a block to the one before; 1: none", high=1.0, default=1.0
    ),
    "optim.clip_norm": _number(
        "largest global norm of the gradient; 0: no clipping", 0.0, 1e9, default=1.0
    ),
    "optim.beta1": _rate("decay rate of the first moment; momentum of sgd", default=0.9),
    "optim.beta2": _rate(
        "decay rate of the second moment", default=0.999, when=[{"name": _SECOND_MOMENT}]
    ),
    "init.from": _text(
        "run, file, zoo:NAME or hub:OWNER/NAME to start from; empty: random weights", fixed=STARTED
    ),
    "init.classifier": _choice(
        "classifier of init.from: matched by class name, kept, new, or without its first class",
        *("match", "keep", "new", "drop_first"),
        fixed=STARTED,
    ),
    "init.stem": _choice(
        "first layer of init.from: kept, or refitted to other image channels",
        *("keep", "refit"),
        fixed=STARTED,
    ),
    "init.positions": _choice(
        "positions of init.from: kept, or resized to the image", "keep", "resize", fixed=STARTED
    ),
    "init.whiten": _flag(
        "random weights whose first convolution whitens image patches (HSViT)", fixed=STARTED
    ),
    "init.teacher": _text(
        "run, file, zoo:NAME or hub:OWNER/NAME that teaches; empty: none",
        when=[_CLASSES],
        off="",
        fixed=_TAUGHT,
    ),
    "init.freeze": _text("frozen parts of the network, separated by commas", fixed=_TRAINED),
    "init.unfreeze_after": _whole(
        "epochs after which frozen parts train too; 0: never",
        0,
        MOST_STEPS,
        when=[{"freeze": ON}],
        off=0,
        fixed=_TRAINED,
    ),
    "init.cache": _text("folder of cached features of the frozen parts; empty: no cache"),
    "mesh.group": _whole(
        "devices on the group axis; -1: the remaining ones", 1, 2**20, besides=(-1,)
    ),
    "mesh.data": _whole(
        "devices on the data axis; -1: the remaining ones", 1, 2**20, besides=(-1,), default=-1
    ),
    "mesh.aggregate": _choice(
        "sum of the groups' CLS tokens: one all-reduce, in the groups' order, or in bfloat16",
        *("psum", "ordered", "bf16"),
    ),
    "mesh.gradients": _choice("format of gradients sent between devices", "float32", "bf16"),
    "checkpoint.every": _whole(
        "epochs between checkpoints; a best evaluation saves one too", 1, MOST_STEPS
    ),
    "checkpoint.keep_latest": _whole("number of latest checkpoints kept", 1, 10_000, default=2),
    "checkpoint.keep_best": _whole("number of best checkpoints kept", 1, 10_000, when=[_SELECTS]),
}

#: Keys of every `model` section.
OF_MODELS: Mapping[str, Key] = {
    "family": _text("family of the network"),
    "variant": _text("variant of the family"),
    "dtype": _choice("dtype of the computation; parameters are float32", "float32", "bfloat16"),
}


def all_keys() -> list[str]:
    """Returns every key as 'section.name', including those of all networks."""
    names = dict.fromkeys(name for family in FAMILIES.values() for name in family.keys)
    keys = (*KEYS, *(f"model.{name}" for name in (*OF_MODELS, *names)))
    return [key for key in keys if key not in LABELS]


def leaves(config: ml_collections.ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting as ('section.key', value)."""
    for key in sorted(config.keys()):
        value = config[key]
        if isinstance(value, ml_collections.ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def of(path: str, model: Mapping[str, Any]) -> Key:
    """Looks up a key such as 'train.batch' or 'model.depth'.

    Args:
      path: sections and name, joined by points.
      model: the `model` section, whose family declares its keys.

    Raises:
      ValueError: no such key exists.
    """
    section, _, name = path.partition(".")
    entry = KEYS.get(path) if section != "model" else OF_MODELS.get(name)
    if section == "model" and entry is None:
        family = model.get("family", "hsvit")
        if family not in FAMILIES:
            raise UnknownFamily(family)
        entry = FAMILIES[family].key(name, model)
    if entry is None:
        raise ValueError(f"unknown configuration key {path!r}")
    return entry


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for the first value outside its key's range."""
    for path, value in leaves(config):
        of(path, config.model).check(path, value)


def refuse_unread(config: ml_collections.ConfigDict, own: Iterable[str] | None = None) -> None:
    """Raises ValueError for a setting that others leave without effect.

    Args:
      config: resolved, as the number of images may choose the recipe.
      own: keys to check; all of the user's by default.
    """
    values = dict(leaves(config))
    for path in filter(values.__contains__, config.user if own is None else own):
        key, section = of(path, config.model), path.rpartition(".")[0]
        if key.off is not None and values[path] == key.off:
            continue
        for condition in key.when:
            needed = {n if "." in n else f"{section}.{n}": v for n, v in condition.items()}
            needed = {name: wanted for name, wanted in needed.items() if name in values}
            if needed and not any(values[name] in wanted for name, wanted in needed.items()):
                others = " and ".join(f"{name}={shown(values[name])}" for name in needed)
                raise ValueError(
                    f"{path} has no effect with {others}: set {' or '.join(needed)} too, or remove "
                    f"{path}"
                )


def shown(value: Any) -> str:
    """Formats a value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(config: ml_collections.ConfigDict, reads: Callable[[str], bool]) -> str:
    """Lists settings as flags with meaning and range, for --help.

    Args:
      reads: whether to list a key.
    """
    lines = []
    for key, value in leaves(config):
        if key not in LABELS and reads(key):
            entry = of(key, config.model)
            lines += [f"  --config.{key}={shown(value)}"]
            lines += [f"      {entry.meaning}; {entry.expected}"]
    return "\n".join(lines)
