"""The scripts in examples/, each as its first lines say, on small data for a step or two."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from support.data_files import class_folders

import hsvit_jax
from hsvit_jax import main
from hsvit_jax.weights import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ("train.steps=2", "train.batch=16", "model.depth=1")

SMALL = (
    ("float.onnx",),
    ("int8.onnx", "--quantize=int8"),
    ("litert.tflite",),
    ("parts", "--format=onnx", "--quantize=int8", "--parts=2"),
    ("litert_parts", "--format=tflite", "--parts=2"),
)
#: Stands before an example and stops what a small device lacks.
WITHOUT_JAX = "import runpy, sys; sys.modules.update(jax=None, hsvit_jax=None); del sys.argv[0]; "
WITHOUT_JAX += "runpy.run_path(sys.argv[0], run_name='__main__')"
ONNX = pytest.mark.skipif(find_spec("jax2onnx") is None, reason="run by `make test-onnx`")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the examples are given: class folders of noise, and weights of a ResNet-18."""
    folder = tmp_path_factory.mktemp("examples")
    class_folders(folder / "my_images", ("cat", "dog"), 40, (40, 48, 3))
    model = hsvit_jax.build_model("resnet:18")
    weights = torch.table("resnet").dump(*model.init(jax.random.key(0)), model)
    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "18.safetensors")
    stroke = Image.new("L", (60, 40))
    stroke.paste(255, (27, 4, 33, 36))
    stroke.save(folder / "stroke.png")
    for words in SMALL if ONNX.args[0] is False else ():
        assert (
            main.main(["hsvit", "export", "zoo:c2a2-digits", str(folder / words[0]), *words[1:]])
            == 0
        )
    return folder


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("own_folder", ("my_images", *SHORT), r"cat: predicted (cat|dog), \d"),
        ("arrays", SHORT, r"true      square disc diamond"),
        (
            "pretrained_backbone",
            ("my_images", "18.safetensors", *SHORT, "data.image_size=32"),
            r"test accuracy \d.* parameters",
        ),
        ("custom_loop", ("2",), r"step 0: loss \d\.\d+\ntest accuracy \d"),
        ("towers", SHORT, r"4 devices: test accuracy \d"),
        ("draw_shapes", ("shapes",), r"240 pictures"),
        pytest.param("export_onnx", (), r"\n1 \d+\.\d%\n0 \d", marks=ONNX),
        *(
            pytest.param(
                "small_device",
                (file, "stroke.png"),
                r"^stroke.png: 1 [6-9]\d\.\d%\n$",
                marks=ONNX,
                id=f"onnx-{file}",
            )
            for file, *_ in SMALL
        ),
    ],
)
def test_it_runs(files, name, words, said):
    script = EXAMPLES / f"{name}.py"
    assert f"python examples/{script.name}" in script.read_text("utf-8")
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(EXAMPLES.parent)}
    alone = ["-c", WITHOUT_JAX] if name == "small_device" else []
    command = [sys.executable, *alone, script, *words]
    done = subprocess.run(
        command, cwd=files, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout)


def test_every_example_is_tested():
    (cases,) = (mark for mark in test_it_runs.pytestmark if mark.name == "parametrize")
    names = {getattr(case, "values", case)[0] for case in cases.args[1]}
    assert names == {path.stem for path in EXAMPLES.glob("*.py")}
