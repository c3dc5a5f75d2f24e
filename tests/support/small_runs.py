"""Runs of a second or two for the tests of the trainer: a tiny network and made-up images."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from hsvit_jax import checkpoint, classifier, data, models, train
from hsvit_jax import config as config_lib
from hsvit_jax.models import FAMILIES
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.train import evaluate
from hsvit_jax.weights.stored import Stored

CLASSES, SIDE = 7, 8

#: A network of hardly any work, for tests of its weights alone.
HSVIT = hsvit.HSViTConfig(
    image_size=(4, 8),
    image_channels=1,
    num_classes=5,
    conv_channels=(2, 4),
    conv_kernels=(3, 3),
    pool_strides=(2, 1),
    groups=2,
    depth=1,
    embed_dim=6,
    heads=2,
    dropout=0.2,
)


def small_dataset(
    sizes: tuple[int, int, int] = (70, 21, 23),
    *,
    seed: int = 3,
    streamed: bool = False,
    val_fraction: float = 0.1,
) -> data.Dataset:
    """Noise on a bright row that tells the class; train, validation and test of these sizes."""
    rng = np.random.default_rng(seed)

    def split(count: int) -> data.Split:
        labels = (np.arange(count) % CLASSES).astype(np.int32)
        images = rng.integers(0, 120, size=(count, SIDE, SIDE, 1), dtype=np.uint8)
        images[np.arange(count), labels] += 120
        if streamed:
            return data.Split(labels, None, images.__getitem__)
        return data.Split(labels, images, None)

    info = data.DataInfo(
        name="rows",
        image_size=(SIDE, SIDE),
        channels=1,
        class_names=tuple(f"row {i}" for i in range(CLASSES)),
        mean=(0.3,),
        std=(0.2,),
        flip=False,
    )
    splits, fingerprint = (split(n) for n in sizes), f"rows-{seed}-{sizes}"
    return data.Dataset(info, *splits, fingerprint=fingerprint, val_fraction=val_fraction)


def small_config(**settings: Any) -> ml_collections.ConfigDict:
    """A configuration for `small_dataset`; settings as section__key=value. Images are cropped, not
    mixed, which would take as long to compile as all the rest of a step."""
    config = config_lib.base(
        "digits",
        model={
            "variant": "c2a2",
            "conv_channels": (4, 16),
            "conv_kernels": (3, 3),
            "groups": 8,
            "depth": 1,
            "embed_dim": 8,
            "heads": 2,
            "dropout": 0.2,
        },
    )
    wanted = {
        "train__batch": 16,
        "train__epochs": 0,
        "train__steps": 6,
        "train__log_every": 1,
        "augment__crop_padding": 1,
        "mesh__data": 1,
        **settings,
    }
    with config.unlocked():
        for name, value in wanted.items():
            section, _, key = name.partition("__")
            if key:
                config[section][key] = value
            else:
                config[section] = value
    return config


def sizes_of(config: ml_collections.ConfigDict) -> Any:
    """The config of a resolved configuration's network, which is not built."""
    image, family = config.data, models.FAMILIES[config.model.family]
    shape = {"channels": image.channels, "num_classes": image.num_classes}
    return family.sizes(config.model.to_dict(), image_size=image.image_size, **shape)


def made_up_values(network: Any, seed: int = 0) -> tuple[dict, dict]:
    """(params, stats) of a network drawn by NumPy, which needs no program to be compiled.

    Kernels are of the size that a layer of that fan-in starts with, scales and variances around 1.
    """
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        name = str(path[-1].key)
        drawn = rng.normal(size=leaf.shape).astype(np.float32)
        if name in ("scale", "norm_scale", "var"):
            return np.exp(0.2 * drawn)
        if name == "features":  # of a Performer: a Gaussian's rows
            return drawn
        if len(leaf.shape) < 2:
            return 0.2 * drawn
        inner = leaf.shape[-4:-1] if "kernels" in {k.key for k in path} else leaf.shape[-2:-1]
        return drawn / np.float32(np.sqrt(np.prod(inner)))

    trees = network.init_shapes()
    return tuple(jax.tree_util.tree_map_with_path(value, tree) for tree in trees)


def made_up_classifier(names: tuple[str, ...], **settings: Any) -> classifier.Classifier:
    """A network of `small_config` with made-up weights, on one device."""
    config, one = small_config(**settings), jax.devices()[:1]
    run = train.prepare(config, dataset=small_dataset(), devices=one)
    arrays = made_up_values(run.model)
    return classifier.Classifier(run.config, names, run.model, *arrays, 3, run.mesh)


def untrained_run(folder: Path, *steps: int) -> Path:
    """A work folder with untrained networks for digits, each step's weights its own."""
    config = config_lib.get_config("c2a2:digits,tiny", "model.depth=1")
    config = config_lib.resolve(config, data.describe("digits"))
    model, names = train.build_model(config), [f"class {i}" for i in range(10)]
    meta = {"config": config.to_dict(), "class_names": names, "fingerprint": "f" * 64}
    with checkpoint.Checkpoints(folder / "checkpoints") as checkpoints:
        for number in steps:
            state = dict(zip(("params", "stats"), made_up_values(model, number), strict=True))
            checkpoints.save(number, state, meta, metric=-float(number), wait=True)
    return folder


def stored(family: str, *changes: str, side: int = 32) -> Stored:
    """A tiny network of a family with made-up weights, as a run has it stored."""
    name = FAMILIES[family].config_file or family if family in FAMILIES else family
    config = config_lib.get_config(f"{name}:cifar10,tiny", *changes)
    with config.unlocked():
        config.data.update(image_size=(side, side), channels=3, num_classes=10)
        config.data.update(mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    model = train.build_model(config)
    return Stored(0, config, model, *made_up_values(model), (), None, {})


def spy_on_batches(monkeypatch: Any) -> set[int]:
    """The batch sizes that evaluations ask for from now on."""
    seen, batches = set(), evaluate.padded_batches

    def spied(split: Any, batch: int, *rest: Any) -> Any:
        seen.add(batch)
        return batches(split, batch, *rest)

    monkeypatch.setattr(evaluate, "padded_batches", spied)
    return seen


def metric_lines(workdir: Path) -> list[dict]:
    """The lines of a run's metrics, without what depends on the clock."""
    lines = [json.loads(text) for text in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def losses(workdir: Path) -> dict[int, float]:
    """The loss of every step that a run has told."""
    return {line["step"]: line["loss"] for line in metric_lines(workdir) if "split" not in line}


def digest(workdir: Path) -> str:
    """SHA-256 over every array of the latest checkpoint, and their names."""
    state = checkpoint.load_tree(workdir)[1]
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


class Keep(hsvit.GroupShard):
    """Sees the CLS outputs before they are added up."""

    def sum(self, x_GBD: jax.Array) -> jax.Array:
        self.cls = x_GBD
        return x_GBD.sum(0)


#: For runs that compare steps: nothing is drawn but the batches.
DATASET = small_dataset()
PLAIN = {
    "augment__crop_padding": 0,
    "train__batch": 35,
    "train__steps": 2,
}
