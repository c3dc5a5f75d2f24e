"""Transforms of single images, which `augment.transforms` lists by name: pure functions of a key.

    hsvit_jax.register_transform("noise", lambda key, image_HWC, sigma=0.1: ...)

A transform takes a key and float32 pixels (H, W, C) in [0, 1], and perhaps a number, which follows
its name after a colon; it returns such pixels. They are clipped and rounded to 8 bits after each
transform, as Pillow keeps them.
"""

import inspect
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.augment import op_tables, randaugment
from hsvit_jax.text import few

#: (key, image_HWC) or (key, image_HWC, number) → image_HWC.
Transform = Callable[..., jax.Array]

#: AutoAugment's policy for CIFAR-10 (arXiv 1805.09501, table 7): two ops a row, each with its
#: probability in tenths and its magnitude.
_POLICY = """
    Invert 1 0 Contrast 2 6, Rotate 7 2 TranslateX 3 9, Sharpness 8 1 Sharpness 9 3,
    ShearY 5 8 TranslateY 7 9, AutoContrast 5 0 Equalize 9 0, ShearY 2 7 Posterize 3 7,
    Color 4 3 Brightness 6 7, Sharpness 3 9 Brightness 7 9, Equalize 6 0 Equalize 5 0,
    Contrast 6 7 Sharpness 6 5, Color 7 7 TranslateX 5 8, Equalize 3 0 AutoContrast 4 0,
    TranslateY 4 3 Sharpness 2 6, Brightness 9 6 Color 2 8, Solarize 5 2 Invert 0 0,
    Equalize 2 0 AutoContrast 6 0, Equalize 2 0 Equalize 6 0, Color 9 9 Equalize 6 0,
    AutoContrast 8 0 Solarize 2 8, Brightness 1 3 Color 7 0, Solarize 4 5 AutoContrast 9 0,
    TranslateY 9 9 TranslateY 7 9, AutoContrast 9 0 Solarize 8 3, Equalize 8 0 Invert 1 0,
    TranslateY 7 9 AutoContrast 9 0
"""
_BLUR_TAPS = 6  # to each side: three standard deviations of the widest blur


def vertical_flip(key: jax.Array, image_HWC: jax.Array, probability: float = 0.5) -> jax.Array:
    """Mirrors top and bottom by chance."""
    return jnp.where(_uniform(key, 0.0, 1.0) < probability, image_HWC[::-1], image_HWC)


def quarter_turns(key: jax.Array, image_HWC: jax.Array) -> jax.Array:
    """Turns by 0, 90, 180 or 270°."""
    height, width, _ = image_HWC.shape
    if height != width:
        raise ValueError(
            f"augment.transforms=quarter_turns needs square images, not {height}×{width}: set "
            "data.image_size to one number, or remove it"
        )
    turns = _whole(key, (), 0, 4)
    return jax.lax.select_n(turns, *(jnp.rot90(image_HWC, count) for count in range(4)))


def rotate(key: jax.Array, image_HWC: jax.Array, degrees: float = 15.0) -> jax.Array:
    """Rotates by up to so many degrees.

    Bilinear; places outside the image have its mirrored pixels.
    """
    angle = _uniform(key, -math.radians(degrees), math.radians(degrees))
    height, width, _ = image_HWC.shape
    cos, sin, middle_y, middle_x = jnp.cos(angle), jnp.sin(angle), (height - 1) / 2, (width - 1) / 2
    y_H1 = jnp.arange(height, dtype=jnp.float32)[:, None] - middle_y
    x_1W = jnp.arange(width, dtype=jnp.float32)[None, :] - middle_x
    places = [sin * x_1W + cos * y_H1 + middle_y, cos * x_1W - sin * y_H1 + middle_x]

    def turn(plane_HW: jax.Array) -> jax.Array:
        return jax.scipy.ndimage.map_coordinates(plane_HW, places, order=1, mode="mirror")

    return jax.vmap(turn, -1, -1)(image_HWC)


