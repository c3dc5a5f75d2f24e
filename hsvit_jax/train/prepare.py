"""Prepares a run: the data, the resolved configuration, network, mesh and optimizer."""

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import augment, data, tasks
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.runtime import coordination, memory
from hsvit_jax.text import printable
from hsvit_jax.train import feature_cache, init_from, optim, step
from hsvit_jax.train.run_spec import Run
from hsvit_jax.weights import teacher


def load_data(
    config: ml_collections.ConfigDict,
    *,
    resident: bool = True,
    test_only: bool = False,
    training: bool = False,
    verbose: bool = True,
) -> data.Dataset:
    """Loads the data set of a configuration at its image size.

    Args:
        config: only its `data` section counts.
        resident: False reads image files as needed even if they fit in memory.
        test_only: put every image into the test split.
        training: the training split has data.train_size, if that is set.
        verbose: process 0 reports the progress of a slow first load on standard error.
    """
    settings = config.data
    limit = {} if resident else {"resident_limit_bytes": 0}

    def load(size: tuple[int, ...]) -> data.Dataset:
        dataset = data.load(
            settings.name,
            data_dir=settings.dir or None,
            image_size=(size * 2 if len(size) == 1 else size) or None,
            channels=settings.channels or None,
            fit=settings.fit,
            val_fraction=settings.val_fraction,
            on_bad_image=settings.on_bad_image,
            task=settings.task,
            progress=_progress() if verbose and coordination.is_lead() else None,
            test_only=test_only,
            **limit,
        )
        return dataset.subset(settings.fraction)

    dataset = load(tuple(settings.image_size))
    if training and settings.train_size:
        dataset = dataclasses.replace(dataset, train=load(tuple(settings.train_size)).train)
    return dataset


def _progress() -> Callable[[str, int, int], None]:
    """Makes a function that reports the work of a load at once, then every ten seconds."""
    reported: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in reported or time.monotonic() - reported[what] >= 10:
            reported[what] = time.monotonic()
            text = f"{what}: {done:,}" if done else what
            text += f" of {total:,}" if total else ""
            print(printable(text), file=sys.stderr, flush=True)

    return report


