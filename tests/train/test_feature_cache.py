"""Features computed once: the same training as without them, and never those of something else."""

import signal

import jax
import numpy as np
import pytest
from support import small_runs
from support.small_runs import DATASET, PLAIN

from hsvit_jax import config as config_lib
from hsvit_jax import models, train
from hsvit_jax.models import feature_extractor
from hsvit_jax.models.hsvit import hsvit
from hsvit_jax.runtime import coordination, signals
from hsvit_jax.train import feature_cache


def config_for(source, cache, **settings):
    start = {"init__from": str(source), "init__freeze": "trunk", "init__cache": str(cache)}
    return small_runs.small_config(**{**PLAIN, **start, **settings})


def lines(config, folder, dataset=DATASET):
    train.train(config, folder, dataset=dataset, verbose=False)
    return small_runs.metric_lines(folder)


@pytest.fixture(scope="module")
def cached(stored_weights, tmp_path_factory):
    """The folder of features of a run, and what it wrote into its metrics."""
    folder = tmp_path_factory.mktemp("cached")
    return folder / "cache", lines(config_for(stored_weights, folder / "cache"), folder / "run")


def close(found, expected):
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == (value if isinstance(value, str) else pytest.approx(value, 1e-4))


def test_training_is_the_same(cached, frozen):
    close(cached[1], small_runs.metric_lines(frozen))


def test_it_is_read_again_and_a_damaged_one_is_not(stored_weights, cached, monkeypatch):
    """Streamed this time: too large, as it were, for the devices."""
    cache, _ = cached
    (features,) = cache.rglob("train.npy")
    whole = features.read_bytes()
    batches = small_runs.spy_on_batches(monkeypatch)
    run = train.prepare(config_for(stored_weights, cache), dataset=DATASET)
    params, stats = small_runs.made_up_values(run.model)
    state = {"params": params, "stats": stats}
    monkeypatch.setattr(feature_cache, "_RESIDENT_BYTES", 0)
    said = []
    made = feature_cache.attach(run, state, said.append)
    assert not made.dataset.resident and made.dataset.fingerprint == DATASET.fingerprint
    found = made.dataset.train.gather(np.array([69, 3]))
    np.testing.assert_array_equal(found, np.load(features)[[69, 3]])
    assert found.shape == (2, 16, 8) and found.dtype == np.float32
    features.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.warns(UserWarning, match="damaged"):
        feature_cache.attach(run, state, said.append)
    assert features.read_bytes() == whole and batches == {run.config.train.batch}
    assert ["is read from" in line for line in said] == [True, True, False]


@pytest.mark.slow
def test_streamed_features_train_the_same(stored_weights, cached, tmp_path, monkeypatch):
    cache, expected = cached
    monkeypatch.setattr(feature_cache, "_RESIDENT_BYTES", 0)
    close(lines(config_for(stored_weights, cache), tmp_path), expected)


@pytest.mark.slow
def test_training_is_the_same_on_a_mesh(stored_weights, tmp_path):
    settings = {"mesh__data": 2, "mesh__group": 2, "mesh__gradients": "bf16", "train__batch": 34}
    plain = lines(config_for(stored_weights, "", **settings), tmp_path / "plain")
    close(
        lines(config_for(stored_weights, tmp_path / "cache", **settings), tmp_path / "run"), plain
    )


def test_a_request_to_stop_ends_the_computing(stored_weights, tmp_path, monkeypatch):
    monkeypatch.setattr(coordination.StopTogether, "due", lambda self: signal.SIGTERM)
    config = config_for(stored_weights, tmp_path / "cache")
    with pytest.raises(signals.Interrupted, match=r"stopped by SIGTERM$"):
        train.train(config, tmp_path / "run", dataset=DATASET, verbose=False)
    assert not list((tmp_path / "cache").iterdir())


def test_other_data_or_weights_have_features_of_their_own(stored_weights, tmp_path):
    run = train.prepare(config_for(stored_weights, tmp_path), dataset=DATASET)
    params, stats = small_runs.made_up_values(run.model)
    state = {"params": params, "stats": stats}
    folders = [feature_cache._folder(run, state, "trunk")]
    params["head"]["linear"]["bias"] += 1
    assert feature_cache._folder(run, state, "trunk") == folders[0]
    params["trunk"]["embed"]["bias"] += 1
    folders.append(feature_cache._folder(run, state, "trunk"))
    stats["trunk"]["blocks"]["0"]["norms"]["0"]["mean"] += 1
    folders.append(feature_cache._folder(run, state, "trunk"))
    other = train.prepare(
        config_for(stored_weights, tmp_path), dataset=small_runs.small_dataset(seed=4)
    )
    folders.append(feature_cache._folder(other, state, "trunk"))
    darker = train.prepare(config_for(stored_weights, tmp_path, data__mean=(0.1,)), dataset=DATASET)
    folders.append(feature_cache._folder(darker, state, "trunk"))
    assert len(set(folders)) == 5


