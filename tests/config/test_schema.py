"""The schema: every key of every family is swept, below, above, of another type, without effect."""

import dataclasses
import functools
import math
import operator

import ml_collections
import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import main, models
from hsvit_jax.config import schema
from hsvit_jax.models.settings import declared


@functools.cache
def configuration(family):
    return config_lib.base("cifar10", models.FAMILIES[family].settings())


def key_of(family, path):
    return schema.of(path, configuration(family).model)


#: (family, key): every key of the first one, and of the others those of their network.
SWEPT = [
    (family, path)
    for family in models.FAMILIES
    for path, _ in config_lib.leaves(configuration(family))
    if path != "model.family" and (family == "hsvit" or path.startswith("model."))
]


def wrong_values(key):
    """Values that a key must refuse, each of them for another reason."""
    one = dataclasses.replace(key, several=False)
    if one.choices:
        wrong = [next(n for n in (99, -99) if n not in one.choices) if one.kind is int else "no"]
    elif one.kind is str:
        wrong = ["x" * 5000, "\0"]
    elif one.kind is bool:
        wrong = ["maybe", 2]
    else:
        below, above = (one.low - 1, one.high + 1)
        wrong = [one.above if math.isfinite(one.above) else min(below, *one.besides, below) - 1]
        wrong += [one.below if math.isfinite(one.below) else above, math.nan, "text"]
        wrong += [one.low + 0.5, True] * (one.kind is int) + [4] * one.odd
    return [(value,) for value in wrong] if key.several else wrong


def edges(key):
    """Values that a key must accept: the ends of its range, or its choices."""
    one = dataclasses.replace(key, several=False)
    values = [*one.choices, *one.besides, *([True, False] if one.kind is bool else [])]
    values += ["x"] if one.kind is str and not one.choices else []
    if one.kind in (int, float) and not one.choices:
        values += [one.high if math.isinf(one.below) else (one.low + one.below) / 2]
        values += [one.low] if math.isinf(one.above) else [one.above + 1e-9]
        values = [one.kind(value) if not one.odd else int(value) | 1 for value in values]
    return [(value,) for value in values] + [()] if key.several else values


def section_of(config, path):
    """The section of a key, and the key's name there."""
    *sections, name = path.split(".")
    return functools.reduce(operator.getitem, sections, config), name


def unlocked(family):
    return ml_collections.ConfigDict(configuration(family).to_dict(), type_safe=False)


@pytest.mark.parametrize(("family", "path"), SWEPT)
def test_a_value_that_does_not_fit_is_refused(family, path):
    """In a file, on the command line, and where a network is built from Python; its ends fit."""
    config, record = unlocked(family), models.FAMILIES[family]
    key = schema.of(path, config.model)
    assert key.meaning and not key.meaning.endswith("."), path
    assert "inf" not in key.expected.split(), path  # every number has two ends
    section, name = section_of(config, path)
    for value in wrong_values(key):
        assert not key.fits(value), value
        section[name] = value
        with pytest.raises(ValueError, match=rf"^{path} must be .*; got "):
            schema.check(config)
        if path == f"model.{name}" and name in record.keys:
            settings = {**record.settings(), name: value}
            with pytest.raises(ValueError, match=rf"^model.{name} must be .*; got "):
                record.sizes(settings, image_size=(32, 32), channels=3, num_classes=10)
    if path not in (*schema.LABELS, "data.name"):
        wrong = [f"{path}={schema.shown(wrong_values(key)[0])}"]
        with pytest.raises(ValueError, match=rf"^{path} must be .*; got "):
            config_lib.override(configuration(family), wrong)
    for value in edges(key):
        assert key.fits(value) and key.parse(schema.shown(value)) == value, value


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_config_of_python_refuses_it_too(family):
    record = models.FAMILIES[family]
    config = record.sizes(record.settings(), image_size=(64, 64), channels=3, num_classes=10)
    for part in filter(dataclasses.is_dataclass, (config, *vars(config).values())):
        for name, key in declared(type(part)).items():
            with pytest.raises(ValueError, match=rf"^{name} must be .*; got "):
                dataclasses.replace(part, **{name: wrong_values(key)[0]})


def outside(wanted, key):
    """A value of a key that is not among the wanted ones."""
    values = [*key.choices, *([0, False, 0.0, "", ()] if not key.choices else [])]
    return next(value for value in values if value not in wanted and key.fits(value))


@pytest.mark.parametrize(("family", "path"), [case for case in SWEPT if key_of(*case).when])
def test_a_setting_without_effect_is_refused_where_it_was_set(family, path):
    """With each condition broken alone; a value that asks for nothing is no mistake."""
    key, prefix = key_of(family, path), path.rpartition(".")[0]
    for condition in key.when:
        config = unlocked(family)
        others = [name if "." in name else f"{prefix}.{name}" for name in condition]
        if not {*others} <= {*dict(config_lib.leaves(config))}:
            continue  # of another network with these settings
        for other, wanted in zip(others, condition.values(), strict=True):
            section, name = section_of(config, other)
            if wanted:  # by some of its values
                section[name] = outside(wanted, schema.of(other, config.model))
        section, name = section_of(config, path)
        if key.off is not None:
            section[name] = key.off
            config_lib.refuse_unread(config, [path])
            section[name] = next(value for value in edges(key) if value != key.off)
        config_lib.refuse_unread(config, ())
        with pytest.raises(ValueError, match=rf"^{path} has no effect with .*{others[0]}="):
            config_lib.refuse_unread(config, (path,))


def test_what_a_default_network_reads_is_not_refused():
    """All keys of a configuration that trains MixUp, decays and selects may be set by hand."""
    config = configuration("hsvit")
    ignored = {"augment.erasing_noise", "augment.rand_augment_kind"}
    ignored |= {"train.distill_weight", "train.distill_temperature", "eval.threshold"}
    ignored |= {"data.target_mean", "data.target_std"}
    config_lib.refuse_unread(config, {path for _, path in SWEPT} - ignored)


@pytest.mark.parametrize(
    "mistake",
    [
        "optim.learning_rate=1e400",
        "train.batch=" + "9" * 5000,
        "data.dir=\0",
        "init.from=" + "x" * 5000,
        "model.conv_channels=" + ",".join(["4"] * 300),
    ],
    ids=lambda text: text[:40],
)
def test_a_mistaken_value_is_one_line_and_exit_code_2(mistake, capfd, tmp_path):
    words = ("--config=c2a2:digits,tiny", f"--config.{mistake}", f"--workdir={tmp_path / 'run'}")
    assert main.main(["main", "--mode=train", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"{mistake.partition('=')[0]} must be ")
    assert err.count("\n") == 2 and len(err) < 400  # the mistake, and where help is
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_a_file_of_one_s_own_is_the_same(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from hsvit_jax import config\n"
        "def get_config(argument):\n"
        "    c = config.base('digits', config.named_model('c2a2'))\n"
        "    c.optim.beta1 = 5.0\n"
        "    return c\n"
    )
    with pytest.raises(ValueError, match=r"^optim.beta1 must be a number from 0, below 1; got 5.0"):
        config_lib.get_config(str(file))


def test_more_steps_than_can_be_counted():
    config = config_lib.get_config("c2a2:digits", "train.epochs=1e6")
    with pytest.raises(ValueError, match=r"train\.epochs"):
        config_lib.total_steps(config, 3000)
