"""Tilings of image maps on a CPU: a few images at a time, and planes of every s-th row and column.

A few images at a time stay in the cache through all that is computed of them. Planes are worked on
apart and joined at the end only: XLA for CPU does that quickly as a computation's last operation,
and one number at a time in the middle of one.
"""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array


def cut_batch(x_BHWC: Array, limit: int, channels: int = 0) -> Array:
    """Whole images in equal slices: (slices, images of one, H, W, C).

    As many images as make at most `limit` numbers (at least one), if there are that many channels
    where those are more. At least two slices: XLA inlines a loop of one iteration, which
    changes fusion and rounding.
    """
    batch, rows, columns, own = x_BHWC.shape
    size = rows * columns * max(own, channels)
    images = max(
        n
        for n in range(1, max(2, batch // 2 + 1))
        if batch % n == 0 and (n == 1 or n * size <= limit)
    )
    return split(x_BHWC, batch // images)


def split(x: Array, parts: int) -> Array:
    """The first axis in that many equal slices."""
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def join_batch(parts: Array) -> Array:
    """Inverse of `cut_batch` and `split`."""
    return parts.reshape(-1, *parts.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def cut_planes(x_BHWC: Array, stride: int) -> list[list[Array]]:
    """Rows i, i + s, … and columns j, j + s, … of a map, as `planes[i][j]`, i, j < s."""
    batch, height, width, channels = x_BHWC.shape
    rows, columns = -(-height // stride), -(-width // stride)
    ends = (0, rows * stride - height), (0, columns * stride - width)
    padded = jnp.pad(x_BHWC, ((0, 0), *ends, (0, 0)))
    apart = padded.reshape(batch, rows, stride, columns, stride, channels)
    whole = [[apart[:, :, i, :, j] for j in range(stride)] for i in range(stride)]
    return crop_planes(whole, height, width)


def crop_planes(planes: list[list[Array]], height: int, width: int) -> list[list[Array]]:
    """Of planes with the same shape, what belongs to a map of height × width."""
    stride = len(planes)
    return [
        [x[:, : -((i - height) // stride), : -((j - width) // stride)] for j, x in enumerate(row)]
        for i, row in enumerate(planes)
    ]


def join_planes(planes: list[list[Array]]) -> Array:
    """The map (B, H, W, C) of which `cut_planes` makes these planes."""
    height, width = sum(row[0].shape[1] for row in planes), sum(x.shape[2] for x in planes[0])
    _, rows, columns, _ = planes[0][0].shape

    def filled(x: Array) -> Array:
        ends = (0, rows - x.shape[1]), (0, columns - x.shape[2])
        return jnp.pad(x, ((0, 0), *ends, (0, 0)))

    whole = jnp.stack([jnp.stack([filled(x) for x in row], 3) for row in planes], 2)
    batch, _, stride, _, _, channels = whole.shape
    return whole.reshape(batch, rows * stride, columns * stride, channels)[:, :height, :width]


cut_planes.defvjp(
    lambda x, stride: (cut_planes(x, stride), None), lambda _, __, grads: (join_planes(grads),)
)
