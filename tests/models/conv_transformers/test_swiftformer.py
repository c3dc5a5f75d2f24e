"""SwiftFormer: exact sizes and costs, its attention by formula, and masks."""

import jax
import numpy as np
import pytest

from hsvit_jax.models.conv_transformers import swiftformer


@pytest.mark.parametrize("queries", ("equal", "weighted"))
def test_attention_is_the_formula(queries):
    module = swiftformer.AdditiveAttention(5, queries, jax.random.key(0))
    for linear in (module.query, module.key, module.mix, module.out):
        linear.bias[...] = jax.random.normal(jax.random.key(1), 5)
    x = np.random.default_rng(0).normal(size=(2, 7, 5)).astype(np.float32)

    def linear(layer, y):
        return y @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])

    q, k = (linear(layer, x) for layer in (module.query, module.key))
    q, k = (y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (q, k))
    weights = np.ones((2, 7, 1))
    if queries == "weighted":
        weights = (q @ np.asarray(module.score[...])[:, None]) * 5**-0.5
        weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    g = (weights * q).sum(1, keepdims=True)
    expected = linear(module.out, linear(module.mix, g * k) + q)
    np.testing.assert_allclose(module(x), expected, atol=1e-5)
    zero = jax.grad(lambda x: module(x * 0).sum())  # tokens of length 0 have a gradient, too
    assert np.isfinite(zero(x)).all()
    module.query.bias[...] = np.zeros(5)
    assert np.isfinite(zero(x)).all()
