"""A teacher: its answers to the same images in the loss, on a mesh, and when a run resumes."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from PIL import Image
from scipy import special
from support import small_runs
from support.small_runs import CLASSES, DATASET, PLAIN

from hsvit_jax import checkpoint, train
from hsvit_jax.runtime import coordination, signals
from hsvit_jax.train import step
from hsvit_jax.train.prepare import with_teacher
from hsvit_jax.weights import teacher as teacher_lib
from hsvit_jax.weights.teacher import Pixels, renormalised

#: All images in one batch, unchanged.
WHOLE = {"train__batch": 70, "augment__label_smoothing": 0.0, "model__dropout": 0.0}
WHOLE |= {"augment__crop_padding": 0, "augment__erasing": 0.0, "augment__rand_augment_ops": 0}
WHOLE |= {"augment__mixup": 0.0, "augment__cutmix": 0.0, "augment__mix_probability": 0.0}
NAMES = [*(f"row {i}" for i in (3, 1, 0, 2, 6, 5, 4)), "no row"]


def stored(folder, names=None, seed=5, side=8, **settings):
    """A run with made-up weights, which sees other pixels."""
    info = DATASET.info.with_shape((8, side), 1)
    pixels = {"data__mean": (0.5,), "data__std": (0.25,)}
    dataset = dataclasses.replace(DATASET, info=info)
    run = train.prepare(small_runs.small_config(**pixels, **settings), dataset=dataset)
    params, stats = small_runs.made_up_values(run.model, seed)
    meta = run.meta | ({"class_names": names} if names else {})
    with checkpoint.Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params, "stats": stats}, meta, metric=0.5, wait=True)
    return folder


def config_for(teacher, **settings):
    settings = {"init__teacher": str(teacher), **settings}
    return small_runs.small_config(**{**PLAIN, **settings})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("teacher"), model__groups=4)


def test_the_loss_is_that_of_the_paper(tmp_path, stored_weights):
    """By SciPy, from what two networks answer to the images; its classes are in another order."""
    folder = stored(tmp_path / "teacher", NAMES, data__num_classes=8, model__depth=2)
    soft = {"train__distill_weight": 0.7, "train__distill_temperature": 3.0}
    start = {"init__from": str(stored_weights), "train__ema_decay": 0.0}
    config = config_for(folder, train__steps=1, **soft, **start, **WHOLE)
    train.train(config, tmp_path / "run", dataset=DATASET, verbose=False)
    split, logits = DATASET.train, []
    networks = (stored_weights, 0, 0.3, 0.2, True), (folder, 5, 0.5, 0.25, False)
    for path, seed, mean, std, training in networks:
        model = teacher_lib.stored_network(path).model
        trees = small_runs.made_up_values(model, seed)
        x = ((split.images / 255.0 - mean) / std).astype(np.float32)
        apply = jax.jit(model.apply, static_argnames="train")
        logits.append(np.asarray(apply(*trees, x, train=training)[0], np.float64))
    order = [NAMES.index(f"row {k}") for k in range(CLASSES)]
    p, q = (special.softmax(x / 3.0, 1) for x in (logits[1][:, order], logits[0]))
    hard = -special.log_softmax(logits[0], 1)[np.arange(70), split.labels].mean()
    expected = 0.3 * hard + 0.7 * 9.0 * special.rel_entr(p, q).sum(1).mean()
    assert small_runs.losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - hard) > 0.1


def test_a_teacher_is_not_trained_and_the_same_answers_teach_nothing(tmp_path, stored_weights):
    """The gradient is zero where the student answers as its teacher."""
    config = config_for(stored_weights, train__distill_weight=1.0, **WHOLE)
    run = with_teacher(train.prepare(config, dataset=DATASET))
    params, stats = jax.device_get(run.lessons)
    logits = jax.jit(run.teacher.network.apply)(params, stats, np.ones((3, 8, 8, 1), np.float32))[0]
    loss, gradient = jax.value_and_grad(step.distillation)(logits, logits, 2.0)
    assert loss == 0 and abs(gradient).max() < 1e-7


def groups_on_a_device(config):
    """The teacher's, as it lies on a mesh."""
    run = with_teacher(train.prepare(config, dataset=DATASET))
    return jax.tree.leaves(run.teacher.params["groups"])[0].addressable_shards[0].data.shape[0]


