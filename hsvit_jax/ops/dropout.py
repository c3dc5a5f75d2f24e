"""Counter-based dropout: a mask is a function of the key words, example, group and position."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def _mix(bits: Array) -> Array:
    """Hashes 32-bit words (two multiply-xorshift rounds: each input bit reaches all outputs)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def counter_bits(counters: Sequence[Array | int], shape: tuple[int, ...]) -> Array:
    """Random bits that depend on the counters alone, so not on the number of devices.

    The last counter is each element's position in the axes that none of `counters` spans. A
    threefry hash of each element would cost more than the attention that it drops.

    Args:
        counters: key words and identities (stream, example, group, …): uint32 or int32 arrays of
            the rank of `shape`, or ints.
        shape: of the result, before it is broadcast against the counters.

    Returns:
        uint32, of the broadcast shape.
    """
    rank = len(shape)
    base, spanned = jnp.full((1,) * rank, 0x9E3779B9, jnp.uint32), [False] * rank
    for counter in counters:
        bits = jnp.asarray(counter).astype(jnp.uint32)
        bits = bits if bits.ndim else bits.reshape((1,) * rank)
        base = _mix(base + bits * jnp.uint32(0x85EBCA6B) + jnp.uint32(0xC2B2AE35))
        if jnp.ndim(counter):
            spanned = [s or n > 1 for s, n in zip(spanned, counter.shape, strict=True)]
    position = jnp.zeros((1,) * rank, jnp.uint32)
    size = 1
    for axis in reversed(range(rank)):
        if spanned[axis]:
            continue
        position = position + lax.broadcasted_iota(
            jnp.uint32, tuple(shape[axis] if a == axis else 1 for a in range(rank)), axis
        ) * jnp.uint32(size)
        size *= shape[axis]
    return _mix(base ^ (position * jnp.uint32(0x9E3779B1)))


def dropout_scale(counters: Sequence[Array | int], shape: tuple[int, ...], rate: float) -> Array:
    """Factors of inverted dropout, float32: 0 with probability `rate`, else 1/(1 − rate).

    Args:
        counters: see `counter_bits`, as for the shape.
        shape: of the result, before it is broadcast against the counters.
        rate: probability of 0.
    """
    drop_below = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    keep = counter_bits(counters, shape) >= drop_below
    return jnp.where(keep, jnp.float32(1 / (1 - rate)), jnp.float32(0))
