"""Recipes: the papers' by family, and the strong one's changes by data set.

All recipes start from the defaults of `schema.KEYS`.

Sources: HSViT paper, table 2, and its scripts for the batches of ViT; ViX paper, section 4, and
the authors' scripts; HVT paper, section 5, and Touvron et al. (DeiT, ICML 2021), table 9; DHVT
supplement, section 4.1, and the authors' script for CIFAR; the scripts and commands of
EfficientViT, FastViT and SMT. A family's file in configs/ lists what differs from the paper.
"""

import math
from collections.abc import Mapping
from typing import Any

from hsvit_jax.config import schema
from hsvit_jax.models import FAMILIES
from hsvit_jax.models.family import Family

#: AdamW with a constant rate or a cosine, and plain images: the base of the papers' recipes.
_BARE: Mapping[str, Any] = {
    **{k: key.initial for k, key in schema.KEYS.items() if k.startswith(("optim.", "augment."))},
    "train.ema_decay": 0.0,
    "optim.warmup_epochs": 0.0,
    "optim.clip_norm": 0.0,
    "augment.crop_padding": 0,
    "augment.flip": False,
    "augment.rand_augment_ops": 0,
    "augment.erasing": 0.0,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "augment.mix_probability": 0.0,
    "augment.label_smoothing": 0.0,
}

# The authors' 'Adam' is AdamW, which decays every parameter; no schedule, no augmentation.
_VIX: Mapping[str, Any] = {
    **_BARE,
    "train.batch": 64,
    "train.epochs": 100.0,
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,
    "optim.cosine_per": "never",
}

#: DeiT's augmentation and schedule, which HVT and DHVT share.
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

# Images of every data set are resized to 224 pixels, as for CIFAR-100.
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

# For ImageNet. The script scales the paper's 1e-3, for 512 images, with the batch. The authors'
# adaptive clipping of gradients is omitted.
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
    "optim.learning_rate": 2.5e-4,  # 5e-4 for 512 images, scaled with the batch
    "optim.weight_decay": 1e-8,
    "optim.warmup_epochs": 2.0,
    "init.classifier": "new",
    "init.positions": "resize",
}

# HSViT's recipe. Its paper also trained the compared networks with it.
_HSVIT: Mapping[str, Any] = {
    **_BARE,
    "train.batch": 512,
    "train.epochs": 300.0,
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,  # the reference decays biases and norms too
    "optim.cosine_per": "epoch",
    "optim.clip_norm": 0.01,
    "augment.rand_augment_ops": 2,
    "augment.mixup": 1.0,  # torchvision's default, as the paper names no alpha
    "augment.cutmix": 1.0,
    "augment.mix_probability": 1.0,
}
#: ViT and two CvTs converge only at this rate (note 2 of table 2).
_LOW_RATE: Mapping[str, Any] = {"optim.learning_rate": 1e-4}
_HSVIT_VIT: Mapping[str, Any] = {**_HSVIT, **_LOW_RATE}
#: Data sets whose images have at most 32 pixels a side.
_SMALL = ("digits", "cifar10", "cifar100", "fashion_mnist")

# Table 3. The crops' area is torchvision's default, as the paper names none.
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

#: Recipes by the name in a family's record.
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
#: Recipes for single data sets.
_PAPER_ON: Mapping[tuple[str, str], Mapping[str, Any]] = {
    # 5e-4 for 512 images, scaled with the batch.
    ("hvt", "imagenet"): {**_HVT, "train.batch": 1024, "optim.learning_rate": 1e-3},
    ("dhvt", "imagenet"): {**_DHVT, "optim.learning_rate": 5e-4, "optim.warmup_epochs": 10.0},
    # 1e-3 for 512 images, scaled with the batch.
    ("dhvt", "domainnet"): {
        **_DHVT,
        "train.batch": 256,
        "optim.learning_rate": 5e-4,
        "optim.warmup_epochs": 20.0,
    },
    ("hsvit_vit", "tiny_imagenet"): {**_HSVIT_VIT, "train.batch": 128},
    ("hsvit_vit", "food101"): {**_HSVIT_VIT, "train.batch": 16},
}
#: From random weights, with dropout 0.
_MUON: Mapping[str, Any] = {
    "train.ema_decay": 0.0,
    "optim.name": "muon",
    "optim.learning_rate": 5e-3,
    "optim.schedule": "linear",
}
# Digits has 1,439 training images and takes a short, light recipe.
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
#: Of fast and strong, where mirrored images keep their meaning: +0.4 points in a dozen epochs.
_SEEN_BOTH_WAYS: Mapping[str, Any] = {
    "augment.crop_reflect": True,
    "augment.flip_alternate": True,
}
#: Changes of the strong recipe for a dozen epochs, searched on held-out CIFAR-10 images.
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
#: Data sets with fewer training images take the recipe `small`.
FEW = 5_000
#: (variant of CvT, data set) with the low rate, by note 2.
_CVT_LOW_RATE = (("13-patch4", "food101"), ("21-patch4", "tiny_imagenet"))


