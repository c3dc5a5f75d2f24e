"""Files of HSViT on a backbone: goldens, the frozen training step, and what is refused."""

import json

import numpy as np
import pytest
from support import convnet_files, torch_files

from hsvit_jax import models
from hsvit_jax.models.hsvit import backbone
from hsvit_jax.models.network import UNSHARDED
from hsvit_jax.weights import torch
from hsvit_jax.weights.convert import convert

GIVEN = {
    "attn_num": 4,
    "attn_depth": 1,
    "attn_embed_dim": 12,
    "num_heads": 4,
    "num_classes": 7,
    "dropout": 0.0,
    "image_size": 32,
    "backbone": {"model_type": "resnet", "num_channels": 3},
}


def test_without_attention_the_channels_tokens_are_averaged(golden_dir):
    path = golden_dir / "hsvithet-resnet-bottleneck-ds.npz"
    tensors, whole, params, stats, family, description = convnet_files.read(path)
    attention = ("model.attn", "model.cls", "model.position")
    own = {k: v for k, v in tensors.items() if not k.startswith(attention)}
    given = description["constructor"] | {"attn_num": 0}
    network = torch_files.build(*torch.sections(family, own, given))
    trees = torch.table(family.name).load(own, network)
    for key, tensor in torch.table(family.name).dump(*trees, network).items():
        assert key.endswith("num_batches_tracked") or np.array_equal(tensor, own[key])
    images, bound = tensors["input"].transpose(0, 2, 3, 1), whole.bind(params, stats)
    context = backbone.ForwardContext(False, None, np.arange(len(images)))
    tokens = whole.channel_tokens(bound, images, context, UNSHARDED, 0)
    np.testing.assert_allclose(
        network.apply(*trees, images)[0], bound["head"](tokens.mean(1)), atol=1e-5
    )


def test_without_a_backbone_it_is_hsvits_attention_alone(golden_dir, tmp_path):
    """As the authors' two constructors of the same network have it."""
    with np.load(golden_dir / "hsvit-attnonly.npz") as golden:
        tensors = {k: golden[k] for k in golden.files}
    given = json.loads(tensors["config"].item())["constructor"]
    given = {k: v for k, v in given.items() if k not in ("num_channels", "image_size")}
    given |= {"enable_conv_layer": False, "conv_kernel_num": given["conv_kernel_nums"][-1]}
    for name in ("conv_kernel_nums", "conv_kernel_sizes", "pool_strides"):
        del given[name]
    tensors["config"] = json.dumps({"family": "HSViT-het", "constructor": given})
    np.savez(tmp_path / "het.npz", **tensors)
    report = convert(tmp_path / "het.npz")
    assert report["max_abs_error"] <= 1e-9 * report["max_abs_logit"]


def test_named_networks_are_recognised():
    described = {"model_type": "mobilenet_v2", "depth_multiplier": 1.4}
    described |= {"classifier_dropout_prob": 0.2, "image_size": 224}
    given = {"attn_embed_dim": 56, "num_classes": 1000, "backbone": described}
    settings, data = torch_files.settings("hsvit_backbone", {}, given)
    assert settings["variant"] == settings["backbone"] == "mobilenet_v2_1.4"
    assert settings["backbone_settings"] == backbone.backbone_settings("mobilenet_v2_1.4")
    assert (data["image_size"], data["num_classes"]) == ((224, 224), 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": None}, "`backbone` is not a JSON object"),
        ({"backbone": {"model_type": "vgg"}}, "model_type='vgg' is not supported"),
        ({"attn_num": 7}, r"2048 channel tokens cannot split into groups=7"),
        ({"attn_num": -1}, "groups must be"),
        ({"num_heads": 5}, "embed_dim=12 is not divisible by heads=5"),
    ],
)
def test_fields_that_do_not_fit_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        settings, data = torch_files.settings("hsvit_backbone", {}, {**GIVEN, **changes})
        models.build({"dtype": "float32", **settings}, **data)
