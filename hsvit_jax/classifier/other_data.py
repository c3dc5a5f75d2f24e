"""The images that a network is evaluated on: its run's own, or other data."""

from collections.abc import Collection
from typing import Any

import ml_collections

from hsvit_jax import data, train
from hsvit_jax.runtime import coordination

#: The note if a data set's content is not that of the run; one more image changes the splits.
CHANGED = (
    "note: {} has changed since this network was trained, or is split otherwise: training images "
    "may be counted here. To evaluate only new images: hsvit eval RUN --config=c2a2:folder=NEW; to "
    "train on them: hsvit train ... --config.init.from=RUN --workdir=ANOTHER"
)


def load(
    network: Any, asked: Any = None, split: str | None = None, *, named: bool = False
) -> tuple[ml_collections.ConfigDict, str, data.Split]:
    """Loads the images to evaluate, and prints notes.

    Args:
      network: a `Classifier`.
      asked: the configuration of other data; None for the run's own.
      split: defaults to 'test', or to 'all' of a custom folder or table beside a `named` run.

    Returns:
      the configuration, the split's name, and its images.

    Raises:
      ValueError: the data cannot be loaded, have other classes, or have no such split.
    """
    config, own, implied = network.config, True, split is None
    if named and asked is not None and not any(key.startswith("data.") for key in asked.user):
        asked = None  # it names only a network
    if asked is not None:
        config, own = configured(network, asked, asked.user)
    name = config.data.name
    if split is None:
        beside = named and asked is not None and name.startswith(("folder=", "csv="))
        split = "all" if beside else "test"
    dataset = train.load_data(config, test_only=split == "all")
    coordination.check_same("data set", dataset.fingerprint)
    same_name = name == network.config.data.name
    if same_name and network.fingerprint not in (None, dataset.fingerprint):
        coordination.print_once(CHANGED.format(name))
    elif split == "all" and own:
        coordination.print_once(
            "note: these are the images of the training; set --split=test to evaluate unseen ones"
        )
    part = dataset.test if split == "all" else getattr(dataset, split)
    part = network.relabelled(part, dataset.info)
    if not len(part):
        raise ValueError(f"{name} has no {split} split here")
    images = sum(map(len, (dataset.train, dataset.val, dataset.test)))
    hint = " (--split=all takes all of them)" if implied and split != "all" else ""
    coordination.print_once(f"{name}, split {split}: {len(part):,} of {images:,} images{hint}")
    return config, split, part


def configured(
    network: Any, other: ml_collections.ConfigDict, given: Collection[str] = ()
) -> tuple[ml_collections.ConfigDict, bool]:
    """Returns the network's configuration for the data of `other`, and whether they trained it.

    The network keeps its way of evaluating. Its share and validation split are for its own data.

    Args:
      network: a `Classifier`.
      given: explicit keys of `other`, which hold for the network's own data too.
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
    for key in ("batch", "tta", "threshold"):
        if f"eval.{key}" in given:
            config.eval[key] = other.eval[key]
    return config, own
