"""Random resized crops: Pillow's bits for given boxes, torchvision's distribution of boxes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from support.data_files import noise

from hsvit_jax.augment import Augment, resized_crop, train_batch

# Identity normalisation: float pixels can be compared with the uint8 ones.
AREA = (0.08, 1.0)
RAW = Augment(mean=(0.0,) * 3, std=(1 / 255,) * 3, num_classes=7, random_resized_crop=AREA)


def pillow(image_HWC: np.ndarray, box, mirrored: bool) -> np.ndarray:
    """As torchvision does it on PIL images: crop, resize, then flip."""
    top, left, rows, columns = (int(n) for n in box)
    image = Image.fromarray(image_HWC).crop((left, top, left + columns, top + rows))
    resized = image.resize((image_HWC.shape[1], image_HWC.shape[0]), Image.Resampling.BILINEAR)
    return np.asarray(resized)[:, :: -1 if mirrored else 1]


resize_boxes = jax.jit(resized_crop.resize_boxes)


def test_given_boxes_are_pillow_s_to_the_bit():
    size = (29, 37)
    rng = np.random.default_rng(1)
    boxes = [(0, 0, *size), (0, 0, 1, 1), (size[0] - 1, 3, 1, 9), (2, size[1] - 1, 13, 1)]
    for _ in range(60):
        rows, columns = rng.integers(1, size[0] + 1), rng.integers(1, size[1] + 1)
        top, left = rng.integers(size[0] - rows + 1), rng.integers(size[1] - columns + 1)
        boxes.append((top, left, rows, columns))
    images = noise((len(boxes), *size, 3))
    images[7], images[8] = 0, 255
    mirrored = np.arange(len(boxes)) % 3 == 1
    found = resize_boxes(images, np.array(boxes, np.int32), mirrored)
    assert found.dtype == jnp.uint8
    expected = [pillow(*args) for args in zip(images, boxes, mirrored, strict=True)]
    np.testing.assert_array_equal(found, np.stack(expected))
    # At a large image's size weights and places stay within 32 bits.
    images, box = noise((1, 3, 8191, 1)), (1, 17, 2, 8100)
    found = resize_boxes(images, np.array([box], np.int32), np.zeros(1, bool))
    np.testing.assert_array_equal(found[0, ..., 0], pillow(images[0, ..., 0], box, False))


def drawn(count, size, area=(0.08, 1.0), seed=0):
    draw = jax.jit(lambda ids: resized_crop.random_boxes(jax.random.key(seed), ids, size, area))
    return np.asarray(draw(np.arange(count, dtype=np.int32)))


def test_as_torchvision_draws_them():
    """The same ten tries written down with NumPy's numbers: quantiles agree within the noise."""
    rng, count = np.random.default_rng(5), 8_000
    height, width = size = 200, 240
    area = height * width * rng.uniform(0.08, 1.0, (count, 10))
    root = np.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3), (count, 10)) / 2)
    columns, rows = np.round(np.sqrt(area) * root), np.round(np.sqrt(area) / root)
    fits = (columns <= width) & (rows <= height)
    first = np.where(fits.any(1), fits.argmax(1), 0)
    columns = np.where(fits.any(1), columns[np.arange(count), first], width)
    rows = np.where(fits.any(1), rows[np.arange(count), first], height)
    found = drawn(count, size)
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        for ours, theirs in ((found[:, 2], rows), (found[:, 3], columns)):
            assert abs(np.quantile(ours, quantile) - np.quantile(theirs, quantile)) < 6
        ours, theirs = found[:, 2] * found[:, 3], rows * columns
        assert abs(np.quantile(ours, quantile) / np.quantile(theirs, quantile) - 1) < 0.06
    # In a larger image every box fits: its share is uniform, the logarithm of its ratio as well.
    rows, columns = (sides := drawn(count, (300, 400), (0.08, 0.5))[:, 2:]).T
    share, ratio = rows * columns / 120_000, np.log(columns / rows)
    assert 0.079 < share.min() < 0.082 and 0.495 < share.max() < 0.502
    assert abs(np.abs(ratio).max() - math.log(4 / 3)) < 0.02
    assert abs(np.quantile(ratio, 0.75) - math.log(4 / 3) / 2) < 0.006
    small = drawn(count, (30, 40), (0.08, 0.5))[:, 2:]  # the same boxes, rounded
    assert (np.abs((small - sides / 10).mean(axis=0)) < 0.02).all()
    start, room = found[:, :2], np.array(size) - found[:, 2:]
    assert (start >= 0).all() and (start <= room).all()
    roomy = (room > 20).all(axis=1)
    place = start[roomy] / room[roomy]  # every one is reached, evenly
    assert place.min() == 0.0 and place.max() == 1.0
    assert (np.abs(place.mean(axis=0) - 0.5) < 0.02).all()
    assert (np.abs((place < 0.1).mean(axis=0) - 0.1) < 0.03).all()
    assert abs(np.corrcoef(*place.T)[0, 1]) < 0.05


def test_what_never_fits_falls_back_to_the_centre():
    """No box of the area of a strip fits: the largest centred one, of 4/3 or 3/4."""
    for size, box in (((10, 90), (0, 38, 10, 13)), ((90, 10), (38, 0, 13, 10))):
        assert (drawn(5, size, (1.0, 1.0)) == box).all()


@functools.cache
def compiled(settings: Augment):
    return jax.jit(lambda *args: train_batch(settings, *args))


def run(settings, images, ids, seed=0):
    keys = jax.random.key(seed), jax.random.key(1)
    return np.asarray(compiled(settings)(*keys, images, np.zeros(len(images), np.int32), ids)[0])


def test_a_batch_is_cropped_by_its_own_draws():
    """The batch holds the pixels of its boxes, mirrored half of the time."""
    images, ids = noise((40, 13, 17, 3)), np.arange(40, dtype=np.int32) * 31 + 5
    draw = jax.jit(lambda ids: resized_crop.random_boxes(jax.random.key(0), ids, (13, 17), AREA))
    plain = run(RAW, images, ids)
    expected = np.stack([pillow(*args, False) for args in zip(images, draw(ids), strict=True)])
    np.testing.assert_array_equal(plain, expected)
    flipped = run(dataclasses.replace(RAW, flip=True), images, ids)
    mirrored = (flipped == plain[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (mirrored | (flipped == plain).all(axis=(1, 2, 3))).all() and 8 < mirrored.sum() < 32


def test_the_other_draws_stay():
    """Erased boxes are those of a run without it."""
    images, ids = np.full((64, 16, 16, 3), 255, np.uint8), np.arange(64, dtype=np.int32)
    with_crop = dataclasses.replace(RAW, erasing=0.5)
    without = dataclasses.replace(with_crop, random_resized_crop=())
    found = run(with_crop, images, ids)
    np.testing.assert_array_equal(found, run(without, images, ids))
    assert (found == 0).any()
