"""Restores the state that a run resumes from or is evaluated with, and refuses another run's."""

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
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
from hsvit_jax.train.run_spec import Run
from hsvit_jax.weights import whiten

# Errors of reading metadata of another kind.
_FOREIGN = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_LENGTH = ("train.epochs", "train.steps")
_BY_LENGTH = ("optim.warmup_epochs", "train.eval_every", "checkpoint.every")  # may follow from it
_FIXED = {key: entry.fixed for key, entry in schema.KEYS.items() if entry.fixed}


def latest(
    run: Run, checkpoints: checkpoint.Checkpoints, verbose: bool, as_begun: bool = False
) -> tuple[Run, dict | None]:
    """Restores the newest good state of a run.

    Args:
        verbose: print changed settings.
        as_begun: refuse those that change results, though the run has not ended.

    Returns:
        the run as it goes on from there, and its training state on the mesh; None where nothing
        was saved.

    Raises:
        ValueError: the folder is of another network or other data, or its run has ended with other
            settings; the message has the differences.
    """
    meta, folder = checkpoints.meta(), checkpoints.place.removesuffix("/checkpoints")
    if meta is not None:
        try:
            _refuse_mismatch(meta, run.meta, folder)
            number = max(checkpoints.steps(), default=0)
            was, run = _as_saved(run, meta), _moved(run, meta, number)
            config = json.loads(json.dumps(run.config.to_dict()))  # tuples are lists, as in meta
            _refuse_other_state(meta["config"], config)
            saved = json.loads(json.dumps(config_lib.completed(meta["config"]).to_dict()))
            sizes = FAMILIES[run.config.model.family].automatic  # compared as the network has them
            for model in (saved["model"], config["model"]):
                model.update(dict.fromkeys(sizes))
            changed = checkpoint.diff(saved, config)
        except _FOREIGN as error:
            raise ValueError(
                f"the metadata of the checkpoint in {folder} are not those of a run "
                f"({checkpoint.brief(error)}): start afresh in another --workdir"
            ) from error
        if meta.get("lost_groups") and verbose:
            text = f"groups or towers {meta['lost_groups']} were lost before this checkpoint: more "
            print(printable(text + "steps train them anew"))
        lines = [x for x in changed if config_lib.names_run(re.split(r"[:\[]", x)[0])]
        ended = number >= run.total_steps
        if not as_begun:  # a run may go on with others, but one that has ended would not
            named = {re.split(r"[:\[]", x)[0] for x in lines}
            # The state's were compared by what they mean.
            kept = {
                "data.name",
                *_LENGTH,
                *_FIXED,
                *(_BY_LENGTH if named & {*_LENGTH} else ()),
            }
            lines = [x for x in lines if ended and re.split(r"[:\[]", x)[0] not in kept]
        if lines:
            how = "has ended" if number >= was.total_steps else f"is at step {number:,} already"
            how = "was begun" if as_begun else how
            raise ValueError(
                f"the run in {folder} {how} with other settings, and its "
                f"result would be another's: {'; '.join(lines)}; remove that run, name another "
                f"folder, or start from its weights ({_from(folder)})"
            )
        was = meta.get("origin")
        if was and (as_begun or ended) and origin(run) not in ("", was):
            raise ValueError(
                f"init.from={run.config.init['from']} holds another network than when the run in "
                f"{folder} was begun, and its result would be another's: "
                "remove that run, or name another folder"
            )
        if changed and verbose:
            text = "resuming with changed settings:\n  " + "\n  ".join(changed)
            print(printable(text), flush=True)
    restored = checkpoints.restore(step_lib.state_template(run))
    if restored is None:
        return run, None
    number, plain, meta = restored
    run, was = _moved(run, meta, number), _as_saved(run, meta)
    run = dataclasses.replace(run, origin=meta.get("origin", ""))
    if verbose:
        for line in _moves(was, run, number, int(plain["skipped"])):
            print(line, flush=True)
    return run, step_lib.from_plain(plain, run.state_shape)


def _as_saved(run: Run, meta: dict) -> Run:
    """Returns the run with the length and schedule that it had when a checkpoint was saved."""
    config = config_lib.completed(meta["config"])
    steps = len(run.dataset.train) // config.train.batch
    was = dataclasses.replace(run, config=config, steps_per_epoch=steps)
    return was.shifted(meta.get("offset", 0))


def _moved(run: Run, meta: dict, number: int) -> Run:
    """Returns the run that goes on after the images of a checkpoint, whatever their batch was."""
    was = _as_saved(run, meta)
    epoch, steps = divmod(was.position(number), was.steps_per_epoch)
    # The epoch is ended, and evaluated, even where less than a batch is left of it.
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
            f"{was.position(number) / was.steps_per_epoch:.3g} epochs, the run goes on with "
            f"{run.total_steps - number:,} steps of {batches[1]}, up to step {run.total_steps:,}"
        )
    applied = number - skipped
    before, after = float(was.schedule(applied)), float(run.schedule(applied))
    if not np.isclose(before, after, rtol=0.05):
        last = float(was.schedule(max(applied - 1, 0)))
        yield f"the learning rate was {last:.1e} and goes on at {after:.1e}"


