"""Training: from a configuration and a folder to a trained, evaluated, checkpointed network."""

from hsvit_jax.train.loop import Diverged, Run
from hsvit_jax.train.run import Result, build_model, load_data, prepare, train

__all__ = ["Diverged", "Result", "Run", "build_model", "load_data", "prepare", "train"]
