"""Trains a network in a custom loop with optax and the pure functions `init` and `apply`.

python examples/custom_loop.py [STEPS]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hsvit_jax
from hsvit_jax import data

digits = data.load("digits")
size, classes = digits.info.image_size, len(digits.info.class_names)
model = hsvit_jax.build_model("c2a2", image_size=size, channels=1, num_classes=classes)
params, stats = model.init(jax.random.key(0))  # plain nested dicts
optimizer = optax.adamw(1e-3)
state = optimizer.init(params)


def loss(params, stats, images, labels, key):
    logits, stats = model.apply(params, stats, images, train=True, dropout_key=key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats


@jax.jit
def step(params, stats, state, images, labels, key):
    (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(
        params, stats, images, labels, key
    )
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), stats, state, value


def pixels(images):
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


rng = np.random.default_rng(0)
for i in range(int(sys.argv[1]) if len(sys.argv) > 1 else 80):
    chosen = rng.integers(0, len(digits.train.labels), 64)
    images, labels = pixels(digits.train.images[chosen]), digits.train.labels[chosen]
    key = jax.random.fold_in(jax.random.key(1), i)
    params, stats, state, value = step(params, stats, state, images, labels, key)
    if i % 20 == 0:
        print(f"step {i}: loss {value:.3f}")

logits, _ = jax.jit(model.apply)(params, stats, pixels(digits.test.images))
print(f"test accuracy {np.mean(np.argmax(logits, 1) == digits.test.labels):.1%}")
