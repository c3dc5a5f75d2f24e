"""Resizes a random box of each image bilinearly, as Pillow does.

To the size of its image to the bit: a box never exceeds the image, so two pixels a side decide
every new one. To a smaller size within one of 256 levels.
"""

import jax
import jax.numpy as jnp

from hsvit_jax.augment.random_bits import box_sizes, example_bits, whole_number

RATIO = (3 / 4, 4 / 3)
TRIES = 10

# A stream of its own keeps the draws of the other augmentations.
_STREAM = 1
_Y, _X = range(2)
_AREA, _RATIO = slice(2, 2 + TRIES), slice(2 + TRIES, 2 + 2 * TRIES)
_WORDS = 2 + 2 * TRIES
_BITS = 22  # Pillow's fixed-point weights have as many


def random_boxes(
    key: jax.Array, indices_B: jax.Array, size: tuple[int, int], area: tuple[float, float]
) -> jax.Array:
    """Draws a box for each example: int32 (B, 4), top, left, rows, columns.

    Its share of the image's area is uniform in `area`, its ratio of columns to rows log-uniform in
    3/4..4/3, its place uniform. The first of ten tries that fits counts; if none does, the largest
    centred box of the nearest allowed ratio. Source: torchvision's RandomResizedCrop.
    """
    height, width = size
    bits_BS = example_bits(jax.random.fold_in(key, _STREAM), indices_B, _WORDS)
    columns_B, rows_B, fits_B = box_sizes(
        (bits_BS[:, _AREA], bits_BS[:, _RATIO]), height * width, area, RATIO, (1, width, height)
    )
    top_B = whole_number(bits_BS[:, _Y], jnp.maximum(height - rows_B + 1, 1))
    left_B = whole_number(bits_BS[:, _X], jnp.maximum(width - columns_B + 1, 1))
    drawn_B4 = jnp.stack([top_B, left_B, rows_B, columns_B], axis=1)
    return jnp.where(fits_B[:, None], drawn_B4, jnp.asarray(_centred(height, width))[None, :])


def _centred(height: int, width: int) -> tuple[int, int, int, int]:
    """Returns the largest centred box of an allowed ratio: top, left, rows, columns."""
    narrowest, widest = RATIO
    rows, columns = height, width
    if width / height < narrowest:
        rows = max(min(round(width / narrowest), height), 1)
    elif width / height > widest:
        columns = max(min(round(height * widest), width), 1)
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def resize_boxes(images_BHWC: jax.Array, boxes_B4: jax.Array, mirrored_B: jax.Array) -> jax.Array:
    """Enlarges a box of each image to the size of the image, mirrored where `mirrored_B` is set.

    Each pass, columns first, is in Pillow's fixed point.
    """
    _, height, width, _ = images_BHWC.shape
    top_B, left_B, rows_B, columns_B = (boxes_B4[:, i] for i in range(4))
    x_BW = jnp.arange(width, dtype=jnp.int32)[None, :]
    x_BW = jnp.where(mirrored_B[:, None], width - 1 - x_BW, x_BW)
    y_1H = jnp.arange(height, dtype=jnp.int32)[None, :]
    images_BHWC = _pass(images_BHWC, x_BW, left_B, columns_B, axis=1)
    return _pass(images_BHWC, y_1H, top_B, rows_B, axis=0)


def resample_boxes(
    images_BHWC: jax.Array, boxes_B4: jax.Array, mirrored_B: jax.Array, size: tuple[int, int]
) -> jax.Array:
    """Resizes a box of each image to `size`, with Pillow's triangular filter where it shrinks."""

    def one(image_HWC: jax.Array, box_4: jax.Array, mirrored: jax.Array) -> jax.Array:
        start_2, scale_2 = box_4[:2], jnp.asarray(size, jnp.float32) / box_4[2:]
        shape = (*size, image_HWC.shape[-1])
        pixels_HWC = jax.image.scale_and_translate(
            image_HWC.astype(jnp.float32), shape, (0, 1), scale_2, -start_2 * scale_2, "linear"
        )
        pixels_HWC = jnp.clip(jnp.round(pixels_HWC), 0, 255).astype(jnp.uint8)
        return jnp.where(mirrored, pixels_HWC[:, ::-1], pixels_HWC)

    return jax.vmap(one)(images_BHWC, boxes_B4, mirrored_B)


def _pass(
    images_BHWC: jax.Array, place_BS: jax.Array, start_B: jax.Array, length_B: jax.Array, axis: int
) -> jax.Array:
    """Resamples one axis: place o has its centre at (o + ½)·length/size - ½ of the box."""
    size = place_BS.shape[1]
    length_B1 = length_B[:, None]
    twice_BS = (2 * place_BS + 1) * length_B1 - size  # the centre, in units of 1/(2·size)
    before_BS = twice_BS // (2 * size)
    part_BS = twice_BS - before_BS * (2 * size)
    pixels_B2S = start_B[:, None, None] + jnp.clip(
        jnp.stack([before_BS, before_BS + 1], axis=1), 0, length_B1[:, None] - 1
    )
    weight_B2S = jnp.stack([_weight(2 * size - part_BS, size), _weight(part_BS, size)], axis=1)

    def one(image_HWC: jax.Array, pixels_2S: jax.Array, weight_2S: jax.Array) -> jax.Array:
        shape = [1, 1, 1]
        shape[axis] = size
        total = jnp.int32(1 << (_BITS - 1))
        for at_S, weight_S in zip(pixels_2S, weight_2S, strict=True):
            taken_HWC = jnp.take(image_HWC, at_S, axis, mode="clip").astype(jnp.int32)
            total = total + taken_HWC * weight_S.reshape(shape)
        return (total >> _BITS).astype(jnp.uint8)

    return jax.vmap(one)(images_BHWC, pixels_B2S, weight_B2S)


def _weight(part: jax.Array, size: int) -> jax.Array:
    """Returns part/(2·size) in units of 2^-22, rounded; computed in two halves within int32."""
    half = 1 << (_BITS // 2)
    high = part * half // (2 * size)
    low = ((part * half - high * (2 * size)) * half + size) // (2 * size)
    return high * half + low
