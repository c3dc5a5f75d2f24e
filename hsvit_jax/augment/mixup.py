"""Mixes a batch with itself rolled by one, by MixUp or CutMix."""

import jax
import jax.numpy as jnp

from hsvit_jax.augment.random_bits import fraction, span, whole_number


def mix(
    key: jax.Array,
    images_BHWC: jax.Array,
    targets_BK: jax.Array,
    *,
    mixup: float,
    cutmix: float,
    probability: jax.Array | float,
) -> tuple[jax.Array, jax.Array]:
    """Mixes images and targets of a batch with itself by MixUp or CutMix.

    One draw per batch decides whether to mix, by which of the two (evenly, if both are on) and how
    much: λ ~ Beta(α, α) is the share an example keeps of itself. CutMix pastes a box of area about
    1 - λ, clipped at the border, and takes λ from the pasted area.
    ``mixup`` and ``cutmix`` are α of each, 0 for off; at least one is on.
    Sources: Zhang et al. 2018 (arXiv 1710.09412), Yun et al. 2019 (arXiv 1905.04899).
    """
    _, height, width, _ = images_BHWC.shape
    scalars_key, beta_key = jax.random.split(key)
    apply_bits, which_bits, x_bits, y_bits = jax.random.bits(scalars_key, (4,), jnp.uint32)
    is_cutmix = jnp.asarray(cutmix > 0.0) if 0.0 in (mixup, cutmix) else fraction(which_bits) < 0.5
    alpha = jnp.where(is_cutmix, cutmix, mixup)
    drawn = jax.random.beta(beta_key, alpha, alpha, dtype=jnp.float32)
    keep = jnp.where(fraction(apply_bits) < probability, drawn, 1.0)

    half = 0.5 * jnp.sqrt(1.0 - keep)
    high, wide = ((half * size).astype(jnp.int32) for size in (height, width))
    rows_H = span(whole_number(y_bits, height) - high, 2 * high, height)
    columns_W = span(whole_number(x_bits, width) - wide, 2 * wide, width)
    pasted_HW = is_cutmix & rows_H[:, None] & columns_W[None, :]
    kept_by_area = 1.0 - jnp.sum(pasted_HW, dtype=jnp.float32) / (height * width)

    share = jnp.where(is_cutmix, 1.0, keep)
    partner_BHWC = jnp.roll(images_BHWC, 1, axis=0)
    blended_BHWC = share * images_BHWC + (1.0 - share) * partner_BHWC
    mixed_BHWC = jnp.where(pasted_HW[None, :, :, None], partner_BHWC, blended_BHWC)
    keep = jnp.where(is_cutmix, kept_by_area, keep)
    mixed_BK = keep * targets_BK + (1.0 - keep) * jnp.roll(targets_BK, 1, axis=0)
    return mixed_BHWC, mixed_BK
