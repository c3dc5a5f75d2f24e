"""State dicts in transformers', timm's and the authors' names: goldens, the way back, any
constructor, fusing for inference, and what is refused."""

import json

import jax
import numpy as np
import pytest
from support import convnet_files, hf_files, torch_files

import hsvit_jax
from hsvit_jax import main, models
from hsvit_jax.weights import files, torch
from hsvit_jax.weights.convert import convert

#: Family → (shapes of the tensors that tell channels and classes, a constructor, an image).
SMALL = {
    "cvt": (
        {
            "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight": (6, 3, 5, 5),
            "classifier.weight": (7, 8),
        },
        {
            **{"patch_sizes": [5, 2], "patch_stride": [3, 2], "patch_padding": [1, 0]},
            **{"embed_dim": [6, 8], "num_heads": [3, 2], "depth": [1, 2], "mlp_ratio": [2.5, 3]},
            **{"attention_drop_rate": [0.0, 0.1], "drop_rate": [0.2, 0.0]},
            **{"drop_path_rate": [0.0, 0.3], "qkv_bias": [True, False]},
            **{"cls_token": [False, True], "qkv_projection_method": ["dw_bn", "dw_bn"]},
            **{"kernel_qkv": [3, 5], "padding_kv": [1, 0], "stride_kv": [2, 1]},
            **{"padding_q": [1, 2], "stride_q": [1, 1]},
        },
        (3, 30, 36),
    ),
    "mobilevit": (
        {"mobilevit.conv_stem.convolution.weight": (4, 3, 3, 3), "classifier.weight": (7, 13)},
        {
            **{"neck_hidden_sizes": [4, 6, 8, 10, 12, 11, 13], "hidden_sizes": [6, 9, 12]},
            "num_attention_heads": 3,
        },
        (3, 40, 48),
    ),
    "swiftformer": (
        {
            "swiftformer.patch_embed.patch_embedding.0.weight": (3, 3, 3, 3),
            "head.weight": (7, 11),
        },
        {"depths": [1, 2, 1], "embed_dims": [6, 6, 11]},
        (3, 24, 28),
    ),
    "efficientformer": (
        {
            "efficientformer.patch_embed.convolution1.weight": (3, 3, 3, 3),
            "classifier.weight": (7, 11),
        },
        {
            **{"depths": [1, 2, 3], "hidden_sizes": [6, 6, 11], "num_meta3d_blocks": 2},
            **{"downsamples": [False, False, True], "num_attention_heads": 3, "key_dim": 2},
            **{"attention_ratio": 2.5, "mlp_expansion_ratio": 3, "resolution": 3},
        },
        (3, 24, 24),
    ),
}


def test_an_efficientvit_of_fewer_stages_than_the_usual_arguments_have(golden_dir):
    """timm reads as many of them as there are widths."""
    tensors, network, *_, family, description = convnet_files.read(
        golden_dir / "timm-efficientvit-train.npz"
    )
    given = description["constructor"] | {"key_dim": [4, 3, 16], "window_size": [3, 7, 7]}
    del given["down_ops"]
    settings, data = torch.sections(family, tensors, given)
    assert family.sizes(settings, **data) == network.config


@pytest.mark.parametrize("name", ["timm-efficientvit-train", "smt-train"])
def test_a_constructor_tells_the_image_size_of_a_file_without_images(name, golden_dir):
    tensors, network, *_, family, description = convnet_files.read(golden_dir / f"{name}.npz")
    given = description["constructor"]
    weights = {k: v for k, v in tensors.items() if k not in ("input", "logits", "logits_f64")}
    settings, data = torch.sections(family, weights, given)
    assert family.sizes(settings, **data) == network.config
    assert data["image_size"] == (given["img_size"],) * 2
    other = torch.sections(family, weights, given | {"image_size": (64, 80)})[1]
    assert other["image_size"] == (64, 80)  # by option


def test_branches_are_folded_to_the_inference_form(golden_dir):
    """To the tensors of the published fused file, whose logits are those of the branches."""
    network, params, stats = convnet_files.read(golden_dir / "timm-fastvit.npz")[1:4]
    _, wanted, *arrays, _, _ = convnet_files.read(golden_dir / "timm-fastvit-fused.npz")
    fused, *folded = network.fused(params, stats)
    assert fused.config == wanted.config and fused.fused(*folded)[0] is fused
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-7), folded, arrays)


