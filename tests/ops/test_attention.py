"""Attention's formula for the vector unit of a TPU, which a CPU computes too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsvit_jax.ops import conv
from hsvit_jax.ops.attention import attention


def inputs(queries: int, keys: int, width: int = 4, dtype=jnp.float32):
    """Arrays (3, 5, 2, T, E), an output's gradient, and counters of 3 groups and 5 examples."""
    shapes = [(3, 5, 2, n, width) for n in (queries, keys, keys, queries)]
    random = jax.random.split(jax.random.key(0), 4)
    q, k, v, grad = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(random, shapes, strict=True)
    )
    groups, examples = jnp.arange(3).reshape(-1, 1, 1, 1, 1), jnp.arange(5).reshape(1, -1, 1, 1, 1)
    return (q, k, v), grad, (7, groups, examples + 40)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 17)])
def test_on_a_tpu_few_tokens_are_attended_to_without_a_dot(queries, keys, rate):
    arrays, grad, counters = inputs(queries, keys)

    def both(grad, *arrays):
        out, pull = jax.vjp(lambda *x: attention(rate, *x, counters), *arrays)
        return out, *pull(grad)

    expected = jax.jit(both)(grad, *arrays)
    with conv.traced_for("tpu"):
        traced = jax.jit(lambda *given: both(*given)).trace(grad, *arrays)
        found = traced.lower().compile()(grad, *arrays)
    assert "dot_general" not in str(traced.jaxpr)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_on_a_tpu_bfloat16_is_summed_in_float32():
    arrays, *_ = inputs(9, 9, dtype=jnp.bfloat16)
    with conv.traced_for("tpu"):
        found = attention(0.0, *arrays, ())
    exact = attention(0.0, *(x.astype(jnp.float32) for x in arrays), ())
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize(
    ("batch", "keys", "width", "dots"),
    [
        (5, 17, 4, False),
        (5, 18, 4, True),
        (5, 6, 9, True),
        (128, 33, 8, False),
        (128, 34, 8, True),
    ],
)
def test_on_a_tpu_more_tokens_or_wider_heads_are_dots(batch, keys, width, dots):
    q, k = (jax.ShapeDtypeStruct((3, batch, 2, n, width), jnp.float32) for n in (1, keys))
    with conv.traced_for("tpu"):
        traced = jax.make_jaxpr(lambda *x: attention(0.0, *x, ()))(q, k, k)
    assert ("dot_general" in str(traced)) == dots
