"""What a family changes in a configuration: its paper's recipe, a smoke run's size, digits' tokens.

Plain values, applied by `defaults.base` and, for digits, by `variants`. The recipe `strong` is the
same for all families, and hsvit's own values are in `defaults`.

Sources: HSViT paper, table 2, and its scripts for the batches of ViT; ViX paper, section 4, the
authors' scripts where it is silent; HVT paper, section 5, and Touvron et al. (DeiT, ICML 2021),
table 9, which it refers to; DHVT supplement, section 4.1, and the authors' script for CIFAR. What
is left out of a recipe is told in the family's file in configs/.
"""

from collections.abc import Mapping
from typing import Any

_ADAMW = {"optim.name": "adamw", "optim.beta1": 0.9, "optim.beta2": 0.999}

# 'Adam' is AdamW in the authors' code, which decays every parameter; no schedule, no augmentation.
_VIX: Mapping[str, Any] = {
    "train.batch": 64,
    "train.epochs": 100.0,
    "train.ema_decay": 0.0,
    "optim.learning_rate": 1e-3,
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,
    "optim.warmup_epochs": 0.0,
    "optim.cosine_per": "never",
    "optim.clip_norm": 0.0,
    **_ADAMW,
    "augment.crop_padding": 0,
    "augment.random_resized_crop": (),
    "augment.flip": False,
    "augment.rand_augment_ops": 0,
    "augment.rand_augment_magnitude": 9,
    "augment.trivial_augment": False,
    "augment.erasing": 0.0,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "augment.mix_probability": 0.0,
    "augment.label_smoothing": 0.0,
}

#: DeiT's augmentation and schedule, which both HVT and DHVT take over.
_DEIT: Mapping[str, Any] = {
    "train.epochs": 300.0,
    "train.ema_decay": 0.0,
    "optim.decay_all": False,
    "optim.cosine_per": "epoch",
    "optim.clip_norm": 0.0,
    **_ADAMW,
    "augment.crop_padding": 0,
    "augment.random_resized_crop": (0.08, 1.0),
    "augment.rand_augment_ops": 2,
    "augment.rand_augment_magnitude": 9,
    "augment.trivial_augment": False,
    "augment.erasing": 0.25,
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
    "optim.warmup_epochs": 5.0,
}
# 5e-4 for 512 images, raised with the batch.
_HVT_IMAGENET: Mapping[str, Any] = {**_HVT, "train.batch": 1024, "optim.learning_rate": 1e-3}

_DHVT: Mapping[str, Any] = {
    **_DEIT,
    "train.batch": 512,
    "optim.learning_rate": 1e-3,
    "optim.weight_decay": 0.05,
    "optim.warmup_epochs": 5.0,
}
# Up to 32 pixels the authors crop the padded image.
_DHVT_SMALL: Mapping[str, Any] = {
    **_DHVT,
    "augment.crop_padding": 4,
    "augment.random_resized_crop": (),
}
_DHVT_IMAGENET: Mapping[str, Any] = {
    **_DHVT,
    "optim.learning_rate": 5e-4,
    "optim.warmup_epochs": 10.0,
}

# The recipe of hsvit (`defaults`), with which its paper trained what it compares with.
_COMPARED: Mapping[str, Any] = {
    "train.batch": 512,
    "train.epochs": 300.0,
    "train.ema_decay": 0.0,
    "optim.learning_rate": 1e-3,
    "optim.weight_decay": 0.01,
    "optim.decay_all": True,
    "optim.warmup_epochs": 0.0,
    "optim.cosine_per": "epoch",
    "optim.clip_norm": 0.01,
    **_ADAMW,
    "augment.crop_padding": 0,
    "augment.random_resized_crop": (),
    "augment.flip": False,
    "augment.rand_augment_ops": 2,
    "augment.rand_augment_magnitude": 9,
    "augment.trivial_augment": False,
    "augment.erasing": 0.0,
    "augment.mixup": 1.0,
    "augment.cutmix": 1.0,
    "augment.mix_probability": 1.0,
    "augment.label_smoothing": 0.0,
}
#: ViT converges at this rate only (note 2 of table 2), and so do two of the CvTs: see `paper`.
_LOW_RATE: Mapping[str, Any] = {"optim.learning_rate": 1e-4}
_COMPARED_VIT: Mapping[str, Any] = {**_COMPARED, **_LOW_RATE}
#: Of these, what sees small images enlarged to 64 pixels.
_ENLARGED = ("mobilevit", "efficientformer", "swiftformer")
#: Data sets whose images have at most 32 pixels a side.
_SMALL = ("digits", "cifar10", "cifar100", "fashion_mnist")

