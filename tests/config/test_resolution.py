"""The argument after the colon, what follows from a data set, durations, folders, JSON."""

import ast
import dataclasses
import functools
import operator
from pathlib import Path

import pytest

import hsvit_jax
from hsvit_jax import config as config_lib
from hsvit_jax import data
from hsvit_jax.config import schema
from hsvit_jax.models import FAMILIES
from hsvit_jax.train import optim
from hsvit_jax.weights import adapt

PACKAGE = Path(hsvit_jax.__file__).resolve().parent


def make(argument=None, **changes):
    """C2A2 with changes such as train__batch=5."""
    config = config_lib.base(argument, config_lib.named_model("c2a2"))
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    return config


def counted(config, images=50_000, classes=3):
    """The configuration for a data set of so many training images."""
    shape = dataclasses.replace(data.describe("cifar10"), class_names=tuple("abc"[:classes]))
    return config_lib.resolve(config, shape, images=images)


def resolved(argument=None, **changes):
    config = make(argument, **changes)
    return config_lib.resolve(config, data.describe(config.data.name))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (None, ("cifar10", "strong", ())),
        ("", ("cifar10", "strong", ())),
        ("digits", ("digits", "strong", ())),
        ("paper", ("cifar10", "paper", ())),
        ("bf16, paper ,cifar100,tiny", ("cifar100", "paper", ("bf16", "tiny"))),
        ("folder=my images/x", ("folder=my images/x", "strong", ())),
        ("tfds=svhn_cropped,paper", ("tfds=svhn_cropped", "paper", ())),
    ],
)
def test_words_after_the_colon(argument, expected):
    assert config_lib.parse_argument(argument) == expected


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("cifar1O", "'cifar1O' after the colon. Did you mean cifar10?"),
        ("digits,cifar10", "one data set at a time; got digits and cifar10"),
        ("paper,strong", "one recipe at a time"),
        ("qqqq", "Known: digits"),
        ("folder", "unknown word 'folder'"),
        ("folder=a,b/c", "a path with a comma: --config.data.name=KIND=PATH"),
    ],
)
def test_a_wrong_word_names_the_nearest(argument, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        config_lib.parse_argument(argument)


def test_a_path_is_named_by_its_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos.csv").touch()
    for word, meant in (("photos", "folder=photos"), ("./photos.csv", "csv=./photos.csv")):
        for spec in (f"c2a2:{word}", f"vix:vin,{word}"):
            with pytest.raises(ValueError, match=rf"the colon. Did you mean {meant}\?"):
                config_lib.get_config(spec)
    with pytest.raises(ValueError, match="folder=photos"):
        data.describe("photos")


def test_recipes():
    paper, strong = make("cifar10,paper"), make()
    assert (paper.train.batch, paper.train.epochs, paper.train.ema_decay) == (512, 300, 0)
    assert (paper.optim.learning_rate, paper.optim.weight_decay) == (1e-3, 0.01)
    assert paper.optim.decay_all and not counted(paper).optim.warmup_epochs
    assert (paper.optim.clip_norm, paper.optim.cosine_per) == (0.01, "epoch")
    assert (paper.augment.crop_padding, paper.augment.flip, paper.augment.erasing) == (0, False, 0)
    assert (paper.augment.rand_augment_ops, paper.augment.rand_augment_magnitude) == (2, 9)
    assert paper.augment.mix_probability == 1 and paper.augment.label_smoothing == 0
    assert counted(strong).optim.warmup_epochs == 5
    assert not strong.optim.decay_all
    assert strong.augment.crop_padding and strong.augment.flip and strong.augment.erasing
    assert strong.augment.label_smoothing and not strong.train.ema_decay
    assert {**paper.model, "dropout": 0.0} == dict(strong.model)
    assert paper.train.select_on == strong.train.select_on == "val"


@pytest.mark.parametrize("data_set", [n for n in config_lib.DATA_SETS if "domainnet/" not in n])
def test_every_combination_of_words_makes_a_configuration(data_set):
    for switch in ("tiny", "tiny,paper"):
        train = make(f"{data_set},{switch}").train
        assert (train.epochs, train.steps) == (0, 8)
    assert make(f"{data_set},bf16").model.dtype == "bfloat16"
    assert make(f"{data_set},conv_only").model.ablation == "conv_only"
    for order in ("tiny,attention_only", "attention_only,tiny"):
        assert resolved(f"{data_set},{order}").data.image_size == (4, 4)


def test_what_is_empty_follows_from_the_data():
    config = resolved("fashion_mnist")
    assert config.data.image_size == (28, 28)
    assert (config.data.channels, config.data.num_classes) == (1, 10)
    assert len(config.data.mean) == len(config.data.std) == 1
    assert config.is_locked
    chosen = resolved("fashion_mnist", data__image_size=(64,), data__channels=3)
    assert chosen.data.image_size == (64, 64)
    assert len(chosen.data.mean) == 3 and len(set(chosen.data.mean)) == 1
    grey = resolved("cifar10", data__channels=1)
    assert grey.data.mean == pytest.approx((sum(resolved("cifar10").data.mean) / 3,))


def test_the_original_stays_as_it_was():
    config = make("digits")
    before = config_lib.to_json(config)
    config_lib.resolve(config, data.describe("digits"))
    assert config_lib.to_json(config) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__steps": 5, "train__epochs": 1.0}, "train.steps=5 both set the length"),
        ({"data__val_fraction": 0.0}, "needs a held-out validation split"),
        ({"data__channels": 2}, "data.channels must be 1 .grey. or 3 .colour.; got 2"),
        ({"data__image_size": (32, 32, 3)}, "data.image_size"),
        ({"data__num_classes": 9}, "data.num_classes=9, but cifar10 has 10 classes: raise it"),
        ({"data__mean": (0.5, 0.5)}, "data.mean must hold one value per channel"),
        ({"eval__tta": "flip", "init__cache": "features"}, "other views than init.cache"),
    ],
)
def test_values_that_cannot_work_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(**changes)


