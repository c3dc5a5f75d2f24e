"""The sibling systems by name, and each from the command line through training to prediction."""

import json
import os
import signal

import numpy as np
import pytest
from PIL import Image
from support.small_runs import metric_lines, sizes_of

from hsvit_jax import classifier as classifier_lib
from hsvit_jax import config as config_lib
from hsvit_jax import data, main, models, train
from hsvit_jax.config import variants
from hsvit_jax.train import loop

FAMILIES = tuple(variants.siblings())
#: Statistics of a BatchNorm, features that no step changes, no state, and groups on a backbone.
TRAINED = {"resnet", "t2t", "vix", "hsvit_backbone"}


@pytest.mark.parametrize(
    ("spec", "variant", "data"),
    [
        ("vix", "hybrid_vin", "cifar10"),
        ("vix:vin,hybrid,rope,cifar10", "hybrid_vin_rope", "cifar10"),
        ("vix:digits, rope ,vit", "vit_rope", "digits"),
        ("vix:hybrid_vin,rope", "hybrid_vin_rope", "cifar10"),
        ("vix:hybrid,mlp_mixer", "hybrid_mlp_mixer", "cifar10"),
        ("levix:levil,folder=a-b_c/vit", "levil", "folder=a-b_c/vit"),
        ("ccx:ccn,tiny_imagenet", "ccn", "tiny_imagenet"),
        ("hvt:s-4,cifar100", "s-4", "cifar100"),
        ("hvt:s,4,conv", "s-4-conv", "cifar10"),
        ("hvt:2d,s-2", "s-2-2d", "cifar10"),
        ("deit:nocls,ti", "ti-nocls", "cifar10"),
        ("dhvt:t,patch4", "t-patch4", "cifar10"),
        ("dhvt:patch2,s,digits,paper,tiny,bf16", "s-patch2", "digits"),
        ("dhvt:t-bn-ln", "t-bn-ln", "cifar10"),
        ("dhvt:t,ln,bn", "t-ln-bn", "cifar10"),
    ],
)
def test_words_choose_the_variant(spec, variant, data):
    config = config_lib.get_config(spec)
    assert (config.model.variant, config.data.name) == (variant, data)
    sizes = {**models.FAMILIES[config.model.family].variants[variant]}
    if "digits" not in spec and "tiny" not in spec.split(","):
        sizes |= {"dropout": 0.0} if "dropout" in sizes else {}  # the strong recipe's
        assert {key: config.model[key] for key in sizes} == sizes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vix:vim", r"unknown word 'vim' after the colon. Did you mean vi\w\? Known: vit"),
        ("vix:vin,hybird", r"'hybird' after the colon. Did you mean hybrid\?"),
        ("vix:vin,cifar1O", r"'cifar1O' after the colon. Did you mean cifar10\?"),
        ("vix:vin,csv=a,b/c", r"'b/c' .* a comma: --config.data.name=KIND=PATH"),
        ("vix:vin,vit", r"^vin,vit names no variant of vix.* Known: vit, vip"),
        ("vix:fnet,rope", "fnet,rope names no variant"),
        (
            "vix:hybrid,rope",
            "could be hybrid_vit_rope or hybrid_vip_rope or hybrid_vil_rope or hyb",
        ),
        ("dhvt:ln,t,bn", "could be t-bn-ln or t-ln-bn: name one"),
        ("hvt:s", "s could be s-0 or s-1"),
        ("ccx:ccn,digits,cifar10", "one data set at a time"),
        ("levix:conv_only", "conv_only is an ablation of hsvit, and levix has no such part"),
        ("dhvt:attention_only", "attention_only is an ablation of hsvit"),
        ("vixx:vin", r"unknown network 'vixx'. Did you mean vix\?"),
    ],
)
def test_words_that_do_not_are_told(spec, message):
    with pytest.raises(ValueError, match=message):
        config_lib.get_config(spec)


