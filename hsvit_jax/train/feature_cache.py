"""Caches on disk the features that a network's frozen parts compute of every image of a data set.

Training then runs only the other parts, on the same numbers. A folder is named by everything that
its content depends on (weights, network, data, normalisation), written under another name and moved
into place, and checked when it is read: see `data.cache`.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from hsvit_jax import augment, data
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.checkpoint import checksum
from hsvit_jax.data import cache
from hsvit_jax.models import feature_extractor
from hsvit_jax.runtime import coordination
from hsvit_jax.train import evaluate
from hsvit_jax.train import step as step_lib
from hsvit_jax.train.run_spec import Run
from hsvit_jax.weights.stored import averaged

# Up to this size the training split's features lie on the devices, as its images would.
_RESIDENT_BYTES = 1 << 31

_SPLITS = ("train", "val", "test")


def without_augmentation(config: config_lib.Settings) -> config_lib.Settings:
    """Switches off what would change a cached image, but for the user's settings, and says so."""
    active = step_lib.augment_settings(config).active()
    values = {f"augment.{name}": value for name, value in active.items()}
    values |= {"data.repeats": 1} if config.data.repeats > 1 else {}
    values = {key: value for key, value in values.items() if key not in config.user}
    if values:
        coordination.print_once(f"init.cache switches augmentation off: {', '.join(values)}")
    return config.filled(values)


def check(config: ml_collections.ConfigDict, model: Any, mesh: Any) -> None:
    """Raises ValueError, naming the fix, for a run whose features cannot be cached."""
    where = f"init.cache={config.init.cache}"
    if not model.frozen:
        raise ValueError(f"{where} keeps what frozen parts make: name them with init.freeze")
    active = step_lib.augment_settings(config).active()
    if active:
        values = {name: "" if value == () else value for name, value in active.items()}
        off = " ".join(f"--config.augment.{name}={value}" for name, value in values.items())
        raise ValueError(
            f"{where} keeps what the frozen parts make of each image, but augmentation makes "
            f"another image of it every time: switch it off ({off}), or leave init.cache empty"
        )
    if config.init.unfreeze_after:
        raise ValueError(
            f"{where} keeps what frozen parts make, and init.unfreeze_after="
            f"{config.init.unfreeze_after} would train them: set one of the two alone"
        )
    if config.data.repeats > 1:
        raise ValueError(
            f"{where} has one set of features of an image, and data.repeats={config.data.repeats} "
            "would show it again unchanged: set data.repeats=1, or leave init.cache empty"
        )
    if coordination.count() > 1:
        raise ValueError(f"{where} works with one process; this job has {coordination.count()}")
    params = model.init_shapes()[0]
    paths = jax.tree_util.tree_flatten_with_path(_frozen(params, model))[0]
    if mesh.shape[mesh_lib.GROUP] > 1 and any(mesh_lib.is_spread(p, model) for p, _ in paths):
        raise ValueError(
            f"{where} needs frozen parts that are whole on every device: set mesh.group=1"
        )
    feature_extractor.boundary(model)


def attach(
    run: Run, state: dict, say: Callable[[str], None], beat: Callable[[], None] = lambda: None
) -> Run:
    """Returns a run on features instead of images, and on the following parts of its network.

    Args:
        run: with a configuration that `check` accepted.
        state: its frozen parts compute the features.

    Raises:
        ValueError: the folder cannot be written, or the network uses more of the image than the
            features.
    """
    part = feature_extractor.boundary(run.model)
    folder = _folder(run, state, part)

    def build(scratch: Path) -> dict:
        say(f"computing what {part} makes of each image, to be kept in {folder}")
        _build(run, state, part, scratch, beat)
        return {}

    if folder.is_dir():
        say(f"what {part} makes of each image is read from {folder}")
    arrays, _ = cache.read_or_build(folder, build, "choose another folder as init.cache")
    splits = {name: data.Split(getattr(run.dataset, name).labels, arrays[name]) for name in _SPLITS}
    if not run.dataset.resident or arrays["train"].nbytes > _RESIDENT_BYTES:
        splits["train"] = data.Split(
            splits["train"].labels, None, lambda index: np.array(arrays["train"][index])
        )
    rest = feature_extractor.Rest(run.model, part)
    logits = jax.jit(rest.apply)(*averaged(state), np.array(arrays["train"][:2]))[0]
    if not np.isfinite(logits).all():
        raise ValueError(
            f"the network from {part} on gives no finite answers: its weights or features are not "
            "finite, or it uses more of the image than they hold; leave init.cache empty"
        )
    dataset = dataclasses.replace(run.dataset, **splits)
    return dataclasses.replace(run, model=rest, dataset=dataset)


def _frozen(tree: dict, model: Any) -> dict:
    return {name: part for name, part in tree.items() if name in model.frozen}


def _folder(run: Run, state: dict, part: str) -> Path:
    frozen = {kind: _frozen(state[kind], run.model) for kind in ("params", "stats")}
    leaves = jax.tree_util.tree_flatten_with_path(frozen)[0]
    sums = checksum.of([leaf for _, leaf in leaves])
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    key = {
        "weights": hashlib.sha256(repr(list(zip(names, sums, strict=True))).encode()).hexdigest(),
        "network": [repr(run.model.config), str(run.model.dtype), part],
        "data": run.dataset.fingerprint,
        "normalisation": [list(run.config.data.mean), list(run.config.data.std)],
    }
    folder = Path(os.path.expanduser(run.config.init.cache))
    return folder / cache.cache_folder(Path(), part, key).name


def _build(run: Run, state: dict, part: str, scratch: Path, beat: Callable[[], None]) -> None:
    """Writes the features of every split, float32, in the order of its examples."""
    mean, std = tuple(run.config.data.mean), tuple(run.config.data.std)

    def compute(params: dict, stats: dict, images_BHWC: jax.Array) -> jax.Array:
        x_BHWC = augment.normalise(images_BHWC, mean, std)
        return feature_extractor.features(run.model, part, params, stats, x_BHWC).astype(np.float32)

    compiled = jax.jit(compute, out_shardings=mesh_lib.replicated(run.mesh))
    batch, multiple = config_lib.eval_batch(run.config), run.mesh.shape[mesh_lib.DATA]
    for name in _SPLITS:
        split, start = getattr(run.dataset, name), 0
        if not len(split):
            np.save(scratch / f"{name}.npy", np.zeros((0, 1), np.float32))
            continue
        for images, _, valid in evaluate.padded_batches(split, batch, multiple):
            beat()
            placed = mesh_lib.put_batch(run.mesh, images)
            features = np.asarray(compiled(state["params"], state["stats"], placed))[valid]
            if not start:
                shape = (len(split), *features.shape[1:])
                out = cache.new_array(scratch / f"{name}.npy", np.float32, shape)
            out[start : start + len(features)] = features
            start += len(features)
        out.flush()
