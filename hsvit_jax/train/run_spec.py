"""The record of a run: everything that exists before its first step, built once."""

import dataclasses
from typing import Any

import jax
import ml_collections
import optax
from jax.sharding import Mesh

from hsvit_jax import config as config_lib
from hsvit_jax import data
from hsvit_jax.train import optim
from hsvit_jax.weights.teacher import Teacher


@dataclasses.dataclass(frozen=True)
class Run:
    """A resolved configuration with its data, network, mesh and optimizer.

    schedule: the learning rate by optimizer step, which `tx` holds too. state_shape: shapes and
    dtypes of the training state. origin: a digest of the weights of init.from. offset: added to a
    step, it counts the images so far in steps of this batch; not 0 after a change of the batch.
    teacher: of init.teacher, its arrays on the mesh, once steps are to be taken; taught_by: the
    digest of its weights. rate: what callbacks have multiplied the schedule by; asked: a further
    factor and whether to stop, from the end of the epoch on.
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
    teacher: Teacher | None = None
    taught_by: str = ""
    rate: float = 1.0
    asked: tuple[float, bool] = (1.0, False)

    @property
    def lessons(self) -> tuple:
        """What a step takes beside state and batch: the params and stats of a teacher, if any."""
        return (self.teacher.params, self.teacher.stats) if self.teacher else ()

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
        schedule = optim.schedule(settings, length, self.steps_per_epoch, shift, self.rate)
        tx = optim.build(settings, schedule, self.model)
        return dataclasses.replace(moved, total_steps=length - shift, schedule=schedule, tx=tx)

    @property
    def meta(self) -> dict:
        """A checkpoint's metadata, which a resumed run must match, and eval and predict need."""
        network = {name: self.state_shape[name] for name in ("params", "stats")}
        leaves = jax.tree_util.tree_flatten_with_path(network)[0]
        return {
            "config": config_lib.to_tree(self.config),
            "class_names": list(self.dataset.info.class_names),
            "fingerprint": self.dataset.fingerprint,
            "shapes": {".".join(str(k.key) for k in path): list(x.shape) for path, x in leaves},
            "origin": self.origin,
            "offset": self.offset,
            "teacher": self.taught_by,
            "callbacks": [self.rate, *self.asked],
        }
