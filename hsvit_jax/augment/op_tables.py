"""Makes RandAugment's ops as rows of numbers: an affine map, a product table, a blend base.

The host makes the tables once, in float64 or float32 as Pillow does. The device only looks numbers
up and adds integers, so its result is Pillow's to the last bit on every back end, whether or not
the compiler fuses multiply and add.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping

import numpy as np
from jax.typing import ArrayLike

OPS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness"),
    *("Posterize", "Solarize", "AutoContrast", "Equalize"),
)
#: timm's RandAugment with increasing ranges; Identity stands for no op.
TIMM_OPS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd"),
    *("Color", "Contrast", "Brightness", "Sharpness"),
    *("ShearX", "ShearY", "TranslateXRel", "TranslateYRel", "Identity"),
)
#: torchvision's AutoAugment and AugMix.
POLICY_OPS = (*OPS, "Invert")
SIGNED_OPS = frozenset((*OPS[1:10], "TranslateXRel", "TranslateYRel"))
NUM_BINS = 31
POLICY_BINS = 10
TIMM_BINS = 64
TIMM_MOST = 10
TIMM_NOISE = 0.5

# An enhancement blends the image with one of these. Look-up ops blend with black.
BASE_ZERO, BASE_GREY, BASE_MEAN, BASE_SMOOTH = range(4)
_BASES = {"Color": BASE_GREY, "Contrast": BASE_MEAN, "Sharpness": BASE_SMOOTH}
# The last two tables depend on the image.
LUT_STATIC, LUT_AUTOCONTRAST, LUT_EQUALIZE = range(3)
_IMAGE_LUTS = {"AutoContrast": LUT_AUTOCONTRAST, "Equalize": LUT_EQUALIZE}

# A table is indexed by (pixel - base) + 255, so it has 511 entries; 512 is the aligned size.
TABLE_SIZE = 512
TABLE_ZERO = 255


@dataclasses.dataclass(frozen=True)
class OpTables:
    """One row per (op, magnitude bin, sign); `row` numbers them.

    Attributes:
      affine_R6: int32, 16.16 fixed point (a, b, c, d, e, f) of the map from output to input
        pixels: column = (a·x + b·y + c) >> 16, row = (d·x + e·y + f) >> 16.
      base_R: int32, one of BASE_*.
      lut_R: int32, one of LUT_*.
      table_R: int32, the op's row of `products_TV`.
      products_TV: float32 (T, 512); output = clip(trunc(base + products[pixel - base + 255])).
      num_bins: magnitudes of each op.
      num_ops: the number of ops.
      fill: values of pixels from outside the image, one for each channel or for all.
    """

    affine_R6: np.ndarray
    base_R: np.ndarray
    lut_R: np.ndarray
    table_R: np.ndarray
    products_TV: np.ndarray
    num_bins: int
    num_ops: int
    fill: tuple[int, ...]

    def row(self, op: ArrayLike, bin_position: ArrayLike, negative: ArrayLike) -> ArrayLike:
        """Returns the row of an op at a magnitude bin, negative (1) or not (0); integers."""
        return (op * self.num_bins + bin_position) * 2 + negative


def magnitudes(
    op: str,
    height: int,
    width: int,
    wide: bool,
    count: int = NUM_BINS,
    share: float = 150.0 / 331.0,
    bits: int = 8,
) -> np.ndarray:
    """Computes torchvision's float32 magnitudes of an op: float64 (count,), 0 for none.

    ``wide`` selects the ranges of TrivialAugmentWide, instead of RandAugment's. ``share`` of a side
    is the longest translation, and ``bits`` of a pixel are kept by the weakest Posterize.
    """
    if op == "Posterize":
        return bits - np.round(np.arange(count) / (count - 1) * (6 if wide else 4))
    if op == "Solarize":
        return _float32_bins(255.0, 0.0, count)
    shear, degrees, colour = (0.99, 135.0, 0.99) if wide else (0.3, 30.0, 0.9)
    largest = {
        **dict.fromkeys(("ShearX", "ShearY"), shear),
        "TranslateX": 32.0 if wide else share * width,
        "TranslateY": 32.0 if wide else share * height,
        "Rotate": degrees,
    }
    return _float32_bins(0.0, largest.get(op, colour if op in SIGNED_OPS else 0.0), count)


def timm_magnitudes(op: str, level_M: np.ndarray, height: int, width: int) -> np.ndarray:
    """Computes timm's magnitudes of one of TIMM_OPS at levels from 0 to 10: float64 (M,)."""
    share_M = level_M / TIMM_MOST
    if op in ("Posterize", "Solarize"):
        steps = 4 if op == "Posterize" else 256
        return steps - np.floor(share_M * steps)
    if op == "SolarizeAdd":
        return np.floor(share_M * 110)
    if op in ("TranslateXRel", "TranslateYRel"):
        return share_M * 0.45 * (width if op == "TranslateXRel" else height)
    largest = {"Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3}
    return share_M * largest.get(op, 0.9 if op in SIGNED_OPS else 0.0)


def _float32_bins(start: float, end: float, count: int) -> np.ndarray:
    """Spaces bins as torch.linspace: a float32 step from the nearer end, each sum rounded once.

    Some magnitudes are truncated, so the last bit matters: bin 15 of 0..32 is just under 16.
    """
    low, high = np.float32(start), np.float32(end)
    step = float((high - low) / np.float32(count - 1))
    from_low_M = np.arange(count)
    from_high_M = from_low_M[::-1]
    near_low_M = from_low_M < count // 2
    bins_M = np.where(near_low_M, float(low) + step * from_low_M, float(high) - step * from_high_M)
    return bins_M.astype(np.float32).astype(np.float64)


@functools.lru_cache(maxsize=32)
def make(height: int, width: int, wide: bool, bins: tuple[int, ...]) -> OpTables:
    """Makes the rows for images of one size and these magnitude bins (a few kB to 300 kB)."""
    used = {op: magnitudes(op, height, width, wide)[list(bins)] for op in OPS}
    return _tables(used, height, width, (0,))


@functools.lru_cache(maxsize=32)
def make_policy(height: int, width: int, share: float, bits: int) -> OpTables:
    """Makes the rows of POLICY_OPS at torchvision's ten magnitudes; see `magnitudes`."""
    limits = {"count": POLICY_BINS, "share": share, "bits": bits}
    used = {op: magnitudes(op, height, width, False, **limits) for op in POLICY_OPS}
    return _tables(used, height, width, (0,))


@functools.lru_cache(maxsize=32)
def make_timm(height: int, width: int, level: float, fill: tuple[int, ...]) -> OpTables:
    """Makes the rows of timm's RandAugment at a level from 0 to 10.

    The bins are the middles of equally likely parts of the normal distribution about the level,
    with a standard deviation of 0.5, cut off at 0 and 10.
    """
    noise = statistics.NormalDist(level, TIMM_NOISE)
    level_M = [noise.inv_cdf((i + 0.5) / TIMM_BINS) for i in range(TIMM_BINS)]
    level_M = np.clip(level_M, 0.0, TIMM_MOST)
    used = {op: timm_magnitudes(op, level_M, height, width) for op in TIMM_OPS}
    return _tables(used, height, width, fill)


def _tables(
    magnitudes: Mapping[str, np.ndarray], height: int, width: int, fill: tuple[int, ...]
) -> OpTables:
    """Makes the rows of ops, each at its magnitudes (M,) and at their opposites."""
    affine, base, lut, table = [], [], [], []
    products: dict[bytes, int] = {}
    for op, magnitude_M in magnitudes.items():
        for unsigned in magnitude_M:
            for sign in (1.0, -1.0):
                magnitude = float(unsigned) * (sign if op in SIGNED_OPS else 1.0)
                affine.append(_fixed_point(_inverse_affine(op, magnitude, height, width)))
                base.append(_BASES.get(op, BASE_ZERO))
                lut.append(_IMAGE_LUTS.get(op, LUT_STATIC))
                product_V = _products(op, magnitude)
                table.append(products.setdefault(product_V.tobytes(), len(products)))
    return OpTables(
        affine_R6=np.asarray(affine, np.int32),
        base_R=np.asarray(base, np.int32),
        lut_R=np.asarray(lut, np.int32),
        table_R=np.asarray(table, np.int32),
        products_TV=np.stack([np.frombuffer(raw, np.float32) for raw in products]),
        num_bins=len(magnitude_M),
        num_ops=len(magnitudes),
        fill=fill,
    )


def _inverse_affine(op: str, magnitude: float, height: int, width: int) -> tuple[float, ...]:
    """Returns the map from output to input pixels, with torchvision's centres, Pillow's rounding.

    torchvision moves an image by whole pixels; timm moves it by fractions, the other way.
    """
    if op == "Rotate":  # counter-clockwise in degrees, about the centre of the image
        angle = -math.radians(magnitude % 360.0)
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        x, y = width / 2.0, height / 2.0
        return (cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y)
    moves = {
        "ShearX": (1.0, magnitude, 0.0, 0.0, 1.0, 0.0),  # about the top left corner
        "ShearY": (1.0, 0.0, 0.0, magnitude, 1.0, 0.0),
        "TranslateX": (1.0, 0.0, -float(int(magnitude)), 0.0, 1.0, 0.0),
        "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, -float(int(magnitude))),
        "TranslateXRel": (1.0, 0.0, magnitude, 0.0, 1.0, 0.0),
        "TranslateYRel": (1.0, 0.0, 0.0, 0.0, 1.0, magnitude),
    }
    return moves.get(op, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))


