"""Training: from a configuration and a folder to a trained, evaluated, checkpointed network."""

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from hsvit_jax import artifacts, augment, checkpoint, data
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.config import schema
from hsvit_jax.runtime import coordination, memory, watchdog
from hsvit_jax.text import printable
from hsvit_jax.train import batches as batches_lib
from hsvit_jax.train import elastic, feature_cache, init_from, loggers, metrics, optim, resume
from hsvit_jax.train import evaluate as evaluate_lib
from hsvit_jax.train import step as step_lib
from hsvit_jax.train import workdir as workdir_lib
from hsvit_jax.train.loop import Callback, Loop
from hsvit_jax.train.run_spec import Run


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A finished run: its folder, its last step, and evaluations of its best checkpoint."""

    workdir: Path
    step: int
    best_step: int
    parameters: int
    test: evaluate_lib.Evaluation
    validation: evaluate_lib.Evaluation | None
    seconds: float = 0.0
    curves: Path | None = None
    report: Path | None = None


def prepare(
    config: ml_collections.ConfigDict,
    *,
    dataset: data.Dataset | None = None,
    devices: list | None = None,
    verbose: bool = True,
) -> Run:
    """Loads the data, resolves the configuration, and builds network, mesh and optimizer.

    Args:
        config: as a config file's `get_config` returns it.
        dataset: to use instead of loading config.data.name.
        devices: all of jax's when left out.
        verbose: say how far a slow first load is.

    Raises:
        ValueError: configuration, data set and devices do not fit together.
    """
    step_lib.augment_settings(config)  # refuses what excludes each other, before data is read
    if dataset is None:
        config = init_from.as_named(config)
        if config.data.name in config_lib.DATA_SETS:  # of these the shapes are known
            _network(config_lib.resolve(config, data.describe(config.data.name)))
        dataset = load_data(config, verbose=verbose)
    else:
        config = config.copy_and_resolve_references().unlock()
        _take_shape(config, dataset.info)
        for key in ("val_fraction", "fraction", "on_bad_image"):  # by which it is found again
            asked, config.data[key] = config.data[key], getattr(dataset, key)
            if _is_asked(config, key, asked) and asked != config.data[key]:
                raise ValueError(
                    f"data.{key}={asked}, but the data set given has {config.data[key]}: leave it "
                    "out, or make the data set so (val_fraction= and on_bad_image= of what loads "
                    "it, dataset.subset(fraction))"
                )
        if "=" in dataset.info.name or dataset.info.name in config_lib.DATA_SETS:
            config.data.name = dataset.info.name
    if not (examples := len(dataset.train)):
        raise ValueError("the data set has no training images: make it without test_only=True")
    config = config_lib.for_few_images(config, examples, dataset.info.num_classes)
    config_lib.refuse_unread(config)
    config = config_lib.resolve(init_from.as_published(config), dataset.info)
    settings, size = step_lib.augment_settings(config), config.data.image_size
    augment.check_size(settings, *size, config.data.channels)
    model, batch = _network(config), config.train.batch
    _check_held_out(config, dataset)
    if batch > examples:
        raise ValueError(
            f"train.batch={batch} is larger than the training split of {examples} images: lower "
            "train.batch or give more images"
        )
    if not model.group_axis_limit and config.mesh.group > 1:
        groups = getattr(model.config, "groups", 0)
        why = "the groups of it read each other" if groups else "it has no attention groups"
        raise ValueError(
            f"mesh.group={config.mesh.group} cannot spread {config.model.variant} "
            f"({config.model.family}): {why}; set mesh.group=1; mesh.data splits the batch "
            "of every network"
        )
    mesh = mesh_lib.make(
        config.mesh.group,
        config.mesh.data,
        groups=model.group_axis_limit,
        batch=batch,
        accumulate=config.train.accumulate,
        devices=devices,
        parts=_parts(config),
        aggregate=config.mesh.aggregate,
    )
    if config.init.cache:
        feature_cache.check(config, model, mesh)
    steps_per_epoch = examples // batch
    total_steps = config_lib.total_steps(config, steps_per_epoch)
    if not total_steps and config.train.epochs:
        raise ValueError(
            f"train.epochs={config.train.epochs:g} is less than one step of {batch} of {examples} "
            "images: raise it, or set train.epochs=0 and train.steps"
        )
    config = config_lib.with_warmup(config, total_steps, steps_per_epoch)
    schedule = optim.schedule(config.optim, total_steps, steps_per_epoch)
    tx = optim.build(config.optim, schedule, model)
    return Run(
        config=config,
        dataset=dataset,
        model=model,
        mesh=mesh,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        schedule=schedule,
        tx=tx,
        state_shape=jax.eval_shape(
            lambda start: step_lib.init_state(model, tx, config, start), model.init_shapes()
        ),
    )


def _is_asked(config: ml_collections.ConfigDict, key: str, value: Any) -> bool:
    """Whether a key of `data` was set by hand: as text, or as an attribute, which leaves no other
    trace than a value that is not the default; an image's size may be a smoke run's."""
    changed = key != "image_size" and value != schema.KEYS[f"data.{key}"].initial
    return changed or f"data.{key}" in config.by_hand


def _take_shape(config: ml_collections.ConfigDict, info: data.DataInfo) -> None:
    """Takes size, channels and fit, which predictions follow, from a data set that is given."""
    size = tuple(config.data.image_size)
    asked = {"image_size": size * 2 if len(size) == 1 else size}
    asked |= {key: config.data[key] for key in ("channels", "fit")}
    for key, wanted in asked.items():
        value = getattr(info, key)
        if _is_asked(config, key, wanted) and wanted not in (value, (), 0):
            raise ValueError(
                f"data.{key}={wanted}, but the images given have {value}: give {key}= to "
                "hsvit_jax.from_arrays or from_examples instead"
            )
        config.data[key] = value


def _network(config: ml_collections.ConfigDict) -> Any:
    """Builds the network of a resolved configuration, its frozen parts marked; refuses one that
    does not fit in memory."""
    model = config_lib.build_model(config)
    frozen = init_from.frozen_parts(config.init.freeze)
    model = model.with_frozen(frozen) if frozen else model
    memory.check_network(config, model)
    return model


def _parts(config: ml_collections.ConfigDict) -> str:
    """Names the parts of the network that lie on the mesh's `group` axis."""
    if config.model.get("towers", 1) > 1:
        return "towers"
    return "groups and kernels" if config.model.get("trunk") == "sharded" else "groups"


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
    if "data.val_fraction" in config.by_hand and not config.data.val_fraction and len(dataset.val):
        warnings.warn(
            f"data.val_fraction=0 is not used: {config.data.name} has a validation part of its "
            "own, which is not trained on; put its images into the training part for that",
            stacklevel=2,
        )