def brightness(key: jax.Array, image_HWC: jax.Array, strength: float = 0.4) -> jax.Array:
    """Multiplies pixels by 1 ± strength."""
    return _blend(key, image_HWC, jnp.zeros((1, 1, 1), jnp.float32), strength)


def contrast(key: jax.Array, image_HWC: jax.Array, strength: float = 0.4) -> jax.Array:
    """Multiplies the contrast by 1 ± strength."""
    return _blend(key, image_HWC, _grey(image_HWC).mean(), strength)


def saturation(key: jax.Array, image_HWC: jax.Array, strength: float = 0.4) -> jax.Array:
    """Multiplies the saturation by 1 ± strength."""
    return _blend(key, image_HWC, _grey(image_HWC), strength)


def hue(key: jax.Array, image_HWC: jax.Array, strength: float = 0.1) -> jax.Array:
    """Shifts HSV's hue by this share."""
    if image_HWC.shape[-1] == 1:
        return image_HWC
    red_HW, green_HW, blue_HW = jnp.moveaxis(image_HWC, -1, 0)
    value_HW = image_HWC.max(-1)
    chroma_HW = value_HW - image_HWC.min(-1)
    divisor_HW = jnp.where(chroma_HW == 0, 1.0, chroma_HW)
    # Not by equality with the maximum, which a compiler may round otherwise.
    pairs = (green_HW, blue_HW), (blue_HW, red_HW), (red_HW, green_HW)
    from_red, from_green, from_blue = (
        2 * i + (one - other) / divisor_HW for i, (one, other) in enumerate(pairs)
    )
    most_red = (red_HW >= green_HW) & (red_HW >= blue_HW)
    sixth_HW = jnp.where(most_red, from_red, jnp.where(green_HW >= blue_HW, from_green, from_blue))
    sixth_HW += 6 * _uniform(key, -strength, strength)
    away_HWC = (sixth_HW[..., None] + jnp.array([[[5, 3, 1]]], jnp.float32)) % 6
    share_HWC = jnp.clip(jnp.minimum(away_HWC, 4 - away_HWC), 0, 1)
    return value_HW[..., None] - chroma_HW[..., None] * share_HWC


def color(key: jax.Array, image_HWC: jax.Array, strength: float = 0.4) -> jax.Array:
    """Jitters brightness, contrast, saturation and hue/4.

    A quarter of the strength is SimCLR's for hue (arXiv 2002.05709, appendix A).
    """
    keys = jax.random.split(key)
    return hue(keys[1], _jitter(keys[0], image_HWC, strength), strength / 4)


def three_augment(key: jax.Array, image_HWC: jax.Array, strength: float = 0.3) -> jax.Array:
    """Applies DeiT III's 3-Augment.

    It makes an image grey, solarizes or blurs it, then jitters its colours by the strength. Source:
    arXiv 2204.07118, section 3.2, and the authors' `augment.py`.
    """
    which_key, blur_key, jitter_key = jax.random.split(key, 3)
    made = (
        jnp.broadcast_to(_grey(image_HWC), image_HWC.shape),
        jnp.where(image_HWC < 127.5 / 255, image_HWC, 1 - image_HWC),
        _blur(image_HWC, _uniform(blur_key, 0.1, 2.0)),
    )
    which = _whole(which_key, (), 0, len(made))
    return _jitter(jitter_key, jax.lax.select_n(which, *made), strength)