# Table 3. Nothing is said of the crops' area: torchvision's default.
_BACKBONE: Mapping[str, Any] = {
    **_COMPARED,
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
_CONVNETS = ("resnet", "efficientnet", "mobilenet_v2")

_PAPER: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("cvt", *_ENLARGED, *_CONVNETS), _COMPARED),
    "vit": _COMPARED_VIT,
    "hsvit_backbone": _BACKBONE,
    **dict.fromkeys(("vix", "levix", "ccx", "cvx", "pix"), _VIX),
    **dict.fromkeys(("hvt", "deit"), _HVT),
    "dhvt": _DHVT,
}
#: Where a data set has a recipe of its own.
_PAPER_ON: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("hvt", "imagenet"): _HVT_IMAGENET,
    ("deit", "imagenet"): _HVT_IMAGENET,
    ("dhvt", "imagenet"): _DHVT_IMAGENET,
    **{("dhvt", data): _DHVT_SMALL for data in _SMALL},
    ("vit", "tiny_imagenet"): {**_COMPARED_VIT, "train.batch": 128},
    ("vit", "food101"): {**_COMPARED_VIT, "train.batch": 16},
}
#: (variant of CvT, data set) with the low rate, by note 2.
_CVT_LOW_RATE = (("13-patch4", "food101"), ("21-patch4", "tiny_imagenet"))


def paper(family: str, data: str, variant: str = "") -> dict[str, Any]:
    """The recipe of the paper that `family` comes from, for a data set; {} for hsvit.

    Digits are never mirrored; every other data set is where the recipe is DeiT's. variant: of a
    convolutional network, which has a native image size, or of CvT, whose rate depends on it.
    """
    recipe = dict(_PAPER_ON.get((family, data)) or _PAPER.get(family, {}))
    if family == "cvt" and (variant, data) in _CVT_LOW_RATE:
        recipe |= _LOW_RATE
    if family in _CONVNETS:
        side = {"imagenet": native_size(variant), "food101": 128}.get(data, 64)
        recipe["data.image_size"] = (side, side)
    elif family == "hsvit_backbone":
        side = native_size(variant)
        recipe |= {"data.image_size": (side, side), "augment.flip": data != "digits"}
    if recipe:
        recipe.setdefault("augment.flip", data != "digits")
    if family in _ENLARGED and data in _SMALL and data != "digits":
        recipe["data.image_size"] = (64, 64)
    return recipe


#: Sides of the images that the larger EfficientNets were made for; other networks: 224.
_NATIVE: Mapping[str, int] = {"b3": 300, "b4": 380, "b5": 456}


def native_size(variant: str) -> int:
    """Pixels of a side of the images that a convolutional network was made for."""
    return _NATIVE.get(variant.rpartition("_")[2], 224)


def strong(family: str, data: str) -> dict[str, Any]:
    """What the recipe `strong` needs of a data set: images that an EfficientNet can stride over."""
    small = data == "fashion_mnist" and family in (*_CONVNETS, "hsvit_backbone")
    return {"data.image_size": (32, 32)} if small else {}


