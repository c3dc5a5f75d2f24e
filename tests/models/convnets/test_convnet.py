"""What convolutional networks share: statistics, activations, freezing, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
from support import hf_files, small_runs

from hsvit_jax.models.convnets import convnet
from hsvit_jax.ops.activations import ACTIVATIONS


def test_activations_by_their_published_names():
    x = jnp.array([-2.0, 0.5, 7.0])
    for name, expected in (
        ("relu6", [0, 0.5, 6]),
        ("relu2", [0, 0.25, 49]),
        ("swish", x / (1 + np.exp(-x))),
        ("quick_gelu", x / (1 + np.exp(-1.702 * x))),
        ("gelu_new", 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("leaky_relu", [-0.02, 0.5, 7]),
    ):
        np.testing.assert_allclose(ACTIVATIONS[name](x), expected, atol=1e-6)


def test_the_gradient_of_a_largest_pixel_goes_to_the_first():
    x = jnp.array([[[3.0, 1.0], [5.0, 1.0]], [[5.0, 0.0], [2.0, 1.0]]])[None]
    value, back = jax.vjp(convnet.largest, x)
    np.testing.assert_array_equal(value, [[5, 1]])
    (gradient,) = back(jnp.array([[2.0, 7.0]]))
    np.testing.assert_array_equal(gradient, [[[[0, 7], [2, 0]], [[0, 0], [0, 0]]]])


def test_a_frozen_backbone_neither_learns_nor_counts():
    sizes = {"block": "basic", "stem_channels": 4, "channels": (4, 6), "depths": (1, 1)}
    network = hf_files.network("resnet", size=(17, 20), **sizes)
    params, stats = small_runs.made_up_values(network)
    images = np.random.default_rng(2).normal(size=(4, 17, 20, 3)).astype(np.float32)
    frozen = network.with_frozen({"backbone"})

    def loss(model):
        def value(params):
            logits, new = model.apply(params, stats, images, train=True)
            return (logits**2).mean(), (logits, new)

        return jax.jit(jax.grad(value, has_aux=True))(params)

    grads, (logits, new) = loss(frozen)
    assert not any(np.any(x) for x in jax.tree.leaves(grads["backbone"]))
    assert np.any(grads["head"]["linear"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, new, stats)
    np.testing.assert_allclose(logits, network.apply(params, stats, images)[0], atol=1e-5)
    learned, (_, moved) = loss(network)
    assert all(np.any(x) for x in jax.tree.leaves(learned["backbone"]))
    assert not np.array_equal(moved["backbone"]["stem"]["norm"]["mean"], 0)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)
