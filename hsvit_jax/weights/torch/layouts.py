"""Layouts of files: each library's names of a network's tensors, from the keys of its table.

Torchvision and timm name the convolutional networks' tensors otherwise than transformers.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hsvit_jax.models.convnets.inverted_residual import InvertedConfig
from hsvit_jax.weights.torch.base import Table, TorchWeights, names
from hsvit_jax.weights.torch.convnets import EFFICIENTNET, MOBILENET_V2, RESNET, RESNEXT

Rename = Callable[[str], str]


class Layout(NamedTuple):
    """A library's names.

    Attributes:
      rename: from a network's config to a function from the converter's names to the library's.
      settings: from a config to settings of the library's networks that no tensor shows.
      note: a remark on settings that remain unknown.
    """

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
    """Returns `Layout.rename` from a converter's names to another table of the same network."""

    def renamed(config: Any) -> Rename:
        theirs = table(config, ())
        found = {
            name.partition("[")[0]: theirs[path]
            for path, name in weights.table(config, ()).items()
            if path in theirs
        }

        def rename(key: str) -> str:
            module, _, leaf = key.rpartition(".")
            return f"{found.get(module, module)}.{leaf}"

        return rename

    return renamed


# --- Inverted residuals --------------------------------------------------------------------------


def _blocks(c: InvertedConfig) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """Yields our path of a block, its stage, its place there and its convolutions."""
    parts = ("expand", "depthwise", "project")
    for i, ((stage, j), block) in enumerate(zip(c.places(), c.plan().blocks, strict=True)):
        yield f"backbone/blocks/{i}", stage, j, parts[block.expand is None :]


def _timm(c: InvertedConfig, keys: tuple[()]) -> Table:
    ends = "stem=conv_stem stem/norm=bn1 top=conv_head top/norm=bn2"
    table = names("backbone", "", ends) | {"head/linear": "classifier"}
    for ours, stage, j, parts in _blocks(c):
        theirs = f"blocks.{stage}.{j}"
        convs = ("conv_pw", "conv_dw", "conv_pwl") if len(parts) == 3 else ("conv_dw", "conv_pw")
        for n, (part, conv) in enumerate(zip(parts, convs, strict=True), 1):
            table |= names(f"{ours}/{part}", theirs, f"={conv} norm=bn{n}")
        table |= names(f"{ours}/squeeze", f"{theirs}.se", "reduce=conv_reduce expand=conv_expand")
    return table


def _torchvision_ends(last: int) -> Table:
    ends = names("backbone", "features", f"stem=0 top={last}", "=0 norm=1")
    return ends | {"head/linear": "classifier.1"}


def _mobilenet_torchvision(c: InvertedConfig, keys: tuple[()]) -> Table:
    table = _torchvision_ends(len(c.places()) + 1)
    for i, (ours, _, _, (*wider, project)) in enumerate(_blocks(c), 1):
        theirs, last = f"features.{i}.conv", len(wider)
        words = " ".join(f"{part}={n}" for n, part in enumerate(wider))
        table |= names(ours, theirs, words, "=0 norm=1")
        table |= names(ours, theirs, f"{project}={last} {project}/norm={last + 1}")
    return table


def _efficientnet_torchvision(c: InvertedConfig, keys: tuple[()]) -> Table:
    table = _torchvision_ends(c.places()[-1][0] + 2)
    for ours, stage, j, (*wider, project) in _blocks(c):
        theirs, n = f"features.{stage + 1}.{j}.block", len(wider)
        words = " ".join(f"{part}={place}" for place, part in enumerate(wider))
        table |= names(ours, theirs, f"{words} {project}={n + 1}", "=0 norm=1")
        table |= names(f"{ours}/squeeze", f"{theirs}.{n}", "reduce=fc1 expand=fc2")
    return table


def _mobilenet_settings(config: Any) -> dict[str, Any]:
    return {"padding": "symmetric", "bn_eps": 1e-5}


def _efficientnet_settings(config: Any) -> dict[str, Any]:
    """Torchvision's B5 and larger keep the paper's eps."""
    return {"padding": "symmetric", "bn_eps": 1e-3 if config.width >= 1.6 else 1e-5}


_TIMM_NOTE = (
    "no tensor shows the padding: set model.padding=same model.bn_eps=1e-3 for timm's "
    "tf_efficientnet weights, model.padding=symmetric model.bn_eps=1e-5 for its others"
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

# --- Matching ------------------------------------------------------------------------------------


def known(family: str) -> tuple[Layout, ...]:
    """Lists the layouts of a family's files, its converter's first."""
    return (OWN, *LAYOUTS.get(family, ()))


def match(family: str, config: Any, wanted: Collection[str], keys: Collection[str]) -> Match:
    """Finds the layout of `family` in which most of the `wanted` keys are among a file's `keys`."""
    matches = []
    for layout in known(family):
        rename = layout.rename(config)
        found = {key: rename(key) for key in wanted}
        add, drop = _wrapped(set(found.values()), set(keys))
        found = {key: add + name.removeprefix(drop) for key, name in found.items()}
        matches.append(Match(layout, found, sum(name in keys for name in found.values())))
    return max(matches, key=lambda match: match.count)


def _wrapped(names: set[str], keys: set[str]) -> tuple[str, str]:
    """Finds the prefix that the file adds to all names, and the prefix that it drops.

    DataParallel and Lightning wrap a network in another; a bare backbone has no classifier around.
    """
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
