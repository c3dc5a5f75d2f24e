"""Training: from a configuration and a folder to a trained, evaluated, checkpointed network."""

from hsvit_jax.config.resolution import build_model
from hsvit_jax.runtime.signals import Diverged
from hsvit_jax.train.loop import Callback
from hsvit_jax.train.prepare import load_data, prepare
from hsvit_jax.train.run import Result, train
from hsvit_jax.train.run_spec import Run

__all__ = ["Callback", "Diverged", "Result", "Run", "build_model", "load_data", "prepare", "train"]