def test_mistakes_are_told(stored_weights, tmp_path):
    config = config_for(stored_weights, tmp_path, augment__crop_padding=1, augment__mixup=0.2)
    message = r"switch it off \(--config.augment.crop_padding=0 --config.augment.mixup=0.0\)"
    with pytest.raises(ValueError, match=message):
        train.prepare(config, dataset=DATASET)
    config = config_for(stored_weights, tmp_path, augment__random_resized_crop=(0.08, 1.0))
    with pytest.raises(ValueError, match=r"off \(--config.augment.random_resized_crop=\),"):
        train.prepare(config, dataset=DATASET)
    config = config_for(stored_weights, tmp_path, data__repeats=3)
    with pytest.raises(ValueError, match=r"would show it again unchanged: set data\.repeats=1"):
        train.prepare(config, dataset=DATASET)
    config = config_for(stored_weights, tmp_path, init__freeze="")
    with pytest.raises(ValueError, match=r"name them with init\.freeze"):
        train.prepare(config, dataset=DATASET)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*/file .*as init\.cache"):
        train.train(config_for(stored_weights, tmp_path / "file"), tmp_path / "r", dataset=DATASET)


class _Sneaking(hsvit.HSViT):
    """A network that looks at the image behind the cut as well."""

    def forward(self, params, stats, images_BHWC, call):
        logits_BK, stats = super().forward(params, stats, images_BHWC, call)
        return logits_BK + images_BHWC.mean((1, 2, 3))[:, None], stats


def test_a_cut_is_after_what_comes_first(stored_weights):
    run = train.prepare(config_for(stored_weights, "x"), dataset=DATASET)
    assert feature_extractor.boundary(run.model) == "trunk"
    for frozen in ({"groups"}, {"trunk", "head"}):
        with pytest.raises(ValueError, match="goes through trunk, groups, head: freeze the first"):
            feature_extractor.boundary(type(run.model)(run.model.config).with_frozen(frozen))
    three = small_runs.small_config(model__groups=3, model__conv_channels=(4, 6))
    three = train.prepare(three, dataset=DATASET).model  # whose groups return (3, B, D)
    with pytest.raises(ValueError, match="output of groups is not one array for each image"):
        feature_extractor.boundary(three.with_frozen({"trunk", "groups"}))
    sneaking = _Sneaking(run.model.config).with_frozen({"trunk"})
    params, stats = small_runs.made_up_values(run.model)
    x = np.zeros((2, 8, 8, 1), np.float32)
    z = jax.jit(lambda: feature_extractor.features(run.model, "trunk", params, stats, x))()
    for network, finite in ((run.model, True), (sneaking, False)):
        logits = jax.jit(feature_extractor.Rest(network, "trunk").apply)(params, stats, z)[0]
        assert np.isfinite(logits).all() == finite


def test_what_is_computed_of_no_image_is_computed_again():
    settings = config_lib.get_config("t2t:digits,tiny").model.to_dict()
    network = models.build(settings, image_size=(16, 16), channels=1, num_classes=7)
    network = network.with_frozen({"embedding"})
    params, stats = small_runs.made_up_values(network)
    assert feature_extractor.boundary(network) == "embedding"
    x = np.random.default_rng(0).normal(size=(2, 16, 16, 1)).astype(np.float32)
    z = jax.jit(lambda: feature_extractor.features(network, "embedding", params, stats, x))()
    rest = jax.jit(feature_extractor.Rest(network, "embedding").apply)(params, stats, z)[0]
    whole = jax.jit(network.apply)(params, stats, x)[0]
    np.testing.assert_allclose(rest, whole, rtol=1e-5, atol=1e-6)


def test_augmentation_is_off_unless_the_user_set_it(stored_weights, tmp_path, capsys):
    """Of the recipe's; the run learns as one without augmentation, and its config.json says so."""
    spec = "c2a2:digits,fast"
    words = [f"init.from={stored_weights}", "init.freeze=trunk", f"init.cache={tmp_path}"]
    assert config_lib.get_config(spec, *words).augment.flip is False  # digits are not mirrored
    run = train.prepare(config_lib.get_config(spec, *words, "init.from=zoo:c2a2-digits"))
    said = capsys.readouterr().err
    assert said == "init.cache switches augmentation off: augment.crop_padding\n"
    assert run.config.augment.crop_padding == 0
    assert "augment.crop_padding" not in run.config.user
    asked = config_lib.get_config(
        spec, *words, "init.from=zoo:c2a2-digits", "augment.crop_padding=2"
    )
    with pytest.raises(ValueError, match=r"switch it off \(--config.augment.crop_padding=0\)"):
        train.prepare(asked)
