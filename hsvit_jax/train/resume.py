"""Restores the state that a run resumes from or is evaluated with, and refuses another run's."""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hsvit_jax import augment, checkpoint
from hsvit_jax import config as config_lib
from hsvit_jax.config import schema
from hsvit_jax.models import FAMILIES
from hsvit_jax.models.family import misfits
from hsvit_jax.text import few, printable
from hsvit_jax.train import init_from
from hsvit_jax.train import step as step_lib
from hsvit_jax.train.prepare import refuse_contradictions
from hsvit_jax.train.run_spec import Run
from hsvit_jax.weights import whiten

# Errors of reading metadata of another kind.
_FOREIGN = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Settings that a run may change, and those that may follow from its length.
_FIXED = {key: entry.fixed for key, entry in schema.KEYS.items() if entry.fixed}
_LENGTH = {"train.epochs", "train.steps"}
_FREE = {"data.name", *_LENGTH, *_FIXED}
_BY_LENGTH = {"optim.warmup_epochs", "train.eval_every", "checkpoint.every"}


def latest(
    run: Run, checkpoints: checkpoint.Checkpoints, verbose: bool, as_begun: bool = False
) -> tuple[Run, dict | None]:
    """Restores the newest good state of a run.

    Args:
        verbose: print changed settings.
        as_begun: refuse those that change results, even if the run has not ended.

    Returns:
        the resumed run, and its training state on the mesh; None if nothing was saved.

    Raises:
        ValueError: the folder is of another network or other data, or its run has ended with other
            settings; the message lists the differences.
    """
    meta, folder = checkpoints.meta(), checkpoints.place.removesuffix("/checkpoints")
    if meta is not None:
        try:
            _refuse_other_run(run, meta, checkpoints, verbose, as_begun)
        except _FOREIGN as error:
            raise ValueError(
                f"the metadata of the checkpoint in {folder} are not those of a run "
                f"({checkpoint.brief(error)}): start afresh in another --workdir"
            ) from error
    restored = checkpoints.restore(step_lib.state_template(run))
    if restored is None:
        return run, None
    number, plain, meta = restored
    rate, *asked = meta.get("callbacks", (1.0, 1.0, False))
    run = dataclasses.replace(run, rate=rate, asked=tuple(asked))
    was, run = _as_saved(run, meta), _moved(run, meta, number)
    origins = {"origin": meta.get("origin", ""), "taught_by": meta.get("teacher", "")}
    run = dataclasses.replace(run, **origins)
    if verbose:
        for line in _moves(was, run, number, int(plain["skipped"])):
            print(line, flush=True)
    return run, step_lib.from_plain(plain, run.state_shape)