def start(run: Run, verbose: bool) -> tuple[tuple[dict, dict] | None, str]:
    """Loads or makes the (params, stats) that the `init` section asks for, None for random ones;
    with the digest of what init.from names."""
    of_data = run.dataset.fingerprint, run.dataset.info.class_names
    weights = init_from.load(run.config, run.model, *of_data)
    if weights is None:
        return (whitened(run) if run.config.init.whiten else None), ""
    if verbose:
        print(printable("; ".join(weights.notes)), flush=True)
    return (weights.params, weights.stats), weights.origin


def origin(run: Run) -> str:
    """A digest of the weights that init.from names; '' for none, and where they are gone."""
    with contextlib.suppress(ValueError):
        weights = init_from.load(run.config, run.model)
        return weights.origin if weights else ""
    return ""


def whitened(run: Run) -> tuple[dict, dict]:
    """Random (params, stats) with a first convolution that whitens 2,000 training images."""
    params, stats = run.model.init(step_lib.run_key(run.config.seed, step_lib.INIT))
    split, data = run.dataset.train, run.config.data
    chosen = np.linspace(0, len(split) - 1, min(len(split), 2000)).astype(np.int64)
    parts = np.array_split(chosen, -(-len(chosen) // 50))
    batches = (augment.normalise(split.gather(part), data.mean, data.std) for part in parts)
    whiten.first_convolution(run.model.body(params), map(np.asarray, batches))
    return params, stats


def best(run: Run, checkpoints: checkpoint.Checkpoints, state: dict) -> tuple[int, dict, list[int]]:
    """Restores what did best on the selection split.

    Args:
        state: the last one, as saved, which a run that measured none ends with.

    Returns:
        the step, its state, and the groups or towers without which it was trained and measured:
        fresh in the state, they have no vote.
    """
    checkpoints.wait()
    measured = checkpoints.best_step() is not None
    restored = measured and checkpoints.restore(step_lib.state_template(run), "best")
    if not restored:
        return int(state["step"]), state, (checkpoints.meta() or {}).get("lost_groups", [])
    number, plain, meta = restored
    return number, step_lib.from_plain(plain, run.state_shape), meta.get("lost_groups", [])


def _refuse_other_state(saved: dict, wanted: dict) -> None:
    """Refuses another value of a setting that the training state follows from."""
    for key, why in _FIXED.items():
        section, _, name = key.partition(".")
        new = wanted[section][name]
        old = saved[section].get(name, new)  # a run of an older version has no such key
        asks_for_nothing = why == schema.STARTED and new in ("", "match", "keep", False)
        if _meaning(key, old) != _meaning(key, new) and not asks_for_nothing:
            raise ValueError(
                f"the run in this folder has {key}={old!r}, now it is {new!r}: {why}; go on with "
                "the old setting, or start from this run with init.from in another --workdir"
            )


def _meaning(key: str, value: Any) -> Any:
    """A setting's value without what makes no difference: the order of parts, how long an average
    remembers, the commit to which a network of the hub was pinned."""
    if key == "train.ema_decay":
        return value > 0
    if key == "init.freeze":
        return init_from.frozen_parts(value)
    return init_from.without_commit(value) if key == "init.from" else value


def _refuse_mismatch(saved: dict, wanted: dict, workdir: str) -> None:
    """Refuses a checkpoint of another network, other classes or data; settings that may have caused
    the differences come first."""
    sizes = [
        {name: "×".join(map(str, shape)) for name, shape in meta["shapes"].items()}
        for meta in (saved, wanted)
    ]
    lines = checkpoint.diff(*sizes)
    if not lines:  # of the same shapes networks may differ too, as by their heads
        lines = misfits(*(_sizes(meta["config"]) for meta in (saved, wanted)))
    old, new = saved["class_names"], wanted["class_names"]
    known = ({*old}, {*new})
    gone, added = [x for x in old if x not in known[1]], [x for x in new if x not in known[0]]
    if gone or added:
        gone, added = map(few, (gone, added))
        lines.append(
            f"class_names: checkpoint {len(old)}, data {len(new)}; gone {gone}, new {added}"
        )
    elif old != new:
        moved = checkpoint.diff({"class_names": old}, {"class_names": new})
        lines.append(f"the same class_names in another order: {few(moved, '; ')}")
    old, new = (str(meta["fingerprint"]) for meta in (saved, wanted))
    if old != new:
        lines.append(f"fingerprint: checkpoint {old[:12]}…, now {new[:12]}…")
    if lines:
        settings = [
            {part: meta["config"][part] for part in ("model", "data")} for meta in (saved, wanted)
        ]
        lines = checkpoint.diff(*settings) + lines
        raise ValueError(
            "the checkpoint in this folder is of another network or other data: "
            f"{few(lines, '; ')}. Go on with the old settings and data, or in another folder: "
            f"afresh (--workdir=ANOTHER) or from its weights ({_from(workdir)})"
        )


def _from(workdir: str) -> str:
    """The words of a command that starts from a run's weights in another folder."""
    return f"--config.init.from={shlex.quote(workdir)} --workdir=ANOTHER"


def _sizes(config: dict) -> Any:
    """The config of the network in a run's configuration, which an older version may have made."""
    config = config_lib.completed(config)
    image = {"image_size": config.data.image_size, "channels": config.data.channels}
    family, classes = FAMILIES[config.model.family], config.data.num_classes
    return family.sizes(config.model.to_dict(), **image, num_classes=classes)