@pytest.mark.slow
def test_a_trained_network_is_fused_for_inference(golden_dir, tmp_path):
    """By the command and in Python, with the same logits."""
    run, out = tmp_path / "run", tmp_path / "fused.safetensors"
    convert(golden_dir / "timm-fastvit.npz", run)  # compares the logits
    argv = ["main", "--mode=export", str(run), str(out), "--format=reference", "--fused"]
    assert main.main(argv) == 0
    tensors, _ = files.read(out)
    with np.load(golden_dir / "timm-fastvit-fused.npz") as golden:
        for key, tensor in tensors.items():
            assert key.endswith("tracked") or np.allclose(tensor, golden[key], 1e-6, 1e-7), key
    trained = hsvit_jax.load(run)
    fused, images = trained.fused(), np.random.default_rng(0).random((2, 64, 64, 3))
    np.testing.assert_allclose(fused.logits(images), trained.logits(images), atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "maps", "settings"),
    [
        (
            *("cvt", {}, ((10, 12), (5, 6))),
            {"hidden_widths": (15, 24), "dropouts": (0.2, 0.0), "attention_dropouts": (0.0, 0.1)},
        ),
        (
            "mobilevit",
            {
                **{"mlp_ratio": 1.5, "expand_ratio": 2, "conv_kernel_size": 5, "patch_size": 3},
                **{"output_stride": 8, "hidden_act": "relu", "qkv_bias": False},
                **{"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
                **{"classifier_dropout_prob": 0.4, "layer_norm_eps": 1e-3},
            },
            ((20, 24), (20, 24), (10, 12), (5, 6), (5, 6), (5, 6)),
            {
                **{"dropout": 0.2, "attention_dropout": 0.3, "head_dropout": 0.4, "patch": 3},
                **{"activation": "relu", "eps": 1e-3},
            },
        ),
        (
            "swiftformer",
            {
                **{"mlp_ratio": 3, "downsamples": [False, False, True], "down_patch_size": 5},
                **{"down_stride": 3, "down_pad": 2, "hidden_act": "relu"},
                **{"use_layer_scale": False, "drop_path_rate": 0.1, "drop_mlp_rate": 0.2},
                **{"drop_conv_encoder_rate": 0.3, "batch_norm_eps": 1e-3},
            },
            ((12, 14), (6, 7), (6, 7), (2, 3)),
            {
                **{"hidden_widths": (18, 18, 33), "drop_path": 0.1, "dropout": 0.2, "eps": 1e-3},
                **{"conv_drop_path": 0.3, "layer_scale": 0, "activation": "relu"},
            },
        ),
        (
            "efficientformer",
            {
                **{"use_layer_scale": False, "hidden_act": "relu", "pool_size": 5},
                **{"drop_path_rate": 0.03125, "hidden_dropout_prob": 0.1},
                **{"layer_norm_eps": 1e-3, "batch_norm_eps": 1e-2},
            },
            ((12, 12), (6, 6), (6, 6), (3, 3)),
            {
                **{"value_dim": 5, "pool_window": 5, "activation": "relu", "layer_scale": 0},
                **{"dropout": 0.1, "eps": 1e-3, "norm_eps": 1e-2},
                "drop_path": 5 * 0.03125,  # the reference's grows by this a block
            },
        ),
    ],
    ids=SMALL,
)
def test_fields_make_the_network(family, changes, maps, settings):
    shapes, given, image = SMALL[family]
    network, model = hf_files.check_every_tensor_has_its_place(
        family, given | changes, shapes, image=image
    )
    assert network.config.maps() == maps and model["variant"] == "custom"
    assert {name: getattr(network.config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("family", "given", "name"),
    [
        ("cvt", {"patch_sizes": [4, 3, 3]}, "13-patch4"),
        ("cvt", {"depth": [1, 4, 16]}, "21"),
        (
            "mobilevit",
            {"hidden_sizes": [96, 120, 144], "neck_hidden_sizes": [16, 32, 48, 64, 80, 96, 384]},
            "xs",
        ),
        ("swiftformer", {"depths": [3, 3, 9, 6], "embed_dims": [48, 64, 168, 224]}, "s"),
        ("efficientformer", {"resolution": 4}, "l1"),
    ],
)
def test_published_sizes_have_their_name(family, given, name):
    """An EfficientFormer's resolution tells the image's size, too."""
    tensors = {key: np.zeros(shape) for key, shape in SMALL[family][0].items()}
    told = {} if "resolution" in given else {"image_size": 128}
    model, data = torch_files.settings(family, tensors, given | told)
    assert (model["variant"], data["image_size"]) == (name, (128, 128))


def test_networks_that_the_authors_code_has_not():
    for family, changes in (
        ("fastvit", {"down_activation": "relu"}),
        ("swiftformer", {"queries": "weighted"}),
        ("efficientnet", {"padding": "symmetric"}),
    ):
        weights = torch.table(family)
        weights.check_known(hf_files.network(family).config)
        with pytest.raises(ValueError, match=f"no network with {next(iter(changes))}="):
            weights.check_known(hf_files.network(family, **changes).config)


def test_indices_are_passed_over():
    shapes, given, image = SMALL["efficientformer"]
    network, tensors, _ = hf_files.small_file("efficientformer", given, shapes, image)
    key = "efficientformer.encoder.last_stage.meta3D_layers.blocks.0.token_mixer"
    tensors[f"{key}.attention_bias_idxs"] = np.zeros((9, 9), np.int64)
    params, _ = torch_files.load("efficientformer", tensors, network)
    bias = params["stage2"]["attention_blocks"]["0"]["attention"]["offset_bias"]
    np.testing.assert_array_equal(bias, tensors[f"{key}.attention_biases"])


#: Family → changes of its constructor, and what is said of them.
REFUSED = {
    "cvt": [
        ({"embed_dim": [6, 8, 9]}, r"widths=\(6, 8, 9\) needs one entry for each of depths"),
        ({"cls_token": [False, False]}, "cls_token=.* is not supported"),
        ({"stride_q": [1, 2]}, r"stride_q=\(1, 2\) is not supported; expected \(1, 1\)"),
        ({"padding_q": [1, 1]}, "query_paddings=1 with kernels=5 does not keep the map's size"),
        ({"qkv_projection_method": ["dw_bn", "avg"]}, "qkv_projection_method=.* is not supported"),
        ({"num_heads": [4, 2]}, "a width of 6 is not divisible by heads=4"),
        ({"kernel_qkv": [3, 9], "padding_q": [1, 4]}, "map of 5×6 is too small for .* size 9"),
    ],
    "mobilevit": [
        ({"neck_hidden_sizes": [4, 6]}, "has seven channels .* and three widths"),
        ({"hidden_sizes": [6, 9, 13]}, r"widths=\(6, 9, 13\) are not all divisible by heads=3"),
        ({"output_stride": 4}, "output_stride must be one of 8, 16, 32"),
        ({"conv_kernel_size": 4}, "kernel must be an odd number"),
        ({"patch_size": 0}, "patch must be"),
    ],
    "swiftformer": [
        ({"depths": [1, 2]}, r"widths=\(6, 6, 11\) needs one entry for each of depths"),
        ({"depths": [1, 0, 1]}, "depths must be"),
        ({"down_patch_size": 11}, "a map of 6×7 is too small for a convolution of size 11"),
    ],
    "efficientformer": [
        ({"dim": 12}, "dim=12 is not supported; expected 11"),
        ({"num_meta3d_blocks": 4}, "attention_blocks=4 must be at most .* depth, 3"),
        ({"pool_size": 2}, "pool_window must be an odd number"),
    ],
    "timm-efficientvit-train": [
        ({"num_heads": [1, 3]}, r"widths\[1\]=16 must be divisible by"),
        ({"kernels": [4, 3]}, "kernels must be"),
        ({"kernels": [3]}, r"one for each of 2 heads"),
        ({"down_ops": [["", 1], ["", 1]]}, r"needs downsamples\[1\]"),
        ({"depth": [1]}, r"needs one entry for each of depths=\(1,\)"),
    ],
    "timm-fastvit": [
        ({"token_mixers": ["repmixer"]}, r"mixers=.* needs one entry for each of depths"),
        ({"embed_dims": [8, 12, 16, 64]}, r"12 must be a multiple of 8 before it"),
        ({"token_mixers": ["repmixer", "attention"] * 2}, r"divisible by 32"),
        ({"repmixer_kernel_size": 4}, "kernel must be an odd number"),
        ({"cls_ratio": -1.0}, "top_ratio must be"),
        ({"stem_use_scale_branch": False}, r"is not supported; expected True"),
    ],
    "smt-train": [
        ({"ca_num_heads": [3, 2, 4, -1]}, r"modulation_heads\[0\]=3 must be positive"),
        ({"sa_num_heads": [-1, -1, -1, 4]}, r"\bheads\[2\]=0 must be positive"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *row) for name in REFUSED for row in REFUSED[name]]
)
def test_arguments_that_do_not_fit_are_told(name, changes, message, golden_dir):
    if name in SMALL:
        shapes, given, image = SMALL[name]
        family = models.FAMILIES[name]
        tensors = {key: np.zeros(shape) for key, shape in shapes.items()}
        tensors["input"] = np.zeros((1, *image))
    else:
        with np.load(golden_dir / f"{name}.npz") as golden:
            tensors = {key: golden[key] for key in golden.files}
        description = json.loads(tensors["config"].item())
        family, given = torch.family_of(description), description["constructor"]
    with pytest.raises(ValueError, match=message):
        settings, data = torch.sections(family, tensors, given | changes)
        family.sizes(settings, **data)