def _refuse_other_run(
    run: Run, meta: dict, checkpoints: checkpoint.Checkpoints, verbose: bool, as_begun: bool
) -> None:
    """Refuses a checkpoint that the run cannot resume from; prints the changed settings."""
    folder = checkpoints.place.removesuffix("/checkpoints")
    number = max(checkpoints.steps(), default=0)
    elsewhere = (
        f"use another folder: afresh (--workdir=ANOTHER) or from its weights "
        f"(--config.init.from={shlex.quote(folder)} --workdir=ANOTHER)"
    )
    saved = config_lib.completed(meta["config"])
    changed = _differences(*(dict(config_lib.leaves(config)) for config in (saved, run.config)))
    for name in FAMILIES[run.config.model.family].automatic:  # the shapes show these
        changed.pop(f"model.{name}", None)
    if lines := _other_network_or_data(meta, run.meta, saved):
        lines = [x for key, x in changed.items() if key.startswith(("model.", "data."))] + lines
        raise ValueError(
            "the checkpoint in this folder is of another network or other data: "
            f"{few(lines, '; ')}. Restore the old settings and data, or {elsewhere}"
        )
    _refuse_other_state(meta["config"], run.config)
    was, moved = _as_saved(run, meta), _moved(run, meta, number)
    if meta.get("lost_groups") and verbose:
        text = f"groups or towers {meta['lost_groups']} were lost before this checkpoint: more "
        print(printable(text + "steps train them anew"))
    # A run that continues may have other settings; the result of a finished one would not.
    ended = number >= moved.total_steps
    named = {key for key in changed if config_lib.names_run(key)}
    if not as_begun:
        named -= _FREE | (_BY_LENGTH if named & _LENGTH else set())
    if named and (as_begun or ended):
        how = "has ended" if number >= was.total_steps else f"is at step {number:,} already"
        lines = [line for key, line in changed.items() if key in named]
        raise ValueError(
            f"the run in {folder} {'was begun' if as_begun else how} with other settings, which "
            f"give another result: {'; '.join(lines)}; remove that run, or {elsewhere}"
        )
    began = meta.get("origin")
    if began and (as_begun or ended) and _origin(run) not in ("", began):
        raise ValueError(
            f"init.from={run.config.init['from']} holds another network than when the run in "
            f"{folder} was begun: remove that run, or use another folder"
        )
    if changed and verbose:
        text = "\n  ".join(["resuming with changed settings:", *changed.values()])
        print(printable(text), flush=True)


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Returns a line for each value that differs, by its name."""
    return {
        name: f"{name}: checkpoint {saved.get(name, 'none')!r}, config {now.get(name, 'none')!r}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name, "none") != now.get(name, "none")
    }


def _as_saved(run: Run, meta: dict) -> Run:
    """Returns the run with the length and schedule that it had when a checkpoint was saved."""
    config = config_lib.completed(meta["config"])
    steps = len(run.dataset.train) // config.train.batch
    was = dataclasses.replace(run, config=config, steps_per_epoch=steps)
    return was.shifted(meta.get("offset", 0))


def _moved(run: Run, meta: dict, number: int) -> Run:
    """Returns the run that continues after the images of a checkpoint, whatever their batch."""
    was = _as_saved(run, meta)
    epoch, steps = divmod(was.position(number), was.steps_per_epoch)
    # The epoch ends with an evaluation even if less than a batch is left of it.
    within = steps * was.config.train.batch // run.config.train.batch
    place = epoch * run.steps_per_epoch + min(within, run.steps_per_epoch - 1)
    return run.shifted(place - number)


def _moves(was: Run, run: Run, number: int, skipped: int) -> Iterator[str]:
    """Yields what another batch or schedule changes: lengths in steps, learning rates."""
    if number >= run.total_steps:
        return
    batches = [one.config.train.batch for one in (was, run)]
    if batches[0] != batches[1]:
        yield (
            f"after {number:,} of {was.total_steps:,} steps of {batches[0]} images, "
            f"{was.position(number) / was.steps_per_epoch:.3g} epochs, the run resumes with "
            f"{run.total_steps - number:,} steps of {batches[1]}, up to step {run.total_steps:,}"
        )
    applied = number - skipped
    before, after = float(was.schedule(applied)), float(run.schedule(applied))
    if not np.isclose(before, after, rtol=0.05):
        last = float(was.schedule(max(applied - 1, 0)))
        yield f"the learning rate was {last:.1e} and resumes at {after:.1e}"


def start(run: Run, verbose: bool) -> tuple[tuple[dict, dict] | None, str]:
    """Loads or makes the (params, stats) of the `init` section, None for random ones.

    Returns:
        them, and the digest of the network in init.from.
    """
    of_data = run.dataset.fingerprint, run.dataset.info.class_names
    try:
        weights = init_from.load(run.config, run.model, *of_data)
    except config_lib.Contradiction:
        refuse_contradictions(run.config, run.dataset)
    if weights is None:
        return (whitened(run) if run.config.init.whiten else None), ""
    if verbose:
        print(printable("; ".join(weights.notes)), flush=True)
    return (weights.params, weights.stats), weights.origin


def _origin(run: Run) -> str:
    """Returns a digest of init.from's weights; '' without them."""
    with contextlib.suppress(ValueError):
        weights = init_from.load(run.config, run.model)
        return weights.origin if weights else ""
    return ""


