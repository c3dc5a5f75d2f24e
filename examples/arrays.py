"""Trains on arrays: here 600 images of shapes that NumPy draws.

python examples/arrays.py [KEY=VALUE ...]
"""

import sys

import numpy as np

import hsvit_jax

rng = np.random.default_rng(0)
rows, columns = np.mgrid[:32, :32]
labels = np.arange(600) % 3
centres, sizes = rng.uniform(10, 22, (600, 2, 1, 1)), rng.uniform(4, 9, (600, 1, 1))
down, across = np.abs(rows - centres[:, 0]), np.abs(columns - centres[:, 1])
inside = np.select(
    [labels[:, None, None] == k for k in range(3)],
    [np.maximum(down, across) < sizes, np.hypot(down, across) < sizes, down + across < sizes],
)
images = (rng.integers(0, 90, (600, 32, 32, 1)) + 120 * inside[..., None]).astype(np.uint8)

dataset = hsvit_jax.from_arrays(images, labels, class_names=("square", "disc", "diamond"))
config = hsvit_jax.get_config("c2a2", *(sys.argv[1:] or ["train.epochs=8"]))
hsvit_jax.fit(config, "runs/arrays", dataset=dataset)

classifier = hsvit_jax.load("runs/arrays")
probabilities = classifier.predict(images[:6])
print("predicted", *(classifier.class_names[k] for k in probabilities.argmax(1)))
print("true     ", *(classifier.class_names[k] for k in labels[:6]))