def digits(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe `strong` changes in a network for digits: 8×8 tokens instead of 32×32.

    They are 8×8 images, enlarged to 32×32 pixels, so that one such token is one of their own
    pixels. Landmarks and projected positions are 16, fewer than the tokens. Keys of the `model`
    section; {} for families whose tokens are few already.
    """
    sizes = _tokens(model, (2, 2, 1), 4)
    return {**sizes, "landmarks": 16, "projections": 16} if sizes else {}


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a smoke run of seconds, whatever the variant: narrow, shallow, images of 32 pixels.

    {} for hsvit. What tells variants apart stays, but for widths, heads, depths and HVT's patches:
    mixers, stems, the number and kind of poolings, CLS, the parts of a DHVT.
    """
    family, few = model["family"], {"heads": 2, "mlp_dim": 32}
    mixing = {"landmarks": 4, "projections": 4, "residual_kernel": 5}
    found: dict[str, Any] = {}
    if family in ("vix", "levix", "ccx", "cvx", "pix"):
        found = {**few, **mixing, "embed_dim": 16, **_tokens(model, (2, 2, 2), 8)}
        found |= {} if family == "ccx" else {"head_dim": 8}
        found |= {"depths": (1,) * len(model["depths"])} if "depths" in model else {"depth": 2}
        for key in ("stem_channels", "conv_channels"):
            if model.get(key):
                found[key] = (4,) * len(model[key])
    elif family in ("hvt", "deit"):
        stages = model["depth"] // model.get("stage_depth", 0) if model.get("stage_depth") else 0
        found = {"heads": 2, "head_dim": 8, "depth": stages or 2, "patch": 4}
        if "stage_depth" in model:
            found["stage_depth"] = min(stages, 1)
    elif family == "vit":
        found = {"heads": 2, "head_dim": 8, "depth": 2, "mlp_dim": 32, "patch": 4}
    elif family == "efficientformer":
        found = {"depths": (1, 1, 1, 2), "widths": (8, 8, 12, 16), "heads": 2, "key_dim": 4}
        found["attention_blocks"] = 1
    elif family == "mobilevit":
        found = {"channels": (4, 4, 8, 8, 8, 8, 16), "widths": (8, 8, 8), "heads": 2}
    elif family == "cvt":
        found = {"depths": (1, 1, 2), "widths": (8, 12, 16), "heads": (1, 2, 2)}
    elif family == "swiftformer":
        found = {"depths": (1, 1, 2, 1), "widths": (8, 8, 12, 16)}
    elif family == "dhvt":
        found = {"heads": 2, "embed_dim": 16, "depth": 2}
    elif family in _CONVNETS:
        found = _narrow(family, model)
    elif family == "hsvit_backbone":
        name = next(name for name in _CONVNETS if model["backbone"].startswith(name))
        own = _narrow(name, model["backbone_settings"])
        found = {f"backbone_settings.{key}": value for key, value in own.items()}
        found |= {"groups": 4, "heads": 2}
    if not found:
        return {}
    return {f"model.{key}": value for key, value in found.items()} | {"data.image_size": (32, 32)}


def _narrow(family: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """A convolutional network's settings with few channels, and blocks in proportion to its own."""
    if family == "resnet":
        depths = tuple(max(1, round(depth / 4)) for depth in model["depths"])
        return {"stem_channels": 8, "channels": (8, 16, 16, 32), "depths": depths}
    widths = {"width": 0.08 * model["width"], "divisor": 4}
    if family == "mobilenet_v2":
        return {**widths, "least_channels": 4, "expand": 2.0, "full_top": False}
    return {**widths, "depth": 0.3 * model["depth"], "expand": (1, 2, 2, 2, 2, 2, 2)}


def _tokens(model: Mapping[str, Any], strides: tuple[int, ...], patch: int) -> dict[str, Any]:
    """Strides of the first convolutions, or a patch: whichever makes this network's tokens."""
    for key, of in (
        ("conv_strides", "conv_channels"),
        ("stage_strides", "depths"),
        ("stem_strides", "stem_channels"),
    ):
        if key in model and model[of]:
            convolutions = len(model[of]) + (of != "depths")
            return {key: (*strides, *(1,) * convolutions)[:convolutions]}
    return {"patch": patch} if "stem_strides" in model else {}
