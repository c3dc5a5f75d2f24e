"""Reads the weight files of other libraries: their network, its sizes and its arrays.

The sizes are those of the file's own configuration: its `config`, or the `config.json` beside it.
Without one the network is given, and the tensors show its classes and image channels alone. The
tensors' names show the layout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from hsvit_jax import config as config_lib
from hsvit_jax.models.network import Network
from hsvit_jax.text import few
from hsvit_jax.weights import files, sources, torch
from hsvit_jax.weights.torch import layouts
from hsvit_jax.weights.torch.base import Shape, Tensors, pair


class Weights(NamedTuple):
    """The weights of a file.

    Attributes:
      params: NumPy arrays, as `stats`.
      network: the network in the file, in the file's sizes.
      family: the network's.
      source: the file and its layout, for the log.
      config: the file's own configuration, or None.
      class_names: names of its classes, as far as the file has them.
    """

    params: dict
    stats: dict
    network: Network
    family: str
    source: str
    config: ml_collections.ConfigDict | None
    class_names: tuple[str, ...]


def read(
    path: Path,
    tensors: Tensors,
    description: Mapping[str, Any],
    like: Network | None = None,
    family: str = "",
    *,
    fresh_classifier: bool = False,
) -> Weights:
    """Reads the weights in a file.

    Args:
      path: a file; for a network on a backbone also one of the backbone's family.
      tensors: its tensors and its `description`, as `files.read` returns them.
      like: the network of a file that describes none, with any number of classes.
      family: the family of `like`.
      fresh_classifier: the file need not have a classifier, which is then zeros.

    Raises:
      ValueError: nothing describes the network, it is another one, or tensors are missing, extra or
        misshapen.
    """
    published = sources.pixels(path)
    if published and published.blue_first:
        tensors = red_first(tensors)
    about, wanted = {**description, **sources.description(path)}, family
    try:
        config = _described(about, tensors, like, family)
        if config is None and like is not None and (size := about.get("pretrained_cfg")):
            like = like.resized(image_size=pair(size["input_size"][1:]))  # timm's
    except files.FOREIGN as error:
        raise ValueError(
            f"its description gives no network ({error}): correct it, or take the tensors alone "
            "and name the network by --config"
        ) from error
    if config is not None:
        network, family = config_lib.build_model(config), config.model.family
    elif like is None:
        raise ValueError(
            "it does not say what network it holds: name one, as in --config=c2a2 "
            "--config.model.heads=8 --config.data.image_size=32,32"
        )
    elif torch.table(family).prefix(tensors) is None and (base := like.feature_network()):
        family, network = base
    else:
        network = like
    fresh = fresh_classifier or family != (wanted or family)
    params, stats, network, library = _load(tensors, family, network, fresh, wanted or family)
    c, names = network.config, description.get("class_names", [])
    if config is not None:
        config = config.filled(
            {"data.channels": c.image_channels, "data.num_classes": c.num_classes}
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`class_names` in its `config` must be a list of texts; got {names!r:.60}"
        )
    if len(names) > c.num_classes:
        raise ValueError(
            f"`class_names` in its `config` are {len(names)} of {c.num_classes} classes"
        )
    source = f"{path.name}, named as in {library}"
    if isinstance(name := about.get("architecture"), str):
        source += f", published as {name}"
    return Weights(params, stats, network, family, source, config, tuple(names))


def _described(
    description: Mapping[str, Any], tensors: Tensors, like: Network | None, family: str
) -> ml_collections.ConfigDict | None:
    """Returns the configuration that a description gives, if any."""
    own = description.get("config")
    if isinstance(own, dict):  # a file that export wrote under the authors' names
        config = config_lib.completed(own)
        config_lib.validate(config)
        return config
    try:
        record, given = torch.family_of(description), torch.constructor(description)
    except ValueError:
        if like is None:
            raise
        return None  # nobody has written a reader for it
    if given == {"variant": ""}:
        return None
    if record.name == family and hasattr(like.config, "pool_strides"):
        given = {"pool_strides": like.config.pool_strides, **given}
    prefix = torch.table(record.name).prefix(tensors) or ""
    tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    model, data = torch.sections(record, tensors, given, like and like.config)
    sizes = {f"data.{key}": value for key, value in data.items()}
    config = config_lib.base("cifar10", model).filled(sizes)
    config_lib.validate(config)
    return config


# --- Tensors -------------------------------------------------------------------------------------


def red_first(tensors: Tensors) -> Tensors:
    """Reverses the image channels of the one convolution that reads three."""
    first = [name for name, x in tensors.items() if x.ndim == 4 and x.shape[1] == 3]
    if len(first) != 1:
        raise ValueError(
            f"its pixels come with blue first, but {len(first)} convolutions read three channels, "
            "not one: nothing can be reversed"
        )
    return {**tensors, first[0]: tensors[first[0]][:, ::-1]}


def _load(
    tensors: Tensors, family: str, network: Network, fresh_classifier: bool, wanted: str
) -> tuple[dict, dict, Network, str]:
    """Loads tensors as (params, stats, the network with their classes and channels, the library).

    wanted: the family of the network that gets the weights, perhaps for its backbone.
    """
    table = torch.table(family)
    prefix = table.prefix(tensors) or ""
    keys = [key.removeprefix(prefix) for key in tensors]
    known: dict[Any, dict[str, Shape]] = {}

    def shapes(network: Network, **sizes: int) -> dict[str, Shape]:
        network = network.resized(**sizes) if sizes else network
        if network.config not in known:
            entries = table.entries(network, keys)
            known[network.config] = {entry.key: entry.shape for entry in entries}
        return known[network.config]

    expected = shapes(network)
    layout, names, count = layouts.match(family, network.config, expected, tensors)
    if 2 * count < len(expected):
        raise ValueError(
            f"these are the weights of another architecture: of the {len(expected)} tensors that "
            f"this {family} network needs, {count} are there"
        )
    used = {name: key for key, name in names.items() if name in tensors}
    # Unused tensors keep their names, unless the network needs another tensor under that name.
    tensors = {
        used.get(name, f"{name} (of the file)" if name in expected else name): tensor
        for name, tensor in tensors.items()
    }
    if any(expected.get(key, x.shape) != x.shape for key, x in tensors.items()):
        for name in ("num_classes", "image_channels"):
            now = getattr(network.config, name)
            larger = shapes(network, **{name: now + 1})
            sizes = {
                now + (size - a) // (b - a)
                for key, shape in shapes(network).items()
                if key in tensors and tensors[key].ndim == len(shape)
                for a, b, size in zip(shape, larger[key], tensors[key].shape, strict=True)
                if a != b
            }
            if len(sizes) == 1 and 0 < min(sizes) != now:
                network = network.resized(**{name: sizes.pop()})
    ours = shapes(network)
    larger = shapes(network, num_classes=network.config.num_classes + 1)
    missing = ours.keys() - tensors.keys()
    headless = bool(missing) and all(larger[key] != ours[key] for key in missing)
    if headless and fresh_classifier:
        tensors |= {key: np.zeros(ours[key], np.float32) for key in missing}
    needed = layout.settings(network.config)
    wrong = {k: v for k, v in needed.items() if getattr(network.config, k) != v}
    if wrong:
        section = "" if family == wanted else "backbone_settings."
        now = ", ".join(f"{k}={getattr(network.config, k)}" for k in wrong)
        fix = " ".join(f"--config.model.{section}{k}={v}" for k, v in wrong.items())
        raise ValueError(f"these {layout.library} weights need {fix}; the configuration has {now}")
    if problems := table.misfits(tensors, network):
        lines = (f"{kind} {names.get(key, key)}{figures}" for kind, key, figures in problems)
        hint = ". It has no classifier; set init.classifier=new to start with a fresh one"
        raise ValueError(
            f"{len(problems)} tensors, named as in {layout.library}, do not fit this {family} "
            f"network; nothing was loaded: {few(lines, '; ')}{hint if headless else ''}"
        )
    source = layout.library + (layout.note and f" ({layout.note})")
    return *table.load(tensors, network), network, source
