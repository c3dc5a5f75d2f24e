"""Augments batches inside the compiled training step: uint8 images to float images and targets.

All functions are pure and all shapes static. An image's random bits are a function of (key,
epoch, its index) alone, so its augmentation does not depend on the batch, the devices or a resume.
MixUp and CutMix pair neighbours, and draw from a key of the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.augment import op_tables, randaugment, resized_crop, transforms
from hsvit_jax.augment.mixup import mix
from hsvit_jax.augment.random_bits import box_sizes, example_bits, fraction, span, whole_number
from hsvit_jax.augment.transforms import register_transform

__all__ = ["Augment", "normalise", "one_hot_targets", "register_transform", "train_batch"]

# Pillow's sums stay within int32 up to here.
MAX_SIDE = 8192
MAX_PIXELS = 2048 * 2048

ERASING_SCALE = (0.02, 0.33)
ERASING_RATIO = (0.3, 3.3)
ERASING_TRIES = 10

# Each purpose has fixed places among an example's words, so that switching one kind of
# augmentation on or off does not change the draws of the others.
_CROP_Y, _CROP_X, _FLIP, _ERASE, _ERASE_Y, _ERASE_X = range(6)
_ERASE_AREA = slice(6, 6 + ERASING_TRIES)
_ERASE_RATIO = slice(6 + ERASING_TRIES, 6 + 2 * ERASING_TRIES)
_OPS_START = 6 + 2 * ERASING_TRIES
# The words have no stream, resized crops have 1.
_NOISE_STREAM, _TRANSFORMS_STREAM = 2, 3
_EVERY_EPOCH = 2**32 - 1  # the number of no epoch
_WORDS_PER_OP = 3  # op, magnitude bin, sign


@dataclasses.dataclass(frozen=True)
class Augment:
    """Settings of the augmentation; immutable and hashable, so that jit can close over them.

    `config.schema` checks the ranges. Sources: RandAugment arXiv 1909.13719, TrivialAugment arXiv
    2103.10158, random erasing arXiv 1708.04896, resized crops arXiv 1409.4842, section 6.

    Attributes:
      mean, std: one value a channel, for pixels scaled to [0, 1].
      num_classes: length K of a target row.
      crop_padding: pixels added on every side before a crop of the old size; 0 = off.
      crop_reflect: they mirror the image about its outermost pixels, instead of being black.
      random_resized_crop: least and largest share of the area of a box (aspect ratio 3/4–4/3)
        that is resized bilinearly to `size`, instead of that crop; () = off.
      size: (H, W) of the images that random_resized_crop makes of larger ones; () = as before.
      flip: mirror left-right with probability 1/2.
      flip_alternate: draw this once for an image, and mirror it in every other epoch since
        (airbench, arXiv 2404.00498).
      rand_augment_ops: ops drawn per image, evenly and with replacement (usually 2); 0 = off.
      rand_augment_magnitude: their strength, a bin from 0 to 30; timm's level, from 0 to 10.
      rand_augment_kind: 'torchvision', or 'timm' for m9-mstd0.5-inc1: other ops and ranges, each
        applied with probability 1/2, at a level with noise of 0.5, filled with the mean.
      trivial_augment: one op of random strength from the wide ranges, instead of RandAugment.
      transforms: names of `transforms`, such as 'rotate:15', applied in turn after the ops.
      erasing: probability of erasing a box (2–33 % of the area, aspect ratio 0.3–3.3) to the mean.
      erasing_noise: fill that box with normal noise for each pixel, instead of the mean.
      mixup, cutmix: α of the Beta distribution; 0 = off. With both on, each batch draws one.
      mix_probability: share of the batches that are mixed.
      mix_until: share of the run after which no batch is mixed (timm's mixup_off_epoch).
      label_smoothing: share of a target that is spread evenly over all classes.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    crop_padding: int = 0
    crop_reflect: bool = False
    random_resized_crop: tuple[float, ...] = ()
    size: tuple[int, ...] = ()
    flip: bool = False
    flip_alternate: bool = False
    rand_augment_ops: int = 0
    rand_augment_magnitude: int = 9
    rand_augment_kind: str = "torchvision"
    trivial_augment: bool = False
    transforms: tuple[str, ...] = ()
    erasing: float = 0.0
    erasing_noise: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    mix_until: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self):
        for name in ("mean", "std", "random_resized_crop"):
            values = tuple(map(float, getattr(self, name)))
            object.__setattr__(self, name, values)  # a list would not be hashable
        area, magnitude = self.random_resized_crop, self.rand_augment_magnitude
        if area and (len(area) != 2 or area[0] > area[1]):
            raise ValueError(f"random_resized_crop={area}: set the least and the largest share")
        pairs = ("random_resized_crop", "crop_padding"), ("trivial_augment", "rand_augment_ops")
        for one, other in pairs:
            if getattr(self, one) and (value := getattr(self, other)):
                raise ValueError(f"{one} replaces {other}, but {other} is {value}: set it to 0")
        if self.rand_augment_kind == "timm" and magnitude > op_tables.TIMM_MOST:
            raise ValueError(
                f"rand_augment_magnitude={magnitude} exceeds timm's {op_tables.TIMM_MOST}: lower it"
            )

    def active(self) -> dict[str, object]:
        """Returns the settings that change images, each with the value that switches it off."""
        names = ["crop_padding", "random_resized_crop", "flip"]
        names += ["rand_augment_ops", "trivial_augment", "transforms", "erasing"]
        names += ["mixup", "cutmix"] if self.mix_probability else []
        off = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: off[name] for name in names if getattr(self, name) != off[name]}


