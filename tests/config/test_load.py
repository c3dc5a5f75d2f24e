"""Configurations from files, names and KEY=VALUE texts."""

import pytest

from hsvit_jax import config as config_lib

GOOD = "from hsvit_jax import config; from hsvit_jax.config import variants\n"


def settings(*texts, spec="c2a2:digits"):
    return config_lib.get_config(spec, *texts)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.epochs=5", "epochs", 5.0),
        ("train.epochs=0.5", "epochs", 0.5),
        ("train.batch=1e3", "batch", 1000),
        ("train.batch=16.0", "batch", 16),
        ("train.select_on=test", "select_on", "test"),
    ],
)
def test_values_take_the_type_of_the_key(text, key, value):
    found = settings(text).train[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["64", "64,", "(64,)", "[64]"])
def test_tuples_are_numbers_with_commas(text):
    assert settings(f"data.image_size={text}").data.image_size == (64,)
    assert settings("data.image_size=(64, 32)").data.image_size == (64, 32)
    assert settings("data.mean=0.5,1,0").data.mean == (0.5, 1.0, 0.0)
    assert settings("data.image_size=").data.image_size == ()
    for text, area in (("0.08,1", (0.08, 1.0)), ("", ())):
        given = settings(f"augment.random_resized_crop={text}")
        assert given.augment.random_resized_crop == area


def test_truth_values_and_a_path_with_commas():
    assert settings("data.name=folder=a,b").data.name == "folder=a,b"
    for text, value in (("true", True), ("1", True), ("No", False), ("False", False)):
        assert settings(f"optim.decay_all={text}").optim.decay_all is value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.bacth=5", r"'train.bacth'; did you mean train.batch\?"),
        ("batch=5", r"'batch'; did you mean eval.batch or train.batch\?"),
        ("optim.lr=1", r"did you mean optim.learning_rate\?"),
        ("model.drop_path_rate=0.1", "no model.drop_path in this network"),
        ("train.output_dir=x", r"did you mean --workdir\?"),
        ("zzz=1", "known: augment.crop_padding"),
        ("train=5", "train is a section; its keys are train.accumulate, train.bad_steps_limit"),
        ("train.batch", "train.batch needs a value, as in --config.train.batch=64"),
        ("train.batch=abc", r"a whole number from 1 to 1048576; got 'abc' \(it was 64\)"),
        ("data.image_size=32x32", "values with commas between them"),
        ("recipe=paper", "after the colon"),
        ("data.name=cifar10", "after the colon"),
        ("model.variant=c4a8", "name the network by its file"),
        ("model.patch=4", "unknown configuration key 'model.patch'"),
    ],
)
def test_a_wrong_setting_says_what_fits(text, message):
    with pytest.raises(ValueError, match=message):
        settings(text)


def test_an_epoch_count_of_none_evaluates_and_no_more():
    train = settings("train.epochs=0", spec="c2a2:digits,tiny").train
    assert (train.epochs, train.steps) == (0.0, 0)


def test_later_settings_win_and_the_rest_stays():
    config = settings("train.batch=5", "train.batch=7")
    assert config.is_locked and dict(config_lib.leaves(config)) == {
        **dict(config_lib.leaves(settings())),
        "train.batch": 7,
    }


def test_help_shows_what_can_be_given_back():
    config = settings("data.image_size=64,32", "optim.decay_all=true")
    lines = [line.strip() for line in config_lib.describe(config, lambda key: True).splitlines()]
    given = [line.removeprefix("--config.") for line in lines[::2]]
    labels = ("recipe", "model.family", "model.variant", "data.name")
    again = [x for x in given if x.split("=")[0] not in labels]
    assert settings(*again) == config
    at = lines.index("--config.train.batch=64")
    meaning = "global batch size of training; a whole number from 1 to 1048576"
    assert lines[at + 1] == meaning


def test_a_file_and_a_name(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        GOOD + "def get_config(argument):\n"
        "    c = config.base(argument, config.named_model('c3a4'))\n"
        "    c.train.batch = 7\n"
        "    return c\n"
    )
    config = config_lib.get_config(f"{file}:digits,paper")
    assert (config.model.variant, config.train.batch, config.recipe) == ("c3a4", 7, "paper")
    assert config.is_locked
    assert {*config.user} == {"data.name", "recipe", "train.batch"}
    tiny = config_lib.get_config(f"{file}:digits,tiny,bf16", "seed=3")
    assert {*tiny.user} == {"data.name", "train.batch", "seed"} and "tiny" in tiny.words.switches
    monkeypatch.setenv("HOME", str(tmp_path))  # of --config=~/mine.py a shell hands on the ~
    assert config_lib.get_config("~/mine.py:digits,paper").train.batch == 7


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = (", "failed in line 2: SyntaxError"),
        ("x = 1", r"needs a get_config\(argument\)"),
        ("\nraise RuntimeError('boo')", "failed in line 3: RuntimeError: boo"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("def get_config(argument):\n    return {}", "returned dict; return a config"),
        ("def get_config(argument):\n    return int('x')", "failed in line 3: ValueError"),
        (
            "def get_config(argument):\n    return config.base('digit', {})",
            r"^unknown word 'digit' after the colon. Did you mean digits\?",
        ),
        (
            "def get_config(argument):\n"
            "    c = config.base('digits', config.named_model('c2a2'))\n"
            "    c.unlock()\n    del c.train.batch\n    c.train.bach = 5\n    return c",
            "unknown configuration key 'train.bach'",
        ),
        (
            "def get_config(argument):\n"
            "    c = variants.get_config('dhvt', 'digits')\n"
            "    c.model.family = 'dhv'\n    return c",
            "unknown model.family 'dhv'",
        ),
    ],
)
def test_a_file_that_fails_is_told_with_its_line(tmp_path, body, message):
    file = tmp_path / "mine.py"
    file.write_text(GOOD + body)
    with pytest.raises(ValueError, match=message):
        config_lib.get_config(str(file))


def test_a_file_or_name_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"No such file"):
        config_lib.get_config(f"{tmp_path}/mine.py:digits")
    with pytest.raises(ValueError, match=r"'c2a3'. Did you mean c2a2\?"):
        config_lib.get_config("c2a3:digits")
    with pytest.raises(ValueError, match="names no file"):
        config_lib.get_config(":digits")
    with pytest.raises(ValueError, match=r"cannot read the config file .*directory"):
        config_lib.get_config(f"{tmp_path}/")