def load_data(
    config: ml_collections.ConfigDict,
    *,
    resident: bool = True,
    test_only: bool = False,
    verbose: bool = True,
) -> data.Dataset:
    """Loads the data set of a configuration at the image size it asks for.

    Args:
        config: its `data` section counts.
        resident: False reads image files as needed though they would fit in memory.
        test_only: put every image into the test split.
        verbose: process 0 says on standard error how far a slow first load is.
    """
    size = tuple(config.data.image_size)
    limit = {} if resident else {"resident_limit_bytes": 0}
    dataset = data.load(
        config.data.name,
        data_dir=config.data.dir or None,
        image_size=(size * 2 if len(size) == 1 else size) or None,
        channels=config.data.channels or None,
        fit=config.data.fit,
        val_fraction=config.data.val_fraction,
        on_bad_image=config.data.on_bad_image,
        progress=_progress() if verbose and coordination.is_lead() else None,
        test_only=test_only,
        **limit,
    )
    return dataset.subset(config.data.fraction)


def _progress() -> Callable[[str, int, int], None]:
    """Makes a function that says what a load begins to do, and every ten seconds how far it is."""
    told: dict[str, float] = {}

    def tell(what: str, done: int, total: int) -> None:
        if what not in told or time.monotonic() - told[what] >= 10:
            told[what] = time.monotonic()
            text = f"{what}: {done:,}" if done else what
            text += f" of {total:,}" if total else ""
            print(printable(text), file=sys.stderr, flush=True)

    return tell