def train_batch(
    settings: Augment,
    key: jax.Array,
    epoch: jax.Array | int,
    batch_key: jax.Array,
    images_BHWC: jax.Array,
    labels_B: jax.Array,
    indices_B: jax.Array,
    late: jax.Array | bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Augments one batch: crop, flip, RandAugment, transforms, normalise, erase, mix.

    Args:
      settings: static.
      key: the run's threefry key; an example draws from it, the epoch and its index.
      epoch: from 0 on.
      batch_key: this batch's key, for MixUp and CutMix.
      images_BHWC: uint8.
      labels_B: int (B,), from 0 to num_classes - 1; or float32 targets (B, K).
      indices_B: int (B,), the examples' indices in the data set.
      late: the batch comes after `mix_until` and is not mixed.

    Returns:
      float32 images (B, H, W, C), of `settings.size`, and float32 targets (B, K); a row of classes
      sums to 1.

    Raises:
      ValueError: as `check_size`.
    """
    check_size(settings, *(settings.size or images_BHWC.shape[1:3]), images_BHWC.shape[3])
    op_count = 1 if settings.trivial_augment else settings.rand_augment_ops
    always_key, key = (jax.random.fold_in(key, n) for n in (_EVERY_EPOCH, epoch))
    bits_BS = example_bits(key, indices_B, _OPS_START + _WORDS_PER_OP * op_count)
    mirrored_B = settings.flip & (bits_BS[:, _FLIP] >> 31 == 1)
    if settings.flip and settings.flip_alternate:
        mirrored_B = (example_bits(always_key, indices_B, 1)[:, 0] >> 31) == epoch % 2
    if settings.random_resized_crop:
        size, area = images_BHWC.shape[1:3], settings.random_resized_crop
        boxes_B4 = resized_crop.random_boxes(key, indices_B, size, area)
        smaller = (settings.size,) if settings.size not in ((), size) else ()
        resize = resized_crop.resample_boxes if smaller else resized_crop.resize_boxes
        images_BHWC = resize(images_BHWC, boxes_B4, mirrored_B, *smaller)
    elif settings.crop_padding or settings.flip:
        images_BHWC = _crop_and_flip(settings, mirrored_B, bits_BS, images_BHWC)
    if op_count:
        images_BHWC = _random_ops(settings, bits_BS[:, _OPS_START:], images_BHWC, op_count)
    if settings.transforms:
        own_key = jax.random.fold_in(key, _TRANSFORMS_STREAM)
        images_BHWC = transforms.apply(settings.transforms, own_key, indices_B, images_BHWC)
    images_BHWC = normalise(images_BHWC, settings.mean, settings.std)
    if settings.erasing:
        erased_BHW = _erased(settings.erasing, bits_BS, *images_BHWC.shape[1:3])
        fill = _noise(key, indices_B, images_BHWC.shape[1:]) if settings.erasing_noise else 0.0
        images_BHWC = jnp.where(erased_BHW[..., None], fill, images_BHWC)
    targets_BK = one_hot_targets(labels_B, settings.num_classes, settings.label_smoothing)
    if (settings.mixup or settings.cutmix) and settings.mix_probability:
        strengths = {"mixup": settings.mixup, "cutmix": settings.cutmix}
        probability = jnp.where(late, 0.0, settings.mix_probability)
        images_BHWC, targets_BK = mix(
            batch_key, images_BHWC, targets_BK, **strengths, probability=probability
        )
    return images_BHWC, targets_BK


def normalise(images_BHWC: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """Normalises each channel: (pixel - 255·mean) / (255·std).

    It is a difference times a constant in float32. No compiler contracts that, so the bits are the
    same alone or within a larger program. ``mean`` and ``std`` have one value a channel, for pixels
    scaled to [0, 1].
    """
    channels = images_BHWC.shape[-1]
    if not channels == len(mean) == len(std):
        raise ValueError(f"images have {channels} channels, mean {len(mean)}, std {len(std)}")
    mean_C = (255.0 * np.asarray(mean, np.float64)).astype(np.float32)
    scale_C = (1.0 / (255.0 * np.asarray(std, np.float64))).astype(np.float32)
    centred_BHWC = images_BHWC.astype(jnp.float32) - jnp.asarray(mean_C)[None, None, None, :]
    return centred_BHWC * jnp.asarray(scale_C)[None, None, None, :]


def one_hot_targets(labels_B: jax.Array, num_classes: int, label_smoothing: float) -> jax.Array:
    """Makes target rows, float32 (B, K), with smoothing s: 1 - s + s/K at the label, else s/K.

    Labels that are target rows already move by the share s towards 1/2.
    """
    if labels_B.ndim == 2:
        return labels_B * (1.0 - label_smoothing) + 0.5 * label_smoothing
    off = label_smoothing / num_classes
    on = 1.0 - label_smoothing + off
    classes_K = jnp.arange(num_classes, dtype=labels_B.dtype)
    is_label_BK = labels_B[:, None] == classes_K[None, :]
    return jnp.where(is_label_BK, jnp.float32(on), jnp.float32(off))


def _crop_and_flip(
    settings: Augment, mirrored_B: jax.Array, bits_BS: jax.Array, images_BHWC: jax.Array
) -> jax.Array:
    """Crops and flips with one gather, since both map rows and columns."""
    height, width = images_BHWC.shape[1:3]
    padding = settings.crop_padding
    places = 2 * padding + 1
    y_BH = jnp.arange(height, dtype=jnp.int32)[None, :]
    y_BH = y_BH + whole_number(bits_BS[:, _CROP_Y, None], places) - padding
    x_BW = jnp.arange(width, dtype=jnp.int32)[None, :]
    x_BW = jnp.where(mirrored_B[:, None], width - 1 - x_BW, x_BW)
    x_BW = x_BW + whole_number(bits_BS[:, _CROP_X, None], places) - padding
    if settings.crop_reflect:
        y_BH, x_BW = (
            last - jnp.abs(last - jnp.abs(place))
            for place, last in ((y_BH, height - 1), (x_BW, width - 1))
        )
    return randaugment.gather_pixels(images_BHWC, y_BH[:, :, None], x_BW[:, None, :])


def _random_ops(
    settings: Augment, bits_BS: jax.Array, images_BHWC: jax.Array, op_count: int
) -> jax.Array:
    _, height, width, _ = images_BHWC.shape
    wide, level = settings.trivial_augment, settings.rand_augment_magnitude
    halved = not wide and settings.rand_augment_kind == "timm"
    if halved:
        mean = tuple(round(255 * value) for value in settings.mean)
        tables = op_tables.make_timm(height, width, level, mean)
    else:
        bins = tuple(range(op_tables.NUM_BINS)) if wide else (level,)
        tables = op_tables.make(height, width, wide, bins)
    last = tables.num_ops - 1  # half of the numbers stand for timm's Identity
    numbers = 2 * last if halved else last + 1
    for i in range(op_count):
        words = range(_WORDS_PER_OP * i, _WORDS_PER_OP * (i + 1))
        op_bits_B, bin_bits_B, sign_bits_B = (bits_BS[:, word] for word in words)
        row_B = tables.row(
            jnp.minimum(whole_number(op_bits_B, numbers), last),
            whole_number(bin_bits_B, tables.num_bins),
            (sign_bits_B >> 31).astype(jnp.int32),
        )
        images_BHWC = randaugment.apply_rows(images_BHWC, row_B, tables)
    return images_BHWC


def _erased(probability: float, bits_BS: jax.Array, height: int, width: int) -> jax.Array:
    """Draws the box to erase in each image: bool (B, H, W)."""
    words_BA = (bits_BS[:, _ERASE_AREA], bits_BS[:, _ERASE_RATIO])
    rows_B, columns_B, fits_B = box_sizes(
        words_BA, height * width, ERASING_SCALE, ERASING_RATIO, (0, height - 1, width - 1)
    )
    applied_B = (fraction(bits_BS[:, _ERASE]) < probability) & fits_B
    top_B = whole_number(bits_BS[:, _ERASE_Y], jnp.maximum(height - rows_B + 1, 1))
    left_B = whole_number(bits_BS[:, _ERASE_X], jnp.maximum(width - columns_B + 1, 1))
    in_rows_BH, in_columns_BW = span(top_B, rows_B, height), span(left_B, columns_B, width)
    return applied_B[:, None, None] & in_rows_BH[:, :, None] & in_columns_BW[:, None, :]


def _noise(key: jax.Array, indices_B: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws normal noise for each example from (key, its index) alone: float32 (B, *shape)."""
    key = jax.random.fold_in(key, _NOISE_STREAM)
    return jax.vmap(
        lambda index: jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
    )(indices_B)


def check_size(settings: Augment, height: int, width: int, channels: int) -> None:
    """Raises ValueError if an augmentation cannot take images of this size.

    RandAugment's colour ops need 1 or 3 channels, and its integer sums bound the size.
    """
    if settings.crop_padding >= min(height, width):
        raise ValueError(
            f"crop_padding is {settings.crop_padding}, but the images are {height}×{width}: set "
            "less than their shorter side"
        )
    transforms.check(settings.transforms, (height, width, channels))
    fits = max(height, width) <= MAX_SIDE and height * width <= MAX_PIXELS and channels in (1, 3)
    if (settings.trivial_augment or settings.rand_augment_ops) and not fits:
        raise ValueError(
            f"RandAugment takes 1 or 3 channels, at most {MAX_SIDE} pixels a side and {MAX_PIXELS} "
            f"in all; the images are {height}×{width}×{channels}: switch it off"
        )
