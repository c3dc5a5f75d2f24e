"""What other programs call keys, flags, words, networks and commands."""

import tomllib
from pathlib import Path

import pytest

import hsvit_jax
from hsvit_jax import commands
from hsvit_jax import config as config_lib
from hsvit_jax.config import synonyms, words

TABLE = tomllib.loads(Path(synonyms.__file__).with_suffix(".toml").read_text("utf-8"))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("optim.lr", "optim.learning_rate"),  # everywhere
        ("train.lr", "optim.learning_rate"),
        ("learningRate", "optim.learning_rate"),
        ("lr0", "optim.learning_rate"),  # ultralytics
        ("imgsz", "data.image_size"),
        ("optim.wd", "optim.weight_decay"),
        ("train.batch_size", "train.batch"),
        ("per_device_train_batch_size", "train.batch"),  # transformers
        ("num_train_epochs", "train.epochs"),
        ("max_grad_norm", "optim.clip_norm"),
        ("gradient_accumulation_steps", "train.accumulate"),
        ("trainer.max_epochs", "train.epochs"),  # Lightning
        ("gradient_clip_val", "optim.clip_norm"),
        ("accumulate_grad_batches", "train.accumulate"),
        ("validation_split", "data.val_fraction"),  # Keras
        ("init.pretrained", "init.from"),  # timm
        ("drop-path", "model.drop_path"),
        ("reprob", "augment.erasing"),
        ("train.dropout", "model.dropout"),
        ("train.seed", "seed"),
        ("random_state", "seed"),
        ("optim.momentum", "optim.beta1"),
        ("early_stopping_patience", "train.patience"),
        ("model.name", "--config=NETWORK:DATA"),
    ],
)
def test_a_key_of_another_program(theirs, ours):
    assert synonyms.meant(theirs, config_lib.all_keys())[0] == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("resnet18", "resnet:18"),
        ("resnet50.a1_in1k", "resnet:50"),
        ("microsoft/resnet-50", "resnet:50"),
        ("vit_base", "vit:b-patch4"),
        ("ViT-B/16", "vit:b-patch16"),
        ("google/vit-large-patch16-224", "vit:l-patch16"),
        ("deit_tiny_patch16_224", "deit:ti"),
        ("swin_tiny_patch4_window7_224", "swin:t"),
        ("tf_efficientnet_b3", "efficientnet:b3"),
        ("mobilenetv2_100", "mobilenet_v2:1.0"),
        ("apple/mobilevit-x-small", "mobilevit:xs"),
        ("resnext50_32x4d", "resnext:50-32x4d"),
        ("HSViT-C4A8", "c4a8"),
        ("vgg16", ""),
    ],
)
def test_a_network_of_another_program(theirs, ours):
    assert synonyms.network(theirs) == ours
    if ours:
        with pytest.raises(ValueError, match=rf"Did you mean {ours}\?"):
            hsvit_jax.get_config(f"{theirs}:cifar10")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("CIFAR-100", "cifar100"),
        ("FashionMNIST", "fashion_mnist"),
        ("imagenet1k", "imagenet"),
        ("mnist", "tfds=NAME or hf=NAME"),
        ("ImageFolder", "folder=PATH of class folders"),
        ("hfds/beans", "hf=beans"),
        ("fp16", "bf16"),
        ("debug", "tiny"),
        ("fine-tune", "finetune"),
        ("resnet18", "resnet:18"),
    ],
)
def test_a_word_after_the_colon(word, meant):
    with pytest.raises(ValueError, match=rf"Did you mean {meant}\?"):
        hsvit_jax.get_config(f"c2a2:{word}")


def test_a_size_after_the_colon_is_a_variant():
    with pytest.raises(ValueError, match=r"Did you mean vit:b-patch4\?"):
        hsvit_jax.get_config("vit:base,cifar10")


def test_the_table_names_what_is_there():
    """Each of ours is a key, a flag, a command, a word after the colon, or advice."""
    names = {*config_lib.all_keys(), *commands.COMMANDS, "--checkpoint", "--workdir"}
    names |= {*words.DATA_SETS, *words.RECIPES, *words.SWITCHES}
    assert all(ours in names or " " in ours or "=" in ours for ours in TABLE["words"])
    for ours, theirs in TABLE["networks"].items():
        hsvit_jax.get_config(ours)
        assert all(synonyms.network(word) == ours for word in theirs.split())
    plain = [word for theirs in TABLE["words"].values() for word in theirs.split()]
    assert all(word.isalnum() and word == word.lower() for word in plain)
