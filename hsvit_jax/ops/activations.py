"""Activations by the names that published configurations give them."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Array = jax.Array


def gelu(x: Array) -> Array:
    """The exact GELU, by the error function."""
    return jax.nn.gelu(x, approximate=False)


def _identity(x: Array) -> Array:
    return x


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _quick_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.702 * x)


def _relu_squared(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


#: Name → element-wise function. 'gelu' is exact; 'gelu_new', 'gelu_fast' and 'gelu_pytorch_tanh'
#: are its tanh approximation; '', 'none' and 'linear' are the identity.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "": _identity,
    "none": _identity,
    "linear": _identity,
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "mish": jax.nn.mish,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "relu2": _relu_squared,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The function of this name; raises ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        known = [*filter(None, ACTIVATIONS)]
        raise ValueError(
            f"unknown activation {name!r}; known: {', '.join(known[:5])} and {len(known) - 5} more"
        )
    return ACTIVATIONS[name]
