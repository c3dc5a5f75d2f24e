"""Exports a trained network as ONNX and classifies images with onnxruntime.

python examples/export_onnx.py [RUN]

RUN is a run's folder, an exported file, or a network of the zoo, by default the one for digits. The
extra `onnx` brings an older Orbax: install it in an environment of its own. Behind the first call,
nothing but NumPy and onnxruntime is needed.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from hsvit_jax import main

run = sys.argv[1] if len(sys.argv) > 1 else "zoo:c2a2-digits"
if code := main.main(["hsvit", "export", run, "network.onnx", "--format=onnx"]):
    sys.exit(code)

names = json.loads(Path("network.onnx.json").read_text())["class_names"]
session = onnxruntime.InferenceSession("network.onnx")
_, rows, columns, channels = session.get_inputs()[0].shape  # of a batch of any size
images = np.zeros((2, rows, columns, channels), np.uint8)
images[0, rows // 8 : -rows // 8, columns * 7 // 16 : columns * 9 // 16] = 255  # a stroke
images[1, rows // 8 : -rows // 8, columns // 4 : -columns // 4] = 255
images[1, rows // 4 : -rows // 4, columns * 3 // 8 : -columns * 3 // 8] = 0  # a ring
logits, probabilities = session.run(None, {"images": images})
for image in probabilities:
    print(f"{names[image.argmax()]} {image.max():.1%}")