def test_only_choosing_on_it_needs_a_validation_split():
    for split in ("test", "last"):
        assert resolved(train__select_on=split, data__val_fraction=0.0).train.select_on == split


def test_durations():
    assert config_lib.total_steps(make(train__epochs=2.5), 10) == 25
    assert config_lib.total_steps(make(train__epochs=0.0, train__steps=7), 10) == 7


@pytest.mark.parametrize(
    ("argument", "epochs", "own", "expected"),
    [
        ("cifar10", 100, None, 5.0),
        ("cifar10", 5, None, 0.5),
        ("cifar10", 1, None, 0.1),
        ("cifar10", 5, 5.0, 5.0),
        ("cifar10", 100, 0.0, 0.0),
        ("digits", 12, None, 1.0),
        ("digits", 4, None, 0.4),
        ("cifar10,paper", 5, None, 0.0),
        ("digits,tiny", 12, None, 0.0),
    ],
)
def test_a_warm_up_is_at_most_a_tenth_of_the_run_unless_it_is_set(argument, epochs, own, expected):
    config = make(argument, train__epochs=float(epochs), train__batch=64)
    if own is not None:
        config.optim.warmup_epochs = own
    found = counted(config, 20 * 64)
    assert found.optim.warmup_epochs == expected
    rate = optim.schedule(found.optim, 20 * epochs, 20)
    assert (float(rate(20 * epochs)) == 0) == (expected < epochs)


def test_runs_folders_keep_their_names(golden_dir):
    """Those of commit 76a4737."""
    for line in (golden_dir / "house/folders.tsv").read_text().splitlines():
        folder, spec, *settings = line.split("\t")
        config = config_lib.get_config(spec, *settings)
        assert config_lib.default_workdir(config, spec, settings) == folder


def test_other_settings_are_another_run():
    def folder(*settings):
        config = config_lib.get_config("c2a2:digits", *settings)
        return config_lib.default_workdir(config, "c2a2:digits", settings)

    assert folder("train.epochs=5", "train.batch=32") == folder(
        "train.batch=8", "train.batch=32", "train.epochs=5"
    )
    for same in ("mesh.data=1", "train.log_every=1", "data.dir=/x", "checkpoint.keep_latest=9"):
        assert folder(same) == folder()
    assert folder("init.from=a/model.safetensors") != folder("init.from=b/model.safetensors")
    many = [f"augment.{key}=0.25" for key in ("mixup", "cutmix", "erasing", "label_smoothing")]
    many += [f"model.{key}=2" for key in ("groups", "depth", "towers", "heads", "embed_dim")]
    many += ["model.conv_channels=32,64", "model.conv_kernels=3,3", "model.pool_strides=2,2"]
    names = {folder(*many, f"optim.beta2=0.{b}", f"seed={s}") for b in (98, 99) for s in (0, 1)}
    assert len(names) == 4 and all(len(name) < 200 for name in names)
    for path in ("猫" * 80, "猫" * 79 + "犬", "\udce9" * 200, "猫" * 70 + "\udce9"):
        names.add(folder(f"data.name=folder={path}"))
    assert len(names) == 8 and all(len(name.encode()) < 206 for name in names)


