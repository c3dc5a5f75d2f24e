"""The table of a configuration's keys: it is complete, and what it refuses is refused early."""

import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import main, models
from hsvit_jax.config import schema


def sections():
    """The `model` section of every variant of every registered family."""
    for family, variant in models.VARIANTS:
        yield models.FAMILIES[family].settings(variant)


def test_every_key_of_every_family_has_an_entry_and_its_value_fits():
    used = set()
    for model in sections():
        for argument in ("cifar10", "digits,tiny", "cifar10,paper,bf16"):
            config = config_lib.base(argument, model)
            config_lib.validate(config)
            used |= {id(schema.of(key, config.model)) for key, _ in config_lib.leaves(config)}
    tables = (schema.KEYS, schema.MODEL_KEYS)
    assert [name for table in tables for name, key in table.items() if id(key) not in used] == []


def test_an_entry_says_what_it_means_and_takes():
    for table in (schema.KEYS, schema.MODEL_KEYS):
        for name, key in table.items():
            assert key.meaning and not key.meaning.endswith("."), name
            numeric = key.kind in (int, float) and not key.choices
            assert numeric == (" from " in key.expected or " above " in key.expected), name
            assert "inf" not in key.expected.split(), name  # every number has two ends


#: Settings that no run can have; each was accepted, a traceback or minutes of silence once.
MISTAKES = (
    "seed=4294967296",
    "optim.learning_rate=nan",
    "optim.learning_rate=-1",
    "optim.learning_rate=inf",
    "optim.learning_rate=1e400",
    "optim.learning_rate=fast",
    "optim.beta1=5",
    "optim.beta2=1",
    "optim.warmup_epochs=-2",
    "train.batch=-1",
    "train.batch=1e400",
    "train.batch=nan",
    "train.batch=1.5",
    "train.batch=99999999999999999999",
    "train.batch=" + "9" * 5000,
    "train.steps=3000000000",
    "train.epochs=1e300",
    "train.log_every=3000000000",
    "eval.batch=-1",
    "data.image_size=100000,100000",
    "data.image_size=0",
    "data.num_classes=-1",
    "data.mean=123.7",
    "data.dir=\0",
    "init.from=" + "x" * 5000,
    "mesh.data=0",
    "augment.mixup=nan",
    "checkpoint.every=0",
    "model.embed_dim=1000000",
    "model.depth=100000",
    "model.groups=-1",
    "model.conv_channels=" + ",".join(["4"] * 300),
    "model.dropout=1",
    "model.dtype=float16",
    "train.log_every=0",
    "train.eval_every=0",
    "train.bad_steps_limit=0",
    "checkpoint.keep_latest=0",
    "data.val_fraction=1",
    "data.on_bad_image=ignore",
    "optim.cosine_per=batch",
    "mesh.aggregate=mean",
    "mesh.gradients=int8",
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda text: text[:40])
def test_a_mistaken_value_is_one_line_and_exit_code_2(mistake, capfd, tmp_path):
    words = ("--config=c2a2:digits,tiny", f"--config.{mistake}", f"--workdir={tmp_path / 'run'}")
    for mode in ("train", "summary") if mistake.startswith("model.") else ("train",):
        given = words if mode == "train" else words[:2]
        assert main.main(["main", f"--mode={mode}", *given]) == 2
        out, err = capfd.readouterr()
        key = mistake.partition("=")[0]
        assert out == "" and err.startswith(f"{key} must be ")
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


@pytest.mark.parametrize("backbone", ["resnet18", "efficientnet_b0", "mobilenet_v2_1.0"])
def test_a_backbone_s_own_settings_are_checked(backbone):
    with pytest.raises(ValueError, match=r"backbone_settings.activation must be text"):
        config_lib.get_config(
            f"backbone:{backbone},digits", f"model.backbone_settings.activation={'x' * 5000}"
        )


def test_more_steps_than_can_be_counted():
    config = config_lib.get_config("c2a2:digits", "train.epochs=1e6")
    with pytest.raises(ValueError, match=r"are 3,000,000,000 steps.*2,147,483,647.*lower it"):
        config_lib.total_steps(config, 3000)
