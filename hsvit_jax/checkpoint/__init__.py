"""Training states on disk, checked when they are read."""

from hsvit_jax.checkpoint.directory import probe
from hsvit_jax.checkpoint.manager import Checkpoints, CheckpointWarning, Which, load_tree
from hsvit_jax.checkpoint.orbax_arrays import alone
from hsvit_jax.checkpoint.record import CheckpointError, brief, misfits

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "Which",
    "alone",
    "brief",
    "load_tree",
    "misfits",
    "probe",
]
