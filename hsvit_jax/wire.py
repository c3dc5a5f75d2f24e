"""Numbers in fewer bytes, for the way between devices: float32 in, what is sent, float32 out.

Known methods: rounding to bfloat16, and 8-bit integers with one scale for each row. Both give whole
numbers of bytes that no compiler widens again on the way. NaN and infinity arrive as such, so that
a step that is not finite is seen everywhere.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


class Code(NamedTuple):
    """encode: float32 (R, …) → integers (R, …); decode: the way back, float32."""

    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]


def _to_bf16(x: Array) -> Array:
    """As uint16: back ends without bfloat16 collectives would send float32 in its place."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _from_bf16(sent: Array) -> Array:
    return lax.bitcast_convert_type(sent, jnp.bfloat16).astype(jnp.float32)


def _to_int8(x_RD: Array) -> Array:
    """(R, D) → (R, D + 4): the scale's four bytes travel with their row, in one message."""
    scale_R = jnp.abs(x_RD).max(1) / 127
    steps_RD = jnp.round(x_RD / jnp.where(scale_R == 0, 1, scale_R)[:, None])
    finite_RD = jnp.where(jnp.isfinite(steps_RD), steps_RD, 0)  # the scale is not: all the row is
    bytes_R4 = lax.bitcast_convert_type(scale_R, jnp.int8)
    return jnp.concatenate([jnp.clip(finite_RD, -127, 127).astype(jnp.int8), bytes_R4], axis=1)


def _from_int8(sent: Array) -> Array:
    scale_R = lax.bitcast_convert_type(sent[:, -4:], jnp.float32)
    steps_RD = sent[:, :-4].astype(jnp.float32)
    return jnp.where(jnp.isfinite(scale_R)[:, None], steps_RD * scale_R[:, None], jnp.nan)


#: bf16: any shape, 2 bytes a number, each within 2^-8 of its size. int8: rows (R, D), D + 4 bytes a
#: row, each number within 1/254 of the row's largest.
CODES: Mapping[str, Code] = {
    "bf16": Code(_to_bf16, _from_bf16),
    "int8": Code(_to_int8, _from_int8),
}
