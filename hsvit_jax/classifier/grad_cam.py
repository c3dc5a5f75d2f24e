"""Grad-CAM: the places of an image that speak for a class, by the last feature maps.

Source: Selvaraju et al. 2017, arXiv 1610.02391, section 3.
"""

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def grad_cam(
    model: Any, params: dict, stats: dict, x_BHWC: Array, class_B: Array | None = None
) -> Array | None:
    """Computes ReLU(Σ_c α_c A_c), where α_c is the mean gradient of the class's logit by map A_c.

    The maps are those that `hsvit visualize` draws, or the output of the last part that has maps.

    Args:
      x_BHWC: normalised images.
      class_B: classes to explain, defaults to the predicted ones.

    Returns:
      float32 (B, rows, columns) of the maps; None for a network without maps.
    """
    order: list[str] = []

    def through(wanted: str, offsets: Sequence[Array]) -> tuple[Array, dict[str, list[Array]]]:
        """Returns logits and all maps by name, after it adds offsets to the wanted ones."""
        seen: dict[str, list[Array]] = {}

        def tap(name: str, x: Any) -> Any:
            if not isinstance(x, jax.Array) or x.ndim != 4 or x.shape[1] * x.shape[2] == 1:
                return x
            of_name = seen.setdefault(name, [])
            x = x + offsets[len(of_name)] if name == wanted else x
            of_name.append(x)
            order.append(name)
            return x

        hooked = copy.copy(model)
        hooked.part_hook = tap
        how = {"hook": lambda name, x: tap(name, x) if name == "maps" else None}
        return hooked.apply(params, stats, x_BHWC, **how)[0], seen

    shapes = jax.eval_shape(lambda: through("", ())[1])
    if not order:
        return None
    wanted = "maps" if "maps" in order else order[-1]

    def score(offsets: list[Array]) -> tuple[Array, list[Array]]:
        logits_BK, seen = through(wanted, offsets)
        chosen_B = logits_BK.argmax(1) if class_B is None else class_B
        return jnp.take_along_axis(logits_BK, chosen_B[:, None], 1).sum(), seen[wanted]

    zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes[wanted]]
    found = jax.grad(score, has_aux=True)(zeros)
    pairs = zip(*jax.tree.map(lambda x: x.astype(jnp.float32), found), strict=True)
    heats = [(g.mean((1, 2), keepdims=True) * a).sum(3) for g, a in pairs]
    rows, columns = getattr(model.config, "tiles", (1, 1))  # that an HSViT's towers see in turn
    count, (batch, *size) = rows * columns, heats[0].shape
    tiled = jnp.stack([sum(heats[tile::count]) for tile in range(count)], 1)
    tiled = tiled.reshape(batch, rows, columns, *size).swapaxes(2, 3)
    return jax.nn.relu(tiled.reshape(batch, rows * size[0], columns * size[1]))
