"""Applies RandAugment's ops to batches of uint8 images, equal to Pillow's to the last bit.

One op is one row of `op_tables.OpTables`. Every row takes one gather for geometry and one for
colours, so a batch of different ops costs no more than a batch of one.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.augment import op_tables as ops


def apply_rows(images_BHWC: jax.Array, row_B: jax.Array, tables: ops.OpTables) -> jax.Array:
    """Applies to every uint8 image, C 1 or 3, the op of its row of `tables`, int32 (B,).

    `tables` are made for images of this size; pixels from outside are `tables.fill`.
    """
    _, height, width, _ = images_BHWC.shape
    affine_B6 = jnp.asarray(tables.affine_R6)[row_B]
    y_1H1 = jnp.arange(height, dtype=jnp.int32)[None, :, None]
    x_11W = jnp.arange(width, dtype=jnp.int32)[None, None, :]
    a, b, c, d, e, f = (affine_B6[:, i, None, None] for i in range(6))
    column_BHW = (a * x_11W + b * y_1H1 + c) >> 16
    row_BHW = (d * x_11W + e * y_1H1 + f) >> 16
    moved_BHWC = gather_pixels(images_BHWC, row_BHW, column_BHW, tables.fill)
    return _recolour(moved_BHWC, row_B, tables)


def gather_pixels(
    images_BHWC: jax.Array, row_BHW: jax.Array, column_BHW: jax.Array, fill: tuple[int, ...] = (0,)
) -> jax.Array:
    """Gathers pixel (row, column) of each image, int32 that broadcast; `fill` if it is outside."""
    batch, height, width, channels = images_BHWC.shape
    inside_BHW = (row_BHW >= 0) & (row_BHW < height) & (column_BHW >= 0) & (column_BHW < width)
    flat_BHW = jnp.where(inside_BHW, row_BHW * width + column_BHW, 0)
    pixels_BPC = images_BHWC.reshape(batch, height * width, channels)
    gathered_BHWC = jax.vmap(lambda pixels, place: pixels.at[place].get(mode="promise_in_bounds"))(
        pixels_BPC, flat_BHW
    )
    return jnp.where(inside_BHW[..., None], gathered_BHWC, jnp.asarray(fill, images_BHWC.dtype))


def _recolour(images_BHWC: jax.Array, row_B: jax.Array, tables: ops.OpTables) -> jax.Array:
    """Computes clip(trunc(base + table[pixel - base + 255])): a blend, or a look-up with base 0."""
    pixels_BHWC = images_BHWC.astype(jnp.int32)
    base_BHWC = _base(pixels_BHWC, jnp.asarray(tables.base_R)[row_B])
    table_BCV = _table(pixels_BHWC, row_B, tables)
    batch, channels, size = table_BCV.shape
    # One flat table per image keeps this a gather with a single index.
    offset_C = jnp.arange(channels, dtype=jnp.int32) * size + ops.TABLE_ZERO
    at_BHWC = pixels_BHWC - base_BHWC + offset_C[None, None, None, :]
    product_BHWC = jax.vmap(lambda table, place: table.at[place].get(mode="promise_in_bounds"))(
        table_BCV.reshape(batch, channels * size), at_BHWC
    )
    mixed_BHWC = base_BHWC.astype(jnp.float32) + product_BHWC
    return jnp.clip(mixed_BHWC, 0.0, 255.0).astype(jnp.uint8)


def _base(pixels_BHWC: jax.Array, base_B: jax.Array) -> jax.Array:
    """Returns an image's partner in a blend, int32: black, its grey, mean grey, or smooth."""
    grey_BHW1 = _grey(pixels_BHWC)
    count = grey_BHW1.shape[1] * grey_BHW1.shape[2]
    total_B111 = jnp.sum(grey_BHW1, axis=(1, 2, 3), keepdims=True)
    mean_B111 = (2 * total_B111 + count) // (2 * count)  # rounded half up
    base_B111 = base_B[:, None, None, None]
    flat_BHW1 = jnp.where(base_B111 == ops.BASE_MEAN, mean_B111, 0)
    flat_BHW1 = jnp.where(base_B111 == ops.BASE_GREY, grey_BHW1, flat_BHW1)
    return jnp.where(base_B111 == ops.BASE_SMOOTH, _smooth(pixels_BHWC), flat_BHW1)


