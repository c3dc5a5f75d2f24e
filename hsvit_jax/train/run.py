"""Training: from a configuration and a folder to a trained, evaluated, checkpointed network."""

import contextlib
import dataclasses
import functools
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_collections

from hsvit_jax import artifacts, checkpoint, data, tasks
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.runtime import coordination, watchdog
from hsvit_jax.train import batches as batches_lib
from hsvit_jax.train import elastic, feature_cache, init_from, metrics, optim, resume
from hsvit_jax.train import evaluate as evaluate_lib
from hsvit_jax.train import step as step_lib
from hsvit_jax.train import workdir as workdir_lib
from hsvit_jax.train.loop import Callback, Loop
from hsvit_jax.train.prepare import prepare, with_teacher
from hsvit_jax.train.run_spec import Run


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A finished run: its folder, its last step, and evaluations of its best checkpoint.

    workdir: of a URL its copy on this machine, which is removed when the process ends.
    test: None if the run was to leave the test split unread.
    """

    workdir: Path
    step: int
    best_step: int
    parameters: int
    test: evaluate_lib.Evaluation | None
    validation: evaluate_lib.Evaluation | None
    seconds: float = 0.0
    curves: Path | None = None
    report: Path | None = None


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
    evaluate_test: bool = True,
) -> Result:
    """Trains to the end, resuming what `workdir` holds, and evaluates the best checkpoint.

    All processes call this with the same arguments (see `cluster.start`); process 0 writes and
    prints. A request to stop is honoured after the current step, or after an epoch's evaluation, so
    the metrics of an interrupted run are those of an uninterrupted one.

    Args:
        config: as a config file's `get_config` returns it.
        workdir: the run's folder, created if needed: a URL of an object store, such as
            gs://bucket/run, or a folder that all processes share.
        dataset: replaces config.data.name.
        devices: defaults to all of jax's.
        stall_timeout: seconds without a step or a finished save before the process ends with code
            75 (compiling may take half an hour more), 0 for never; defaults to 600 with several
            processes and 3600 with one.
        recoverable: continue with fewer groups after the loss of a process; see `elastic`.
        callbacks: called by process 0; their exceptions end the run.
        as_begun: refuse to resume with settings that change results, rather than adopt them.
        evaluate_test: False does not read the test split; the same call with True only does that.

    Returns:
        the finished run.

    Raises:
        ValueError: settings that cannot work, or a checkpoint of another network or data.
        KeyboardInterrupt: SIGTERM or Ctrl-C; the state is saved, and the same call resumes.
        Diverged: train.bad_steps_limit non-finite steps in a row.
    """
    config = config_lib.resolve(config)  # keys may have been assigned
    metrics.check_loggers(config.train.loggers)
    started, given, lead = time.monotonic(), str(workdir), coordination.is_lead()
    several, verbose = coordination.count() > 1, verbose and lead
    if stall_timeout is None:
        stall_timeout = 600.0 if several else 3600.0

    def open_run() -> tuple[Run, checkpoint.Checkpoints]:
        name = dataset.info.name if dataset else config.data.name
        workdir_lib.check_apart(name, workdir)
        begun = (workdir / "checkpoints").is_dir()
        kind, _, place = name.partition("=")
        gone = kind in ("folder", "csv") and not data.is_there(place)
        if not begun:  # before data are read for nothing
            init_from.refuse_random(config)
        elif gone and dataset is None:
            raise ValueError(
                f"{name} of the run in {given} does not exist. To resume with data that have "
                f"moved: --config=NETWORK:{kind}=NEW --workdir={shlex.quote(given)}"
            )
        options = {"devices": devices, "verbose": verbose, "workdir": workdir}
        run = prepare(config, dataset=dataset, **options)
        if recoverable:
            elastic.check(run)
        return run, stack.enter_context(workdir_lib.opened(workdir, run.config))

    with contextlib.ExitStack() as stack:
        workdir = stack.enter_context(workdir_lib.staged(given))
        # All processes, and later resumed ones, draw the same numbers.
        stack.enter_context(jax.threefry_partitionable(True))
        run, checkpoints = coordination.agree(open_run)
        settings = (f"{k}={v}" for k, v in config_lib.leaves(run.config))
        coordination.check_same("configuration", "\n".join(settings))
        coordination.check_same("version or jax setting", workdir_lib.programs())
        coordination.check_same("data set", run.dataset.fingerprint)
        coordination.agree(lambda: workdir_lib.check_shared(workdir))
        dog = stack.enter_context(watchdog.Watchdog(stall_timeout, coordination.leave_stalled))
        stop = stack.enter_context(coordination.StopTogether(dog.hurry))

        # The newest good checkpoint comes first, then the weights of init.from, then random ones.
        run, state = resume.latest(run, checkpoints, verbose, as_begun)
        if state is None:
            start, origin = resume.start(run, verbose)
            run = dataclasses.replace(run, origin=origin)
            state = step_lib.first_state(run, mesh_lib.from_lead(start))
        first = int(state["step"])
        if first < run.total_steps:
            run = coordination.agree(functools.partial(with_teacher, run, verbose))
            coordination.check_same("teacher", run.taught_by)
        log, bar = _open_metrics(run, workdir, first, verbose, stack)
        if run.config.init.cache:

            def before_batch() -> None:
                dog.heartbeat("a batch of features", slow=True)
                stop.check(first)

            run = feature_cache.attach(run, state, bar.say, before_batch)
        bar.say(_opening(run, first, given))
        kind = elastic.RecoverableLoop if recoverable and several else Loop
        loop = kind(run, checkpoints, log, bar, stop, dog, callbacks if lead else ())
        if verbose and not first and not run.config.init.cache:
            draw = functools.partial(_draw_first, run, workdir / "batch.png")
            if several:  # later the others would wait in a collective of the second step
                draw()
            else:
                loop.after_first = draw
        state = loop.take_steps(state)
        last = int(state["step"])
        best_step, state, validation, test = loop.conclude(state, evaluate_test)
        figure = tasks.of(run.config).reported[0]
        curves = metrics.draw_curves(workdir, workdir.name, figure) if lead else None
    parameters = sum(x.size for x in jax.tree.leaves(state["params"]))
    seconds = time.monotonic() - started
    result = Result(workdir, last, best_step, parameters, test, validation, seconds, curves)
    for callback in callbacks if lead else ():
        callback.on_end(result)
    return result


def _open_metrics(
    run: Run, workdir: Path, first: int, verbose: bool, stack: contextlib.ExitStack
) -> tuple[metrics.MetricLog, metrics.Progress]:
    """Opens the run's metrics and bar; process 0 writes its configuration and environment."""
    lead, config, total = coordination.is_lead(), run.config, run.total_steps
    names, about = config.train.loggers, config.to_dict()
    log = metrics.MetricLog(workdir, start_step=first, enabled=lead, names=names, config=about)
    stack.enter_context(log)
    split, figure = config_lib.selection(config)
    found = log.evaluations(split, figure)
    steps, best = (total, first, run.steps_per_epoch), max(found.values(), default=None)
    shown = {"best": best, "figure": figure}
    progress = metrics.Progress(*steps, offset=run.offset, **shown, enabled=verbose)
    bar = stack.enter_context(progress)
    if figure and found and first >= total and first not in found:
        bar.say(
            f"step {first:,} was saved without an evaluation, and the run ends at step {total:,}: "
            "the result is that of the best step before; to evaluate the last one, end the run a "
            "step later (train.steps)"
        )
    if first > total:
        bar.say(
            f"the run is at step {first:,} already, beyond the requested {total:,}: nothing is "
            "trained, and its config.json does not change"
        )
    elif lead:
        artifacts.write_file(workdir / "config.json", config_lib.to_json(config) + "\n")
    if lead:
        about, patience = workdir / "environment.json", config.train.patience
        ended = first >= total or metrics.best_before_patience_ended(found, patience)
        if not (ended and about.exists()):  # a finished run keeps the training's environment
            artifacts.write_file(about, json.dumps(workdir_lib.environment(), indent=2) + "\n")
    return log, bar


