"""Rematerialisation: a gradient recomputes what is large and cheap instead of keeping it.

XLA for CPU drops the barriers of `jax.checkpoint` when it orders a program (jax 0.10.2, see
docs/performance.md), and then recomputes everything at once and holds it. When it keeps them,
`jax.checkpoint` can take the place of `recomputed`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

Array = jax.Array


def after(gradient: Array, values: Any) -> Any:
    """The same values with a data dependency on `gradient`.

    Adds a zero computed from the gradient, so that XLA cannot start the recomputation early.
    Integers stay without, and so do arrays that are replicated where the gradient is split.
    """
    zero = jnp.minimum(jnp.abs(gradient[(0,) * gradient.ndim]), 0)

    def dependent(x: Array) -> Array:
        replicated = jax.typeof(zero).mat.varying - jax.typeof(x).mat.varying
        if replicated or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x + zero.astype(x.dtype)

    return jax.tree.map(dependent, values)


def recomputed(function: Callable[..., Array], *args: Array) -> Array:
    """function(*args), recomputed for the gradient from the arguments, `after` it has arrived.

    What `function` closes over is kept too, and has its gradient.
    """
    traced = jax.make_jaxpr(function)(*args)

    def plain(args: tuple[Array, ...], closed_over: list[Array]) -> Array:
        (out,) = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, closed_over))(*args)
        return out

    def forward(args: tuple[Array, ...], closed_over: list[Array]) -> tuple[Array, Any]:
        return plain(args, closed_over), (args, closed_over)

    def backward(residuals: Any, gradient: Array) -> tuple[tuple[Array, ...], list[Array]]:
        _, backwards = jax.vjp(lambda *both: plain(*after(gradient, both)), *residuals)
        return backwards(gradient)

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward)
    return run(args, traced.consts)
