"""Prepares a run: the data, the resolved configuration, network, mesh and optimizer."""

import warnings
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import augment, data
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.runtime import memory
from hsvit_jax.train import feature_cache, init_from, optim, step
from hsvit_jax.train.run_spec import Run, load_data, of_given


def prepare(
    config: ml_collections.ConfigDict,
    *,
    dataset: data.Dataset | None = None,
    devices: list | None = None,
    verbose: bool = True,
    workdir: Path | None = None,
) -> Run:
    """Loads the data, resolves the configuration, and builds network, mesh and optimizer.

    Args:
        config: as a config file's `get_config` returns it.
        dataset: to use instead of loading config.data.name.
        devices: all of jax's when left out.
        verbose: say how far a slow first load is.
        workdir: of a run that may have begun, see `init_from.of_weights`.

    Raises:
        ValueError: configuration, data set and devices do not fit together.
    """
    weights = init_from.of_weights(config, workdir)
    loading, given = config_lib.resolve(config, weights=weights), {}
    if dataset is None:
        _refuse_early(loading)
        dataset = load_data(loading, verbose=verbose)
    else:
        given = of_given(dataset)
    if not (images := len(dataset.train)):
        raise ValueError("the data set has no training images: make it without test_only=True")
    known = {"images": images, "given": given, "weights": weights}
    config = config_lib.resolve(config, dataset.info, **known)
    config_lib.refuse_unread(config)
    _check_held_out(config, dataset)
    model = _network(config)
    mesh = _mesh(config, model, devices)
    if config.init.cache:
        feature_cache.check(config, model, mesh)
    steps_per_epoch = images // config.train.batch
    total_steps = config_lib.total_steps(config, steps_per_epoch)
    schedule = optim.schedule(config.optim, total_steps, steps_per_epoch)
    tx = optim.build(config.optim, schedule, model)
    state_shape = jax.eval_shape(
        lambda start: step.init_state(model, tx, config, start), model.init_shapes()
    )
    length = steps_per_epoch, total_steps
    return Run(config, dataset, model, mesh, *length, schedule, tx, state_shape)


def _refuse_early(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for what cannot work whatever the images are, before they are read."""
    step.augment_settings(config)
    if config.data.name in config_lib.DATA_SETS:  # of these the shapes are known
        _network(config_lib.resolve(config, data.describe(config.data.name)))


def _network(config: ml_collections.ConfigDict) -> Any:
    """Builds the network of a resolved configuration, its frozen parts marked; refuses one that
    does not fit in memory."""
    settings, size = step.augment_settings(config), config.data.image_size
    augment.check_size(settings, *size, config.data.channels)
    model = config_lib.build_model(config)
    frozen = init_from.frozen_parts(config.init.freeze)
    model = model.with_frozen(frozen) if frozen else model
    memory.check_network(config, model)
    return model


def _mesh(config: ml_collections.ConfigDict, model: Any, devices: list | None) -> jax.sharding.Mesh:
    if not model.group_axis_limit and config.mesh.group > 1:
        groups = getattr(model.config, "groups", 0)
        why = "the groups of it read each other" if groups else "it has no attention groups"
        raise ValueError(
            f"mesh.group={config.mesh.group} cannot spread {config.model.variant} "
            f"({config.model.family}): {why}; set mesh.group=1; mesh.data splits the batch "
            "of every network"
        )
    kernels = " and kernels" * (config.model.get("trunk") == "sharded")
    return mesh_lib.make(
        config.mesh.group,
        config.mesh.data,
        groups=model.group_axis_limit,
        batch=config.train.batch,
        accumulate=config.train.accumulate,
        devices=devices,
        parts=f"{model.splits or 'groups'}{kernels}",
        aggregate=config.mesh.aggregate,
    )


def _check_held_out(config: ml_collections.ConfigDict, dataset: data.Dataset) -> None:
    """Refuses a data set without the splits to evaluate on; warns of unused validation images."""
    if not len(dataset.test):
        raise ValueError(
            f"{config.data.name} has no test images: the run could not be evaluated; add some"
        )
    if config.train.select_on in ("val", "macro_f1") and not len(dataset.val):
        raise ValueError(
            f"train.select_on={config.train.select_on!r}, but {config.data.name} has no validation "
            "images: give three or more of a class and a val_fraction above 0, or say "
            "train.select_on='last' to take the last checkpoint"
        )
    if "data.val_fraction" in config.user and not config.data.val_fraction and len(dataset.val):
        warnings.warn(
            f"data.val_fraction=0 is not used: {config.data.name} has a validation part of its "
            "own, which is not trained on; put its images into the training part for that",
            stacklevel=2,
        )