def _draw_first(run: Run, path: Path) -> None:
    """Draws the first batch, or warns that it cannot."""
    with metrics.forgiven("picture of the first batch"):
        batches_lib.draw_first(run, path)


def _devices(mesh: jax.sharding.Mesh) -> str:
    """Formats several devices and their axes: ', on 4 of 6 TPU v4 (data 2, group 2)'."""
    if mesh.size == 1:
        return ""
    every = jax.device_count()
    of = f" of {every}" if mesh.size < every else ""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f", on {mesh.size}{of} {mesh.devices.flat[0].device_kind} ({axes})"


def _stored(split: data.Split) -> str:
    """Formats the size of stored images and their memory: '288×288 (67 MB)'."""
    size = "×".join(map(str, split.gather([0]).shape[1:3]))
    if split.images is None:
        return size
    return f"{size} ({-(-split.images.nbytes // 10**6):,} MB)"


def _opening(run: Run, first: int, workdir: Path) -> str:
    """Formats four lines on the data, the network, the length of the run and its folder."""
    config, source, total = run.config, run.config.init["from"], run.total_steps
    train, val, test = (f"{len(getattr(run.dataset, x)):,}" for x in ("train", "val", "test"))
    fresh = f"from the network in {source}" if source else "from scratch"
    start = f"from step {first:,}" if first else fresh
    warmup = optim.warmup_steps(config.optim, run.steps_per_epoch)
    warmup_text = f"{warmup:,} of them warm-up" if warmup else "no warm-up"
    if warmup >= max(total, 1):
        warmup_text = (
            f"all of them warm-up: the learning rate ends at {total / warmup:.2%} of "
            f"optim.learning_rate (optim.warmup_epochs={config.optim.warmup_epochs:g})"
        )
    recipe = f"recipe {config.recipe}"
    if config.recipe == "small":  # the number of images decides these too
        keys = [key for key in ("augment.mixup", "augment.cutmix") if key not in config.user]
        recipe += "".join(f" {key}={config[key]:g}" for key in keys if config[key])
    if config.words and "tiny" in config.words.switches:
        recipe = "smoke run: its accuracy means nothing"
    crops = f", crops of {_stored(run.dataset.train)}" if config.data.train_size else ""
    epochs = f"{run.position(total) / run.steps_per_epoch:.3g} epochs"
    on_test = ", whose best checkpoint the TEST split selects (train.select_on=test)"
    parameters = sum(x.size for x in jax.tree.leaves(run.state_shape["params"]))
    return (
        f"data     {config.data.name}: {train} training, {val} validation and {test} test images "
        f"of {config.data.num_classes} {tasks.of(config).noun}, "
        f"{'×'.join(map(str, config.data.image_size))}{crops}\n"
        f"network  {config_lib.title(config.model)}, {parameters:,} parameters, {start}"
        f"{_devices(run.mesh)}\n"
        f"length   {total:,} steps of {config.train.batch} images ({epochs}), {warmup_text}; "
        f"{recipe}\n"
        f"folder   {workdir}{on_test if config.train.select_on == 'test' else ''}"
    )
