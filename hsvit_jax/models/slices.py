"""A few images at a time, so that what is computed of them stays in a CPU's cache."""

import jax

Array = jax.Array


def cut(x_BHWC: Array, limit: int, channels: int = 0) -> Array:
    """Whole images in equal slices: (slices, images of one, H, W, C).

    As many images as make at most `limit` numbers (at least one), if there are that many channels
    where those are more. Two slices or more, of two images or more: a loop that runs once is none,
    and what is in it would be compiled, and rounded, as its surroundings have it.
    """
    batch, rows, columns, own = x_BHWC.shape
    size = rows * columns * max(own, channels)
    images = max(
        n
        for n in range(1, max(2, batch // 2 + 1))
        if batch % n == 0 and (n == 1 or n * size <= limit)
    )
    return cut_into(x_BHWC, batch // images)


def cut_into(x: Array, parts: int) -> Array:
    """The first axis in that many equal slices."""
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def join(parts: Array) -> Array:
    """What `cut` cut."""
    return parts.reshape(-1, *parts.shape[2:])
