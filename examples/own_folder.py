"""Trains on a folder of images, one sub-folder a class, and names the classes of its images.

python examples/own_folder.py my_images [KEY=VALUE ...]
"""

import sys
from pathlib import Path

import numpy as np

import hsvit_jax
from hsvit_jax.data.images import is_image_name

if len(sys.argv) < 2:
    sys.exit(__doc__)
folder, *settings = sys.argv[1:]
config = hsvit_jax.get_config(f"c2a2:folder={folder}", *settings)
result = hsvit_jax.fit(config, "runs/own-folder")
print(f"test {result.test}, curves in {result.curves}")

classifier = hsvit_jax.load("runs/own-folder")
files = sorted(path for path in Path(folder).rglob("*") if is_image_name(path.name))[:8]
probabilities = classifier.predict(np.stack([classifier.read(path) for path in files]))
for path, p in zip(files, probabilities, strict=True):
    print(f"{path}: {classifier.class_names[p.argmax()]} {p.max():.1%}")
