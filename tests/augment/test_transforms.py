"""Transforms of images against Pillow, SciPy, colorsys and torchvision's ranges; their draws."""

import colorsys
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage
from support.data_files import noise
from support.pillow_ops import pillow_op

from hsvit_jax import augment
from hsvit_jax.augment import op_tables, transforms

KEY = jax.random.key(0)
IMAGE = noise((1, 17, 23, 3))[0]


def run(texts, image_HWC, count):
    """Copies of an image, transformed by their own draws."""
    images = np.repeat(image_HWC[None], count, axis=0)
    apply = jax.jit(lambda x: transforms.apply(texts, KEY, jnp.arange(count), x))
    return np.asarray(apply(images))


def drawn(monkeypatch, value):
    """Makes every uniform draw this value; returns the ranges that are asked for."""
    ranges = []
    monkeypatch.setattr(
        transforms,
        "_uniform",
        lambda _, low, high: ranges.append((low, high)) or jnp.float32(value),
    )
    return ranges


def changed(text, image_HWC=IMAGE):
    """One image as one transform makes it, in 8 bits."""
    return run([text], image_HWC, 1)[0]


def off(a, b):
    """The largest distance of two images, in levels."""
    return np.abs(a.astype(int) - np.asarray(b).astype(int)).max()


def shares(made_N, candidates):
    """The share of images that equal each candidate; every image equals one."""
    same = np.array([(made_N == image).all(axis=(1, 2, 3)) for image in candidates])
    assert same.any(axis=0).all()
    return same.mean(axis=1)


def test_flips_and_quarter_turns_are_even():
    assert np.allclose(
        shares(run(["vertical_flip"], IMAGE, 800), [IMAGE, IMAGE[::-1]]), 0.5, atol=0.06
    )
    most = shares(run(["vertical_flip:0.9"], IMAGE, 800), [IMAGE, IMAGE[::-1]])
    assert abs(most[1] - 0.9) < 0.04
    square = IMAGE[:, :17]
    turned = [np.rot90(square, k) for k in range(4)]
    assert np.allclose(shares(run(["quarter_turns"], square, 800), turned), 0.25, atol=0.06)
    with pytest.raises(ValueError, match=r"square images, not 17×23: set data.image_size"):
        transforms.check(["quarter_turns"], IMAGE.shape)


@pytest.mark.parametrize("degrees", [15, -37, 180])
def test_a_rotation_is_pillow_s_of_the_mirrored_image(monkeypatch, degrees):
    ranges = drawn(monkeypatch, np.deg2rad(degrees))
    padded = Image.fromarray(np.pad(IMAGE, ((16, 16), (16, 16), (0, 0)), "reflect"))
    turned = np.asarray(padded.rotate(degrees, Image.Resampling.BILINEAR))[16:-16, 16:-16]
    assert off(changed("rotate:45"), turned) <= 1
    assert off(changed("rotate:45"), IMAGE) > 50
    np.testing.assert_allclose(ranges[0], [-np.pi / 4, np.pi / 4])


@pytest.mark.parametrize("factor", [0.6, 1.3])
def test_colours_are_pillow_s(monkeypatch, factor):
    ranges, picture = drawn(monkeypatch, factor), Image.fromarray(IMAGE)
    for name, enhance in (
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ):
        expected = enhance(picture).enhance(factor)
        assert off(changed(f"{name}:1.5"), expected) <= 1
        assert off(changed(f"{name}:1.5"), IMAGE) > 20
    assert {*ranges} == {(0.0, 2.5)}  # torchvision's: at least 0
    changed("contrast:0.25")
    assert ranges[-1] == (0.75, 1.25)


@pytest.mark.parametrize("shift", [-0.4, 0.07, 0.3])
def test_a_hue_is_shifted_in_hsv(monkeypatch, shift):
    ranges = drawn(monkeypatch, shift)
    pixels = np.concatenate([IMAGE[0], [[7, 7, 7], [0, 0, 0], [255, 255, 0], [0, 9, 9]]])
    expected = []
    for pixel in pixels / 255:
        hue, *others = colorsys.rgb_to_hsv(*pixel)
        expected.append(colorsys.hsv_to_rgb((hue + shift) % 1, *others))
    made = changed("hue:0.5", pixels[None].astype(np.uint8))[0]
    assert off(made, np.round(255 * np.array(expected))) <= 1
    assert ranges == [(-0.5, 0.5)]
    grey = IMAGE[..., :1]
    np.testing.assert_array_equal(changed("hue:0.5", grey), grey)


def test_color_jitters_hue_by_a_quarter(monkeypatch):
    ranges = drawn(monkeypatch, 0.0)
    changed("color:0.8")
    np.testing.assert_allclose(ranges, [(0.2, 1.8)] * 3 + [(-0.2, 0.2)], atol=1e-6)


def test_three_augment_is_grey_solarized_or_blurred(monkeypatch):
    """A factor of 2 is the blur's width, and jitters by none once the jitter is left out."""
    drawn(monkeypatch, 2.0)
    monkeypatch.setattr(transforms, "_jitter", lambda _, image, strength: image)
    made, picture = run(["three_augment"], IMAGE, 300), Image.fromarray(IMAGE)
    candidates = [
        np.asarray(picture.convert("L"))[..., None].repeat(3, axis=2),
        np.asarray(ImageOps.solarize(picture)),
        ndimage.gaussian_filter(IMAGE.astype(float), (2, 2, 0), mode="nearest", truncate=3),
    ]
    near = np.array(
        [np.abs(made - image.astype(float)).max(axis=(1, 2, 3)) <= 1 for image in candidates]
    )
    assert (near.sum(axis=0) == 1).all()
    assert np.allclose(near.mean(axis=1), 1 / 3, atol=0.1)


