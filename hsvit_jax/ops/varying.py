"""Marks of arrays that differ along a mesh axis, inside a manual region (`shard_map`)."""

import jax
from jax import lax

Array = jax.Array


def vary_like(x: Array, like: Array) -> Array:
    """Marks x as differing along the mesh axes that `like` differs along, inside a manual region.

    A custom gradient must hand back what it was given; this makes the sum over devices, which the
    gradient of a replicated kernel needs, part of the step before it.
    """
    missing = tuple(jax.typeof(like).mat.varying - jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: Array) -> list[Array]:
    """Marks each as differing along every mesh axis that any of them differs along."""
    for like in arrays:
        arrays = tuple(vary_like(x, like) for x in arrays)
    return list(arrays)