def augmix(key: jax.Array, image_HWC: jax.Array, severity: float = 3.0) -> jax.Array:
    """Applies AugMix at this severity.

    It blends an image with three chains of one to three ops, as torchvision does. Source: arXiv
    1912.02781, algorithm 1; without its loss.
    """
    if not 1 <= severity <= op_tables.POLICY_BINS:
        raise ValueError(f"augmix:{severity:g} must be from 1 to {op_tables.POLICY_BINS}")
    tables = op_tables.make_policy(*image_HWC.shape[:2], share=1 / 3, bits=4)
    depth_key, weight_key, share_key, *keys = jax.random.split(key, 6)
    depth_3 = _whole(depth_key, (3,), 1, 4)
    # Neither Identity nor Invert, the first and the last.
    op_33 = _whole(keys[0], (3, 3), 1, tables.num_ops - 1)
    bin_33 = _whole(keys[1], (3, 3), 0, int(severity))
    negative_33 = _whole(keys[2], (3, 3), 0, 2)
    row_33 = tables.row(op_33, bin_33, negative_33)
    row_33 = jnp.where(jnp.arange(3)[:, None] < depth_3[None], row_33, 0)  # Identity
    chains_3HWC = _chain(jnp.stack(3 * [_eight_bits(image_HWC)]), row_33, tables)
    weight_3 = jax.random.dirichlet(weight_key, jnp.ones(3, jnp.float32), dtype=jnp.float32)
    share = _uniform(share_key, 0.0, 1.0)  # Beta(1, 1)
    mixed_HWC = (weight_3[:, None, None, None] * chains_3HWC.astype(jnp.float32)).sum(0) / 255
    return (1 - share) * image_HWC + share * mixed_HWC


def autoaugment(key: jax.Array, image_HWC: jax.Array) -> jax.Array:
    """Applies AutoAugment's policy for CIFAR-10.

    One of 25 pairs of ops, each with its probability, as torchvision does.
    """
    tables = op_tables.make_policy(*image_HWC.shape[:2], share=150 / 331, bits=8)
    words_P6 = np.array([pair.split() for pair in _POLICY.replace("\n", " ").split(",")])
    op_P2 = np.vectorize(op_tables.POLICY_OPS.index)(words_P6[:, ::3])
    chance_P2, bin_P2 = (words_P6[:, start::3].astype(np.int32) for start in (1, 2))
    pair_key, sign_key, chance_key = jax.random.split(key, 3)
    pair = _whole(pair_key, (), 0, len(words_P6))
    op_2, chance_2, bin_2 = (jnp.asarray(table)[pair] for table in (op_P2, chance_P2, bin_P2))
    row_2 = tables.row(op_2, bin_2, _whole(sign_key, (2,), 0, 2))
    applied_2 = 10 * jax.random.uniform(chance_key, (2,), jnp.float32) < chance_2
    row_21 = jnp.where(applied_2, row_2, 0)[:, None]
    return _chain(_eight_bits(image_HWC)[None], row_21, tables)[0].astype(jnp.float32) / 255


#: Name in `augment.transforms` → transform: those of this package, and registered ones.
TRANSFORMS: dict[str, Transform] = {
    function.__name__: function
    for function in (
        *(vertical_flip, quarter_turns, rotate, brightness, contrast, saturation, hue, color),
        *(three_augment, augmix, autoaugment),
    )
}
_BUILT_IN = frozenset(TRANSFORMS)


def register_transform(name: str, transform: Transform) -> Transform:
    """Adds and returns a transform of images; yours of the same name is replaced.

    Args:
        name: what `augment.transforms` names it by.
        transform: a pure function (key, image_HWC) → image_HWC of float32 pixels in [0, 1], which
            may take a number as its third argument. The step maps it over a batch by `jax.vmap`.

    Raises:
        ValueError: the name is that of a transform of this package, or holds a comma or colon.
    """
    if name in _BUILT_IN or {*",:"} & {*name}:
        raise ValueError(f"a transform cannot be named {name!r}: register yours by another name")
    TRANSFORMS[name] = transform
    return transform