def _grey(pixels_BHWC: jax.Array) -> jax.Array:
    """Returns ITU-R 601 luma in Pillow's 16-bit fixed point; one channel is its own grey."""
    if pixels_BHWC.shape[-1] == 1:
        return pixels_BHWC
    red, green, blue = (pixels_BHWC[..., i, None] for i in range(3))
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _smooth(pixels_BHWC: jax.Array) -> jax.Array:
    """Returns the 3×3 mean with weight 5 in the middle, rounded; the outermost pixels stay."""
    _, height, width, _ = pixels_BHWC.shape
    if height < 3 or width < 3:
        return pixels_BHWC
    rows = pixels_BHWC[:, :-2] + pixels_BHWC[:, 1:-1] + pixels_BHWC[:, 2:]
    box = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    total = box + 4 * pixels_BHWC[:, 1:-1, 1:-1]
    return pixels_BHWC.at[:, 1:-1, 1:-1].set((2 * total + 13) // 26)


def _table(pixels_BHWC: jax.Array, row_B: jax.Array, tables: ops.OpTables) -> jax.Array:
    batch, _, _, channels = pixels_BHWC.shape
    static_BV = jnp.asarray(tables.products_TV)[jnp.asarray(tables.table_R)[row_B]]
    static_BCV = jnp.broadcast_to(static_BV[:, None], (batch, channels, ops.TABLE_SIZE))
    lut_B11 = jnp.asarray(tables.lut_R)[row_B][:, None, None]
    equal_BCV, contrast_BCV = _equalize_lut(pixels_BHWC), _autocontrast_lut(pixels_BHWC)
    lut_BCV = jnp.where(lut_B11 == ops.LUT_EQUALIZE, equal_BCV, contrast_BCV)
    before, after = ops.TABLE_ZERO, ops.TABLE_SIZE - ops.TABLE_ZERO - 256
    dynamic_BCV = jnp.pad(lut_BCV, ((0, 0), (0, 0), (before, after))).astype(jnp.float32)
    return jnp.where(lut_B11 == ops.LUT_STATIC, static_BCV, dynamic_BCV)


def _equalize_lut(pixels_BHWC: jax.Array) -> jax.Array:
    """Flattens each channel's histogram: int32 (B, C, 256), as ImageOps.equalize."""
    batch, height, width, channels = pixels_BHWC.shape
    values_BPC = pixels_BHWC.reshape(batch, height * width, channels)
    at_BPC = values_BPC + jnp.arange(channels, dtype=jnp.int32)[None, None, :] * 256
    histogram_BCV = jax.vmap(
        lambda at: jnp.zeros(channels * 256, jnp.int32).at[at].add(1, mode="promise_in_bounds")
    )(at_BPC.reshape(batch, -1)).reshape(batch, channels, 256)
    below_BCV = jnp.cumsum(histogram_BCV, axis=-1) - histogram_BCV
    highest_BC1 = jnp.max(values_BPC, axis=1)[..., None]
    before_last_BC1 = jnp.take_along_axis(below_BCV, highest_BC1, axis=-1)
    step_BC1 = before_last_BC1 // 255
    safe_step_BC1 = jnp.maximum(step_BC1, 1)
    reached_BCV = safe_step_BC1 // 2 + below_BCV
    flat_BCV = jnp.minimum(_quotient(reached_BCV, safe_step_BC1), 255)
    return jnp.where(step_BC1 == 0, jnp.arange(256, dtype=jnp.int32)[None, None, :], flat_BCV)


def _autocontrast_lut(pixels_BHWC: jax.Array) -> jax.Array:
    """Stretches each channel to 0..255: int32 (B, C, 256), as ImageOps.autocontrast in float64."""
    low_BC1 = jnp.min(pixels_BHWC, axis=(1, 2))[..., None]
    span_BC1 = jnp.max(pixels_BHWC, axis=(1, 2))[..., None] - low_BC1
    short_BC1 = jnp.asarray(ops.autocontrast_shortfall())[low_BC1, span_BC1]
    steps_BC1 = jnp.asarray(np.gcd(255, np.arange(256)).astype(np.int32))[span_BC1]
    value_11V = jnp.arange(256, dtype=jnp.int32)[None, None, :]
    safe_span_BC1 = jnp.maximum(span_BC1, 1)
    scaled_BCV = 255 * jnp.clip(value_11V - low_BC1, 0, safe_span_BC1)
    exact_BCV = _quotient(scaled_BCV, safe_span_BC1)
    integral_BCV = exact_BCV * safe_span_BC1 == scaled_BCV
    bit_BCV = _quotient(exact_BCV * steps_BC1, jnp.full_like(steps_BC1, 255)).astype(jnp.uint32)
    is_short_BCV = integral_BCV & ((short_BC1 >> bit_BCV) & 1).astype(bool) & (bit_BCV < 32)
    stretched_BCV = exact_BCV - is_short_BCV.astype(jnp.int32)
    return jnp.where(span_BC1 == 0, value_11V, stretched_BCV)


def _quotient(numerator_BCV: jax.Array, denominator_BC1: jax.Array) -> jax.Array:
    """Divides integers ≥ 0, without the sign handling that makes `//` slow."""
    return jax.lax.div(numerator_BCV, jnp.broadcast_to(denominator_BC1, numerator_BCV.shape))
