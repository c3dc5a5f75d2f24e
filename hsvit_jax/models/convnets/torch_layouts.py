"""Torchvision's and timm's names of the convolutional networks' tensors, from transformers' names.

A layout gives another library's name for each key that a converter asks for, so that a file of
either can be read, and a missing tensor is told in the file's own words.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Rename = Callable[[str], str]


class Layout(NamedTuple):
    """The library; its name of a tensor by the converter's, for a network's config; the settings
    that its networks of this config's size have, which no tensor shows; and what is to be said."""

    library: str
    rename: Callable[[Any], Rename]
    settings: Callable[[Any], dict[str, Any]] = lambda config: {}
    note: str = ""


def _from_table(*table: tuple[str, str]) -> Rename:
    """A rename by the first regular expression that a key begins with; `{}` in its replacement are
    the groups, numbers of them raised by what follows: `{0+1}`."""
    rules = [(re.compile(pattern), place) for pattern, place in table]

    def rename(key: str) -> str:
        for pattern, place in rules:
            match = pattern.match(key)
            if match:
                return _filled(place, match.groups()) + key[match.end() :]
        return key

    return rename


def _filled(place: str, groups: tuple[str, ...]) -> str:
    def value(match: re.Match) -> str:
        group = groups[int(match[1])]
        return str(int(group) + int(match[2])) if match[2] else group

    return re.sub(r"\{(\d)(?:\+(\d))?\}", value, place)


def _units(*table: tuple[str, str, str]) -> Rename:
    """A rename by (the unit's key, its convolution's name, its normalisation's)."""
    rules = []
    for key, conv, norm in table:
        rules += [(rf"{key}\.convolution(?=\.)", conv), (rf"{key}\.normalization(?=\.)", norm)]
    return _from_table(*rules, (r"classifier(?:\.1)?(?=\.\w+$)", "CLASSIFIER"))


def _with_classifier(rename: Rename, name: str) -> Rename:
    return lambda key: rename(key).replace("CLASSIFIER", name)


# --- ResNet: torchvision's names, which are timm's too --------------------------------------------


def _resnet(config: Any) -> Rename:
    layer = r"resnet\.encoder\.stages\.(\d+)\.layers\.(\d+)"
    rename = _units(
        (r"resnet\.embedder\.embedder", "conv1", "bn1"),
        (rf"{layer}\.shortcut", "layer{0+1}.{1}.downsample.0", "layer{0+1}.{1}.downsample.1"),
        (rf"{layer}\.layer\.(\d+)", "layer{0+1}.{1}.conv{2+1}", "layer{0+1}.{1}.bn{2+1}"),
    )
    return _with_classifier(rename, "fc")


# --- MobileNetV2 ---------------------------------------------------------------------------------

_SYMMETRIC = {"padding": "symmetric", "bn_eps": 1e-5}

#: Blocks of each of timm's stages after the first.
_MOBILE_STAGES = (2, 3, 4, 3, 3, 1)


def _mobilenet_torchvision(config: Any) -> Rename:
    stem, layer = r"mobilenet_v2\.conv_stem", r"mobilenet_v2\.layer\.(\d+)"
    block, last = "features.{0+2}.conv", sum(_MOBILE_STAGES) + 2
    rename = _units(
        (rf"{stem}\.first_conv", "features.0.0", "features.0.1"),
        (rf"{stem}\.conv_3x3", "features.1.conv.0.0", "features.1.conv.0.1"),
        (rf"{stem}\.reduce_1x1", "features.1.conv.1", "features.1.conv.2"),
        (rf"{layer}\.expand_1x1", f"{block}.0.0", f"{block}.0.1"),
        (rf"{layer}\.conv_3x3", f"{block}.1.0", f"{block}.1.1"),
        (rf"{layer}\.reduce_1x1", f"{block}.2", f"{block}.3"),
        (r"mobilenet_v2\.conv_1x1", f"features.{last}.0", f"features.{last}.1"),
    )
    return _with_classifier(rename, "classifier.1")


