"""What a user sets is noted however it is set, and no recipe, switch or fact changes it."""

import copy
import pickle
import types

import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import data


def by_override(tmp_path, spec, key, value):
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return config_lib.get_config(spec, f"{key}={text}")


def by_attribute(tmp_path, spec, key, value):
    config = config_lib.get_config(spec)
    section, name = key.split(".")
    setattr(config[section], name, value)
    return config


def by_update(tmp_path, spec, key, value):
    config = config_lib.get_config(spec)
    section, name = key.split(".")
    config.update({section: {name: value}})
    return config


def by_file(tmp_path, spec, key, value):
    network, _, argument = spec.partition(":")
    file = tmp_path / "mine.py"
    file.write_text(
        "from hsvit_jax import config\n\ndef get_config(argument=None):\n"
        f"    settings = config.for_network({network!r})(argument)\n"
        f"    settings.{key} = {value!r}\n    return settings\n"
    )
    return config_lib.get_config(f"{file}:{argument}")


WAYS = (by_override, by_attribute, by_update, by_file)
OWN = config_lib.Weights({"data.image_size": (96, 96), "data.mean": (0.1,)})
PUBLISHED = config_lib.Weights(fills={"data.image_size": (224, 224)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("spec", "key", "value", "otherwise", "facts"),
    [
        ("c2a2:folder=x", "train.batch", 128, 64, {"images": 720}),  # as strong has it
        ("c2a2:cifar10,small", "augment.mixup", 0.8, 0.0, {"images": 6000}),
        ("c2a2:cifar10,tiny", "train.batch", 128, 32, {"images": 720}),
        ("c2a2:cifar10,tiny", "model.groups", 16, 4, {"images": 720}),
        ("resnet:18,cifar10", "data.image_size", (32, 32), (224, 224), {"weights": PUBLISHED}),
        ("dhvt:t,finetune,cifar10", "data.image_size", (224, 224), (96, 96), {"weights": OWN}),
        ("c2a2:cifar10", "data.mean", (0.5, 0.5, 0.5), (0.1, 0.1, 0.1), {"weights": OWN}),
        ("c2a2:cifar10,fast", "optim.warmup_epochs", 5.0, 1.0, {"images": 50}),
        ("c2a2:cifar10", "train.batch", 50, 32, {"images": 50}),
    ],
)
def test_what_a_user_sets_stays(tmp_path, way, spec, key, value, otherwise, facts):
    """Also where a recipe, the network or the keys' defaults have the same value."""
    config, info = way(tmp_path, spec, key, value), data.describe("cifar10")
    assert config_lib.resolve(config_lib.get_config(spec), info, **facts)[key] == otherwise
    found = config_lib.resolve(config, info, **facts)
    assert found[key] == value and found.user[key] == value
    assert config_lib.resolve(found, info, **facts) == found
    stored = config_lib.from_json(config_lib.to_json(found))
    assert stored == found and stored.user == found.user
    assert config_lib.resolve(stored, info, **facts) == found


@pytest.mark.parametrize("way", WAYS)
def test_one_length_set_leaves_no_other(tmp_path, way):
    for spec, key, value, length in (
        ("c2a2:cifar10", "train.steps", 7, (0, 7)),
        ("c2a2:cifar10,tiny", "train.epochs", 3.0, (3, 0)),
        ("c2a2:cifar10", "train.steps", 0, (100, 0)),
    ):
        train = config_lib.resolve(way(tmp_path, spec, key, value), images=500).train
        assert (train.epochs, train.steps) == length
    both = way(tmp_path, "c2a2:cifar10", "train.steps", 7)
    both.train.epochs = 3.0
    with pytest.raises(ValueError, match=r"train\.epochs=3 and train\.steps=7"):
        config_lib.resolve(both)


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_work_with_a_setting_is_an_error(tmp_path, way):
    config = way(tmp_path, "c2a2:folder=x", "train.batch", 128)
    with pytest.raises(ValueError, match=r"train\.batch=128 is larger .* 50 images"):
        config_lib.resolve(config, images=50)
    assert config_lib.resolve(config_lib.get_config("c2a2:cifar10"), images=50).train.batch == 32
    config = way(tmp_path, "c2a2:cifar10", "data.val_fraction", 0.2)
    with pytest.raises(ValueError, match=r"data\.val_fraction=0.2, but the data set .* 0\.1"):
        config_lib.resolve(config, given={"data.val_fraction": 0.1})


@pytest.mark.parametrize("way", WAYS)
def test_a_flip_of_digits_is_the_user_s(tmp_path, way):
    info = data.describe("digits")
    for key, value in (("augment.flip", True), ("eval.tta", "flip")):
        config = way(tmp_path, "c2a2:digits,fast", key, value)
        with pytest.warns(UserWarning, match=rf"{key}={value} mirrors images"):
            assert config_lib.resolve(config, info)[key] == value
    plain = config_lib.resolve(config_lib.get_config("c2a2:digits,fast"), info)
    assert (plain.augment.flip, plain.eval.tta) == (False, "none")


def test_words_are_the_user_s():
    assert config_lib.get_config("c2a2").user == {}
    config = config_lib.get_config("c2a2:folder=x,strong,tiny", "seed=3")
    assert config.user == {"data.name": "folder=x", "recipe": "strong", "seed": 3}
    assert config_lib.resolve(config, images=50).recipe == "strong"
    assert config.words.switches == ("tiny",)


def test_a_recipe_may_be_set_in_python():
    config = config_lib.get_config("c2a2:cifar10")
    config.recipe = "paper"
    assert config_lib.resolve(config) == config_lib.get_config("c2a2:cifar10,paper")


def test_an_override_is_later_than_a_file(tmp_path):
    by_file(tmp_path, "c2a2:cifar10", "train.steps", 7)
    config = config_lib.get_config(f"{tmp_path}/mine.py:cifar10", "train.epochs=2")
    assert (config.train.epochs, config.train.steps) == (2, 0)
    assert config.user == {"data.name": "cifar10", "train.epochs": 2.0}


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: config.copy_and_resolve_references(),
        lambda config: config.unlock().lock(),
        config_lib.Settings,
    ],
)
def test_copies_note_the_same_keys(again):
    config = config_lib.get_config("backbone:resnet18,tiny", "train.batch=8")
    config.model.backbone_settings.bn_momentum = 0.9
    config.optim = {**config.optim, "beta1": 0.8}
    copied = again(config)
    assert copied == config and copied.words == config.words
    assert copied.user == config.user
    assert {"train.batch", "model.backbone_settings.bn_momentum", "optim.beta1"} <= {*copied.user}
    assert "optim.beta2" in copied.user and "train.epochs" not in copied.user
    copied.seed = 5
    assert "seed" in copied.user


def test_an_older_run_has_no_layers():
    """Its JSON has a section that there is no more, and all of its values stay."""
    tree = config_lib.get_config("c2a2:folder=x,paper", "train.batch=16", "eval.tta=flip").to_dict()
    stored = config_lib.completed({**tree, "hand_set": ["train.batch"]})
    assert stored.user == {} and stored.to_dict() == tree
    info = types.SimpleNamespace(**vars(data.describe("cifar10")), num_classes=10)
    found = config_lib.resolve(stored, info, images=720)
    assert (found.recipe, found.train, found.eval.tta) == ("paper", stored.train, "flip")
