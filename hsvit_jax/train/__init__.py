"""Training: from a configuration and a folder to a trained, evaluated, checkpointed network."""

from hsvit_jax.runtime.signals import Diverged
from hsvit_jax.train.loop import Callback
from hsvit_jax.train.run import Result, load_data, prepare, train
from hsvit_jax.train.run_spec import Run, build_model

__all__ = ["Callback", "Diverged", "Result", "Run", "build_model", "load_data", "prepare", "train"]
