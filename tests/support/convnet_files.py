"""Goldens of the convolutional networks in float64, and whole state dicts of any constructor."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import torch_files

from hsvit_jax import models


def read(path):
    """(tensors, network, params, stats, reader, description) of a golden file."""
    with np.load(path) as golden:
        tensors = {k: golden[k] for k in golden.files}
    description = json.loads(tensors.pop("config").item())
    given = description.get("patched_or_fixed", {}) | description["constructor"]
    family = models.family_of(description)
    weights = {k: v for k, v in tensors.items() if not k.startswith(("grad/", "after/"))}
    settings, data = models.torch_settings(family, weights, given)
    network = torch_files.build(settings, data)
    return tensors, network, *family.torch_weights.load(weights, network), family, description


def comes_back(path):
    """The network has all of the golden's parameters and in float64 its logits, and its arrays
    under the golden's names are the golden's."""
    tensors, network, params, stats, family, description = read(path)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == description["n_params"]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, stats))
        images = jnp.asarray(tensors["input"].transpose(0, 2, 3, 1), jnp.float64)
        logits = jax.jit(lambda p, s, x: network.apply(p, s, x)[0])(*wide, images)
    limit = 1e-9 * np.abs(tensors["logits_f64"]).max()
    np.testing.assert_allclose(logits, tensors["logits_f64"], rtol=0, atol=limit)
    for key, tensor in family.torch_weights.dump(params, stats, network).items():
        assert key.endswith("tracked") or np.array_equal(tensor, tensors[key]), key


def training_step_agrees(path, frozen=frozenset()):
    """Loss, gradients and running statistics of one step in float64 are the golden's."""
    tensors, network, params, stats, family, _ = read(path)
    network.frozen = frozen
    weights = {k: v for k, v in tensors.items() if not k.startswith(("grad/", "after/"))}
    after = {k.removeprefix("after/"): v for k, v in tensors.items() if k.startswith("after/")}
    grads = {k.removeprefix("grad/"): v for k, v in tensors.items() if k.startswith("grad/")}
    none = {k: np.zeros_like(v) for k, v in weights.items()}  # what is frozen has no gradient
    expected_grads, _ = family.torch_weights.load(none | grads, network)
    _, expected_stats = family.torch_weights.load(weights | after, network)

    def loss(params, stats, images, labels):
        logits, stats = network.apply(params, stats, images, train=True)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -scores.mean(), stats

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, stats))
        images = jnp.asarray(tensors["input"].transpose(0, 2, 3, 1), jnp.float64)
        labels = jnp.asarray(tensors["labels"], jnp.int32)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, new_stats), gradients = step(*wide, images, labels)
    assert value == pytest.approx(float(tensors["loss_f64"]), rel=1e-12)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_grads))

    def close(ours, theirs):
        # Stored in float32; a bias before a BatchNorm has no gradient but rounding noise.
        limit = 1e-4 * np.abs(theirs).max() + 1e-6 * largest
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit)

    jax.tree.map(close, gradients, expected_grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        new_stats,
        expected_stats,
    )
    return gradients, new_stats, stats
