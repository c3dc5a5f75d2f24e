"""The optimizer: AdamW behind a global-norm clip, with a cosine schedule or none."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax


def warmup_steps(optim: ml_collections.ConfigDict, steps_per_epoch: int) -> int:
    """The steps of the linear warm-up that optim.warmup_epochs asks for; none while it is -1."""
    return max(round(optim.warmup_epochs * steps_per_epoch), 0)


def schedule(
    optim: ml_collections.ConfigDict, total_steps: int, steps_per_epoch: int
) -> optax.Schedule:
    """Learning rate by optimizer step: linear warm-up, then a cosine to zero.

    optim.warmup_epochs, in epochs; optim.cosine_per: 'step', or 'epoch' for a cosine that moves
    once an epoch, as PyTorch Lightning's (the paper's recipe), or 'never' for a constant rate.
    """
    peak = optim.learning_rate
    warmup = min(warmup_steps(optim, steps_per_epoch), total_steps)
    per_epoch = optim.cosine_per == "epoch"

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        along = step - warmup
        if per_epoch:
            along = jnp.floor(along / steps_per_epoch) * steps_per_epoch
        progress = jnp.clip(along / max(total_steps - warmup, 1), 0.0, 1.0)
        cosine = 0.5 * peak * (1.0 + jnp.cos(math.pi * progress))
        if optim.cosine_per == "never":
            cosine = jnp.full_like(step, peak)
        return jnp.where(step < warmup, peak * (step + 1.0) / max(warmup, 1), cosine)

    return rate


def decay_mask(params: Any) -> Any:
    """True for the leaves that decay: kernels, not biases, norms, CLS or positions."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        return any("kernel" in str(getattr(k, "key", "")) for k in path)

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Gradients times limit / their global norm, where that is less than one; without a state.

    As `optax.clip_by_global_norm`, but one factor for all: its division and choice for each leaf
    would be a kernel and a pass of their own, where a factor is part of what follows. `update`
    takes a norm= that is known already.
    """

    def clip(
        updates: Any, state: Any, _: Any = None, *, norm: jax.Array | None = None, **others: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.minimum(1.0, limit / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), clip)


def build(optim: ml_collections.ConfigDict, rate: optax.Schedule) -> optax.GradientTransformation:
    """Clip by global norm (0: none), then AdamW; decay on kernels, or on all with `decay_all`."""
    adamw = optax.adamw(
        rate,
        b1=optim.beta1,
        b2=optim.beta2,
        weight_decay=optim.weight_decay,
        mask=None if optim.decay_all else decay_mask,
    )
    clip = clip_by_norm(optim.clip_norm) if optim.clip_norm else optax.identity()
    return optax.chain(clip, adamw)  # one shape of state, so that a resumed run may change the clip
