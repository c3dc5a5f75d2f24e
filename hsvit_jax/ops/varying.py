"""Types of arrays inside `shard_map`: along which mesh axes they vary."""

import jax
from jax import lax

Array = jax.Array


def vary_like(x: Array, like: Array) -> Array:
    """x, marked as varying along the mesh axes that `like` varies along.

    A custom gradient must return the types of its arguments; the gradient of this cast is the sum
    over devices that a replicated kernel's gradient needs.
    """
    missing = tuple(jax.typeof(like).mat.varying - jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: Array) -> list[Array]:
    """The arrays, each marked as varying along every mesh axis that any of them varies along."""
    for like in arrays:
        arrays = tuple(vary_like(x, like) for x in arrays)
    return list(arrays)
