"""Recipes: the papers' by family, and the strong one's changes by data set.

`keys` holds what the recipes start from, the same for all families; `words` applies these to it.

Sources: HSViT paper, table 2, and its scripts for the batches of ViT; ViX paper, section 4, the
authors' scripts where it is silent; HVT paper, section 5, and Touvron et al. (DeiT, ICML 2021),
table 9, which it refers to; DHVT supplement, section 4.1, and the authors' script for CIFAR;
the scripts and commands of EfficientViT, FastViT and SMT. What is left out of a recipe is listed in
the family's file in configs/.
"""

import math
from collections.abc import Mapping
from typing import Any

from hsvit_jax.config import schema
from hsvit_jax.models import FAMILIES
from hsvit_jax.models.family import Family

#: AdamW at a rate that is constant or, after the warm-up, a cosine; plain images. Each recipe of a
#: paper says what it has besides.
_BARE: Mapping[str, Any] = {
    "train.ema_decay": 0.0,
    "optim.name": "adamw",
    "optim.learning_rate": 1e-3,
    "optim.decay_all": False,
    "optim.warmup_epochs": 0.0,
    "optim.schedule": "cosine",
    "optim.clip_norm": 0.0,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "augment.crop_padding": 0,
    "augment.random_resized_crop": (),
    "augment.flip": False,
    "augment.rand_augment_ops": 0,
    "augment.rand_augment_magnitude": 9,
    "augment.rand_augment_kind": "torchvision",
    "augment.trivial_augment": False,
    "augment.erasing": 0.0,
    "augment.erasing_noise": False,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "augment.mix_probability": 0.0,
    "augment.mix_until": 1.0,
    "augment.label_smoothing": 0.0,
}

# 'Adam' is AdamW in the authors' code, which decays every parameter; no schedule, no augmentation.
_VIX: Mapping[str, Any] = {
    **_BARE,
    "train.batch": 64,
    "train.epochs": 100.0,
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,
    "optim.cosine_per": "never",
}

#: DeiT's augmentation and schedule, which both HVT and DHVT take over.
_DEIT: Mapping[str, Any] = {
    **_BARE,
    "data.repeats": 3,
    "train.epochs": 300.0,
    "optim.warmup_epochs": 5.0,
    "optim.cosine_per": "epoch",
    "augment.random_resized_crop": (0.08, 1.0),
    "augment.flip": True,
    "augment.rand_augment_ops": 2,
    "augment.rand_augment_kind": "timm",
    "augment.erasing": 0.25,
    "augment.erasing_noise": True,
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.mix_probability": 1.0,
    "augment.label_smoothing": 0.1,
}

# Resized to 224 pixels for every data set, as for CIFAR-100.
_HVT: Mapping[str, Any] = {
    **_DEIT,
    "data.image_size": (224, 224),
    "train.batch": 128,
    "optim.learning_rate": 1.25e-4,
    "optim.weight_decay": 0.025,
}

_DHVT: Mapping[str, Any] = {**_DEIT, "train.batch": 512, "optim.weight_decay": 0.05}
# Up to 32 pixels the authors crop the padded image.
_PADDED: Mapping[str, Any] = {"augment.crop_padding": 4, "augment.random_resized_crop": ()}

# For ImageNet. The script raises its 1e-3, for 512 images, with the batch; the paper says 1e-3. The
# authors' adaptive clipping of gradients is left out.
_EFFICIENTVIT: Mapping[str, Any] = {
    **_DEIT,
    "train.batch": 2048,
    "optim.learning_rate": 4e-3,
    "optim.weight_decay": 0.025,
}
_FASTVIT: Mapping[str, Any] = {
    **_DEIT,
    "data.repeats": 1,
    "train.batch": 1024,
    "train.ema_decay": 0.9995,
    "optim.weight_decay": 0.05,
    "augment.mixup": 0.2,
}
_SMT: Mapping[str, Any] = {
    **_FASTVIT,
    "train.ema_decay": 0.0,
    "optim.learning_rate": 2e-3,  # 1e-3 for 512 images
    "optim.cosine_per": "step",
    "optim.clip_norm": 5.0,
}

# DHVT supplement, sections 2.1 and 3.3 (tables 1 and 8), and the authors' script.
_FINETUNE: Mapping[str, Any] = {
    **_DHVT,
    "data.repeats": 1,
    "train.batch": 256,
    "train.epochs": 100.0,
    "optim.learning_rate": 2.5e-4,  # 5e-4 for 512 images, lowered with the batch
    "optim.weight_decay": 1e-8,
    "optim.warmup_epochs": 2.0,
    "init.classifier": "new",
    "init.positions": "resize",
}

