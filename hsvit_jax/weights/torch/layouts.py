"""Layouts of files: each library's names of a network's tensors, from the keys of its table.

Torchvision and timm name the convolutional networks' tensors otherwise than transformers.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hsvit_jax.models.convnets.inverted_residual import InvertedConfig
from hsvit_jax.weights.torch.base import Table, TorchWeights
from hsvit_jax.weights.torch.convnets import (
    EFFICIENTNET,
    MOBILENET_V2,
    RESNET,
    RESNEXT,
    unit,
)

Rename = Callable[[str], str]


class Layout(NamedTuple):
    """The library; its name of a tensor by the converter's, for a network's config; the settings
    that its networks of this config's size have, which no tensor shows; and what is to be said."""

    library: str
    rename: Callable[[Any], Rename]
    settings: Callable[[Any], dict[str, Any]] = lambda config: {}
    note: str = ""


class Match(NamedTuple):
    """A layout, its names (with a wrapper's prefix) by the converter's keys, and how many of them
    are in the file."""

    layout: Layout
    names: dict[str, str]
    count: int


#: The layout of a family's converter.
OWN = Layout("our converter's reference", lambda config: lambda key: key)


def _from(weights: TorchWeights, table: Callable[..., Table]) -> Callable[[Any], Rename]:
    """From a converter's names to those of another table of the same network."""

    def renamed(config: Any) -> Rename:
        theirs = table(config, ())
        names = {
            name.partition(" ")[0]: theirs[path]
            for path, name in weights.table(config, ()).items()
            if path in theirs
        }

        def rename(key: str) -> str:
            module, _, leaf = key.rpartition(".")
            return f"{names.get(module, module)}.{leaf}"

        return rename

    return renamed


# --- Inverted residuals --------------------------------------------------------------------------


def _blocks(c: InvertedConfig) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """(our path of a block, its stage, its place there, its convolutions)."""
    parts = ("expand", "depthwise", "project")
    for i, ((stage, j), block) in enumerate(zip(c.places(), c.plan().blocks, strict=True)):
        yield f"backbone/blocks/{i}", stage, j, parts[block.expand is None :]


def _timm(c: InvertedConfig, keys: tuple[()]) -> Table:
    table = {"backbone/stem": "conv_stem", "backbone/stem/norm": "bn1", "head/linear": "classifier"}
    table |= {"backbone/top": "conv_head", "backbone/top/norm": "bn2"}
    for ours, stage, j, parts in _blocks(c):
        theirs = f"blocks.{stage}.{j}"
        convs = ("conv_pw", "conv_dw", "conv_pwl") if len(parts) == 3 else ("conv_dw", "conv_pw")
        for n, (part, conv) in enumerate(zip(parts, convs, strict=True), 1):
            table |= unit(f"{ours}/{part}", theirs, conv, f"bn{n}")
        for part in ("reduce", "expand"):
            table[f"{ours}/squeeze/{part}"] = f"{theirs}.se.conv_{part}"
    return table


def _torchvision_ends(last: int) -> Table:
    table = unit("backbone/stem", "features.0", "0", "1") | {"head/linear": "classifier.1"}
    return table | unit("backbone/top", f"features.{last}", "0", "1")


def _mobilenet_torchvision(c: InvertedConfig, keys: tuple[()]) -> Table:
    table = _torchvision_ends(len(c.places()) + 1)
    for i, (ours, _, _, (*wider, project)) in enumerate(_blocks(c)):
        theirs = f"features.{i + 1}.conv"
        for n, part in enumerate(wider):
            table |= unit(f"{ours}/{part}", f"{theirs}.{n}", "0", "1")
        n = len(wider)
        table |= unit(f"{ours}/{project}", theirs, f"{n}", f"{n + 1}")
    return table


def _efficientnet_torchvision(c: InvertedConfig, keys: tuple[()]) -> Table:
    table = _torchvision_ends(c.places()[-1][0] + 2)
    for ours, stage, j, (*wider, project) in _blocks(c):
        theirs, n = f"features.{stage + 1}.{j}.block", len(wider)
        for place, part in (*enumerate(wider), (n + 1, project)):
            table |= unit(f"{ours}/{part}", f"{theirs}.{place}", "0", "1")
        table[f"{ours}/squeeze/reduce"] = f"{theirs}.{n}.fc1"
        table[f"{ours}/squeeze/expand"] = f"{theirs}.{n}.fc2"
    return table


def _mobilenet_settings(config: Any) -> dict[str, Any]:
    return {"padding": "symmetric", "bn_eps": 1e-5}


def _efficientnet_settings(config: Any) -> dict[str, Any]:
    """torchvision's B5 and larger keep the paper's eps."""
    return {"padding": "symmetric", "bn_eps": 1e-3 if config.width >= 1.6 else 1e-5}


_TIMM_NOTE = (
    "timm's tf_efficientnet weights are of networks with model.padding=same model.bn_eps=1e-3, its "
    "others of such with model.padding=symmetric model.bn_eps=1e-5: no tensor tells"
)

#: Family → layouts besides its converter's.
LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "resnet": (Layout("torchvision and timm", _from(RESNET, RESNEXT.table)),),
    "mobilenet_v2": (
        Layout("torchvision", _from(MOBILENET_V2, _mobilenet_torchvision), _mobilenet_settings),
        Layout("timm", _from(MOBILENET_V2, _timm), _mobilenet_settings),
    ),
    "efficientnet": (
        Layout(
            "torchvision", _from(EFFICIENTNET, _efficientnet_torchvision), _efficientnet_settings
        ),
        Layout("timm", _from(EFFICIENTNET, _timm), note=_TIMM_NOTE),
    ),
}

# --- Which layout a file has ---------------------------------------------------------------------


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
