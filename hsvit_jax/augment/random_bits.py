"""Draws random numbers from raw bits: one threefry call per example, then integer arithmetic."""

import math

import jax
import jax.numpy as jnp


def example_bits(key: jax.Array, indices_B: jax.Array, count: int) -> jax.Array:
    """Draws ``count`` words of each example from (key, its index) alone: uint32 (B, S).

    The key must be threefry2x32: batched draws of 'rbg' keys depend on an example's neighbours.
    """
    return jax.vmap(
        lambda index: jax.random.bits(jax.random.fold_in(key, index), (count,), jnp.uint32)
    )(indices_B)


def fraction(bits: jax.Array) -> jax.Array:
    """Returns uniform float32 in [0, 1), multiples of 2^-24, from uint32 words."""
    return (bits >> 8).astype(jnp.float32) * (1.0 / (1 << 24))


def whole_number(bits: jax.Array, count: int | jax.Array) -> jax.Array:
    """Returns uniform int32 in [0, count), from uint32 words; count from 1 to 65535.

    It is the upper half of the 64-bit product bits·count, uneven by less than count/2^32.
    """
    count = jnp.asarray(count, jnp.uint32)
    low = (bits & 0xFFFF) * count
    return (((bits >> 16) * count + (low >> 16)) >> 16).astype(jnp.int32)


def span(start: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """Marks the places from `start` for `length`: bool (size,), behind the axes of `start`."""
    place = jax.lax.broadcasted_iota(jnp.int32, (*start.shape, size), start.ndim)
    return (place >= start[..., None]) & (place < (start + length)[..., None])


def box_sizes(
    bits_BA: tuple[jax.Array, jax.Array],
    area: int,
    share: tuple[float, float],
    ratio: tuple[float, float],
    limits: tuple[int, int, int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws the two sides of a box for each example: the first of A tries that fits.

    Args:
      bits_BA: uint32 (B, A) words for the share of the area, and for the ratio of the sides.
      share: range of the uniform share.
      ratio: range of the log-uniform ratio of the first side to the second.
      limits: the least side, the largest first side and the largest second side, in pixels.

    Returns:
      First sides int32 (B,), second sides int32 (B,), and whether any try fits, bool (B,).
    """
    low, high = (math.log(value) for value in ratio)
    area_BA = area * (share[0] + (share[1] - share[0]) * fraction(bits_BA[0]))
    root_BA = jnp.exp(0.5 * (low + (high - low) * fraction(bits_BA[1])))
    first_BA = jnp.round(jnp.sqrt(area_BA) * root_BA).astype(jnp.int32)
    second_BA = jnp.round(jnp.sqrt(area_BA) / root_BA).astype(jnp.int32)
    least, most_first, most_second = limits
    fits_BA = (first_BA <= most_first) & (second_BA <= most_second)
    fits_BA &= jnp.minimum(first_BA, second_BA) >= least
    chosen_B1 = jnp.argmax(fits_BA, axis=1)[:, None]
    first_B = jnp.take_along_axis(first_BA, chosen_B1, axis=1)[:, 0]
    second_B = jnp.take_along_axis(second_BA, chosen_B1, axis=1)[:, 0]
    return first_B, second_B, jnp.any(fits_BA, axis=1)
