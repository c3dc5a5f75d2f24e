"""Reads the weight files of other libraries for a network: recognises their layout and sizes.

The configuration gives the architecture; the file may have other classes, image channels and, where
its positions show it, another image size.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hsvit_jax.models.network import Network
from hsvit_jax.weights import layouts, torch
from hsvit_jax.weights.torch.base import Misfits, Tensors, listed


class Pretrained(NamedTuple):
    """The weights of a file.

    Attributes:
      params: parameters of `network`, NumPy arrays.
      stats: its batch statistics.
      network: the configured network, or the classifier of its backbone, in the file's sizes.
      complete: whether `network` is the configured one rather than its backbone's classifier.
      source: the file and its layout, for the log.
    """

    params: dict
    stats: dict
    network: Any
    complete: bool
    source: str


def load(
    path: Path, tensors: Tensors, family: str, network: Any, *, fresh_classifier: bool
) -> Pretrained:
    """Reads the weights in a file for a network like `network`.

    Args:
      path: of the file; for a network on a backbone also one of the backbone's family.
      fresh_classifier: the file need not have a classifier, which is then zeros.

    Raises:
      ValueError: it is of another architecture, or has tensors that are missing, extra or
        misshapen.
    """
    base, complete = network.feature_network(), True
    if base is not None and not torch.table(family).recognises(tensors):
        (family, network), complete, fresh_classifier = base, False, True
    reading = _Reading(family, network, tensors)
    network, classifier = reading.sizes_of_file(network)
    if fresh_classifier:
        reading.fill(network, classifier)
    params, stats = reading.read(network, classifier)
    section = "model" if complete else "model.backbone_settings"
    _check_settings(reading.layout, network.config, section)
    note = reading.layout.note
    source = f"{path.name}, named as in {reading.layout.library}" + (note and f" ({note})")
    return Pretrained(params, stats, network, complete, source)


def _check_settings(layout: layouts.Layout, config: Any, section: str) -> None:
    """Raises ValueError where the layout's networks compute with other settings than `config`."""
    wanted = layout.settings(config)
    wrong = {k: v for k, v in wanted.items() if getattr(config, k) != v}
    if wrong:
        now = ", ".join(f"{k}={getattr(config, k)}" for k in wrong)
        fix = " ".join(f"--config.{section}.{k}={v}" for k, v in wrong.items())
        raise ValueError(
            f"these are weights of a {layout.library} network, which computes otherwise than this "
            f"configuration's with {now}: say {fix}"
        )


