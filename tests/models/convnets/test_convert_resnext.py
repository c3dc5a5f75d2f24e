"""ResNeXt's files in timm's names: a golden's logits, training step and way back."""

import numpy as np
from support import convnet_files, torch_files

from hsvit_jax import models


def test_shapes_tell_the_variant():
    assert torch_files.variant_of_shapes("resnext", "50-32x4d") == "50-32x4d"


def test_a_golden(golden_dir):
    path = golden_dir / "timm-resnext.npz"
    convnet_files.logits_agree(path)
    convnet_files.training_step_agrees(path)
    tensors, network, params, stats, family, description = convnet_files.read(path)
    written = family.torch_weights.dump(params, stats, network)
    for key, tensor in written.items():
        if not key.endswith("tracked"):
            np.testing.assert_array_equal(tensor, tensors[key])
    # Without a constructor the shapes tell the sizes.
    shown, _ = models.torch_settings(family, tensors, {})
    told, _ = models.torch_settings(family, tensors, description["constructor"])
    assert shown == told and told["channels"] == (16, 32, 32, 40)