# HSViT's, with which its paper also trained the networks that it compares with.
_HSVIT: Mapping[str, Any] = {
    **_BARE,
    "train.batch": 512,
    "train.epochs": 300.0,
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,  # as the reference, which decays biases and norms too
    "optim.cosine_per": "epoch",
    "optim.clip_norm": 0.01,
    "augment.rand_augment_ops": 2,
    "augment.mixup": 1.0,  # the paper names no alpha: torchvision's default
    "augment.cutmix": 1.0,
    "augment.mix_probability": 1.0,
}
#: ViT converges at this rate only (note 2 of table 2), and two of the CvTs: `_CVT_LOW_RATE`.
_LOW_RATE: Mapping[str, Any] = {"optim.learning_rate": 1e-4}
_HSVIT_VIT: Mapping[str, Any] = {**_HSVIT, **_LOW_RATE}
#: Data sets whose images have at most 32 pixels a side.
_SMALL = ("digits", "cifar10", "cifar100", "fashion_mnist")

# Table 3. Nothing is said of the crops' area: torchvision's default.
_BACKBONE: Mapping[str, Any] = {
    **_HSVIT,
    "train.batch": 128,
    "train.epochs": 30.0,
    "optim.warmup_epochs": 2.0,
    "optim.cosine_per": "step",
    "init.freeze": "backbone",
    "augment.random_resized_crop": (0.08, 1.0),
    "augment.flip": True,
    "augment.rand_augment_ops": 0,
    "augment.trivial_augment": True,
    "augment.erasing": 0.1,
    "augment.mixup": 0.2,
    "augment.label_smoothing": 0.1,
}

#: Recipes by the name in a family's record; those of HSViT's paper differ in rate or image size.
_PAPER: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("hsvit", "hsvit_cvt", "hsvit_convnet", "hsvit_enlarged"), _HSVIT),
    "hsvit_vit": _HSVIT_VIT,
    "hsvit_backbone": _BACKBONE,
    "efficientvit": _EFFICIENTVIT,
    "fastvit": _FASTVIT,
    "smt": _SMT,
    "vix": _VIX,
    "hvt": _HVT,
    "dhvt": _DHVT,
    "finetune": _FINETUNE,
}
#: Where a data set has a recipe of its own.
_PAPER_ON: Mapping[tuple[str, str], Mapping[str, Any]] = {
    # 5e-4 for 512 images, raised with the batch.
    ("hvt", "imagenet"): {**_HVT, "train.batch": 1024, "optim.learning_rate": 1e-3},
    ("dhvt", "imagenet"): {**_DHVT, "optim.learning_rate": 5e-4, "optim.warmup_epochs": 10.0},
    # 1e-3 for 512 images, lowered with the batch.
    ("dhvt", "domainnet"): {
        **_DHVT,
        "train.batch": 256,
        "optim.learning_rate": 5e-4,
        "optim.warmup_epochs": 20.0,
    },
    ("hsvit_vit", "tiny_imagenet"): {**_HSVIT_VIT, "train.batch": 128},
    ("hsvit_vit", "food101"): {**_HSVIT_VIT, "train.batch": 16},
}
#: From random weights, with dropout 0; docs/results.md compares it with AdamW in 30 to 100 epochs.
_MUON: Mapping[str, Any] = {
    "train.ema_decay": 0.0,
    "optim.name": "muon",
    "optim.learning_rate": 5e-3,
    "optim.schedule": "linear",
}
# Digits, with 1,439 training images: a short, light recipe of a minute or two on a laptop.
_STRONG_ON: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "optim.warmup_epochs": 1.0,
        "train.batch": 64,
        "train.epochs": 12.0,
        "train.ema_decay": 0.98,
        "augment.flip": False,
        "augment.crop_padding": 2,
        "augment.rand_augment_ops": 0,
        "augment.erasing": 0.0,
        "augment.mixup": 0.0,
        "augment.cutmix": 0.0,
        "augment.label_smoothing": 0.05,
    },
    "food101": {"augment.crop_padding": 16},
    "imagenet": {"augment.crop_padding": 16},
}
#: Changes of the strong recipe for a dozen epochs, searched on held-out CIFAR-10 images:
#: docs/results.md has the gain of each, and what gained nothing.
_FAST: dict[str, Any] = {
    "train.epochs": 12.0,
    "eval.tta": "flip",
    **_MUON,
    "augment.rand_augment_ops": 0,
    "augment.erasing": 0.0,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "augment.label_smoothing": 0.0,
}
_FAST_ON: Mapping[str, Mapping[str, Any]] = {"digits": {"train.epochs": 6.0}}
#: Training images from which a data set is not small: see `small`.
FEW = 5_000
#: (variant of CvT, data set) with the low rate, by note 2.
_CVT_LOW_RATE = (("13-patch4", "food101"), ("21-patch4", "tiny_imagenet"))


