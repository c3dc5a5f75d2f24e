"""A map cut into planes of every s-th row and column, which are worked on apart.

Put together again only at the end: XLA for CPU does that quickly as a computation's last operation,
and one number at a time in the middle of one.
"""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def cut(x_BHWC: Array, stride: int) -> list[list[Array]]:
    """Rows i, i + s, … and columns j, j + s, … of a map, as [i][j], for each i, j < s."""
    batch, height, width, channels = x_BHWC.shape
    rows, columns = -(-height // stride), -(-width // stride)
    ends = (0, rows * stride - height), (0, columns * stride - width)
    padded = jnp.pad(x_BHWC, ((0, 0), *ends, (0, 0)))
    apart = padded.reshape(batch, rows, stride, columns, stride, channels)
    whole = [[apart[:, :, i, :, j] for j in range(stride)] for i in range(stride)]
    return crop(whole, height, width)


def crop(planes: list[list[Array]], height: int, width: int) -> list[list[Array]]:
    """Of planes with the same shape, what belongs to a map of height × width."""
    stride = len(planes)
    return [
        [x[:, : -((i - height) // stride), : -((j - width) // stride)] for j, x in enumerate(row)]
        for i, row in enumerate(planes)
    ]


def join(planes: list[list[Array]]) -> Array:
    """The map (B, H, W, C) of which `cut` makes these planes."""
    height, width = sum(row[0].shape[1] for row in planes), sum(x.shape[2] for x in planes[0])
    _, rows, columns, _ = planes[0][0].shape

    def filled(x: Array) -> Array:
        ends = (0, rows - x.shape[1]), (0, columns - x.shape[2])
        return jnp.pad(x, ((0, 0), *ends, (0, 0)))

    whole = jnp.stack([jnp.stack([filled(x) for x in row], 3) for row in planes], 2)
    batch, _, stride, _, _, channels = whole.shape
    return whole.reshape(batch, rows * stride, columns * stride, channels)[:, :height, :width]


cut.defvjp(lambda x, stride: (cut(x, stride), None), lambda _, __, grads: (join(grads),))
