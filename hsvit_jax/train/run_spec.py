"""The record of a run: everything that stands before its first step, built once."""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import optax
from jax.sharding import Mesh

from hsvit_jax import config as config_lib
from hsvit_jax import data
from hsvit_jax.runtime import coordination
from hsvit_jax.text import printable
from hsvit_jax.train import optim


@dataclasses.dataclass(frozen=True)
class Run:
    """A resolved configuration with its data, network, mesh and optimizer.

    schedule: the learning rate by optimizer step, which `tx` holds too. state_shape: shapes and
    dtypes of the training state. origin: a digest of the weights of init.from that it started with.
    offset: added to a step's number it counts the images up to there in steps of this batch; not 0
    where the run went on with another batch.
    """

    config: ml_collections.ConfigDict
    dataset: data.Dataset
    model: Any
    mesh: Mesh
    steps_per_epoch: int
    total_steps: int
    schedule: optax.Schedule
    tx: optax.GradientTransformation
    state_shape: dict
    origin: str = ""
    offset: int = 0

    def position(self, step: int) -> int:
        """Returns how many steps of this batch hold the images up to a step."""
        return step + self.offset

    @property
    def length_offset(self) -> int:
        """The offset of the run's length and schedule, which train.steps counts in steps."""
        return 0 if self.config.train.steps else self.offset

    def shifted(self, offset: int) -> "Run":
        """Returns the run with length, schedule and optimizer for another offset."""
        moved = dataclasses.replace(self, offset=offset)
        length = config_lib.total_steps(self.config, self.steps_per_epoch)
        shift, settings = moved.length_offset, self.config.optim
        schedule = optim.schedule(settings, length, self.steps_per_epoch, shift)
        tx = optim.build(settings, schedule, self.model)
        return dataclasses.replace(moved, total_steps=length - shift, schedule=schedule, tx=tx)

    @property
    def meta(self) -> dict:
        """Metadata of a checkpoint, for a resumed run to agree with and for eval and predict."""
        network = {name: self.state_shape[name] for name in ("params", "stats")}
        leaves = jax.tree_util.tree_flatten_with_path(network)[0]
        return {
            "config": config_lib.to_tree(self.config),
            "class_names": list(self.dataset.info.class_names),
            "fingerprint": self.dataset.fingerprint,
            "shapes": {".".join(str(k.key) for k in path): list(x.shape) for path, x in leaves},
            "origin": self.origin,
            "offset": self.offset,
        }


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


def of_given(dataset: data.Dataset) -> dict[str, Any]:
    """Returns the settings by which a data set was made, by 'data.key'."""
    info = dataset.info
    found = {f"data.{key}": getattr(info, key) for key in ("image_size", "channels", "fit")}
    for key in ("val_fraction", "fraction", "on_bad_image"):
        found[f"data.{key}"] = getattr(dataset, key)
    if "=" in info.name or info.name in config_lib.DATA_SETS:
        found["data.name"] = info.name
    return found