def named(text: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the transform that a text such as 'rotate:15' names, as a function (key, image_HWC).

    Raises:
        ValueError: nothing has registered the name, or the transform does not take the number; when
            it is called, its result has another shape or kind than the image.
    """
    name, colon, number = text.partition(":")
    if name not in TRANSFORMS:
        raise ValueError(
            f"unknown transform {name!r} in augment.transforms: add --config=FILE.py, the file "
            f"that registers it; known: {few(TRANSFORMS)}"
        )
    try:
        numbers = (float(number),) if colon else ()
        inspect.signature(TRANSFORMS[name]).bind(None, None, *numbers)
    except (TypeError, ValueError):
        text = f"augment.transforms={text}: set a number that {name} takes, or none"
        raise ValueError(text) from None

    def checked(key: jax.Array, image_HWC: jax.Array) -> jax.Array:
        made, shape = TRANSFORMS[name](key, image_HWC, *numbers), image_HWC.shape
        if made.shape != shape or not jnp.issubdtype(made.dtype, jnp.floating):
            raise ValueError(
                f"the transform {text!r} returned {made.dtype} {made.shape} for float32 {shape}: "
                "return as many floats, from 0 to 1"
            )
        return made

    return checked


def check(texts: Sequence[str], shape: tuple[int, int, int]) -> None:
    """Raises ValueError if a transform cannot take images (H, W, C), or as `named`."""
    for text in texts:
        image_HWC = jax.ShapeDtypeStruct(shape, jnp.float32)
        jax.eval_shape(named(text), jax.random.key(0), image_HWC)


def apply(
    texts: Sequence[str], key: jax.Array, indices_B: jax.Array, images_BHWC: jax.Array
) -> jax.Array:
    """Applies transforms in turn to uint8 images; an image draws from (key, its index) alone."""

    def one(index: jax.Array, image_HWC: jax.Array) -> jax.Array:
        own_key = jax.random.fold_in(key, index)
        for place, text in enumerate(texts):
            pixels_HWC = image_HWC.astype(jnp.float32) / 255
            image_HWC = _eight_bits(named(text)(jax.random.fold_in(own_key, place), pixels_HWC))
        return image_HWC

    return jax.vmap(one)(indices_B, images_BHWC)


def _chain(images_BHWC: jax.Array, row_TB: jax.Array, tables: op_tables.OpTables) -> jax.Array:
    """Applies to each image the ops of its rows, one a turn."""

    def turn(images_BHWC: jax.Array, row_B: jax.Array) -> tuple[jax.Array, None]:
        return randaugment.apply_rows(images_BHWC, row_B, tables), None

    return jax.lax.scan(turn, images_BHWC, row_TB)[0]


def _eight_bits(image_HWC: jax.Array) -> jax.Array:
    return jnp.round(255 * jnp.clip(image_HWC, 0, 1)).astype(jnp.uint8)


def _uniform(key: jax.Array, low: float, high: float) -> jax.Array:
    return jax.random.uniform(key, (), jnp.float32, low, high)


def _whole(key: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    return jax.random.randint(key, shape, low, high, jnp.int32)


def _grey(image_HWC: jax.Array) -> jax.Array:
    """Returns ITU-R 601 luma, (H, W, 1)."""
    if image_HWC.shape[-1] == 1:
        return image_HWC
    weight_11C = jnp.array([[[0.299, 0.587, 0.114]]], jnp.float32)
    return (image_HWC * weight_11C).sum(-1, keepdims=True)


def _blend(key: jax.Array, image_HWC: jax.Array, other: jax.Array, strength: float) -> jax.Array:
    factor = _uniform(key, max(0.0, 1 - strength), 1 + strength)
    return jnp.clip(factor * image_HWC + (1 - factor) * other, 0, 1)


def _jitter(key: jax.Array, image_HWC: jax.Array, strength: float) -> jax.Array:
    keys = jax.random.split(key, 3)
    image_HWC = contrast(keys[1], brightness(keys[0], image_HWC, strength), strength)
    return saturation(keys[2], image_HWC, strength)


def _blur(image_HWC: jax.Array, sigma: jax.Array) -> jax.Array:
    """Blurs by a Gaussian; the outermost pixels are repeated."""
    tap_T = jnp.arange(-_BLUR_TAPS, _BLUR_TAPS + 1, dtype=jnp.float32)
    weight_T = jnp.exp(-0.5 * (tap_T / sigma) ** 2)
    weight_T /= weight_T.sum()
    for axis in (0, 1):
        size, pads = image_HWC.shape[axis], [(0, 0)] * 3
        pads[axis] = (_BLUR_TAPS, _BLUR_TAPS)
        padded = jnp.pad(image_HWC, pads, mode="edge")
        image_HWC = sum(
            weight * jax.lax.slice_in_dim(padded, start, start + size, axis=axis)
            for start, weight in enumerate(weight_T)
        )
    return image_HWC
