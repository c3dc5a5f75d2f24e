"""Classifies photos with an exported network on a small device, without jax and this package.

python examples/small_device.py NETWORK IMAGE ...

NETWORK is what `hsvit export RUN NETWORK` wrote: net.onnx (--quantize=int8 makes it four times
smaller), net.tflite, or a folder of --parts=N. Needs NumPy, Pillow, and onnxruntime for ONNX or
ai-edge-litert for LiteRT. Parts may lie on several devices: those that are in the folder vote.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps


def program(path):
    """Returns a function from named inputs to named outputs."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        return lambda **given: dict(zip(names, session.run(None, given), strict=True))
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(str(path)).get_signature_runner()


def pixels(photo, data):
    """Crops the centre and resizes it, uint8 (1, H, W, C)."""
    image = ImageOps.exif_transpose(Image.open(photo)).convert(
        "RGB" if data["channels"] == 3 else "L"
    )
    height, width = data["image_size"]
    image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    return np.asarray(image, np.uint8).reshape(1, height, width, data["channels"])


network, photos = Path(sys.argv[1]), sys.argv[2:]
sheet = network / "parts.json" if network.is_dir() else network.with_name(f"{network.name}.json")
about = json.loads(sheet.read_text())
files = [sheet.with_name(row["file"]) for row in about["programs"]]
first, *parts = [program(file) for file in files if file.exists()]
for photo in photos:
    images = pixels(photo, about["config"]["data"])
    answer = first(images=images)
    if parts:  # the last one is the head, which takes the sums of the others
        totals = [answer, *(part(images=images) for part in parts[:-1])]
        sums = {name: np.asarray(sum(total[name] for total in totals)) for name in answer}
        answer = parts[-1](**sums)
    (probabilities,) = answer["probabilities"]
    best = probabilities.argmax()
    print(f"{photo}: {about['class_names'][best]} {probabilities[best]:.1%}")
