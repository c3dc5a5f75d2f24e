"""RandAugment's ops against Pillow, pixel for pixel, as torchvision calls it on PIL images."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps
from support.pillow_ops import pillow_op

from hsvit_jax.augment import op_tables, randaugment

ALL_BINS = tuple(range(op_tables.NUM_BINS))


def timm_op(image: Image.Image, op: str, argument: float, fill: tuple[int, ...]) -> Image.Image:
    """The op as timm does it on PIL images, with its argument, but NEAREST."""
    shears = {"ShearX": (1, argument, 0, 0, 1, 0), "ShearY": (1, 0, 0, argument, 1, 0)}
    moves = {"TranslateXRel": (1, 0, argument, 0, 1, 0), "TranslateYRel": (1, 0, 0, 0, 1, argument)}
    how = {"resample": Image.Resampling.NEAREST, "fillcolor": fill}
    if matrix := (shears | moves).get(op):
        return image.transform(image.size, Image.Transform.AFFINE, matrix, **how)
    if op == "Rotate":
        return image.rotate(argument, **how)
    if op == "Invert":
        return ImageOps.invert(image)
    if op == "Posterize" and argument == 0:  # at level 10; newer releases of Pillow refuse it
        return image.point(lambda _: 0)
    if op == "SolarizeAdd":
        table = [min(255, int(i + argument)) if i < 128 else i for i in range(256)]
        return image.point(table * len(image.getbands()))
    return pillow_op(image, op, argument)


def sample_images(height: int, width: int, channels: int) -> np.ndarray:
    """Noise, low contrast, ramps, flat, two values, almost flat: uint8 (N, H, W, C)."""
    rng = np.random.default_rng(height * 1000 + width)
    shape = (height, width, channels)
    ramp = np.linspace(3, 249, width).astype(np.uint8)[None, :, None]
    almost_flat = np.full(shape, 90, np.uint8)
    almost_flat[0, 0], almost_flat[-1, -1] = 12, 200
    return np.stack(
        [
            rng.integers(0, 256, shape, dtype=np.uint8),
            rng.integers(60, 131, shape, dtype=np.uint8),
            np.broadcast_to(ramp, shape) // np.arange(1, channels + 1, dtype=np.uint8),
            np.full(shape, 77, np.uint8),
            np.where(rng.random(shape) < 0.3, 11, 240).astype(np.uint8),
            almost_flat,
        ]
    )


def to_pillow(image_HWC: np.ndarray) -> Image.Image:
    return Image.fromarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC)


def compare(tables, images_NHWC, ops, bins, pillow) -> set[str]:
    """Ops at `bins(op)` with both signs equal `pillow(image, op, bin, sign)`; which changed any."""
    cases = [
        (number, op, bin_, negative)
        for number, op in enumerate(ops)
        for bin_ in bins(op)
        for negative in ((0, 1) if op in op_tables.SIGNED_OPS else (0,))
    ]
    rows_R = np.array([tables.row(number, bin_, neg) for number, _, bin_, neg in cases])
    ours = jax.jit(lambda x, rows: randaugment.apply_rows(x, rows, tables))(
        np.tile(images_NHWC, (len(cases), 1, 1, 1)),
        np.repeat(rows_R, len(images_NHWC)).astype(np.int32),
    )
    changed = set()
    for (_, op, bin_, negative), got_NHWC in zip(
        cases, np.asarray(ours).reshape(len(cases), *images_NHWC.shape), strict=True
    ):
        for image_HWC, got_HWC in zip(images_NHWC, got_NHWC, strict=True):
            expected = np.asarray(pillow(to_pillow(image_HWC), op, bin_, -1.0 if negative else 1.0))
            expected = expected.reshape(got_HWC.shape)
            np.testing.assert_array_equal(got_HWC, expected, err_msg=f"{op} {bin_} {negative}")
            if (got_HWC != image_HWC).any():
                changed.add(op)
    return changed


@pytest.mark.parametrize(
    ("shape", "wide"),
    [((19, 29, 3), False), ((11, 21, 3), True), ((17, 13, 1), True), ((2, 5, 3), False)],
)
def test_every_op_bin_and_sign_equals_pillow(shape, wide):
    height, width, _ = shape

    def bins(op):
        if op not in op_tables.SIGNED_OPS and op not in ("Posterize", "Solarize"):
            return [4]
        return ALL_BINS if shape[2] == 3 and height > 2 else ALL_BINS[::10]

    def pillow(image, op, bin_, sign):
        return pillow_op(image, op, sign * float(magnitudes[op][bin_]))

    magnitudes = {op: op_tables.magnitudes(op, height, width, wide) for op in op_tables.OPS}
    tables = op_tables.make(height, width, wide, ALL_BINS)
    changed = compare(tables, sample_images(*shape), op_tables.OPS, bins, pillow)
    if shape == (19, 29, 3):  # fewer than 256 pixels are not equalised, grey ones have no colour
        assert changed == set(op_tables.OPS) - {"Identity"}


def test_timm_s_ops_equal_pillow():
    """At the least, a middling and the largest level of noise about 9."""
    height, width, fill = 19, 29, (9, 120, 250)
    tested = (0, 40, 63)
    levels = np.array([NormalDist(9, 0.5).inv_cdf((i + 0.5) / 64) for i in range(64)])
    levels = np.minimum(levels, 10.0)

    def pillow(image, op, bin_, sign):
        return timm_op(image, op, sign * float(magnitudes[op][bin_]), fill)

    magnitudes = {
        op: op_tables.timm_magnitudes(op, levels, height, width) for op in op_tables.TIMM_OPS
    }
    tables = op_tables.make_timm(height, width, 9, fill)
    images_NHWC = sample_images(height, width, 3)
    changed = compare(tables, images_NHWC, op_tables.TIMM_OPS, lambda op: tested, pillow)
    assert changed == set(op_tables.TIMM_OPS) - {"Identity"}
    nine = np.array([9.0])
    at = {op: op_tables.timm_magnitudes(op, nine, 100, 200)[0] for op in op_tables.TIMM_OPS}
    assert (at["Posterize"], at["Solarize"], at["SolarizeAdd"]) == (1, 26, 99)
    np.testing.assert_allclose(
        [at[op] for op in ("Rotate", "ShearX", "TranslateXRel", "TranslateYRel", "Color")],
        [27, 0.27, 81, 40.5, 0.81],
    )


def test_autocontrast_stretches_every_range_as_float64_does():
    """All 32,640 (darkest, brightest) pairs; one in five has a value that falls one short."""
    values_V = np.arange(256)
    low_P, high_P = np.triu_indices(256, 1)
    made = op_tables.make(16, 16, False, (9,))
    row = made.row(op_tables.OPS.index("AutoContrast"), 0, 0)
    stretch = jax.jit(lambda x: randaugment.apply_rows(x, jnp.full(len(x), row), made))
    chunk = 4080
    for start in range(0, len(low_P), chunk):
        low_P1 = low_P[start : start + chunk, None]
        high_P1 = high_P[start : start + chunk, None]
        images_PV = np.clip(values_V[None, :], low_P1, high_P1)
        scale_P1 = 255.0 / (high_P1 - low_P1)
        expected_PV = np.trunc(images_PV * scale_P1 + -low_P1 * scale_P1).astype(np.uint8)
        got = stretch(images_PV.astype(np.uint8).reshape(-1, 16, 16, 1))
        np.testing.assert_array_equal(np.asarray(got).reshape(-1, 256), expected_PV)


def test_magnitudes_are_torchvisions():
    def at(op, bin_, wide=False):
        return op_tables.magnitudes(op, 24, 48, wide)[bin_]

    assert at("ShearX", 30) == np.float32(0.3) and at("ShearY", 30, True) == np.float32(0.99)
    assert at("TranslateX", 30) == np.float32(150 / 331 * 48)
    assert at("TranslateY", 30) == np.float32(150 / 331 * 24)
    assert at("TranslateX", 15, True) == np.float32(15.999999)  # shifts by 15 pixels
    assert at("Rotate", 9) == 9.0 and at("Rotate", 20, True) == 90.0
    assert at("Color", 9) == np.float32(0.26999998) and at("Color", 30, True) == np.float32(0.99)
    assert [at("Posterize", b) for b in (0, 3, 4, 9, 30)] == [8, 8, 7, 7, 4]
    assert [at("Posterize", b, True) for b in (0, 2, 3, 30)] == [8, 8, 7, 2]
    assert at("Solarize", 0) == 255.0 and at("Solarize", 30) == 0.0 and at("Solarize", 9) == 178.5
