"""Augmented batches: independence, statistics of the draws, targets, and random resized crops."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from PIL import Image
from support.data_files import noise

from hsvit_jax.augment import (
    Augment,
    normalise,
    one_hot_targets,
    random_bits,
    resized_crop,
    train_batch,
)

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
PLAIN = Augment(mean=MEAN, std=STD, num_classes=7)
# Identity normalisation: float pixels can be compared with the uint8 ones.
RAW = Augment(mean=(0.0,), std=(1 / 255,), num_classes=7)
TIMM = dataclasses.replace(PLAIN, rand_augment_ops=2, rand_augment_kind="timm")
PER_EXAMPLE = dataclasses.replace(TIMM, crop_padding=3, flip=True, erasing=0.5, erasing_noise=True)
BOTH_WAYS = dataclasses.replace(
    PLAIN, crop_padding=3, crop_reflect=True, flip=True, flip_alternate=True
)
BOXES = {"crop_padding": 0, "random_resized_crop": (0.08, 1.0)}
TRIVIAL = dataclasses.replace(PER_EXAMPLE, rand_augment_ops=0, trivial_augment=True, **BOXES)
CHANGED = ("vertical_flip", "rotate:30", "color:0.4", "three_augment")
TRANSFORMED = dataclasses.replace(PLAIN, transforms=CHANGED)
MIXED = dataclasses.replace(PLAIN, mixup=0.8, cutmix=1.0, label_smoothing=0.1)


def batch(count: int, shape=(13, 17, 3), seed: int = 0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = rng.integers(0, 7, count).astype(np.int32)
    return images, labels, np.arange(count, dtype=np.int32) * 31 + 5


@functools.cache
def compiled(settings: Augment):
    return jax.jit(lambda *args: train_batch(settings, *args))


def run(settings: Augment, images, labels, indices, seed: int = 0, epoch: int = 0):
    keys = jax.random.key(seed), epoch, jax.random.key(1)
    out = compiled(settings)(*keys, images, labels, indices)
    return tuple(np.asarray(array) for array in out)


@pytest.mark.parametrize("settings", [PER_EXAMPLE, TRIVIAL, TRANSFORMED])
def test_an_example_depends_on_the_key_and_its_index_alone(settings):
    images, labels, indices = batch(48)
    out, _ = run(settings, images, labels, indices)
    order = np.random.default_rng(1).permutation(48)
    shuffled, _ = run(settings, images[order], labels[order], indices[order])
    np.testing.assert_array_equal(shuffled, out[order])
    assert (run(settings, images, labels, indices, seed=9)[0] != out).any(axis=(1, 2, 3)).all()
    moved, _ = run(settings, images, labels, indices + 1)
    assert (moved != out).any(axis=(1, 2, 3)).mean() > 0.9


@pytest.mark.parametrize("settings", [PER_EXAMPLE, TRIVIAL, TRANSFORMED, MIXED, BOTH_WAYS])
def test_eight_devices_give_the_same_bits(settings):
    """And what is done to each example alone compiles to local work."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    arrays = batch(48)
    sharded = [jax.device_put(array, spread) for array in arrays]
    step = jax.jit(lambda *args: train_batch(settings, *args), out_shardings=spread)
    step = step.lower(jax.random.key(0), 0, jax.random.key(1), *sharded).compile()
    if settings is not MIXED:
        text = step.as_text()
        collectives = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        assert "fusion" in text and not any(name in text for name in collectives)
    together = step(jax.random.key(0), 0, jax.random.key(1), *sharded)
    assert len(together[0].sharding.device_set) == 8
    for got, expected in zip(together, run(settings, *arrays), strict=True):
        if settings is TRANSFORMED:  # floats, rounded to 8 bits
            assert (np.asarray(got) != expected).mean() < 1e-3
            np.testing.assert_allclose(got, expected, atol=1.01 / 255 / min(STD))
        else:
            np.testing.assert_array_equal(got, expected)


