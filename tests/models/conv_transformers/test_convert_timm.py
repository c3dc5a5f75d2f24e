"""Files in timm's and the authors' names: goldens, the way back, and what is refused."""

import json

import jax
import numpy as np
import pytest
from support import convnet_files

import hsvit_jax
from hsvit_jax import main, models
from hsvit_jax.commands import convert
from hsvit_jax.weights import files

TRAINED = ("timm-efficientvit-train", "timm-fastvit-train", "smt-train")
GOLDENS = ("timm-efficientvit-train", "timm-fastvit-fused", "smt-train")


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_and_the_way_back(name, golden_dir):
    path = golden_dir / f"{name}.npz"
    convnet_files.logits_agree(path)
    tensors, network, params, stats, family, _ = convnet_files.read(path)
    for key, tensor in family.torch_weights.dump(params, stats, network).items():
        assert key.endswith("tracked") or np.array_equal(tensor, tensors[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step(name, golden_dir):
    convnet_files.training_step_agrees(golden_dir / f"{name}.npz")


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
    convert.convert_file(golden_dir / "timm-fastvit.npz", run)  # compares the logits
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
    ("name", "changes", "message"),
    [
        ("timm-efficientvit-train", {"num_heads": [1, 3]}, r"widths\[1\]=16 must be divisible by"),
        ("timm-efficientvit-train", {"kernels": [4, 3]}, r"kernels=\(4, 3\) must be odd"),
        ("timm-efficientvit-train", {"kernels": [3]}, r"one for each of 2 heads"),
        ("timm-efficientvit-train", {"down_ops": [["", 1], ["", 1]]}, r"needs downsamples\[1\]"),
        ("timm-efficientvit-train", {"depth": [1]}, r"depths=\(1,\) needs an entry per stage"),
        ("timm-efficientvit-train", {"img_size": 96}, r"img_size=96 does not fit an image"),
        ("timm-fastvit", {"token_mixers": ["repmixer"]}, r"depths=.* needs an entry per stage"),
        ("timm-fastvit", {"embed_dims": [8, 12, 16, 64]}, r"12 must be a multiple of 8 before it"),
        ("timm-fastvit", {"token_mixers": ["repmixer", "attention"] * 2}, r"divisible by 32"),
        ("timm-fastvit", {"repmixer_kernel_size": 4}, r"kernels must be odd"),
        ("smt-train", {"depths": [1, 1, 2]}, r"depths=.* needs an entry per stage"),
        ("smt-train", {"ca_num_heads": [3, 2, 4, -1]}, r"modulation_heads\[0\]=3 must be positive"),
        ("smt-train", {"sa_num_heads": [-1, -1, -1, 4]}, r"\bheads\[2\]=0 must be positive"),
        ("timm-fastvit", {"stem_use_scale_branch": False}, r"is not supported; expected True"),
    ],
)
def test_arguments_that_do_not_fit_are_told(name, changes, message, golden_dir):
    with np.load(golden_dir / f"{name}.npz") as golden:
        tensors = {key: golden[key] for key in golden.files}
    description = json.loads(tensors["config"].item())
    family = models.family_of(description)
    with pytest.raises(ValueError, match=message):
        settings, data = models.torch_settings(
            family, tensors, description["constructor"] | changes
        )
        models.build({"dtype": "float32", **settings}, **data)
