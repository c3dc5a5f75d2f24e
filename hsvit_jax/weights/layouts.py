"""Recognises the library that named a file's tensors: pure renames of our converters' keys."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hsvit_jax.models.convnets.torch_layouts import LAYOUTS, Layout


class Match(NamedTuple):
    """A layout with what a wrapper puts before its names: `names` by the converter's keys, `found`
    of them in the file."""

    layout: Layout
    names: dict[str, str]
    found: int


#: The names that a family's converter asks for.
OWN = Layout("our converter's reference", lambda config: lambda key: key)

#: How to tell whose file it is when it fits nothing: a name that only its networks have.
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
    """The layouts of a family's files, its converter's own first."""
    return (OWN, *LAYOUTS.get(family, ()))


def match(family: str, config: Any, wanted: Collection[str], keys: Collection[str]) -> Match:
    """The layout of `family` in which most of the `wanted` keys are among the file's `keys`."""
    found = []
    for layout in known(family):
        rename = layout.rename(config)
        names = {key: rename(key) for key in wanted}
        add, drop = _wrapped(set(names.values()), set(keys))
        names = {key: add + name.removeprefix(drop) for key, name in names.items()}
        there = sum(name in keys for name in names.values())
        found.append(Match(layout, names, there))
    return max(found, key=lambda match: match.found)


def _wrapped(names: set[str], keys: set[str]) -> tuple[str, str]:
    """(what the file puts before all names, what it leaves out there): DataParallel and Lightning
    wrap a network in another, and a bare backbone is not wrapped in its classifier."""
    votes: Counter[tuple[str, str]] = Counter()
    for key in keys:
        votes.update((before, "") for before, rest in _splits(key) if rest in names)
    for name in names:
        votes.update(("", before) for before, rest in _splits(name) if before and rest in keys)
    return max(votes, key=lambda way: (votes[way], way == ("", ""))) if votes else ("", "")


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """A dotted name as (prefix with its dot, rest), the empty prefix first."""
    at = 0
    while True:
        yield name[:at], name[at:]
        at = name.find(".", at) + 1
        if not at:
            return


def looks_like(keys: Collection[str]) -> str:
    """Whose network a file's keys are, in words; empty where they are nobody's that is known."""
    for whose, sign in _SIGNS.items():
        if any(re.search(sign, key) for key in keys):
            return whose
    return ""
