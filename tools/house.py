"""Writes down what a redesign must not change, to be compared between two commits.

    PYTHONPATH=.:tests python tools/house.py OUT [configs commands api bits]

One JSON file for each: resolved configurations, the table of commands with their flags and keys,
the public names with their signatures, and digests of trained parameters. `diff -r` of the folders
of two commits is the answer. Digests of parameters hold for one machine and one version of jax.
"""

import gzip
import hashlib
import inspect
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from support import small_runs

import hsvit_jax
from hsvit_jax import cli, commands, data, train
from hsvit_jax import config as config_lib
from hsvit_jax.config import recipes, schema
from hsvit_jax.models import FAMILIES

IMAGES = (50, 500, 5_000, 50_000)
PHOTOS = data.DataInfo(
    name="folder=photos",
    image_size=(128, 128),
    channels=3,
    class_names=("a", "b", "c"),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    flip=True,
)
#: Kinds of runs of 20 steps, by settings of `small_runs.small_config`.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"model__dtype": "bfloat16"},
    "accumulate": {"train__accumulate": 2},
    "ema": {"train__ema_decay": 0.9},
    "no ema": {"train__ema_decay": 0.0},
    "muon": {"optim__name": "muon", "optim__learning_rate": 5e-3},
    "towers": {"model__towers": 2, "mesh__group": 2},
    "sharded trunk": {"model__trunk": "sharded", "mesh__group": 4},
    "ordered": {"mesh__aggregate": "ordered", "mesh__group": 4, "mesh__data": 2},
    "mesh": {"mesh__group": 2, "mesh__data": 2},
    "votes": {"model__votes": "learned", "model__group_dropout": 0.2},
    "repeats": {"data__repeats": 2},
    "balance": {"data__balance": "sample"},
    "mixed": {"augment__mixup": 0.8, "augment__cutmix": 1.0, "augment__mix_until": 0.5},
    "randaugment": {"augment__rand_augment_ops": 2, "augment__erasing": 0.2},
}


def resolved(argument: str, model: dict[str, Any], info: data.DataInfo, images: int) -> Any:
    """Returns a configuration as training resolves it, or the error's text."""
    try:
        config = config_lib.resolve(config_lib.base(argument, model), info, images=images)
        config_lib.refuse_unread(config)
    except ValueError as error:
        return f"refused: {error}"
    recipe = recipes.values(config.recipe, config.model, config.data.name)
    warmup = min(recipe["optim.warmup_epochs"], 1.0)  # a tenth of ten epochs, whatever the length
    return dict(config_lib.leaves(config)) | {"optim.warmup_epochs": warmup}


def configs(out: Path) -> dict[str, str]:
    """Digests the configurations of each variant and recipe over data sets and image counts."""
    infos = {name: data.describe(name) for name in config_lib.DATA_SETS}
    infos["folder=photos"] = PHOTOS
    found = {}
    with gzip.open(out / "configs.jsonl.gz", "wt", compresslevel=6) as whole:
        for family, recipe in itertools.product(FAMILIES.values(), config_lib.RECIPES):
            for variant in family.variants:
                total = hashlib.sha256()
                for name, images in itertools.product(infos, IMAGES):
                    settings = family.settings(variant)
                    config = resolved(f"{name},{recipe}", settings, infos[name], images)
                    case = [family.name, variant, recipe, name, images]
                    line = json.dumps([case, config], sort_keys=True)
                    total.update(line.encode())
                    print(line, file=whole)
                found[f"{family.name} {variant} {recipe}"] = total.hexdigest()[:16]
    return found


def table(_: Path) -> dict[str, Any]:
    """Returns commands with their flags, and keys with their ranges and defaults."""
    found: dict[str, Any] = {}
    for name, command in commands.COMMANDS.items():
        rows = [[getattr(row[0], "__name__", "path"), *map(str, row[1:])] for row in command.flags]
        found[name] = {"flags": rows, "config": command.config, "words": command.words}
    of_models = {f"{n}.{k}": key for n, f in FAMILIES.items() for k, key in f.keys.items()}
    for name, key in {**schema.KEYS, **of_models}.items():
        found[f"key {name}"] = [key.meaning, key.expected, str(key.initial)]
    found["exit codes"] = cli.__doc__
    return found


def api(_: Path) -> dict[str, str]:
    """Returns the signatures of the public names and of their public methods."""

    def signatures(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
        yield prefix, str(inspect.signature(value)) if callable(value) else type(value).__name__
        for name, part in vars(value).items() if inspect.isclass(value) else ():
            if isinstance(part, property | cached_property):
                yield f"{prefix}.{name}", "property"
            elif not name.startswith("_") and inspect.isfunction(part):
                yield f"{prefix}.{name}", str(inspect.signature(part))

    names = {name: getattr(hsvit_jax, name) for name in hsvit_jax.__all__}
    return dict(line for name, value in names.items() for line in signatures(name, value))


def bits(_: Path) -> dict[str, str]:
    """Digests the states of kinds of runs after 20 steps, and of each family after 2."""
    found = {}

    def trained(name: str, config: Any, dataset: data.Dataset) -> None:
        with tempfile.TemporaryDirectory() as folder:
            train.train(config, folder, dataset=dataset, verbose=False)
            found[name] = small_runs.digest(Path(folder))
        print(name, found[name][:12], flush=True)

    for name, settings in RUNS.items():
        config = small_runs.small_config(train__steps=20, **settings)
        trained(name, config, small_runs.small_dataset())
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (40, 32, 32, 3), np.uint8)
    names = tuple("abcdefghij")
    dataset = hsvit_jax.from_arrays(pictures, np.arange(40) % 10, names, val_fraction=0.2)
    for family in FAMILIES.values():
        name = (family.config_file or family.name) if family.name != "hsvit" else "c2a2"
        words = ["train.steps=2", "train.batch=8", "mesh.data=1"]
        config = config_lib.get_config(f"{name}:cifar10,tiny", *words)
        try:
            trained(family.name, config, dataset)
        except ValueError as error:
            found[family.name] = f"refused: {error}"
    return found


PARTS: dict[str, Callable[[Path], Any]] = {
    "configs": configs,
    "commands": table,
    "api": api,
    "bits": bits,
}


def main(out: Path, names: list[str]) -> None:
    """Writes the files of the named parts (default: all)."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or PARTS:
        text = json.dumps(PARTS[name](out), indent=1, sort_keys=True)
        (out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
