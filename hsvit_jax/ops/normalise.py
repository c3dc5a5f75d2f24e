"""Layer normalisation, and the affine map of batch normalisation."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def moments_dtype(x: Array) -> jnp.dtype:
    """The dtype of x's moments: never less than float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def wide(x: Array) -> Array:
    """Returns x in at least float32, for exponentials and long sums."""
    return x.astype(moments_dtype(x))


def scale_shift(x: Array, factor: Array, shift: Array) -> Array:
    """x·factor + shift over the last axis, computed in at least float32, in x's dtype."""
    return (x * last_axis(factor, x.ndim) + last_axis(shift, x.ndim)).astype(x.dtype)


def last_axis(vector: Array, ndim: int) -> Array:
    """A (C,) vector with leading axes of size one, so that nothing is broadcast implicitly."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def layer_norm(x: Array, scale: Array, bias: Array, eps: float = 1e-5) -> Array:
    """Layer normalisation over the last axis; scale and bias have x's rank."""
    dtype = moments_dtype(x)
    wide = x.astype(dtype)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.square(wide - mean).mean(-1, keepdims=True)
    out = (wide - mean) * lax.rsqrt(var + eps) * scale.astype(dtype) + bias.astype(dtype)
    return out.astype(x.dtype)
