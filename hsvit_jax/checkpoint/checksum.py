"""64-bit checksums of arrays, computed where the arrays are, the same for every sharding.

A checksum is two sums modulo 2^32 over an array's 32-bit words, each hashed together with its
position in the unsharded array. The hash is one-to-one, so a change of any single word always
shows; a sum has no order, so the sharding does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
# Multipliers of two well-mixing 32-bit hashes: C. Wellons' lowbias32, MurmurHash3's finaliser.
_MULTIPLIERS = ((0x7FEB352D, 0x846CA68B), (0x85EBCA6B, 0xC2B2AE35))


def of(leaves: list[jax.Array | np.ndarray]) -> list[str]:
    """Computes 16 hexadecimal digits per leaf, the same for every sharding, device count and host.

    One compiled call per set of devices (mostly one), in which leaves of one shape and dtype are
    stacked: 440 leaves compile in half a second instead of four.
    """
    sums = np.zeros((len(leaves), 2), np.uint32)
    by_devices: dict[tuple, dict[tuple, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            words = leaf.reshape(-1).view(f"u{min(leaf.dtype.itemsize, 4)}").astype(np.uint32)
            sums[i] = _sums(words, np.arange(words.size, dtype=np.uint32))
        else:
            kinds = by_devices.setdefault(_devices(leaf.sharding), {})
            kinds.setdefault((leaf.shape, leaf.dtype, leaf.sharding), []).append(i)
    for devices, kinds in by_devices.items():
        groups = [[leaves[i] for i in indices] for indices in kinds.values()]
        order = [i for indices in kinds.values() for i in indices]
        sums[order] = np.asarray(_device_sums(devices)(groups))
    return [f"{one:08x}{other:08x}" for one, other in sums.tolist()]


def _devices(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


@functools.cache
def _device_sums(devices: tuple[jax.Device, ...]) -> Callable[[list[list[jax.Array]]], jax.Array]:
    """Compiles the sums of groups of like leaves: uint32 (leaves, 2), replicated."""

    def one(leaf: jax.Array) -> jax.Array:
        if leaf.dtype.itemsize == 8 or leaf.dtype == jnp.uint32:
            words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        elif leaf.dtype == jnp.bool_:
            words = leaf.astype(jnp.uint32)
        else:
            unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
            words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        index, stride = jnp.zeros(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):
            iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
            index, stride = index + iota * np.uint32(stride % 2**32), stride * words.shape[axis]
        return jnp.stack(_sums(words, index))

    def many(groups: list[list[jax.Array]]) -> jax.Array:
        return jnp.concatenate([jax.vmap(one)(jnp.stack(group)) for group in groups])

    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    return jax.jit(many, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _sums(words: Any, index: Any) -> list[Any]:
    """Sums uint32 words modulo 2^32 twice, each word hashed with its position."""
    return [
        _hash(words + _hash(index + np.uint32(b), a, b), a, b).sum(dtype=np.uint32)
        for a, b in _MULTIPLIERS
    ]


def _hash(words: Any, a: int, b: int) -> Any:
    """A one-to-one hash of uint32 words: xor-shifts, and products with odd numbers."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(a)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(b)
    return words ^ (words >> np.uint32(16))
