"""Splits a network after its frozen parts into a feature extractor and the rest.

This works for every family: parts are called by name (`BoundModules`), and a `Network.part_hook`
receives and replaces their outputs.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp

from hsvit_jax.models.network import Network

Array = jax.Array

# Images of the pass that `boundary` traces: a prime that is no other size of an output.
_IMAGES = 10_007


def boundary(network: Network) -> str:
    """The last of the frozen parts, which must all run before any other part.

    Raises:
        ValueError: the first part is not frozen, a frozen part runs after one that is not, or the
            last frozen part does not return one array with an entry for each image.
    """
    order: list[str] = []
    shapes: dict[str, Any] = {}

    def hook(name: str, output: Any) -> Any:
        order.append(name)
        shapes[name] = output
        return output

    seen = _hooked(network, hook)
    images = jax.ShapeDtypeStruct((_IMAGES, *_image(network)), jnp.float32)
    trees = network.init_shapes()
    jax.eval_shape(seen.apply, *trees, images)
    first = next((i for i, name in enumerate(order) if name not in network.frozen), len(order))
    frozen, used = ", ".join(sorted(network.frozen)), ", ".join(dict.fromkeys(order))
    if not first or network.frozen & {*order[first:]} or not network.frozen <= {*order}:
        raise ValueError(
            f"the frozen parts ({frozen}) are not what comes first in this network, in which an "
            f"image goes through {used}: freeze the first parts, or leave init.cache empty"
        )
    last = shapes[order[first - 1]]
    if not isinstance(last, jax.Array) or last.shape[:1] != (_IMAGES,):
        raise ValueError(
            f"the output of {order[first - 1]} is not one array for each image, so it cannot be "
            "cached: leave init.cache empty"
        )
    return order[first - 1]


def features(network: Network, part: str, params: dict, stats: dict, images_BHWC: Array) -> Array:
    """The output (B, …) of `part` in an evaluation pass of normalised images (B, H, W, C)."""
    seen: dict[str, Array] = {}

    def hook(name: str, output: Any) -> Any:
        seen[name] = output
        return output

    _hooked(network, hook).apply(params, stats, images_BHWC)
    return seen[part]


class Rest:
    """A network that takes the features of its frozen `part` instead of images.

    All other attributes are the network's, and so are its trees. Outputs before the split are NaN,
    so that a network that uses them after it cannot go unnoticed; those of parts that no network of
    the class trains are constants, and stay.
    """

    def __init__(self, network: Network, part: str) -> None:
        self.network, self.part = network, part
        self._passed = network.frozen - type(network).frozen - {part}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def apply(self, params: dict, stats: dict, features: Array, **how: Any) -> tuple[Array, dict]:
        """Applies the network to the output (B, …) of `part`; see `Network.apply`."""

        def hook(name: str, output: Any) -> Any:
            if name == self.part:
                return features.astype(output.dtype)
            if name in self._passed:
                return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), output)
            return output

        batch = features.shape[0]
        nan_B = jnp.nan * features.reshape(batch, -1)[:, 0]
        images_BHWC = jnp.broadcast_to(
            nan_B.reshape(batch, 1, 1, 1), (batch, *_image(self.network))
        )
        return _hooked(self.network, hook).apply(params, stats, images_BHWC, **how)


def _image(network: Network) -> tuple[int, int, int]:
    return *network.config.image_size, network.config.image_channels


def _hooked(network: Network, hook: Any) -> Network:
    hooked = copy.copy(network)
    hooked.part_hook = hook
    return hooked
