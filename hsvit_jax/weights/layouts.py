"""Layouts of weight files: the names that each library gives to the converters' keys."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hsvit_jax.weights.torch.layouts import LAYOUTS, Layout


class Match(NamedTuple):
    """A layout, its names (with a wrapper's prefix) by the converter's keys, and how many of them
    are in the file."""

    layout: Layout
    names: dict[str, str]
    count: int


#: The layout of a family's converter.
OWN = Layout("our converter's reference", lambda config: lambda key: key)

#: For messages about files that fit no layout: networks, and a name that only theirs have.
_SIGNS: Mapping[str, str] = {
    "a torchvision or timm ResNet": r"layer1\.0\.conv1\.weight$",
    "a transformers ResNet": r"embedder\.embedder\.convolution\.weight$",
    "a torchvision MobileNetV2": r"features\.1\.conv\.0\.0\.weight$",
    "a transformers MobileNetV2": r"conv_stem\.first_conv\.convolution\.weight$",
    "a torchvision EfficientNet": r"features\.1\.0\.block\.0\.0\.weight$",
    "a transformers EfficientNet": r"embeddings\.convolution\.weight$",
    "a timm MobileNetV2 or EfficientNet": r"blocks\.0\.0\.conv_dw\.weight$",
    "a transformers ViT or DeiT": r"embeddings\.patch_embeddings\.projection\.weight$",
    "a timm ViT or DeiT": r"blocks\.0\.attn\.qkv\.weight$",
    "a reference HSViT": r"classifier\.mlp_head\.1\.weight$",
}


def known(family: str) -> tuple[Layout, ...]:
    """Lists the layouts of a family's files, its converter's first."""
    return (OWN, *LAYOUTS.get(family, ()))


def match(family: str, config: Any, wanted: Collection[str], keys: Collection[str]) -> Match:
    """Finds the layout of `family` in which most of the `wanted` keys are among a file's `keys`."""
    matches = []
    for layout in known(family):
        rename = layout.rename(config)
        names = {key: rename(key) for key in wanted}
        add, drop = _wrapped(set(names.values()), set(keys))
        names = {key: add + name.removeprefix(drop) for key, name in names.items()}
        matches.append(Match(layout, names, sum(name in keys for name in names.values())))
    return max(matches, key=lambda match: match.count)


def _wrapped(names: set[str], keys: set[str]) -> tuple[str, str]:
    """Finds (prefix that the file adds to all names, prefix that it drops): DataParallel and
    Lightning wrap a network in another, and a bare backbone is not wrapped in its classifier."""
    votes: Counter[tuple[str, str]] = Counter()
    for key in keys:
        votes.update((before, "") for before, rest in _splits(key) if rest in names)
    for name in names:
        votes.update(("", before) for before, rest in _splits(name) if before and rest in keys)
    return max(votes, key=lambda way: (votes[way], way == ("", ""))) if votes else ("", "")


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Splits a dotted name into (prefix with its dot, rest), the empty prefix first."""
    words = name.split(".")
    for i in range(len(words)):
        rest = ".".join(words[i:])
        yield name.removesuffix(rest), rest


def looks_like(keys: Collection[str]) -> str:
    """Names the network whose keys a file has, in words; empty where it is not known."""
    for network, sign in _SIGNS.items():
        if any(re.search(sign, key) for key in keys):
            return network
    return ""
