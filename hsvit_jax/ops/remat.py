"""What a gradient computes again, because it is large and cheap, instead of keeping it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

Array = jax.Array


def after(gradient: Array, values: Any) -> Any:
    """The same values, which now depend on `gradient`.

    So that what a gradient computes again from them is not computed before, and held. The barriers
    by which `jax.checkpoint` says so are gone when XLA for CPU orders a program; a sum with a zero
    that is made of the gradient stays. values: a tree; left as they are: integers, and what is
    whole on devices where the gradient is in parts.
    """
    zero = jnp.minimum(jnp.abs(gradient[(0,) * gradient.ndim]), 0)

    def late(x: Array) -> Array:
        whole = jax.typeof(zero).mat.varying - jax.typeof(x).mat.varying
        if whole or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x + zero.astype(x.dtype)

    return jax.tree.map(late, values)


def recomputed(function: Callable[..., Array], *args: Array) -> Array:
    """function(*args), of which only the arguments are kept for the gradient.

    For what is large and cheap: the gradient computes it again, `after` it has come. What
    `function` closes over is kept too, and has its gradient.
    """
    traced = jax.make_jaxpr(function)(*args)

    def plain(args: tuple[Array, ...], closed_over: list[Array]) -> Array:
        (out,) = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, closed_over))(*args)
        return out

    def forward(args: tuple[Array, ...], closed_over: list[Array]) -> tuple[Array, Any]:
        return plain(args, closed_over), (args, closed_over)

    def backward(kept: Any, gradient: Array) -> tuple[tuple[Array, ...], list[Array]]:
        _, backwards = jax.vjp(lambda *both: plain(*after(gradient, both)), *kept)
        return backwards(gradient)

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward)
    return run(args, traced.consts)
