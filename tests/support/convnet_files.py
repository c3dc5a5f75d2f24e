"""Goldens of the convolutional networks in float64, and whole state dicts of any constructor."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import torch_files

from hsvit_jax.weights import torch


def read(path):
    """(tensors, network, params, stats, reader, description) of a golden file."""
    with np.load(path) as golden:
        tensors = {k: golden[k] for k in golden.files}
    description = json.loads(tensors.pop("config").item())
    given = description.get("patched_or_fixed", {}) | description["constructor"]
    family = torch.family_of(description)
    weights = {k: v for k, v in tensors.items() if not k.startswith(("grad/", "after/"))}
    settings, data = torch.sections(family, weights, given)
    network = torch_files.build(settings, data)
    return tensors, network, *torch.table(family.name).load(weights, network), family, description


def training_step_agrees(path, frozen=(), double=True, tolerance=1e-4, noise=1e-6, statistics=1e-5):
    """Loss, logits, gradients and running statistics of one step are the golden's.

    tolerance: of each gradient's largest value; noise: of the largest of all, where stored
    gradients are rounding, as of a bias before a BatchNorm; statistics: of each one's largest, as
    they are stored by a run in float32 of the baselines.
    """
    tensors, network, params, stats, family, _ = read(path)
    network.frozen = frozenset(frozen)
    dtype = jnp.float64 if double else jnp.float32
    weights = {k: v for k, v in tensors.items() if not k.startswith(("grad/", "after/"))}
    after = {k.removeprefix("after/"): v for k, v in tensors.items() if k.startswith("after/")}
    grads = {k.removeprefix("grad/"): v for k, v in tensors.items() if k.startswith("grad/")}
    none = {k: np.zeros_like(v) for k, v in weights.items()}  # what is frozen has no gradient
    expected_grads, _ = torch.table(family.name).load(none | grads, network)
    _, expected_stats = torch.table(family.name).load(weights | after, network)

    def loss(params, stats, images, labels):
        logits, stats = network.apply(params, stats, images, train=True)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -scores.mean(), (logits, stats)

    with jax.enable_x64(double), jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, stats))
        images = jnp.asarray(tensors["input"].transpose(0, 2, 3, 1), dtype)
        labels = jnp.asarray(tensors["labels"], jnp.int32)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, (logits, new_stats)), gradients = step(*wide, images, labels)
    assert logits.dtype == dtype
    assert value == pytest.approx(float(tensors["loss_f64"]), rel=1e-12 if double else 1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_grads))

    def close(ours, theirs, part, least=0.0):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=part * np.abs(theirs).max() + least)

    close(logits, tensors["train_logits"], 3e-6)
    jax.tree.map(lambda a, b: close(a, b, tolerance, noise * largest), gradients, expected_grads)
    jax.tree.map(lambda a, b: close(a, b, statistics), new_stats, expected_stats)
