"""Random numbers from raw bits: one threefry call per example, then only integer arithmetic."""

import jax
import jax.numpy as jnp


def example_bits(key: jax.Array, indices_B: jax.Array, count: int) -> jax.Array:
    """`count` random words for each example, a function of (key, its index) alone: uint32 (B, S).

    Raises ValueError for keys of another kind than threefry2x32: those of 'rbg' and 'unsafe_rbg'
    give draws that change with an example's neighbours once they are batched.
    """
    kind = str(jax.random.key_impl(key))
    if kind != "threefry2x32":
        raise ValueError(
            f"augmentation needs a key of kind 'threefry2x32', got {kind!r}: make it with "
            "jax.random.key(seed, impl='threefry2x32')"
        )
    return jax.vmap(lambda index: jax.random.bits(jax.random.fold_in(key, index), (count,)))(
        indices_B
    )


def fraction(bits: jax.Array) -> jax.Array:
    """Uniform float32 in [0, 1), multiples of 2^-24, from uint32 words."""
    return (bits >> 8).astype(jnp.float32) * (1.0 / (1 << 24))


def whole_number(bits: jax.Array, count: int | jax.Array) -> jax.Array:
    """Uniform int32 in [0, count), from uint32 words; count from 1 to 65535.

    The upper half of the 64-bit product bits·count: uneven by less than count/2^32.
    """
    count = jnp.asarray(count, jnp.uint32)
    low = (bits & 0xFFFF) * count
    return (((bits >> 16) * count + (low >> 16)) >> 16).astype(jnp.int32)
