"""The optimizer: one of optax's behind a global-norm clip, and its learning rate by step."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from optax import contrib

from hsvit_jax.models import costs

#: The path of a network's block in `costs.modules`.
_BLOCK = re.compile(r"(blocks|stages)(\.\d+)+$")


def warmup_steps(optim: ml_collections.ConfigDict, steps_per_epoch: int) -> int:
    """Returns the steps of optim.warmup_epochs; none while it is -1."""
    return max(round(optim.warmup_epochs * steps_per_epoch), 0)


def schedule(
    optim: ml_collections.ConfigDict,
    total_steps: int,
    steps_per_epoch: int,
    offset: int = 0,
    factor: float = 1.0,
) -> optax.Schedule:
    """Builds the learning rate by optimizer step: linear warm-up, then a cosine or a line to zero.

    Args:
        optim: the `optim` section; cosine_per='epoch' changes the rate once an epoch, as PyTorch
            Lightning does (the paper's recipe).
        offset: steps of total_steps before optimizer step 0.
        factor: of every rate.
    """
    peak = factor * optim.learning_rate
    warmup = warmup_steps(optim, steps_per_epoch)

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.int32) + offset
        counted = step
        if optim.cosine_per == "epoch":  # in integers, as a quotient may be rounded below one
            counted = step // steps_per_epoch * steps_per_epoch
        progress = jnp.clip((counted - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
        after = 0.5 * peak * (1.0 + jnp.cos(math.pi * progress))
        if optim.schedule == "linear":
            after = peak * (1.0 - progress)
        if optim.cosine_per == "never":
            after = jnp.full(step.shape, peak)
        return jnp.where(step < warmup, peak * (step + 1.0) / max(warmup, 1), after)

    return rate


def _is_kernel(path: tuple[Any, ...]) -> bool:
    """Whether a leaf's last name, without a list's number, is a kernel's."""
    names = [str(getattr(k, "key", "")) for k in path]
    name = [name for name in names if not name.isdigit()][-1]
    return "kernel" in name or name == "depthwise"


def decay_mask(params: Any) -> Any:
    """Marks the leaves that decay: kernels, not biases, norms, CLS or positions."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_kernel(path), params)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Builds `optax.clip_by_global_norm` as one factor, which fuses with Adam's update.

    `update` accepts a `norm` that is known already.
    """

    def clip(
        updates: Any, state: Any, _: Any = None, *, norm: jax.Array | None = None, **others: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.minimum(1.0, limit / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), clip)


def matrices(params: Any) -> Any:
    """Returns the axes of each kernel's matrix, None for leaves that Muon leaves to Adam.

    Inputs are all axes of a convolution but the last, and the last but one of another kernel.
    Axes before them (groups, towers, queries, keys and values) number matrices. Kernels of one
    input channel, biases and tokens are no matrices.
    """

    def axes(path: tuple[Any, ...], leaf: Any) -> contrib.MuonDimensionNumbers | None:
        names = [str(getattr(k, "key", "")) for k in path]
        if not _is_kernel(path) or "residual_kernel" in names or leaf.shape[-2] == 1:
            return None
        inputs = (-4, -3, -2) if leaf.ndim >= 4 and "groups" not in names else (-2,)
        return contrib.MuonDimensionNumbers(inputs, (-1,))

    return jax.tree_util.tree_map_with_path(axes, params)


def _muon(beta1: float, beta2: float) -> optax.GradientTransformation:
    """Builds Muon (Jordan, 2024) for kernels' matrices, and Nesterov's Adam for other leaves.

    A matrix's step has the root mean square 0.2, about that of Adam (arXiv 2502.16982), so that one
    rate and one decay serve both.
    """
    return contrib.muon(
        -1.0,  # uphill: the chain's last transformation turns it round
        np.float32((3.4445, -4.7750, 2.0315)),  # optax's, in float32 with x64 too
        adam_b1=beta1,
        adam_b2=beta2,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=0.2,
    )


#: optim.name → the direction of a step, before weight decay, by (beta1, beta2).
DIRECTIONS: Mapping[str, Callable[[float, float], optax.GradientTransformation]] = {
    "adamw": optax.scale_by_adam,
    "nadamw": lambda beta1, beta2: optax.scale_by_adam(beta1, beta2, nesterov=True),
    "lamb": lambda beta1, beta2: optax.scale_by_adam(beta1, beta2, eps=1e-6),
    "lion": optax.scale_by_lion,
    "sgd": lambda beta1, _: optax.trace(beta1, nesterov=True),
    "muon": _muon,
}


def layer_scales(model: Any, decay: float) -> Callable[[tuple[Any, ...]], float]:
    """Builds scales of the learning rate by layer, as BEiT's (arXiv 2106.08254, table 9).

    Returns:
        `scale(path of a leaf of params)`: 1 after the last block, `decay` for that block, its
        square for the block before, and so on down to the stem.
    """
    layers, blocks = {}, 0
    for name, *_ in costs.modules(model.unfrozen()):  # stop_gradient would precede all layers
        block = _BLOCK.search(name) is not None
        layers[name] = blocks + 1 if block or blocks else 0
        blocks += block
    return lambda path: decay ** (blocks + 1 - layers[costs.module_of(path)])


def _scaled(
    method: optax.GradientTransformation, scale: Callable[[tuple[Any, ...]], float]
) -> optax.GradientTransformation:
    """Scales the updates of a method, and leaves its state unchanged."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = method.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(lambda p, x: x * scale(p), updates), state

    return optax.GradientTransformation(method.init, update)


def build(
    optim: ml_collections.ConfigDict, rate: optax.Schedule, model: Any
) -> optax.GradientTransformation:
    """Builds a clip by global norm (clip_norm 0: none), then the optimizer of optim.name.

    Weights decay in kernels, or everywhere with `decay_all`. LAMB's step is as long as its
    parameter times the rate (You et al., 2020). `optim.layer_decay` counts the model's layers.
    """
    mask = None if optim.decay_all else decay_mask
    ratio = [optax.scale_by_trust_ratio()] if optim.name == "lamb" else []
    method = optax.chain(
        DIRECTIONS[optim.name](optim.beta1, optim.beta2),
        optax.add_decayed_weights(optim.weight_decay, mask),
        *ratio,
        optax.scale_by_learning_rate(rate),
    )
    if optim.layer_decay < 1:
        method = _scaled(method, layer_scales(model, optim.layer_decay))
    clip = clip_by_norm(optim.clip_norm) if optim.clip_norm else optax.identity()
    # The identity keeps the state's shape, so that a resumed run may change clip_norm.
    return optax.chain(clip, method)


def moment_bytes(settings: ml_collections.ConfigDict, model: Any) -> int:
    """Returns the bytes of the moments: Muon has one for a kernel, AdamW two."""
    params, _ = model.init_shapes()
    state = jax.eval_shape(build(settings, lambda step: 0.0, model).init, params)
    return sum(4 * x.size for x in jax.tree.leaves(state) if x.ndim)
