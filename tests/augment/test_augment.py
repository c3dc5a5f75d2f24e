"""Augmented batches: independence of neighbours and devices, statistics of the draws, targets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hsvit_jax.augment import (
    Augment,
    normalise,
    one_hot_targets,
    random_bits,
    train_batch,
)

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
PLAIN = Augment(mean=MEAN, std=STD, num_classes=7)
# Identity normalisation: float pixels can be compared with the uint8 ones.
RAW = Augment(mean=(0.0,), std=(1 / 255,), num_classes=7)
TIMM = dataclasses.replace(PLAIN, rand_augment_ops=2, rand_augment_kind="timm")
PER_EXAMPLE = dataclasses.replace(TIMM, crop_padding=3, flip=True, erasing=0.5, erasing_noise=True)
BOXES = {"crop_padding": 0, "random_resized_crop": (0.08, 1.0)}
TRIVIAL = dataclasses.replace(PER_EXAMPLE, rand_augment_ops=0, trivial_augment=True, **BOXES)
MIXED = dataclasses.replace(PLAIN, mixup=0.8, cutmix=1.0, label_smoothing=0.1)


def batch(count: int, shape=(13, 17, 3), seed: int = 0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = rng.integers(0, 7, count).astype(np.int32)
    return images, labels, np.arange(count, dtype=np.int32) * 31 + 5


@functools.cache
def compiled(settings: Augment):
    return jax.jit(lambda *args: train_batch(settings, *args))


def run(settings: Augment, images, labels, indices, seed: int = 0):
    keys = jax.random.key(seed), jax.random.key(1)
    out = compiled(settings)(*keys, images, labels, indices)
    return tuple(np.asarray(array) for array in out)


@pytest.mark.parametrize("settings", [PER_EXAMPLE, TRIVIAL])
def test_an_example_depends_on_the_key_and_its_index_alone(settings):
    images, labels, indices = batch(48)
    out, _ = run(settings, images, labels, indices)
    order = np.random.default_rng(1).permutation(48)
    shuffled, _ = run(settings, images[order], labels[order], indices[order])
    np.testing.assert_array_equal(shuffled, out[order])
    assert (run(settings, images, labels, indices, seed=9)[0] != out).any(axis=(1, 2, 3)).all()
    moved, _ = run(settings, images, labels, indices + 1)
    assert (moved != out).any(axis=(1, 2, 3)).mean() > 0.9


@pytest.mark.parametrize("settings", [PER_EXAMPLE, TRIVIAL, MIXED])
def test_eight_devices_give_the_same_bits(settings):
    """And what is done to each example alone compiles to local work."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    arrays = batch(48)
    sharded = [jax.device_put(array, spread) for array in arrays]
    step = jax.jit(lambda *args: train_batch(settings, *args), out_shardings=spread)
    step = step.lower(jax.random.key(0), jax.random.key(1), *sharded).compile()
    if settings is not MIXED:
        text = step.as_text()
        collectives = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        assert "fusion" in text and not any(name in text for name in collectives)
    together = step(jax.random.key(0), jax.random.key(1), *sharded)
    assert len(together[0].sharding.device_set) == 8
    for got, expected in zip(together, run(settings, *arrays), strict=True):
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


def test_crop_takes_every_place_of_the_padded_image():
    images, labels, indices = batch(3000, (5, 7, 1))
    images = np.maximum(images, 1)  # only the padding is black
    out, _ = run(dataclasses.replace(RAW, crop_padding=2), images, labels, indices)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
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
    step = jax.jit(lambda key: train_batch(settings, keys, key, images, labels, labels))
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


@pytest.mark.parametrize("settings", [MIXED, PER_EXAMPLE, TRIVIAL])
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
        keys = jax.random.key(seed), jax.random.key(seed)
        step(Augment(mean=[0.5] * 3, std=[0.2] * 3, num_classes=7), *keys, *batch(4, seed=seed))
    assert step._cache_size() == 1


def test_settings_that_exclude_each_other_are_refused():
    for change, message in (
        ({"trivial_augment": True}, "rand_augment_ops is 2: set it to 0"),
        ({"rand_augment_magnitude": 11}, r"magnitude is 11, .* end at 10"),
        ({"random_resized_crop": (0.5,)}, r"random_resized_crop is \(0.5,\).*\(0.08, 1.0\)"),
        ({"random_resized_crop": (0.9, 0.5)}, r"is \(0.9, 0.5\)"),
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
        (PLAIN, (images.astype(np.float32), labels, indices), r"float32.*expected uint8"),
        (PLAIN, (images, labels[:3], indices), r"labels are.*one per image"),
        (PLAIN, (images, labels, indices.astype(np.float32)), "indices are float"),
        (RAW, (images, labels, indices), "3 channels, but mean and std have 1 and 1"),
        (padded, (images, labels, indices), "crop_padding is 13"),
        (two_channels, (images[..., :2], labels, indices), r"2 channels.*1 or 3"),
    ):
        with pytest.raises(ValueError, match=message):
            train_batch(settings, key, key, *arrays)
    with pytest.raises(ValueError, match="too large"):
        huge = jax.ShapeDtypeStruct((4, 8193, 8, 3), jnp.uint8)
        jax.eval_shape(lambda x: train_batch(PER_EXAMPLE, key, key, x, labels, indices), huge)
    with pytest.raises(ValueError, match=r"threefry2x32.*'rbg'"):
        train_batch(PLAIN, jax.random.key(0, impl="rbg"), key, images, labels, indices)
