"""The configuration by which a network is evaluated on data that are named anew."""

from collections.abc import Collection
from typing import Any

import ml_collections


def configured(
    network: Any, other: ml_collections.ConfigDict, given: Collection[str] = ()
) -> tuple[ml_collections.ConfigDict, bool]:
    """Returns the network's configuration for the data of `other`, and whether those are the images
    of its training, by whatever path.

    The network's own way of evaluating stays. Its share and its validation split are of its own
    data.

    Args:
      network: a `Classifier`.
      given: keys of `other` that were set by hand, and hold for the network's own data too.
    """
    config = network.config.copy_and_resolve_references().unlock()
    own, config.data.name = config.data.name == other.data.name, other.data.name
    for key in ("dir", "on_bad_image"):
        if not own or f"data.{key}" in given:
            config.data[key] = other.data[key]
    own = own or network.trained_on(config)
    if not own:
        config.data.fraction = 1.0
    if not own or "data.val_fraction" in given:
        config.data.val_fraction = other.data.val_fraction
    for key in ("batch", "tta"):
        if f"eval.{key}" in given:
            config.eval[key] = other.eval[key]
    return config, own
