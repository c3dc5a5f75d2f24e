"""Activations by the names that published configurations give them."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@jax.custom_jvp
def _erfc(x: Array) -> Array:
    return jax.lax.erfc(x)


# jax 0.12.0 cannot differentiate its own within `shard_map`; this is the rule of jax 0.10.
_erfc.defjvps(lambda dx, _, x: dx * jnp.exp(-jnp.square(x)) * (-2 / math.sqrt(math.pi)))


def gelu(x: Array) -> Array:
    """Returns the exact GELU, by the error function."""
    return 0.5 * x * _erfc(-x * np.sqrt(0.5).astype(x.dtype))


_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
#: Name → element-wise function.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    **dict.fromkeys(("", "none", "linear"), lambda x: x),
    **dict.fromkeys(("gelu", "gelu_python"), gelu),
    **dict.fromkeys(_GELU_TANH, lambda x: jax.nn.gelu(x, approximate=True)),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "leaky_relu": jax.nn.leaky_relu,
    "mish": jax.nn.mish,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
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