def values(recipe: str, model: Mapping[str, Any], data: str) -> dict[str, Any]:
    """Returns a recipe's values that differ from the keys' defaults, by 'section.key'.

    Args:
      recipe: its name; 'small' is 'strong' until the images are counted.
      model: the `model` section, whose family and variant decide a paper's image size.
    """
    record = FAMILIES[model["family"]]
    if recipe in ("paper", "finetune"):
        return _published(recipe, record, model["variant"], data)
    fast, digits = recipe == "fast", data == "digits"
    found = {"optim.warmup_epochs": 5.0}
    if recipe != "small" and not digits:
        found |= _SEEN_BOTH_WAYS | ({"augment.crop_padding": 2} if fast else {})
    found |= _STRONG_ON.get(data, {})
    if data == "fashion_mnist" and record.native_size:  # a stride of 32 does not fit 28
        found["data.image_size"] = (32, 32)
    if fast or not digits:
        found |= _MUON
    if fast or (not digits and model["variant"] in record.variants):
        found |= {"init.whiten": record.network.whitens}  # few networks of other sizes can
        found |= {"model.dropout": 0.0} if "dropout" in model else {}
    return found | _FAST | _FAST_ON.get(data, {}) if fast else found


def without_muon(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns AdamW and its settings by 'section.key', which replace the strong recipe's Muon."""
    return {key: schema.KEYS[key].initial for key in (*_MUON, "init.whiten")} | own_dropout(model)


def own_dropout(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dropout of a named network's paper."""
    record, variant = FAMILIES[model["family"]], model["variant"]
    named = "dropout" in model and variant in record.variants
    return {"model.dropout": record.settings(variant)["dropout"]} if named else {}


def _published(recipe: str, record: Family, variant: str, data: str) -> dict[str, Any]:
    """Returns the recipe of the family's paper, or DHVT's fine-tuning for every family."""
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
    if name.startswith("hsvit") and data == "food101":  # both sides of photos become 128 pixels
        found["data.fit"] = "stretch"
    if side:
        found["data.image_size"] = (side, side)
        if name == "finetune" and record.paper_recipe == "dhvt":  # their weights saw such pixels
            found |= {"data.mean": (0.485, 0.456, 0.406), "data.std": (0.229, 0.224, 0.225)}
    elif name in ("dhvt", "finetune") and data in _SMALL:
        found |= _PADDED
    found["augment.flip"] &= data != "digits"  # a mirrored digit is another digit
    return found


def small(
    examples: int, classes: int, model: Mapping[str, Any], epochs: float = 0.0
) -> dict[str, Any]:
    """Returns the recipe of a small data set by 'section.key'; docs/data.md has its table.

    Args:
      epochs: the length of the run, if it is set.
    """
    batch = 2 ** max(min(int(math.log2(examples / 8)), 6), min(int(math.log2(examples)), 3))
    epochs = epochs or max(min(9_600 // examples, 48), 24)
    interval = max(int(epochs / max(min(examples // 200, 12), 1)), 1)
    mixed = {"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.label_smoothing": 0.1}
    whitens = FAMILIES[model["family"]].network.whitens
    return {
        **_FAST,
        **own_dropout(model),
        **(mixed if examples < 500 * classes else {}),
        "train.batch": batch,
        "train.epochs": float(epochs),
        "train.eval_every": interval,
        "checkpoint.every": min(interval, 24),
        "init.whiten": whitens and model.get("ablation") != "attention_only",
    }