def _fixed_point(matrix: tuple[float, ...]) -> tuple[int, ...]:
    """Returns Pillow's 16.16 form; the grid's half-pixel offset goes into the constant terms."""
    a, b, c, d, e, f = matrix
    values = (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)
    return tuple(math.floor(value * 65536.0 + 0.5) for value in values)


def _products(op: str, magnitude: float) -> np.ndarray:
    """Returns float32 (512,): factor·(pixel - base) for blends, the output for look-up ops."""
    difference_V = np.arange(TABLE_SIZE, dtype=np.float32) - np.float32(TABLE_ZERO)
    if op in ("Brightness", "Color", "Contrast", "Sharpness"):
        return np.float32(1.0 + magnitude) * difference_V
    if op == "Posterize":
        kept_bits = 0xFF << (8 - int(magnitude)) & 0xFF
        return (difference_V.astype(np.int32) & kept_bits).astype(np.float32)
    if op == "Solarize":
        return np.where(difference_V < magnitude, difference_V, 255.0 - difference_V)
    if op == "SolarizeAdd":
        brighter_V = np.minimum(difference_V + np.float32(magnitude), 255.0)
        return np.where(difference_V < 128, brighter_V, difference_V)
    if op == "Invert":
        return 255.0 - difference_V
    return difference_V


@functools.lru_cache(maxsize=1)
def autocontrast_shortfall() -> np.ndarray:
    """Returns which values float64 stretching leaves one too low: uint32 bits by (low, span).

    ImageOps.autocontrast truncates i·scale - low·scale, both products rounded to float64. If the
    exact value 255·(i - low)/span is a whole number, rounding can leave it just short. With
    g = gcd(255, span) those whole numbers are the multiples of 255/g: bit j of an entry is set if
    j·255/g is short. No span with g > 17 has any.
    """
    shortfall = np.zeros((256, 256), np.uint32)
    for span in range(1, 256):
        lows_L1 = np.arange(256 - span, dtype=np.float64)[:, None]
        steps = math.gcd(255, span)
        j_1J = np.arange(min(steps, 31) + 1)[None, :]
        scale = 255.0 / span
        stretched_LJ = (lows_L1 + j_1J * (span // steps)) * scale + (-lows_L1 * scale)
        short_LJ = np.trunc(stretched_LJ) < j_1J * (255 // steps)
        bits_LJ = short_LJ.astype(np.uint64) << j_1J.astype(np.uint64)
        shortfall[: 256 - span, span] = bits_LJ.sum(axis=1).astype(np.uint32)
    return shortfall
