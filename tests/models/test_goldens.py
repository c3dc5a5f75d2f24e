"""Every file of reference vectors: its network, its tensors back, and a training step."""

import re
from pathlib import Path

import numpy as np
import pytest
from support import convnet_files

from hsvit_jax import config as configs
from hsvit_jax.weights import files, read, torch
from hsvit_jax.weights.convert import convert

GOLDENS = sorted(path.stem for path in Path(__file__).parents[1].glob("golden/*.npz"))
#: With gradients → the part that is frozen in their step.
FROZEN = {"hsvithet-efficientnet-b0like": {"backbone"}, "t2t-performer": {"constants"}}
TRAINED = [*FROZEN, "hf-resnet-basic", "timm-resnext", "timm-swin-train"]
SLOW = ["hf-efficientnet-train", "hf-mobilenetv2-train", "timm-efficientvit-train"]
SLOW += ["timm-fastvit-train", "smt-train"]
# What follows from the sizes.
COMPUTED = re.compile(r"num_batches_tracked$|attention_bias_idxs$")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in GOLDENS]
)
def test_a_file_becomes_the_network_and_comes_back(name, golden_dir, tmp_path):
    """Logits to 1e-9, or to 1e-6 with rotary positions, whose table is float32; and every tensor
    under the authors' names again, but those of the library's version 5, which are renamed."""
    report = convert(golden_dir / f"{name}.npz", tmp_path / "out")
    tensors, about = files.read(golden_dir / f"{name}.npz")
    found = read.read(golden_dir / f"{name}.npz", tensors, about)
    assert report["parameters"] == about["n_params"]
    tolerance = 1e-6 if name == "vix-viprope" else 1e-9
    assert report["max_abs_error"] <= tolerance * report["max_abs_logit"]
    written = configs.from_json((tmp_path / "out" / "config.json").read_text()).model
    expected = "deit" if "deit" in name else torch.family_of(about).name
    assert (written.family, written.variant) == (expected, "custom")
    if "v5keys" not in name:
        ours = torch.table(expected).dump(*found[:3])
        ours = {key: tensor for key, tensor in ours.items() if not COMPUTED.search(key)}
        wanted = {key for key in tensors if key in ours or key.endswith((".weight", ".bias"))}
        assert set(ours) == {key for key in wanted if "/" not in key} and len(ours) > 10
        for key, tensor in ours.items():
            np.testing.assert_array_equal(tensor, tensors[key])


@pytest.mark.parametrize(
    "name", [*TRAINED, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_a_training_step(name, golden_dir):
    convnet_files.training_step_agrees(golden_dir / f"{name}.npz", FROZEN.get(name, ()))
