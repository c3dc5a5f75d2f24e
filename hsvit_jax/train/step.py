"""The training state, and the step from one state to the next.

Everything random in a step is a function of (seed, epoch or step, example index, group index), so a
run does not depend on the number of devices or on where it was interrupted.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import serialization

from hsvit_jax import augment
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train.run_spec import Run

Array = jax.Array

# What a key is for: folded into the run's key, so that no two uses share a stream.
INIT, ORDER, AUGMENT, MIX, DROPOUT = range(5)


def run_key(seed: int, use: int) -> Array:
    """The key of one use of randomness in a run."""
    return jax.random.fold_in(jax.random.key(seed), use)


def initial_key(seed: int) -> Array:
    """The key that a run's network is drawn by."""
    return run_key(seed, INIT)


def init_state(
    model: Any,
    tx: optax.GradientTransformation,
    config: ml_collections.ConfigDict,
    start: tuple[dict, dict] | None = None,
) -> dict:
    """A training state at step 0, a nested dict of arrays; start: (params, stats) not drawn afresh.

    step: steps taken; params, stats, opt; ema: averaged params and stats, when asked for (opt and
    ema hold only what is trained, nothing of the network's frozen parts); bad: non-finite steps in
    a row; skipped: in all; meter: sums since the last log line.
    """
    params, stats = start or model.init(initial_key(config.seed))
    state = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "stats": stats,
        "opt": tx.init(trainable(params, model.frozen)),
        "bad": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "meter": {name: jnp.zeros(()) for name in ("loss", "accuracy", "steps")},
    }
    if config.train.ema_decay > 0:
        moving = {"params": params, "stats": stats}
        moving = {name: trainable(tree, model.frozen) for name, tree in moving.items()}
        state["ema"] = jax.tree.map(jnp.array, moving)
    return state


def trainable(tree: dict, frozen: Collection[str]) -> dict:
    """What of a tree of parts is not frozen."""
    return {name: part for name, part in tree.items() if name not in frozen}


def to_plain(state: dict) -> dict:
    """The state with optimizer internals as plain dicts: what a checkpoint holds."""
    return {**state, "opt": serialization.to_state_dict(state["opt"])}


def from_plain(plain: dict, like: dict) -> dict:
    """The way back; `like` is a state (or its shapes) of the same optimizer."""
    return {**plain, "opt": serialization.from_state_dict(like["opt"], plain["opt"])}


def averaged(state: dict) -> tuple[dict, dict]:
    """The (params, stats) to evaluate: the moving average where there is one.

    state: of training, or as a checkpoint holds it, where parts without an average are frozen.
    """
    average = state.get("ema", {})
    params, stats = ({**state.get(k, {}), **average.get(k, {})} for k in ("params", "stats"))
    return params, stats


#: Images uint8 (B, H, W, C), or features (B, …) made of them; labels (B,); ids (B,), each example's
#: index in the training split.
Batch = tuple[Array, Array, Array]