def test_all_off_is_plain_normalisation():
    images, labels, indices = batch(11)
    out, targets = run(PLAIN, images, labels, indices)
    np.testing.assert_array_equal(out, normalise(jnp.asarray(images), MEAN, STD))
    expected = (images / 255.0 - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_array_equal(targets, np.eye(7, dtype=np.float32)[labels])
    assert out.dtype == targets.dtype == np.float32


def test_flip_is_a_mirror_half_of_the_time():
    images, labels, indices = batch(2000, (3, 5, 1))
    out, _ = run(dataclasses.replace(RAW, flip=True), images, labels, indices)
    mirrored = (out == images[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (out == images).all(axis=(1, 2, 3))
    assert (mirrored ^ kept).all()
    assert abs(mirrored.mean() - 0.5) < 0.05
    np.testing.assert_array_equal(run(RAW, images, labels, indices)[0], images)


def test_an_alternating_flip_shows_each_image_both_ways_in_two_epochs():
    images, labels, indices = batch(2000, (3, 5, 1))
    settings = dataclasses.replace(RAW, flip=True, flip_alternate=True)
    first, second, third, last = (
        run(settings, images, labels, indices, epoch=n)[0] for n in (0, 1, 2, 31)
    )
    np.testing.assert_array_equal(second, first[:, :, ::-1])
    np.testing.assert_array_equal(third, first)
    np.testing.assert_array_equal(last, second)
    mirrored = (first == images[:, :, ::-1]).all(axis=(1, 2, 3))
    assert ((first == images).all(axis=(1, 2, 3)) ^ mirrored).all()
    assert abs(mirrored.mean() - 0.5) < 0.05
    other, _ = run(settings, images, labels, indices, seed=1)
    assert abs((other == first).all(axis=(1, 2, 3)).mean() - 0.5) < 0.05


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_crop_takes_every_place_of_the_padded_image(mode):
    images, labels, indices = batch(3000, (5, 7, 1))
    images = np.maximum(images, 1)  # only the padding is black
    settings = dataclasses.replace(RAW, crop_padding=2, crop_reflect=mode == "reflect")
    out, _ = run(settings, images, labels, indices)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode)
    matches = np.array(
        [
            (out == padded[:, y : y + 5, x : x + 7]).all(axis=(1, 2, 3))
            for y in range(5)
            for x in range(5)
        ]
    )
    assert (matches.sum(axis=0) == 1).all()
    assert np.abs(matches.mean(axis=1) - 1 / 25).max() < 0.02


def test_erased_pixels_are_the_mean_and_the_other_draws_stay():
    images, labels, indices = batch(64, (9, 9, 3))
    flip = dataclasses.replace(PLAIN, flip=True)
    flipped, _ = run(flip, images, labels, indices)
    erased, _ = run(dataclasses.replace(flip, erasing=1.0), images, labels, indices)
    changed = erased != flipped
    assert changed.any(axis=(1, 2, 3)).mean() > 0.9 and (erased[changed] == 0.0).all()
    noisy = dataclasses.replace(flip, erasing=1.0, erasing_noise=True)
    noise = run(noisy, images, labels, indices)[0][changed]
    assert len(noise) > 2000 and abs(noise.mean()) < 0.1 and abs(noise.std() - 1.0) < 0.05
    assert len(np.unique(noise)) > 0.99 * len(noise)


def test_numbers_are_even_and_stay_in_their_range():
    bits = random_bits.example_bits(jax.random.key(3), jnp.arange(28_000), 2)
    bins = np.bincount(np.asarray(random_bits.whole_number(bits[:, 0], 31)), minlength=31)
    assert len(bins) == 31 and np.abs(bins / (28_000 / 31) - 1).max() < 0.15
    assert abs(np.asarray(random_bits.fraction(bits[:, 1])).mean() - 0.5) < 0.01
    edge = jnp.array([0, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(random_bits.whole_number(edge, 65535), [0, 65534])
    np.testing.assert_array_equal(random_bits.fraction(edge), [0.0, 1.0 - 2.0**-24])


def test_rand_augment_draws_ops_and_signs_evenly_on_images():
    """Only TranslateX moves this picture's left edge sideways by two pixels: 1/28 each way."""
    count = 4000
    picture = np.zeros((1, 16, 16, 1), np.uint8)
    picture[:, :, 8] = 255
    images = np.repeat(picture, count, axis=0)
    labels = np.zeros(count, np.int32)
    settings = dataclasses.replace(RAW, rand_augment_ops=1)
    out, _ = run(settings, images, labels, np.arange(count, dtype=np.int32))
    for shift in (-2, 2):
        moved = (out == np.roll(picture, shift, axis=2)).all(axis=(1, 2, 3))
        assert abs(moved.mean() - 1 / 28) < 0.012
    assert (out == picture).all(axis=(1, 2, 3)).any()


def test_timm_s_ops_are_applied_half_of_the_time():
    """A flat image is changed by Invert, Posterize, Solarize and Brightness, of fifteen."""
    count = 4000
    images = np.full((count, 8, 8, 3), 130, np.uint8)
    settings = dataclasses.replace(TIMM, rand_augment_ops=1, mean=(130 / 255,) * 3, std=(1,) * 3)
    out, _ = run(settings, images, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    levels = np.round(out[:, 4, 4, 0] * 255 + 130)
    changed = (levels != 130).mean()
    assert abs(changed - 0.5 * 4 / 15) < 0.025
    assert len(np.unique(levels)) > 20  # Brightness, of 64 strengths both ways


def test_erasing_statistics():
    count, height, width = 4000, 32, 24
    images = np.full((count, height, width, 1), 255, np.uint8)
    settings = dataclasses.replace(RAW, erasing=0.25)
    out, _ = run(settings, images, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    erased = (out == 0.0)[..., 0]
    assert set(np.unique(out)) == {0.0, 255.0}
    hit = erased.any(axis=(1, 2))
    assert abs(hit.mean() - 0.25) < 0.03
    rows, columns = erased.any(axis=2)[hit].sum(axis=1), erased.any(axis=1)[hit].sum(axis=1)
    area = erased[hit].sum(axis=(1, 2))
    np.testing.assert_array_equal(area, rows * columns)  # one solid box
    share = area / (height * width)
    assert share.min() > 0.01 and share.max() < 0.37
    assert abs(share.mean() - 0.17) < 0.02
    assert (rows / columns).min() > 0.2 and (rows / columns).max() < 4.5
    assert (rows < height).all() and (columns < width).all()
    # Every part of the image is reached.
    assert erased.any(axis=0).all()


@pytest.mark.parametrize(
    ("alphas", "probability", "shares"),
    [  # shares of the batches that are mixed by each
        ({"mixup": 0.8}, 1.0, (1, 0)),
        ({"cutmix": 1.0}, 1.0, (0, 1)),
        ({"mixup": 1.0, "cutmix": 1.0}, 0.6, (0.3, 0.3)),
    ],
)
def test_targets_are_the_shares_of_the_pixels(alphas, probability, shares):
    """Batches of distinct flat images: each pixel tells whose it is."""
    settings = dataclasses.replace(RAW, **alphas, mix_probability=probability)
    values = np.arange(1, 7, dtype=np.uint8) * 40
    images = np.broadcast_to(values[:, None, None, None], (6, 16, 20, 1)).copy()
    labels, keys = np.arange(6, dtype=np.int32), jax.random.key(0)
    step = jax.jit(lambda key: train_batch(settings, keys, 0, key, images, labels, labels))
    kept = {"mixup": [], "cutmix": [], "none": []}
    own, partner = values.astype(np.float32), np.roll(values, 1).astype(np.float32)
    for seed in range(100):
        out, targets = (np.asarray(array) for array in step(jax.random.key(seed)))
        np.testing.assert_allclose(targets.sum(axis=1), 1.0, atol=1e-6)
        keep = targets[0, 0]
        np.testing.assert_allclose(targets[labels, labels], keep, atol=1e-6)
        np.testing.assert_allclose(targets[labels, np.roll(labels, 1)], 1.0 - keep, atol=1e-6)
        is_own = out[..., 0] == own[:, None, None]
        if is_own.all():
            kept["none"].append(keep)
        elif (is_own | (out[..., 0] == partner[:, None, None])).all():
            kept["cutmix"].append(keep)
            assert (is_own == is_own[:1]).all()  # the same box in every image
            pasted = ~is_own[0]
            assert pasted.sum() == pasted.any(axis=1).sum() * pasted.any(axis=0).sum()
            np.testing.assert_allclose(keep, is_own[0].mean(), atol=1e-6)
        else:
            kept["mixup"].append(keep)
            mixed = np.broadcast_to(
                (keep * own + (1.0 - keep) * partner)[:, None, None], (6, 16, 20)
            )
            np.testing.assert_allclose(out[..., 0], mixed, rtol=1e-5)
    # Boxes of CutMix can be empty, so a few of its batches count as unmixed.
    for kind, share in zip(("mixup", "cutmix"), shares, strict=True):
        assert abs(len(kept[kind]) - 100 * share) < (17 if share else 1)
        assert not share or (min(kept[kind]) < 0.5 and max(kept[kind]) > 0.8)
        assert not share or np.std(kept[kind]) > 0.1
    np.testing.assert_array_equal(kept["none"], 1.0)


@pytest.mark.parametrize("settings", [MIXED, PER_EXAMPLE, TRIVIAL, TRANSFORMED])
def test_double_precision_elsewhere_changes_no_batch(settings):
    """With jax_enable_x64 words have 32 bits and images are float32 all the same."""
    arrays = batch(4)
    expected = run(settings, *arrays)
    with jax.enable_x64(True):
        found = run(settings, *arrays)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_label_smoothing_formula():
    labels = jnp.array([2, 0], jnp.int32)
    expected = 0.9 * np.eye(5)[[2, 0]] + 0.1 / 5
    np.testing.assert_allclose(one_hot_targets(labels, 5, 0.1), expected, rtol=1e-6)
    np.testing.assert_array_equal(one_hot_targets(labels, 5, 0.0), np.eye(5)[[2, 0]])
    _, targets = run(MIXED, *batch(48))
    np.testing.assert_allclose(targets.sum(axis=1), 1.0, atol=1e-6)
    assert targets.min() >= np.float32(0.1 / 7) - 1e-7


def test_settings_are_hashable_and_compile_once():
    everything = dataclasses.replace(TRIVIAL, mixup=0.8, cutmix=1.0)
    assert hash(everything) == hash(dataclasses.replace(everything))
    listed = Augment(mean=[0.5], std=[0.25], num_classes=3, random_resized_crop=[0.08, 1])
    assert listed == Augment((0.5,), (0.25,), num_classes=3, random_resized_crop=(0.08, 1.0))
    assert set(everything.active()) == {
        *("random_resized_crop", "flip", "trivial_augment", "erasing", "mixup", "cutmix")
    }
    step = jax.jit(lambda *args: train_batch(*args), static_argnums=0)  # with a cache of its own
    for seed in range(3):
        keys = jax.random.key(seed), seed, jax.random.key(seed)
        step(Augment(mean=[0.5] * 3, std=[0.2] * 3, num_classes=7), *keys, *batch(4, seed=seed))
    assert step._cache_size() == 1


def test_settings_that_exclude_each_other_are_refused():
    for change, message in (
        ({"trivial_augment": True}, "rand_augment_ops is 2: set it to 0"),
        ({"rand_augment_magnitude": 11}, "rand_augment_magnitude=11"),
        ({"random_resized_crop": (0.5,)}, r"random_resized_crop=\(0.5,\)"),
        ({"random_resized_crop": (0.9, 0.5)}, r"=\(0.9, 0.5\)"),
        ({"random_resized_crop": (0.5, 0.9)}, "crop_padding is 3: set it to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(PER_EXAMPLE, **change)


def test_batches_that_do_not_fit_are_refused():
    images, labels, indices = batch(4)
    key, two = jax.random.key(0), (0.5, 0.5)
    two_channels = dataclasses.replace(PER_EXAMPLE, mean=two, std=two)
    padded = dataclasses.replace(PLAIN, crop_padding=13)
    for settings, arrays, message in (
        (RAW, (images, labels, indices), "3 channels, mean 1, std 1"),
        (padded, (images, labels, indices), "crop_padding is 13"),
        (two_channels, (images[..., :2], labels, indices), "1 or 3 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            train_batch(settings, key, 0, key, *arrays)
    with pytest.raises(ValueError, match="8193×8×3"):
        huge = jax.ShapeDtypeStruct((4, 8193, 8, 3), jnp.uint8)
        jax.eval_shape(lambda x: train_batch(PER_EXAMPLE, key, 0, key, x, labels, indices), huge)


AREA = (0.08, 1.0)
CROPPED = Augment(mean=(0.0,) * 3, std=(1 / 255,) * 3, num_classes=7, random_resized_crop=AREA)


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


@pytest.mark.parametrize("size", [(12, 9), (29, 20), (40, 50)])
def test_boxes_of_stored_photos_are_pillow_s_within_a_level(size):
    images, rng = noise((6, 29, 37, 3)), np.random.default_rng(2)
    rows, columns = rng.integers(3, 30, 6), rng.integers(3, 38, 6)
    tops, lefts = rng.integers(30 - rows), rng.integers(38 - columns)
    boxes = np.stack([tops, lefts, rows, columns], axis=1).astype(np.int32)
    resample = jax.jit(resized_crop.resample_boxes, static_argnums=3)
    found = np.asarray(resample(images, boxes, np.arange(6) % 2 == 1, size)).astype(int)
    for image, (top, left, high, wide), mirrored, made in zip(
        images, boxes, np.arange(6) % 2 == 1, found, strict=True
    ):
        box, bilinear = (left, top, left + wide, top + high), Image.Resampling.BILINEAR
        expected = np.asarray(Image.fromarray(image).resize(size[::-1], bilinear, box=box))
        assert np.abs(made - expected[:, :: -1 if mirrored else 1].astype(int)).max() <= 1


def test_a_crop_of_a_larger_photo_has_the_settings_size():
    settings = dataclasses.replace(CROPPED, size=(8, 10), transforms=("vertical_flip",))
    images, labels, indices = batch(4)
    assert run(settings, images, labels, indices)[0].shape == (4, 8, 10, 3)


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


def test_a_batch_is_cropped_by_its_own_draws():
    """The batch holds the pixels of its boxes, mirrored half of the time."""
    images, ids = noise((40, 13, 17, 3)), np.arange(40, dtype=np.int32) * 31 + 5
    key = jax.random.fold_in(jax.random.key(0), 0)  # of the first epoch
    draw = jax.jit(lambda ids: resized_crop.random_boxes(key, ids, (13, 17), AREA))
    labels = np.zeros(40, np.int32)
    plain = run(CROPPED, images, labels, ids)[0]
    expected = np.stack([pillow(*args, False) for args in zip(images, draw(ids), strict=True)])
    np.testing.assert_array_equal(plain, expected)
    flipped = run(dataclasses.replace(CROPPED, flip=True), images, labels, ids)[0]
    mirrored = (flipped == plain[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (mirrored | (flipped == plain).all(axis=(1, 2, 3))).all() and 8 < mirrored.sum() < 32