def test_a_section_by_family():
    assert config_lib.named_model("ccx") == models.FAMILIES["ccx"].settings("ccn")
    with pytest.raises(ValueError, match=r"unknown family 'viit'. Did you mean vit\?"):
        variants.get_config("viit")


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("hvt:s-4-patch32", (), "1 tokens after block 0 are fewer than pool_window=3"),
        ("hvt", ("model.patch=5",), "32×32 pixels cannot be cut into patches of patch=5"),
        ("vix:vin", ("model.landmarks=99",), "landmarks=99 .*there are 65"),
        ("dhvt", ("model.heads=5",), "embed_dim=192 is not divisible by heads=5"),
        ("ccx", ("model.heads=3",), "embed_dim=128 is not divisible by heads=3"),
        ("dhvt", ("mesh.group=2",), r"mesh.group=2 .*dhvt.*no attention groups"),
        ("dhvt", ("mesh.aggregate=ordered",), "mesh.aggregate='ordered' .* network has none"),
    ],
)
def test_sizes_that_do_not_fit_are_told_before_the_first_step(spec, settings, message):
    dataset = train.load_data(config_lib.get_config("c2a2:digits"))
    config = config_lib.get_config(f"{spec}{',' if ':' in spec else ':'}digits", *settings)
    with pytest.raises(ValueError, match=message):
        train.prepare(config, dataset=dataset)


def test_a_patch_can_be_set():
    config = config_lib.get_config("hvt:ti-2,digits", "model.patch=2", "model.depth=2")
    assert sizes_of(config_lib.resolve(config, data.describe("digits"))).tokens == 256


def test_a_network_from_python_for_images_that_are_no_squares():
    sizes = {"image_size": (16, 24), "channels": 1, "num_classes": 7}
    model = classifier_lib.build_model("vix:vit,rope,tiny", **sizes)
    assert model.config.map_size == (2, 3) and model.config.num_classes == 7


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_from_the_command_line(family, tmp_path, monkeypatch, capfd):
    """Builds it for digits, trains some, evaluates, predicts and summarises.

    Every family's gradient is tested beside its network: here those train whose states differ.
    """
    folder, config = tmp_path / "run", f"--config={family}:digits,tiny"

    def call(*words):
        code = main.main(["main", *words])
        out, err = capfd.readouterr()
        return code, out, err

    steps = 3 if family in TRAINED else 0
    start = (config, f"--config.train.steps={steps}", "--config.train.batch=16", "--noreport")
    start += ("--config.mesh.data=1", "--config.data.fraction=0.0625", f"--workdir={folder}")
    process = loop.Loop.process_oldest_step

    def interrupted(self):
        process(self)
        os.kill(os.getpid(), signal.SIGTERM)

    if family == "t2t":
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "in_flight", 0)
            patch.setattr(loop.Loop, "process_oldest_step", interrupted)
            assert call(*start)[0] == 42
    code, out, err = call(*start)
    assert code == 0 and "done: test accuracy" in out
    assert (family == "t2t") == ("from step " in err)
    lines = metric_lines(folder)
    assert [line["step"] for line in lines if line.get("split") == "test"] == [steps]
    assert all(np.isfinite(line["loss"]) for line in lines)

    code, out, _ = call("--mode=eval", f"--checkpoint={folder}")
    assert code == 0 and json.loads(out)["examples"] == 179
    Image.fromarray(np.full((9, 9), 128, np.uint8)).save(tmp_path / "grey.png")
    code, out, _ = call("--mode=predict", f"--checkpoint={folder}", str(tmp_path / "grey.png"))
    assert code == 0 and "grey.png" in out
    code, out, _ = call("--mode=summary", config)
    groups = family == "hsvit_backbone"
    assert code == 0 and f"({family})" in out and ("no logit depends" in out) == groups
    code, _, err = call("--mode=plan", config, "--devices=8")
    assert code == 1 and f"for {family} use hsvit summary" in err
    code, _, err = call("--mode=eval", f"--checkpoint={folder}", "--drop_groups=0")
    assert code == 1 - groups and ("no independent" in err) != groups