class _Reading:
    """A file's tensors under the keys that a family's table asks for."""

    def __init__(self, family: str, network: Network, tensors: dict[str, np.ndarray]) -> None:
        self.family, self.weights = family, torch.table(family)
        self.tensors, self.shapes = tensors, {}
        wanted = self.expected(network)
        match = layouts.match(family, network.config, wanted, tensors)
        if 2 * match.count < len(wanted):
            if all(name.startswith(("params.", "stats.")) for name in tensors):
                raise ValueError(
                    "it has the names of a file that hsvit export wrote, but not its header, which "
                    "says what network it is: export it again, and copy the file as a whole"
                )
            other = layouts.looks_like(tensors)
            raise ValueError(
                f"these are the weights of another architecture{other and f' ({other})'}: of the "
                f"{len(wanted)} tensors that this {family} network needs, {match.count} are there"
            )
        self.layout, self.names = match.layout, match.names
        used = {name: key for key, name in match.names.items() if name in tensors}
        # What is not asked for keeps its name, unless that is asked for and means another tensor.
        self.tensors = {
            used.get(name, f"{name} (of the file)" if name in wanted else name): tensor
            for name, tensor in tensors.items()
        }
        self.shapes.clear()  # the table may have other names for a file with these keys

    def expected(self, network: Network) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a network, by key; computed once for each config."""
        if network.config not in self.shapes:
            entries = self.weights.entries(network, self.weights.unwrapped(self.tensors))
            self.shapes[network.config] = {entry.key: entry.shape for entry in entries}
        return self.shapes[network.config]

    def sizes_of_file(self, network: Network) -> tuple[Network, set[str]]:
        """Resizes the network to the file's classes, channels and image size, as far as its tensors
        show them; also returns the keys whose shapes depend on the classes."""
        classifier: set[str] = set()
        shapes = {key: tensor.shape for key, tensor in self.tensors.items()}
        if self.expected(network).items() <= shapes.items():
            return network, classifier
        for name in ("num_classes", "image_channels"):
            now = getattr(network.config, name)
            differing = self._differing(network, **{name: now + 1})
            sizes = {
                now + (size - ours) // (more - ours)
                for key, (shape, larger) in differing.items()
                if key in self.tensors and self.tensors[key].ndim == len(shape)
                for ours, more, size in zip(shape, larger, self.tensors[key].shape, strict=True)
                if more != ours
            }
            if name == "num_classes":
                classifier = set(differing)
            if len(sizes) == 1 and min(sizes) >= 1 and sizes != {now}:
                network = _resized(network, **{name: sizes.pop()}) or network
        return self._with_image_size(network), classifier

    def _differing(self, network: Network, **sizes: Any) -> dict[str, tuple]:
        """Maps keys whose shapes these sizes change to (shape, shape with these sizes)."""
        ours, other = self.expected(network), _resized(network, **sizes)
        theirs = self.expected(other) if other is not None else {}
        pairs = ((key, (ours[key], theirs.get(key, ours[key]))) for key in ours)
        return {k: (a, b) for k, (a, b) in pairs if a != b and len(a) == len(b)}

    def _with_image_size(self, network: Network) -> Network:
        """Resizes the network to images of its proportions, or square, with as many patches as the
        file has positions; leaves it as it is where no size fits."""
        rows, columns = network.config.image_size
        places = self._differing(network, image_size=(2 * rows, 2 * columns))
        stored = {k: self.tensors[k].shape for k in places if k in self.tensors}
        if all(shape == places[key][0] for key, shape in stored.items()):
            return network
        for base in (network, _resized(network, image_size=(rows, rows))):
            for key, shape in stored.items() if base is not None else ():
                size = _size_of(base, self.expected(base).get(key, shape), shape)
                other = _resized(network, image_size=size)
                wanted = self.expected(other) if other is not None else {}
                if all(wanted.get(k) == shape for k, shape in stored.items()):
                    return other
        return network

    def fill(self, network: Network, keys: set[str]) -> None:
        """Adds zeros for those of `keys` that the file does not have."""
        shapes = self.expected(network)
        zeros = {key: np.zeros(shapes[key], np.float32) for key in keys & shapes.keys()}
        self.tensors = zeros | self.tensors

    def read(self, network: Network, classifier: set[str]) -> tuple[dict, dict]:
        """Converts the tensors to (params, stats); a ValueError uses the file's names."""
        try:
            return self.weights.load(self.tensors, network)
        except Misfits as misfits:
            problems = [
                (kind, self.names.get(key, key), figures) for kind, key, figures in misfits.problems
            ]
            missing = {key for kind, key, _ in misfits.problems if kind == "missing"}
            hint = ""
            if missing and missing == classifier:
                hint = ". It has no classifier: init.classifier=new starts with a fresh one"
            raise ValueError(
                f"{len(problems)} tensors, named as in {self.layout.library}, do not fit the "
                f"{self.family} network of this configuration; nothing was loaded: "
                f"{listed(problems)}{hint}"
            ) from None


def _resized(network: Network, **sizes: Any) -> Network | None:
    try:
        return network.resized(**sizes)
    except ValueError:
        return None


def _size_of(network: Network, ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, int]:
    """The image size with as many patches as the file's positions, of shape `theirs`, or (0, 0)."""
    if ours == theirs:
        return network.config.image_size
    for places, wanted in zip(ours, theirs, strict=False):
        # A family may know grids of its own numbers of tokens only.
        grids = Network.grid(network, places), Network.grid(network, wanted)
        if places != wanted and None not in grids:
            (_, rows, _), (_, more, _) = grids
            height, width = network.config.image_size
            return height * more // rows, width * more // rows
    return 0, 0