def test_a_mesh_gives_the_same_losses(tmp_path, teacher):
    """A teacher's groups are split over devices; a network that cannot be split is on each."""
    found = []
    for name, mesh in (("one", {}), ("four", {"mesh__group": 2, "mesh__data": 2})):
        config = config_for(teacher, train__batch=32, **mesh)
        assert groups_on_a_device(config) == (2 if mesh else 4)
        train.train(config, tmp_path / name, dataset=DATASET, verbose=False)
        found.append([*small_runs.losses(tmp_path / name).values()])
    np.testing.assert_allclose(*found, rtol=2e-5)
    single = stored(tmp_path / "single", model__groups=1)
    assert groups_on_a_device(config_for(single, train__batch=32, **mesh)) == 1


def test_it_resumes_to_the_same_bits(tmp_path, teacher, stored_weights, monkeypatch):
    """With what else changes a step; the teacher may have moved, but not changed."""
    freeze = {"init__from": str(stored_weights), "init__freeze": "trunk"}
    more = {"train__accumulate": 5, "train__steps": 3, "model__dtype": "bfloat16", **freeze}

    def run(folder, source, **others):
        config = config_for(source, **{**more, **others})
        return train.train(config, folder, dataset=DATASET, verbose=False)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, teacher)
    asked = []

    def due(self):
        asked.append(1)
        return signal.SIGTERM if len(asked) == 2 else None

    with monkeypatch.context() as patch:
        patch.setattr(coordination.StopTogether, "due", due)
        with pytest.raises(signals.Interrupted):
            run(cut, teacher)
    other = stored(tmp_path / "other", seed=6, model__groups=4)
    with pytest.raises(ValueError, match="another network than when the run began: restore it"):
        run(cut, other)
    with pytest.raises(ValueError, match=r"init\.teacher='.*', now it is '': a run has one"):
        run(cut, "")
    run(cut, stored(tmp_path / "moved", model__groups=4))
    assert small_runs.digest(cut) == small_runs.digest(whole)
    assert run(whole, tmp_path / "gone").step == 3  # nothing is left to teach
    plain = tmp_path / "plain"
    run(plain, "")
    assert small_runs.digest(plain) != small_runs.digest(whole)


def test_images_become_those_of_the_teacher():
    """Against Pillow: grey and colours, and a smaller and a larger image."""
    rng = np.random.default_rng(0)
    for channels, other in ((1, 3), (3, 1), (3, 3)):
        mode, wanted = ("L", "RGB")[channels == 3], ("L", "RGB")[other == 3]
        pixels = rng.integers(0, 256, (8, 12, channels), dtype=np.uint8)
        image = Image.fromarray(pixels.squeeze(), mode).convert(wanted)
        mean, std = (tuple(rng.uniform(0.2, 0.6, size).tolist()) for size in (channels, channels))
        x = (pixels[None] / 255.0 - mean) / std
        given = Pixels(mean, std, (8, 12))
        for size in ((8, 12), (4, 6), (16, 24)):
            seen = Pixels((0.4, 0.5, 0.6)[:other], (0.5, 0.25, 0.2)[:other], size)
            resized = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))
            expected = (resized.reshape(1, *size, other) / 255.0 - seen.mean) / seen.std
            found = renormalised(x.astype(np.float32), given, seen)
            np.testing.assert_allclose(found, expected, atol=2 / 255 / 0.2)
    assert renormalised(x, given, given) is x


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        (8, {"data__num_classes": 8}, "does not know the classes unnamed 7; it has row 0"),
        (16, {}, "images of .8, 16. rows and .*image_size=.8, 8. has other prop"),
    ],
)
def test_what_cannot_teach_is_refused(tmp_path, side, change, message):
    folder = stored(tmp_path / "teacher", side=side)
    prepared = train.prepare(config_for(folder, **change), dataset=DATASET)
    with pytest.raises(ValueError, match=rf"^init\.teacher={folder}: .*{message}"):
        with_teacher(prepared)


def test_features_are_no_images(tmp_path, teacher, stored_weights):
    freeze = {"init__from": str(stored_weights), "init__freeze": "trunk"}
    config = config_for(teacher, init__cache=str(tmp_path), **freeze)
    with pytest.raises(ValueError, match=r"sees images, and init\.cache holds features"):
        train.prepare(config, dataset=DATASET)
