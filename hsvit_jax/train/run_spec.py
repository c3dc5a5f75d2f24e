"""The record of a run: everything that stands before its first step, built once."""

import dataclasses
from typing import Any

import jax
import ml_collections
import optax
from jax.sharding import Mesh

from hsvit_jax import data, models


@dataclasses.dataclass(frozen=True)
class Run:
    """A resolved configuration with its data, network, mesh and optimizer.

    schedule: the learning rate by optimizer step, which `tx` holds too. state_shape: shapes and
    dtypes of the training state. origin: a digest of the weights of init.from that it started with.
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

    @property
    def meta(self) -> dict:
        """Metadata of a checkpoint, for a resumed run to agree with and for eval and predict."""
        network = {name: self.state_shape[name] for name in ("params", "stats")}
        leaves = jax.tree_util.tree_flatten_with_path(network)[0]
        return {
            "config": self.config.to_dict(),
            "class_names": list(self.dataset.info.class_names),
            "fingerprint": self.dataset.fingerprint,
            "shapes": {".".join(str(k.key) for k in path): list(x.shape) for path, x in leaves},
            "origin": self.origin,
        }


def build_model(config: ml_collections.ConfigDict) -> Any:
    """Builds the network of a resolved configuration."""
    return models.build(
        config.model.to_dict(),
        image_size=tuple(config.data.image_size),
        channels=config.data.channels,
        num_classes=config.data.num_classes,
    )