def whitened(run: Run) -> tuple[dict, dict]:
    """Makes random (params, stats) whose first convolution whitens 2,000 training images."""
    params, stats = run.model.init(step_lib.run_key(run.config.seed, step_lib.INIT))
    split, data = run.dataset.train, run.config.data
    chosen = np.linspace(0, len(split) - 1, min(len(split), 2000)).astype(np.int64)
    parts = np.array_split(chosen, -(-len(chosen) // 50))
    batches = (augment.normalise(split.gather(part), data.mean, data.std) for part in parts)
    whiten.first_convolution(run.model.body(params), map(np.asarray, batches))
    return params, stats


def best(run: Run, checkpoints: checkpoint.Checkpoints, state: dict) -> tuple[int, dict, list[int]]:
    """Restores the best state on the selection split.

    Args:
        state: the last one, as saved; the result of a run without evaluations.

    Returns:
        the step, its state, and the lost groups or towers, which are fresh in the state and do not
        vote.
    """
    checkpoints.wait()
    measured = checkpoints.best_step() is not None
    restored = measured and checkpoints.restore(step_lib.state_template(run), "best")
    if not restored:
        return int(state["step"]), state, (checkpoints.meta() or {}).get("lost_groups", [])
    number, plain, meta = restored
    return number, step_lib.from_plain(plain, run.state_shape), meta.get("lost_groups", [])


def _refuse_other_state(saved: dict, now: Mapping[str, Any]) -> None:
    """Refuses another value of a setting that the training state follows from."""
    for key, why in _FIXED.items():
        section, _, name = key.partition(".")
        new = now[section][name]
        old = saved[section].get(name, new)  # older versions lack some keys
        old = tuple(old) if isinstance(old, list) else old
        no_request = why == schema.STARTED and new in ("", "match", "keep", False)
        if _meaning(key, old) != _meaning(key, new) and not no_request:
            raise ValueError(
                f"the run in this folder has {key}={old!r}, now it is {new!r}: {why}; restore the "
                "old setting, or start from this run with init.from in another --workdir"
            )


def _meaning(key: str, value: Any) -> Any:
    """Reduces a setting to what makes a difference to the state."""
    if key == "train.ema_decay":
        return value > 0
    if key == "init.teacher":  # its weights are compared when it is loaded
        return bool(value)
    if key == "init.freeze":
        return init_from.frozen_parts(value)
    return init_from.without_commit(value) if key == "init.from" else value


def _other_network_or_data(meta: dict, now: dict, saved: config_lib.Settings) -> list[str]:
    """Lists how a checkpoint's network, classes or data differ from the run's."""
    shapes = ({name: "×".join(map(str, s)) for name, s in m["shapes"].items()} for m in (meta, now))
    lines = list(_differences(*shapes).values())
    if not lines:  # equal shapes may hide another number of heads
        theirs, ours = _sizes(saved), _sizes(config_lib.completed(now["config"]))
        lines = [difference.text for difference in misfits(theirs, ours)]
    old, new = meta["class_names"], now["class_names"]
    gone, added = ([x for x in a if x not in {*b}] for a, b in ((old, new), (new, old)))
    if gone or added:
        lines.append(
            f"class_names: checkpoint {len(old)}, data {len(new)}; gone {few(gone)}, new "
            f"{few(added)}"
        )
    elif old != new:
        lines.append(f"the same class_names in another order: {few(new)}")
    old, new = (str(m["fingerprint"]) for m in (meta, now))
    if old != new:
        lines.append(f"fingerprint: checkpoint {old[:12]}…, now {new[:12]}…")
    return lines


def _sizes(config: config_lib.Settings) -> Any:
    """Returns the config of the network of a run's configuration."""
    image = {"image_size": config.data.image_size, "channels": config.data.channels}
    family, classes = FAMILIES[config.model.family], config.data.num_classes
    return family.sizes(config.model.to_dict(), **image, num_classes=classes)
