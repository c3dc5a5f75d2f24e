"""Trains on a folder or archive of images, one sub-folder a class, and names the classes of a few
test images.

python examples/own_folder.py my_images [KEY=VALUE ...]
"""

import sys

import numpy as np

import hsvit_jax
from hsvit_jax import train

if len(sys.argv) < 2:
    sys.exit(__doc__)
folder, *settings = sys.argv[1:]
# Small images, for a minute on a laptop; data.image_size=128 is better for photos, and slower.
config = hsvit_jax.get_config(f"c2a2:folder={folder}", *(settings or ["data.image_size=32"]))
dataset = train.load_data(config)
result = hsvit_jax.fit(config, "runs/own-folder", dataset=dataset)
print(f"test {result.test}, curves in {result.curves}")

classifier = hsvit_jax.load("runs/own-folder")  # predict also takes paths
some = np.unique(np.linspace(0, len(dataset.test) - 1, 8).astype(int))
probabilities = classifier.predict(dataset.test.gather(some))
for label, p in zip(dataset.test.labels[some], probabilities, strict=True):
    truth, found = (classifier.class_names[k] for k in (label, p.argmax()))
    print(f"{truth}: predicted {found}, {p.max():.1%}")
