"""Reads a trained network that teaches another one, and turns images and classes into its own.

Source: Hinton et al. 2015, Distilling the Knowledge in a Neural Network.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from hsvit_jax import config as config_lib
from hsvit_jax.text import few
from hsvit_jax.weights import files, read, sources
from hsvit_jax.weights.stored import digest, for_all, of_survivors, origin_of, stored_network

Array = jax.Array

# Shares of red, green and blue in grey (ITU-R 601-2), as Pillow has them.
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


class Pixels(NamedTuple):
    """Normalised images: mean and standard deviation by channel, and (rows, columns)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int]


class Teacher(NamedTuple):
    """A `TeacherNetwork`, its weights, their digest, and where they are from."""

    network: Any
    params: dict
    stats: dict
    digest: str
    about: str


class TeacherNetwork:
    """A trained network that takes the images of another network and returns its classes.

    All other attributes are the trained network's, so that a mesh can spread it.

    Attributes:
      given, seen: the images that it gets, and those that it was trained on.
      rows: the trained network's logit of each class; () for all of them.
      part_names: empty if the mesh's `devices` cannot share its groups: each computes all of it.
    """

    def __init__(
        self, network: Any, given: Pixels, seen: Pixels, rows: tuple[int, ...], devices: int
    ) -> None:
        self.network, self.given, self.seen, self.rows = network, given, seen, rows
        limit = network.group_axis_limit
        self.part_names = network.part_names if limit and limit % devices == 0 else ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def apply(self, params: dict, stats: dict, images_BHWC: Array, **how: Any) -> tuple:
        """Applies the network to images that are normalised for another; see `Network.apply`."""
        if not self.part_names:
            how.pop("shard", None)
        x_BHWC = renormalised(images_BHWC, self.given, self.seen)
        logits_BK, stats = self.network.apply(params, stats, x_BHWC, **how)
        return logits_BK[:, np.array(self.rows)] if self.rows else logits_BK, stats


def renormalised(x_BHWC: Array, given: Pixels, seen: Pixels) -> Array:
    """Turns float images (B, H, W, C) of one kind into another's channels, size and statistics.

    Grey becomes equal channels, and colours become their luma. Other sizes are bilinear.
    """
    if given[:2] != seen[:2]:
        (mean_C, std_C), (new_mean_C, new_std_C) = (
            (jnp.array(x, jnp.float32)[None, None, None] for x in one[:2]) for one in (given, seen)
        )
        x_BHWC = x_BHWC * std_C + mean_C
        if len(seen.mean) < len(given.mean):
            x_BHWC = (x_BHWC * _LUMA[None, None, None]).sum(-1, keepdims=True)
        x_BHWC = (x_BHWC - new_mean_C) / new_std_C
    if x_BHWC.shape[1:3] == seen.size:
        return x_BHWC
    shape = (len(x_BHWC), *seen.size, x_BHWC.shape[3])
    return jax.image.resize(x_BHWC, shape, "bilinear")


def load(
    config: ml_collections.ConfigDict,
    class_names: tuple[str, ...],
    devices: int = 1,
    fingerprint: str | None = None,
) -> Teacher:
    """Loads the network that `init.teacher` names, for the images and classes of a configuration.

    Its sources are those of `init.from`; a file must describe its network.

    Args:
      config: resolved.
      class_names, fingerprint: of the data; a note reports splits that may have moved.
      devices: they share its groups.

    Raises:
      ValueError: there are no good weights, a class is missing, or images have other proportions.
    """
    source = config.init.teacher
    try:
        path = sources.locate(source)
        tensors, description = files.read(path) if files.is_weights(path) else ({}, {})
        if tensors and not files.is_release(description):
            params, stats, network, _, about, own, theirs = read.read(path, tensors, description)
        else:
            stored = of_survivors(stored_network(path))
            network, params, stats = stored.model, stored.params, stored.stats
            own, theirs = stored.config, stored.class_names
            about = origin_of(stored, config, source, fingerprint)
        if own and own.data.task != "classify":
            raise ValueError(f"its data.task is {own.data.task}: name a network that classifies")
        found, channels = sources.pixels(source), network.config.image_channels
        values = found[:2] if found else (own.data.mean, own.data.std)
        values = (config_lib.per_channel(source, x or config.data.mean, channels) for x in values)
        seen = Pixels(*values, tuple(network.config.image_size))
        given = Pixels(*map(tuple, (config.data.mean, config.data.std, config.data.image_size)))
        if seen.size[0] * given.size[1] != seen.size[1] * given.size[0]:
            raise ValueError(
                f"it sees images of {seen.size} rows and columns, and data.image_size="
                f"{given.size} has other proportions: set {seen.size}"
            )
        rows = _rows(theirs, for_all(class_names, config.data.num_classes), network.config)
    except ValueError as error:
        raise ValueError(f"init.teacher={source}: {error}") from error
    network = TeacherNetwork(network, given, seen, rows, devices)
    return Teacher(network, params, stats, digest(params, stats), about)


def _rows(theirs: tuple[str, ...], ours: tuple[str, ...], sizes: Any) -> tuple[int, ...]:
    """Returns the teacher's logit of each of our classes; () if they are the same in order."""
    if theirs == ours or (not theirs and sizes.num_classes == len(ours)):
        return ()
    if unknown := [name for name in ours if name not in theirs]:
        raise ValueError(
            f"it does not know the classes {few(unknown)}; it has {few(theirs) or 'no names'}: "
            "rename them, or train it on them"
        )
    return tuple(map(theirs.index, ours))