def policy_magnitudes(height, width):
    """torchvision's AutoAugment, its ten magnitudes written down."""
    posterize = [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]
    largest = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30, "Solarize": 255}
    largest |= {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height}
    largest |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9)
    found = {op: np.linspace(0, most, 10, dtype=np.float32) for op, most in largest.items()}
    return found | {"Posterize": posterize, "Solarize": found["Solarize"][::-1]}


def test_autoaugment_is_one_of_its_pairs_by_pillow():
    """Every image is what Pillow makes by a pair of the policy, and nearly all pairs occur."""
    magnitudes, seen = policy_magnitudes(*IMAGE.shape[:2]), set()
    made = run(["autoaugment"], IMAGE, 300)

    def pillow(picture, op, level, sign):
        if op == "Invert":
            return ImageOps.invert(picture)
        return pillow_op(picture, op, sign * float(magnitudes.get(op, [0.0] * 10)[level]))

    pairs = [pair.split() for pair in transforms._POLICY.replace("\n", " ").split(",")]
    assert len(pairs) == 25 and pairs[1] == ["Rotate", "7", "2", "TranslateX", "3", "9"]
    results: dict[bytes, set[int]] = {}
    for number, (one, _, low, two, _, high) in enumerate(pairs):
        for signs in itertools.product((1, -1), repeat=2):
            for applied in itertools.product((0, 1), repeat=2):
                picture = Image.fromarray(IMAGE)
                for op, level, sign, on in zip(
                    (one, two), (low, high), signs, applied, strict=True
                ):
                    signed = sign if op in op_tables.SIGNED_OPS else 1
                    picture = pillow(picture, op, int(level), signed) if on else picture
                results.setdefault(np.asarray(picture).tobytes(), set()).add(number)
    pictures = np.array([np.frombuffer(raw, np.uint8) for raw in results]).astype(np.int16)
    for image in np.unique(made.reshape(len(made), -1), axis=0):
        near = np.flatnonzero(np.abs(pictures - image).max(axis=1) <= 1)  # float32 magnitudes
        assert len(near)
        numbers = set.union(*(list(results.values())[n] for n in near))
        seen |= numbers if len(numbers) == 1 else set()
    assert len(seen) > 15
    kept = (made == IMAGE).all(axis=(1, 2, 3)).mean()
    chances = np.array([[1 - int(p[1]) / 10, 1 - int(p[4]) / 10] for p in pairs])
    assert 0 <= kept - chances.prod(axis=1).mean() < 0.25  # some ops change nothing


def test_augmix_blends_chains_of_ops(monkeypatch):
    """At severity 1 the ops that change pixels are those that need no magnitude, and Posterize."""
    monkeypatch.setattr(
        jax.random, "dirichlet", lambda *_, dtype: jnp.array([0.0, 1.0, 0.0], dtype)
    )
    shares_asked = drawn(monkeypatch, 0.5)
    ops = {"Identity": 0, "Posterize": 4, "Solarize": 255, "AutoContrast": 0, "Equalize": 0}
    results = set()
    for chain in itertools.product(ops, repeat=3):
        picture = Image.fromarray(IMAGE // 2 + 40)
        for op in chain:
            picture = pillow_op(picture, op, ops[op])
        results.add(np.asarray(picture).tobytes())
    image = IMAGE // 2 + 40
    made = run(["augmix:1"], image, 60)
    half = [
        0.5 * np.frombuffer(raw, np.uint8).reshape(image.shape) + 0.5 * image for raw in results
    ]
    distance = np.array([[np.abs(one - other).max() for other in half] for one in made])
    assert (distance.min(axis=1) <= 0.5 + 1e-3).all()
    assert len(np.unique(distance.argmin(axis=1))) > 5
    assert shares_asked == [(0.0, 1.0)]
    with pytest.raises(ValueError, match="augmix:11 must be from 1 to 10"):
        transforms.check(["augmix:11"], image.shape)


def test_own_transforms_are_registered_and_checked(monkeypatch):
    monkeypatch.setattr(transforms, "TRANSFORMS", dict(transforms.TRANSFORMS))
    augment.register_transform("darker", lambda key, image, factor=0.5: factor * image)
    assert off(changed("darker:0.25"), IMAGE / 4) <= 1 and off(changed("darker"), IMAGE / 2) <= 1
    augment.register_transform("ints", lambda key, image: jnp.uint8(image))
    augment.register_transform("small", lambda key, image: image[1:])
    for text, message in (
        ("ints", "'ints' returned uint8 .* return as many floats"),
        ("small", r"'small' returned float32 \(16, 23, 3\)"),
        ("brighter", "unknown transform 'brighter'.*--config=FILE.py"),
        ("rotate:wide", "augment.transforms=rotate:wide: set a number"),
        ("quarter_turns:2", "quarter_turns:2: set a number that quarter_turns takes, or none"),
    ):
        with pytest.raises(ValueError, match=message):
            transforms.check([text], IMAGE.shape)
    for name in ("rotate", "a:b", "a,b"):
        with pytest.raises(ValueError, match="register yours by another name"):
            augment.register_transform(name, abs)