def _settings_of(dataset: data.Dataset) -> dict[str, Any]:
    """Returns the settings of a given data set by 'data.key'."""
    info = dataset.info
    found = {f"data.{key}": getattr(info, key) for key in ("image_size", "channels", "fit", "task")}
    for key in ("val_fraction", "fraction", "on_bad_image"):
        found[f"data.{key}"] = getattr(dataset, key)
    if "=" in info.name or info.name in config_lib.DATA_SETS:
        found["data.name"] = info.name
    return found


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
        dataset: replaces config.data.name.
        devices: defaults to all of jax's.
        verbose: report the progress of a slow first load.
        workdir: of a run that may have begun, see `init_from.of_weights`.

    Raises:
        ValueError: configuration, data set and devices do not fit together.
    """
    weights, given = init_from.of_weights(config, workdir), {}
    if dataset is None:
        early = config_lib.resolve(config, weights=weights)
        tasks.check(early)
        step.augment_settings(early)  # refuses what no images can change, before they are read
        for text in early.augment.transforms:
            augment.transforms.named(text)
        if early.data.name in config_lib.DATA_SETS and not weights.settings:
            _network(config_lib.resolve(early, data.describe(early.data.name)))
        dataset = load_data(early, training=True, verbose=verbose)
    else:
        given = _settings_of(dataset)
    if not (images := len(dataset.train)):
        raise ValueError("the data set has no training images: make it without test_only=True")
    known = {"images": images, "given": given, "weights": weights}
    config = config_lib.resolve(config, dataset.info, **known)
    config_lib.refuse_unread(config)
    tasks.check(config)
    _check_splits(config, dataset)
    if config.init.cache:
        config = feature_cache.without_augmentation(config)
    try:
        model = _network(config)
    except ValueError:
        if weights.settings:
            refuse_contradictions(config, dataset)
        raise
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


def with_teacher(run: Run, verbose: bool = False) -> Run:
    """Returns the run with the network of `init.teacher`, if any, on its mesh.

    Args:
        verbose: print where it is from.

    Raises:
        ValueError: it cannot teach this run, or another one taught it before.
    """
    config, info = run.config, run.dataset.info
    if not config.init.teacher:
        return run
    devices = run.mesh.shape[mesh_lib.GROUP]
    found = teacher.load(config, info.class_names, devices, run.dataset.fingerprint)
    if run.taught_by not in ("", found.digest):
        raise ValueError(
            f"init.teacher={config.init.teacher} holds another network than when the run began: "
            "restore it, or train in another --workdir"
        )
    if verbose:
        print(printable(f"the teacher is {found.about}"), flush=True)
    trees = {"params": found.params, "stats": found.stats}
    found = found._replace(**mesh_lib.place(run.mesh, trees, found.network))
    return dataclasses.replace(run, teacher=found, taught_by=found.digest)


def _network(config: ml_collections.ConfigDict) -> Any:
    """Builds the network of a resolved configuration, with its frozen parts, if it fits memory."""
    size = config.data.image_size
    augment.check_size(step.augment_settings(config), *size, config.data.channels)
    model = config_lib.build_model(config)
    if frozen := init_from.frozen_parts(config.init.freeze):
        model = model.with_frozen(frozen)
    memory.check_network(config, model)
    return model


def refuse_contradictions(config: config_lib.Settings, dataset: data.Dataset) -> None:
    """Raises Contradiction with all that keeps a run from starting at init.from.

    Its settings are complete: a start with them was tried.
    """
    problems, changes, keys = [], dict[str, Any](), dict(config_lib.leaves(config))
    while True:
        try:
            _try_start(config.filled(changes), dataset)
            break
        except config_lib.Contradiction as error:
            problems.append(error.problems)
            fits = error.settings.items()
            new = {k: v for k, v in fits if keys.get(k, v) != v and k not in changes}
        except ValueError as error:
            problems.append(str(error))
            new = {}
        if not new:
            changes = {}
            break
        changes |= new
    if "data.image_size" in changes:  # nothing is left to resize
        changes.pop("init.positions", None)
    text = f"init.from={config.init['from']}: {'; '.join(problems)}"
    raise config_lib.Contradiction(text, changes) from None


def _try_start(config: config_lib.Settings, dataset: data.Dataset) -> None:
    try:
        model = _network(config)
    except ValueError as error:
        fits = init_from.sizes(config)
        others = ", ".join(fits)
        text = f"{error}; the network has other {others}" if fits else str(error)
        raise config_lib.Contradiction(text, fits) from error
    init_from.load(config, model, dataset.fingerprint, dataset.info.class_names)


def _mesh(config: ml_collections.ConfigDict, model: Any, devices: list | None) -> jax.sharding.Mesh:
    if not model.group_axis_limit and config.mesh.group > 1:
        groups = getattr(model.config, "groups", 0)
        why = "its groups exchange values" if groups else "it has no attention groups"
        raise ValueError(
            f"mesh.group={config.mesh.group} cannot spread {config.model.variant} "
            f"({config.model.family}): {why}; set mesh.group=1, or spread the batch by mesh.data"
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


def _check_splits(config: ml_collections.ConfigDict, dataset: data.Dataset) -> None:
    """Refuses a data set without the splits to evaluate on, or with training images of another
    size; warns of unused validation images."""
    wanted = tuple(config.data.train_size)
    if wanted and wanted != (size := dataset.train.gather([0]).shape[1:3]):
        raise ValueError(
            f"data.train_size={wanted}, but the training images that are given have {size}: remove "
            "data.train_size, or give larger ones"
        )
    if not len(dataset.test):
        raise ValueError(f"{config.data.name} has no test images for the evaluation: add some")
    if config.train.select_on in ("val", "macro_f1") and not len(dataset.val):
        raise ValueError(
            f"train.select_on={config.train.select_on!r}, but {config.data.name} has no validation "
            "images: use three or more of a class and a val_fraction above 0, or set "
            "train.select_on='last'"
        )
    if "data.val_fraction" in config.user and not config.data.val_fraction and len(dataset.val):
        warnings.warn(
            f"data.val_fraction=0 has no effect: {config.data.name} has a validation part, which "
            "is not trained on; move its images into the training part to train on them",
            stacklevel=2,
        )
