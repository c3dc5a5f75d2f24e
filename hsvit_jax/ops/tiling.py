"""Tilings of feature maps on a CPU: slices of a few images, planes of every s-th row and column.

A slice stays in the cache from one operation to the next. Planes are joined at the end of a
computation only: there XLA for CPU (jax 0.10.2) concatenates quickly, within a fusion one number at
a time (32 and 17 ms of a C2A2 step). The planes can go with `conv_winograd`, the slices with the
loop of `conv`.
"""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array


def cut_batch(x_BHWC: Array, limit: int, channels: int = 0) -> Array:
    """The batch in equal slices: (slices, images of one, H, W, C).

    At least two slices: XLA inlines a loop of one iteration, which changes fusion and rounding.

    Args:
        limit: most numbers in a slice of more than one image.
        channels: of the output, counted where it has more than x.
    """
    batch, rows, columns, c_in = x_BHWC.shape
    size = rows * columns * max(c_in, channels)
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
    """The s×s planes of a map: `planes[i][j]` has rows i, i + s, … and columns j, j + s, …"""
    batch, height, width, channels = x_BHWC.shape
    rows, columns = -(-height // stride), -(-width // stride)
    ends = (0, rows * stride - height), (0, columns * stride - width)
    padded = jnp.pad(x_BHWC, ((0, 0), *ends, (0, 0)))
    phases = padded.reshape(batch, rows, stride, columns, stride, channels)
    planes = [[phases[:, :, i, :, j] for j in range(stride)] for i in range(stride)]
    return crop_planes(planes, height, width)


def crop_planes(planes: list[list[Array]], height: int, width: int) -> list[list[Array]]:
    """Planes of equal shape without the padding beyond a map of height × width."""
    stride = len(planes)
    return [
        [x[:, : -((i - height) // stride), : -((j - width) // stride)] for j, x in enumerate(row)]
        for i, row in enumerate(planes)
    ]


def join_planes(planes: list[list[Array]]) -> Array:
    """Inverse of `cut_planes`: the map (B, H, W, C)."""
    height, width = sum(row[0].shape[1] for row in planes), sum(x.shape[2] for x in planes[0])
    _, rows, columns, _ = planes[0][0].shape

    def filled(x: Array) -> Array:
        ends = (0, rows - x.shape[1]), (0, columns - x.shape[2])
        return jnp.pad(x, ((0, 0), *ends, (0, 0)))

    phases = jnp.stack([jnp.stack([filled(x) for x in row], 3) for row in planes], 2)
    batch, _, stride, _, _, channels = phases.shape
    return phases.reshape(batch, rows * stride, columns * stride, channels)[:, :height, :width]


cut_planes.defvjp(
    lambda x, stride: (cut_planes(x, stride), None), lambda _, __, grads: (join_planes(grads),)
)