def train(
    config: ml_collections.ConfigDict,
    workdir: str | Path,
    *,
    dataset: data.Dataset | None = None,
    devices: list | None = None,
    verbose: bool = True,
    stall_timeout: float | None = None,
    recoverable: bool = False,
    callbacks: Sequence[Callback] = (),
    as_begun: bool = False,
) -> Result:
    """Trains to the end, resuming whatever `workdir` holds, and evaluates the best checkpoint.

    With several processes (see `cluster.start`) all call this with the same arguments; process 0
    writes and prints. A request to stop is honoured after the step under way, or at an epoch's end
    after its evaluation: so an interrupted run has the same metrics as one that was not.

    Args:
        config: as a config file's `get_config` returns it.
        workdir: the run's folder, which all processes see; made if it is not there.
        dataset: to use instead of loading config.data.name.
        devices: all of jax's when left out.
        stall_timeout: seconds without a step or a finished save after which the process ends with
            code 75 (compiling may take half an hour more), 0 for never; when left out 600 with
            several processes and 3600 with one.
        recoverable: go on with fewer groups when a process is lost; see `elastic` for its limits.
        callbacks: called by process 0; what they raise ends the run.
        as_begun: refuse to resume with settings that change its results; else they are taken over.

    Returns:
        the finished run.

    Raises:
        ValueError: what cannot work, or a checkpoint of another network or data.
        KeyboardInterrupt: SIGTERM or Ctrl-C came, and the state is saved: the same call goes on.
        Diverged: train.bad_steps_limit non-finite steps came in a row.
    """
    _check_config(config)
    started, workdir, lead = time.monotonic(), checkpoint.local(workdir), coordination.is_lead()
    several, verbose = jax.process_count() > 1, verbose and lead
    if stall_timeout is None:
        stall_timeout = 600.0 if several else 3600.0

    def open_run() -> tuple[Run, checkpoint.Checkpoints]:
        name = dataset.info.name if dataset else config.data.name
        workdir_lib.check_apart(name, workdir)
        if not (begun := (workdir / "checkpoints").is_dir()):  # before data are read for nothing
            init_from.refuse_random(config)
        kind, _, place = name.partition("=")
        gone = kind in ("folder", "csv") and not os.path.exists(os.path.expanduser(place))
        if begun and gone and dataset is None:
            raise ValueError(
                f"{name} is not there, with which the run in {workdir} was begun. To go on with "
                f"data that have moved: --config=NETWORK:{kind}=NEW "
                f"--workdir={shlex.quote(str(workdir))}"
            )
        started_as = resume.as_started(config, workdir)
        run = prepare(started_as, dataset=dataset, devices=devices, verbose=verbose)
        if recoverable:
            elastic.check(run)
        return run, stack.enter_context(workdir_lib.opened(workdir, run.config))

    with contextlib.ExitStack() as stack:
        # The same numbers wherever the run goes on, and on every process.
        stack.enter_context(jax.threefry_partitionable(True))
        run, checkpoints = coordination.agree(open_run)
        settings = (f"{k}={v}" for k, v in config_lib.leaves(run.config) if k != "by_hand")
        coordination.check_same("configuration", "\n".join(settings))
        coordination.check_same("version or jax setting", workdir_lib.programs())
        coordination.check_same("data set", run.dataset.fingerprint)
        coordination.agree(lambda: workdir_lib.check_shared(workdir))
        dog = stack.enter_context(watchdog.Watchdog(stall_timeout, coordination.leave_stalled))
        stop = stack.enter_context(coordination.StopTogether(dog.hurry))

        run, state = resume.latest(run, checkpoints, verbose, as_begun)
        if state is None:
            start, origin = resume.start(run, verbose)
            state = step_lib.first_state(run, mesh_lib.from_lead(start))
        else:
            origin = (checkpoints.meta() or {}).get("origin", "")
        run = dataclasses.replace(run, origin=origin)
        first = int(state["step"])
        log, bar = _open_metrics(run, workdir, first, verbose, stack)
        if run.config.init.cache:

            def before_batch() -> None:
                dog.heartbeat("a batch of features", slow=True)
                stop.check(first)

            run = feature_cache.attach(run, state, bar.say, before_batch)
        bar.say(_opening(run, first, workdir))
        if verbose and not first and not run.config.init.cache:
            with metrics.forgiven("picture of the first batch"):
                batches_lib.draw_first(run, workdir / "batch.png")

        kind = elastic.RecoverableLoop if recoverable and several else Loop
        loop = kind(run, checkpoints, log, bar, stop, dog, callbacks if lead else ())
        state = loop.take_steps(state)
        last = int(state["step"])
        best_step, state, validation, test = loop.conclude(state)
    parameters = sum(x.size for x in jax.tree.leaves(state["params"]))
    curves = metrics.draw_curves(workdir, workdir.name) if lead else None
    seconds = time.monotonic() - started
    result = Result(workdir, last, best_step, parameters, test, validation, seconds, curves)
    for callback in callbacks if lead else ():
        callback.on_end(result)
    return result