def make_train_step(
    run: Run, settings: augment.Augment | None = None
) -> Callable[[dict, Batch], tuple[dict, dict]]:
    """The pure step: (state, batch) → (state, metrics).

    Floating-point features in place of images go into the network as they are. A step whose loss,
    gradient or outcome is not finite changes nothing but the counters. metrics: scalars, means
    since the last log line. settings: of augmentation, the configuration's when left out.
    """
    config, model, mesh = run.config, run.model, run.mesh
    settings = augment_settings(config) if settings is None else settings
    aggregate, ema_decay = config.mesh.aggregate, config.train.ema_decay
    apply = mesh_lib.spread(model, mesh, aggregate, config.mesh.gradients)
    tx = optax.with_extra_args_support(run.tx)
    augment_key, mix_key, dropout_key = (run_key(config.seed, u) for u in (AUGMENT, MIX, DROPOUT))

    def loss_fn(
        own: dict,
        fixed: dict,
        stats: dict,
        images: Array,
        targets_BK: Array,
        key: Array,
        ids: Array,
    ):
        logits_BK, stats = apply(
            {**fixed, **own},
            stats,
            images,
            train=True,
            dropout_key=key,
            example_ids_B=ids,
        )
        loss = optax.softmax_cross_entropy(logits_BK, targets_BK).mean()
        hits_B = logits_BK.argmax(1) == targets_BK.argmax(1)
        return loss, (stats, hits_B.astype(jnp.float32).mean())

    def train_step(state: dict, batch: Batch) -> tuple[dict, dict]:
        number, (images_BHWC, labels_B, ids_B) = state["step"], batch
        if jnp.issubdtype(images_BHWC.dtype, jnp.floating):  # features, made of images before
            smoothing = settings.label_smoothing
            images = images_BHWC
            targets_BK = augment.one_hot_targets(labels_B, settings.num_classes, smoothing)
        else:
            images, targets_BK = augment.train_batch(
                settings,
                jax.random.fold_in(augment_key, number // run.steps_per_epoch),
                jax.random.fold_in(mix_key, number),
                images_BHWC,
                labels_B,
                ids_B,
            )
        own = trainable(state["params"], model.frozen)
        fixed = {name: part for name, part in state["params"].items() if name not in own}
        (loss, (stats, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            own,
            fixed,
            state["stats"],
            images,
            targets_BK,
            jax.random.fold_in(dropout_key, number),
            ids_B,
        )
        # The update is not fused with the gradients' sums, whose rounding would depend on the mesh.
        loss, stats, grads = jax.lax.optimization_barrier((loss, stats, grads))
        norm = (
            mesh_lib.ordered_norm(mesh, grads, model)
            if aggregate == "ordered" and model.group_axis_limit
            else optax.tree.norm(grads)
        )
        updates, opt = tx.update(grads, state["opt"], own, norm=norm)
        own = optax.apply_updates(own, updates)
        moving = trainable(stats, model.frozen)
        # The new parameters too: a learning rate that overflows them has a finite gradient.
        sizes = jnp.stack([loss, norm, optax.tree.norm(own), optax.tree.norm(moving)])
        good = jnp.isfinite(sizes).all()
        new = {"params": {**fixed, **own}, "stats": stats, "opt": opt}
        if ema_decay:
            new["ema"] = _average(state["ema"], {"params": own, "stats": moving}, number, ema_decay)
        old = {name: state[name] for name in new}
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        one = good.astype(jnp.float32)
        fresh = number % config.train.log_every == 0
        sums = {
            "loss": jnp.where(good, loss, 0.0),
            "accuracy": accuracy * one,
            "steps": one,
        }
        meter = {k: jnp.where(fresh, v, state["meter"][k] + v) for k, v in sums.items()}
        new |= {
            "step": number + 1,
            "bad": jnp.where(good, 0, state["bad"] + 1),
            "skipped": state["skipped"] + (~good).astype(jnp.int32),
            "meter": meter,
        }
        metrics = {
            "loss": meter["loss"] / meter["steps"],
            "accuracy": meter["accuracy"] / meter["steps"],
            "grad_norm": norm,
            "bad": new["bad"],
            "skipped": new["skipped"],
        }
        return new, metrics

    return train_step


def _average(ema: dict, new: dict, number: Array, decay: float) -> dict:
    """Exponential moving average, quick at first so that the start is soon forgotten."""
    rate = jnp.minimum(decay, (1.0 + number) / (10.0 + number))
    return jax.tree.map(lambda a, b: rate * a + (1.0 - rate) * b, ema, new)


def jit_step(
    run: Run, train_step: Callable[[dict, Batch], tuple[dict, dict]], *, donate: bool = True
) -> jax.stages.Wrapped:
    """`train_step`, jitted for the run's mesh; it donates the state unless told not to."""
    return jax.jit(
        train_step,
        donate_argnums=(0,) if donate else (),
        out_shardings=(
            mesh_lib.state_shardings(run.mesh, run.state_shape, run.model),
            mesh_lib.replicated(run.mesh),
        ),
        compiler_options=mesh_lib.compiler_options(),
    )


def first_state(run: Run, start: tuple[dict, dict] | None = None) -> dict:
    """`init_state`, each of its arrays where it lives: a group's parameters on their own devices.

    start: (params, stats), or None for fresh ones.
    """
    make = jax.jit(
        lambda start: init_state(run.model, run.tx, run.config, start),
        out_shardings=mesh_lib.state_shardings(run.mesh, run.state_shape, run.model),
        compiler_options=mesh_lib.compiler_options(runs=False),
    )
    return make(start)


def state_template(run: Run) -> dict:
    """Shapes, dtypes and shardings of a plain state, for a checkpoint to be restored into."""
    plain = to_plain(run.state_shape)
    shardings = mesh_lib.state_shardings(run.mesh, plain, run.model)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), plain, shardings
    )


def augment_settings(config: ml_collections.ConfigDict) -> augment.Augment:
    """The augmentation of a resolved configuration."""
    return augment.Augment(
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        num_classes=config.data.num_classes,
        **config.augment.to_dict(),
    )