@pytest.mark.parametrize("argument", [None, "digits,paper", "tiny_imagenet,tiny,bf16"])
def test_json_is_the_whole_configuration(argument):
    for config in (make(argument), resolved(argument)):
        back = config_lib.from_json(config_lib.to_json(config))
        assert back == config and back.is_locked
        assert back.to_dict() == config.to_dict()  # types too: tuples are tuples again


@pytest.mark.parametrize("spec", ["c3a4:digits", "backbone:resnet50,paper", "cvt:13"])
def test_a_stored_configuration_gets_the_keys_that_are_newer(spec):
    config = config_lib.get_config(spec)
    for path, _ in schema.leaves(config.model):
        *section, name = path.split(".")
        if name not in ("family", "variant", "dtype", "backbone"):
            old = config.copy_and_resolve_references().unlock()
            del functools.reduce(operator.getitem, section, old.model)[name]
            assert config_lib.completed(old.to_dict()) == config


def test_json_that_is_no_configuration():
    with pytest.raises(TypeError, match="JSON object; got list"):
        config_lib.from_json("[]")


@functools.cache
def _read() -> set[tuple[str, str]]:
    """(owner, key) of every `owner.key`, `owner["key"]` and `owner.get("key")` in the package, but
    for its functions and for what only makes and checks keys."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path.parent.name == "config":
            uses = path.name in ("resolution.py", "stored.py")
            made = ("resolve", "validate") if uses else [getattr(n, "name", "") for n in tree.body]
            tree.body = [node for node in tree.body if getattr(node, "name", "") not in made]
        nodes = list(ast.walk(tree))
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            match node:
                case ast.Attribute(owner, key, ast.Load()) if node not in called:
                    found.add((ast.unparse(owner), key))
                case ast.Subscript(owner, ast.Constant(key), ast.Load()):
                    found.add((ast.unparse(owner), key))
                case ast.Call(ast.Attribute(owner, "get"), [ast.Constant(key), *_]):
                    found.add((ast.unparse(owner), key))
    return found


def test_every_key_is_read_somewhere():
    """A family's settings are all read: they are the fields of its network's config."""
    owners = {"": ("config",), "augment": ("settings",), "checkpoint": ("checkpoint", "keep")}
    owners["data"] = ("data", "settings")
    read = {(owner.rpartition(".")[2], key) for owner, key in _read()}
    read |= {("init", setting) for setting, *_ in adapt._SIZES.values()}
    unread = []
    for key in schema.KEYS:
        section, _, name = key.rpartition(".")
        if not any((owner, name) in read for owner in owners.get(section, (section,))):
            unread.append(key)
    assert unread == []


def test_no_code_reads_a_key_that_is_not_there():
    known = {*schema.KEYS, *schema.all_keys(), *schema.LABELS}
    sections = {key.partition(".")[0] for key in known if "." in key}
    read = {
        f"{section}.{key}"
        for owner, key in _read()
        if (section := owner.rpartition("config.")[2]) in sections and section != owner
    }
    assert {"train.batch", "data.fraction", "model.variant"} <= read <= known


@pytest.mark.parametrize(
    ("spec", "setting", "other"),
    [
        ("c2a2:cifar10,fast", "augment.mix_probability=0.8", "mixup"),
        ("c2a2:cifar10 optim.name=sgd", "optim.beta2=0.9", "name"),
        ("c2a2:attention_only", "model.conv_kernels=7,7", "ablation"),
        ("backbone:efficientnet_b0", "model.backbone_settings.dropout=0", "backbone"),
        ("vix:mlp_mixer", "model.head_pool=cls", "mixer"),
    ],
)
def test_a_setting_that_another_leaves_without_effect_is_refused(spec, setting, other):
    spec, *more = spec.split()
    config = config_lib.get_config(spec, *more, setting)
    with pytest.raises(
        ValueError, match=rf"{setting.split('=')[0]} has no effect with \w+\.{other}="
    ):
        config_lib.refuse_unread(config)
    config_lib.refuse_unread(config_lib.get_config(spec, *more))


def test_a_small_set_has_a_recipe_by_the_number_of_images():
    def fitted(examples, *settings, spec="c2a2:folder=x"):
        return counted(config_lib.get_config(spec, *settings), examples)

    assert fitted(5000).train == config_lib.get_config("c2a2:folder=x").train
    few = fitted(720)
    assert (few.recipe, few.optim.name, few.train.batch) == ("small", "muon", 64)
    assert few.augment.mixup and not fitted(2000).augment.mixup
    assert [fitted(n).train.epochs for n in (64, 300, 720)] == [48, 32, 24]
    for examples in (1, 2, 24, 64, 400):
        assert fitted(examples).train.batch <= examples
    # A setting by hand counts, though it is the default; so does a recipe, but for its batch.
    kept = fitted(720, "train.batch=128", "train.steps=9", "augment.flip=false")
    assert (kept.train.batch, kept.train.steps, kept.train.epochs) == (128, 9, 0)
    assert (kept.optim.name, kept.eval.tta) == ("muon", "none")
    unmirrored = ("augment.flip=false",)
    assert fitted(720, *unmirrored, spec="c2a2:folder=x,fast").eval.tta == "none"
    asked = fitted(720, *unmirrored, "eval.tta=flip", spec="c2a2:folder=x,fast")
    assert (asked.eval.tta, fitted(720, spec="c2a2:folder=x,fast").eval.tta) == ("flip", "flip")
    assert fitted(720, "train.epochs=100").train.epochs == 100
    # 100 and 110 epochs by their steps; 12 and 3 evaluations.
    assert fitted(4000, "train.steps=6200").train.eval_every == 8
    assert fitted(720, "train.steps=1100", "train.batch=72").train.eval_every == 36
    stopped = fitted(64, "train.patience=3", "train.epochs=300")
    assert (stopped.train.eval_every, stopped.checkpoint.every) == (1, 24)
    assert fitted(64, "train.epochs=300").checkpoint.every == 24
    assert fitted(64, spec="c2a2:folder=x,strong").train == make(train__batch=64).train
    # Named sets have recipes of their own; `small` can be asked for; trained weights keep AdamW.
    assert fitted(64, spec="c2a2:digits").recipe == "strong"
    assert fitted(6000, spec="vix:cifar10,small").optim.name == "muon"
    tuned = fitted(720, "init.from=run")
    assert (tuned.optim.name, tuned.init.whiten, tuned.train.batch) == ("adamw", False, 64)
    tiny = fitted(24, spec="c2a2:folder=x,tiny").train
    assert (tiny.steps, tiny.batch) == (8, 16)


@pytest.mark.parametrize(
    ("spec", "examples", "muons", "average", "own"),
    [
        ("c2a2:folder=x", 720, 0.2, 0.0, 0.2),  # small
        ("c2a2:folder=x", 45_000, 0.0, 0.999, 0.2),  # strong
        ("vix:vit,folder=x,strong", 720, 0.0, 0.999, 0.25),
        ("c2a2:digits,fast", 1439, 0.0, 0.999, 0.2),
    ],
)
def test_muon_is_for_random_weights_and_its_settings_for_muon(spec, examples, muons, average, own):
    """`muons`: dropout with Muon; `average`, `own`: moving average and dropout without it."""

    def fitted(*settings):
        once = counted(config_lib.get_config(spec, *settings), examples)
        optim, whiten = once.optim, once.init.whiten
        rest = (optim.schedule, once.train.ema_decay, once.model.dropout, whiten)
        return optim.name, optim.learning_rate, rest

    without = ("cosine", average, own, False)
    assert fitted() == ("muon", 5e-3, ("linear", 0.0, muons, "c2a2" in spec))
    assert fitted("init.from=run") == ("adamw", 1e-3, without)
    assert fitted("init.from=run", "optim.name=muon") == ("muon", 1e-3, without)
    assert fitted("init.from=run", "optim.learning_rate=2e-4") == ("adamw", 2e-4, without)
    assert fitted("optim.name=sgd") == ("sgd", 1e-3, without)
    assert fitted("optim.name=sgd", "optim.learning_rate=0.05") == ("sgd", 0.05, without)


def test_what_the_strong_recipe_leaves_alone():
    """Digits' average with trained weights; dropout that is set, and of a network of own sizes."""
    digits = config_lib.get_config("c2a2:digits", "init.from=run")
    assert counted(digits, 1439).train == config_lib.get_config("c2a2:digits").train
    model = {**FAMILIES["hsvit"].settings("c2a2"), "variant": "custom", "dropout": 0.1}
    own = config_lib.base("folder=x", model)
    assigned = config_lib.get_config("c2a2:folder=x")
    assigned.model.dropout = 0.1
    for config in (own, assigned):
        for examples in (720, 45_000):
            for start in ("", "run"):
                config.init["from"] = start
                assert counted(config, examples).model.dropout == 0.1
    assert own.optim.name == "muon" and not own.init.whiten