def _mobilenet_timm(config: Any) -> Rename:
    stem = r"mobilenet_v2\.conv_stem"
    blocks = []
    places = [(s + 1, j) for s, count in enumerate(_MOBILE_STAGES) for j in range(count)]
    for i, (stage, j) in enumerate(places):
        layer, block = rf"mobilenet_v2\.layer\.{i}", f"blocks.{stage}.{j}"
        blocks += [
            (rf"{layer}\.expand_1x1", f"{block}.conv_pw", f"{block}.bn1"),
            (rf"{layer}\.conv_3x3", f"{block}.conv_dw", f"{block}.bn2"),
            (rf"{layer}\.reduce_1x1", f"{block}.conv_pwl", f"{block}.bn3"),
        ]
    rename = _units(
        (rf"{stem}\.first_conv", "conv_stem", "bn1"),
        (rf"{stem}\.conv_3x3", "blocks.0.0.conv_dw", "blocks.0.0.bn1"),
        (rf"{stem}\.reduce_1x1", "blocks.0.0.conv_pw", "blocks.0.0.bn2"),
        *blocks,
        (r"mobilenet_v2\.conv_1x1", "conv_head", "bn2"),
    )
    return _with_classifier(rename, "classifier")


# --- EfficientNet --------------------------------------------------------------------------------


def _efficient_blocks(config: Any) -> Iterator[tuple[str, int, int, bool]]:
    """(transformers' key of a block, its stage, its place there, whether it expands)."""
    number = 0
    for stage, repeats in enumerate(config.repeats):
        for j in range(math.ceil(config.depth * repeats)):
            key = rf"efficientnet\.encoder\.blocks\.{number}"
            yield key, stage, j, config.expand[stage] != 1
            number += 1


def _efficient(config: Any, names: Callable[[int, int, bool], list[str]], *ends: str) -> Rename:
    """names: of a block's expansion, depthwise, squeeze and projection tensors; ends: of the stem's
    and the last convolution and norm, and of the classifier."""
    theirs = ("expansion.expand_conv", "expansion.expand_bn")
    theirs += ("depthwise_conv.depthwise_conv", "depthwise_conv.depthwise_norm")
    theirs += ("squeeze_excite.reduce", "squeeze_excite.expand")
    theirs += ("projection.project_conv", "projection.project_bn")
    outer = ("embeddings.convolution", "embeddings.batchnorm", "encoder.top_conv", "encoder.top_bn")
    table = [(rf"efficientnet\.{re.escape(a)}(?=\.)", b) for a, b in zip(outer, ends, strict=False)]
    for key, stage, j, wider in _efficient_blocks(config):
        for name, ours in zip(theirs, names(stage, j, wider), strict=True):
            table.append((rf"{key}\.{re.escape(name)}(?=\.)", ours))
    return _from_table(*table, (r"classifier(?=\.\w+$)", ends[-1]))


def _efficient_torchvision(config: Any) -> Rename:
    def names(stage: int, j: int, wider: bool) -> list[str]:
        block = f"features.{stage + 1}.{j}.block"
        first = 1 if wider else 0
        return [
            *(f"{block}.0.{i}" for i in range(2)),
            *(f"{block}.{first}.{i}" for i in range(2)),
            *(f"{block}.{first + 1}.fc{i}" for i in (1, 2)),
            *(f"{block}.{first + 2}.{i}" for i in range(2)),
        ]

    last = f"features.{len(config.repeats) + 1}"
    ends = ("features.0.0", "features.0.1", f"{last}.0", f"{last}.1", "classifier.1")
    return _efficient(config, names, *ends)


def _efficient_timm(config: Any) -> Rename:
    def names(stage: int, j: int, wider: bool) -> list[str]:
        block = f"blocks.{stage}.{j}"
        convs = ["conv_pw", "bn1", "conv_dw", "bn2"] if wider else ["", "", "conv_dw", "bn1"]
        last = ["conv_pwl", "bn3"] if wider else ["conv_pw", "bn2"]
        names = [*convs, "se.conv_reduce", "se.conv_expand", *last]
        return [f"{block}.{name}" for name in names]

    return _efficient(config, names, "conv_stem", "bn1", "conv_head", "bn2", "classifier")


def _efficient_settings(config: Any) -> dict[str, Any]:
    """torchvision's B5 and larger keep the paper's eps."""
    return {"padding": "symmetric", "bn_eps": 1e-3 if config.width >= 1.6 else 1e-5}


_TIMM_NOTE = (
    "timm's tf_efficientnet weights are of networks with model.padding=same model.bn_eps=1e-3, its "
    "others of such with model.padding=symmetric model.bn_eps=1e-5: no tensor tells"
)

#: Family → layouts besides its converter's.
LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "resnet": (Layout("torchvision and timm", _resnet),),
    "mobilenet_v2": (
        Layout("torchvision", _mobilenet_torchvision, lambda config: _SYMMETRIC),
        Layout("timm", _mobilenet_timm, lambda config: _SYMMETRIC),
    ),
    "efficientnet": (
        Layout("torchvision", _efficient_torchvision, _efficient_settings),
        Layout("timm", _efficient_timm, note=_TIMM_NOTE),
    ),
}