def _open_metrics(
    run: Run, workdir: Path, first: int, verbose: bool, stack: contextlib.ExitStack
) -> tuple[metrics.MetricLog, metrics.Progress]:
    """Opens the run's metrics and bar; process 0 writes its configuration and environment."""
    lead, config = coordination.is_lead(), run.config
    names, about = config.train.loggers, config.to_dict()
    log = metrics.MetricLog(workdir, start_step=first, enabled=lead, names=names, config=about)
    stack.enter_context(log)
    split, figure = config_lib.selection(config)
    found = log.evaluations(split, figure)
    steps, best = (run.total_steps, first, run.steps_per_epoch), max(found.values(), default=None)
    progress = metrics.Progress(*steps, offset=run.offset, best=best, enabled=verbose)
    bar = stack.enter_context(progress)
    if figure and found and first >= run.total_steps and first not in found:
        bar.say(
            f"step {first:,} was saved without an evaluation, and the run ends at step "
            f"{run.total_steps:,}: the result is that of the best step before; to evaluate the "
            "last one, end the run a step later (train.steps)"
        )
    if first > run.total_steps:
        bar.say(
            f"the run is at step {first:,} already, beyond the {run.total_steps:,} asked for: "
            "nothing is trained, and its config.json stays as it is"
        )
    elif lead:
        artifacts.write_file(workdir / "config.json", config_lib.to_json(config) + "\n")
    if lead:
        about = workdir / "environment.json"
        ended = first >= run.total_steps or metrics.best_before_patience_ended(
            found, config.train.patience
        )
        if not (ended and about.exists()):  # else that of who trained it stays
            artifacts.write_file(about, json.dumps(workdir_lib.environment(), indent=2) + "\n")
    return log, bar


def _check_config(config: ml_collections.ConfigDict) -> None:
    config_lib.validate(config)  # it may have been changed since `get_config`
    if config.recipe not in ("strong", "small") and "recipe" not in config.by_hand:
        raise ValueError(
            f"recipe={config.recipe!r} alone changes no setting: name it after the colon, as in "
            f"get_config('c2a2:digits,{config.recipe}')"
        )
    loggers.check(config.train.loggers)


#: What the opening says of the recipe `small`, beside epochs, batch and warm-up.
_BY_SIZE = ("augment.mixup", "augment.cutmix")


def _devices(mesh: jax.sharding.Mesh) -> str:
    """Several devices and the axes they are on, as in ', on 4 of 6 TPU v4 (data 2, group 2)'."""
    if mesh.size == 1:
        return ""
    every = jax.device_count()
    of = f" of {every}" if mesh.size < every else ""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f", on {mesh.size}{of} {mesh.devices.flat[0].device_kind} ({axes})"


def _opening(run: Run, first: int, workdir: Path) -> str:
    """Four lines on the data, the network, the length of the run and its folder."""
    config, source = run.config, run.config.init["from"]
    train, val, test = (f"{len(getattr(run.dataset, x)):,}" for x in ("train", "val", "test"))
    fresh = f"from the network in {source}" if source else "from scratch"
    start = f"from step {first:,}" if first else fresh
    warmup = optim.warmup_steps(config.optim, run.steps_per_epoch)
    if not warmup:
        warmup_text = "no warm-up"
    elif warmup >= run.total_steps:
        warmup_text = (
            f"all of them warm-up: the learning rate ends at {run.total_steps / warmup:.2%} of "
            f"optim.learning_rate (optim.warmup_epochs={config.optim.warmup_epochs:g})"
        )
    else:
        warmup_text = f"{warmup:,} of them warm-up"
    leaves = dict(config_lib.leaves(config))
    own = [key for key in _BY_SIZE if leaves[key] and key not in config.by_hand]
    chosen = [f"{key}={leaves[key]:g}" for key in own if config.recipe == "small"]
    epochs = f"{run.position(run.total_steps) / run.steps_per_epoch:.3g} epochs"
    recipe = " ".join(["recipe", config.recipe, *chosen])
    if "tiny" in config.by_hand:
        recipe = "smoke run: its accuracy means nothing"
    on_test = ", whose best checkpoint is chosen on the TEST split, as train.select_on asks"
    parameters = sum(x.size for x in jax.tree.leaves(run.state_shape["params"]))
    own_name = config.model.family == "hsvit"
    network = " ".join([*[config.model.family] * (not own_name), config.model.variant])
    return (
        f"data     {config.data.name}: {train} training, {val} validation and {test} test images "
        f"of {config.data.num_classes} classes, {'×'.join(map(str, config.data.image_size))}\n"
        f"network  {network}, {parameters:,} parameters, {start}{_devices(run.mesh)}\n"
        f"length   {run.total_steps:,} steps of {config.train.batch} images ({epochs}), "
        f"{warmup_text}; {recipe}\n"
        f"folder   {workdir}{on_test if config.train.select_on == 'test' else ''}"
    )
