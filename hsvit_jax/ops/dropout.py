"""Dropout whose mask is a function of who is dropped: key words, example, group and position."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def _mix(bits: Array) -> Array:
    """Scrambles 32-bit words (two multiply-xorshift rounds; each input bit reaches all outputs)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def counter_base(words: Sequence[Array | int], rank: int) -> Array:
    """What counters say before positions: uint32 of the shape that the words broadcast to.

    words: ints, or integer arrays of `rank` axes, as `counter_bits` takes them.
    """
    base = jnp.full((1,) * rank, 0x9E3779B9, jnp.uint32)
    for word in words:
        word = jnp.asarray(word).astype(jnp.uint32)
        word = word if word.ndim else word.reshape((1,) * rank)
        base = _mix(base + word * jnp.uint32(0x85EBCA6B) + jnp.uint32(0xC2B2AE35))
    return base


def counter_at(base: Array, position: Array) -> Array:
    """Random uint32 bits at positions (uint32) of what `counter_base` says."""
    return _mix(base ^ (position * jnp.uint32(0x9E3779B1)))


def drop_below(rate: float) -> int:
    """Random uint32 bits less than this are dropped, which happens with probability `rate`."""
    return min(round(rate * 2**32), 2**32 - 1)


def counter_bits(words: Sequence[Array | int], shape: tuple[int, ...]) -> Array:
    """Random uint32 bits (broadcast of words and shape) that depend only on the counters given.

    words: key words and identities (example index, group index, …), uint32 or int32 arrays of the
    rank of `shape`, or ints. The last counter is each element's position in the trailing axes that
    no word spans. The same identities give the same bits on any number of devices; a threefry
    call per element would cost more than the attention it drops.
    """
    rank = len(shape)
    base, spanned = counter_base(words, rank), [False] * rank
    for word in words:
        if jnp.ndim(word):
            spanned = [s or n > 1 for s, n in zip(spanned, word.shape, strict=True)]
    position = jnp.zeros((1,) * rank, jnp.uint32)
    size = 1
    for axis in reversed(range(rank)):
        if spanned[axis]:
            continue
        position = position + lax.broadcasted_iota(
            jnp.uint32, tuple(shape[axis] if a == axis else 1 for a in range(rank)), axis
        ) * jnp.uint32(size)
        size *= shape[axis]
    return counter_at(base, position)


def dropout_scale(words: Sequence[Array | int], shape: tuple[int, ...], rate: float) -> Array:
    """Inverted-dropout factors (shape, float32): 0 with probability `rate`, else 1/(1 − rate)."""
    keep = counter_bits(words, shape) >= jnp.uint32(drop_below(rate))
    return jnp.where(keep, jnp.float32(1 / (1 - rate)), jnp.float32(0))