def values(recipe: str, model: Mapping[str, Any], data: str) -> dict[str, Any]:
    """The values of a recipe that differ from the keys' defaults, by 'section.key'.

    Args:
      recipe: its name; 'small' is 'strong' until the images are counted.
      model: of the family and variant, which decide what a paper says of their images' size.
    """
    record = FAMILIES[model["family"]]
    if recipe in ("paper", "finetune"):
        return _published(recipe, record, model["variant"], data)
    found = {"optim.warmup_epochs": 5.0, **_STRONG_ON.get(data, {})}
    if data == "fashion_mnist" and record.native_size:  # a stride of 32 does not fit 28
        found["data.image_size"] = (32, 32)
    if recipe == "fast" or data != "digits":
        found |= _MUON
    if recipe == "fast" or (data != "digits" and model["variant"] in record.variants):
        found |= {"init.whiten": record.network.whitens}  # which few networks of other sizes can
        found |= {"model.dropout": 0.0} if "dropout" in model else {}
    if recipe == "fast":
        found |= _FAST | _FAST_ON.get(data, {})
    return found


def without_muon(model: Mapping[str, Any]) -> dict[str, Any]:
    """AdamW and what goes with it, in place of Muon in the strong recipe, by 'section.key'."""
    return {key: schema.KEYS[key].initial for key in (*_MUON, "init.whiten")} | own_dropout(model)


def own_dropout(model: Mapping[str, Any]) -> dict[str, Any]:
    """The dropout of a network that has a name, as its paper has it."""
    record, variant = FAMILIES[model["family"]], model["variant"]
    named = "dropout" in model and variant in record.variants
    return {"model.dropout": record.settings(variant)["dropout"]} if named else {}


def _published(recipe: str, record: Family, variant: str, data: str) -> dict[str, Any]:
    """The recipe of the family's paper, or DHVT's fine-tuning, which is for every family."""
    name = "finetune" if recipe == "finetune" else record.paper_recipe
    if not name:
        raise ValueError(f"{record.name} has no recipe of a paper: choose strong or fast")
    found = dict(_PAPER_ON.get((name, data.partition("/")[0])) or _PAPER[name])
    if name == "hsvit_cvt" and (variant, data) in _CVT_LOW_RATE:
        found |= _LOW_RATE
    side = record.native_sizes.get(variant, record.native_size)
    if name == "hsvit_convnet":
        side = {"imagenet": side, "food101": 128}.get(data, 64)
    elif name == "hsvit_enlarged" and data in _SMALL and data != "digits":
        side = 64
    elif name == "hsvit_cvt" and data == "fashion_mnist":
        side = 32
    if name.startswith("hsvit") and data == "food101":  # of photos: both sides to 128 pixels
        found["data.fit"] = "stretch"
    if side:
        found["data.image_size"] = (side, side)
        if name == "finetune" and record.paper_recipe == "dhvt":  # as their weights saw pixels
            found |= {"data.mean": (0.485, 0.456, 0.406), "data.std": (0.229, 0.224, 0.225)}
    elif name in ("dhvt", "finetune") and data in _SMALL:
        found |= _PADDED
    found["augment.flip"] &= data != "digits"  # a mirrored digit is another digit
    return found


def small(
    examples: int, classes: int, model: Mapping[str, Any], epochs: float = 0.0
) -> dict[str, Any]:
    """The recipe of a small data set: `fast`, with what follows from the number of images.

    Args:
      epochs: of the run, where they are known already.

    Returns:
      values by 'section.key'; docs/data.md has the table, docs/results.md the measurements.
    """
    batch = 2 ** max(min(int(math.log2(examples / 8)), 6), min(int(math.log2(examples)), 3))
    epochs = epochs or max(min(9_600 // examples, 48), 24)
    interval = max(int(epochs / max(min(examples // 200, 12), 1)), 1)
    few_of_each = examples < 500 * classes
    mixed = {"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.label_smoothing": 0.1}
    return {
        **_FAST,
        **own_dropout(model),
        **(mixed if few_of_each else {}),
        "train.batch": batch,
        "train.epochs": float(epochs),
        "train.eval_every": interval,
        "checkpoint.every": min(interval, 24),
        "init.whiten": FAMILIES[model["family"]].network.whitens
        and model.get("ablation") != "attention_only",
    }
