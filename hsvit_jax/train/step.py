"""The training state and the pure, compiled step.

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
from jax.sharding import Mesh

from hsvit_jax import augment
from hsvit_jax import mesh as mesh_lib

Array = jax.Array

# What a key is for: folded into the run's key, so that no two uses share a stream.
_INIT, _ORDER, _AUGMENT, _MIX, _DROPOUT = range(5)


def run_key(seed: int, use: int) -> Array:
    """The key of one use of randomness in a run."""
    return jax.random.fold_in(jax.random.key(seed), use)


def initial_key(seed: int) -> Array:
    """The key that a run's network is drawn by."""
    return run_key(seed, _INIT)


def init_state(
    model: Any,
    tx: optax.GradientTransformation,
    seed: int,
    *,
    ema: bool,
    start: tuple[dict, dict] | None = None,
) -> dict:
    """A training state at step 0, a nested dict of arrays; start: (params, stats) not drawn afresh.

    step: steps taken; params, stats, opt; ema: averaged params and stats, when asked for (opt and
    ema hold only what is trained, nothing of the network's frozen parts); bad: non-finite steps in
    a row; skipped: in all; meter: sums since the last log line.
    """
    params, stats = start or model.init(initial_key(seed))
    state = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "stats": stats,
        "opt": tx.init(trained(params, model.frozen)),
        "bad": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "meter": {name: jnp.zeros(()) for name in ("loss", "accuracy", "steps")},
    }
    if ema:
        moving = {"params": params, "stats": stats}
        moving = {name: trained(tree, model.frozen) for name, tree in moving.items()}
        state["ema"] = jax.tree.map(jnp.array, moving)
    return state


def trained(tree: dict, frozen: Collection[str]) -> dict:
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


def make_epoch_order(examples: int, seed: int) -> Callable[[int], Array]:
    """A compiled epoch → the order of that epoch's examples, int32 (N,)."""
    key = run_key(seed, _ORDER)

    @jax.jit
    def order(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), examples).astype(jnp.int32)

    return lambda epoch: order(jnp.int32(epoch))


#: Images uint8 (B, H, W, C), or features (B, …) made of them; labels (B,); ids (B,), each example's
#: index in the training split.
Batch = tuple[Array, Array, Array]


def make_train_step(
    model: Any,
    tx: optax.GradientTransformation,
    settings: augment.Augment,
    mesh: Mesh,
    *,
    seed: int,
    steps_per_epoch: int,
    log_every: int,
    ema_decay: float,
    aggregate: str = "psum",
    gradients: str = "float32",
) -> Callable[[dict, Batch], tuple[dict, dict]]:
    """The pure step: (state, batch) → (state, metrics).

    Floating-point features in place of images go into the network as they are. A step whose loss,
    gradient or outcome is not finite changes nothing but the counters. metrics: scalars, means
    since the last log line. aggregate, gradients: see `mesh.spread`.
    """
    apply = mesh_lib.spread(model, mesh, aggregate, gradients)
    tx = optax.with_extra_args_support(tx)
    augment_key, mix_key, dropout_key = (run_key(seed, u) for u in (_AUGMENT, _MIX, _DROPOUT))

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
                jax.random.fold_in(augment_key, number // steps_per_epoch),
                jax.random.fold_in(mix_key, number),
                images_BHWC,
                labels_B,
                ids_B,
            )
        own = trained(state["params"], model.frozen)
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
            if aggregate == "ordered" and model.groups
            else optax.tree.norm(grads)
        )
        updates, opt = tx.update(grads, state["opt"], own, norm=norm)
        own = optax.apply_updates(own, updates)
        moving = trained(stats, model.frozen)
        # The new parameters too: a learning rate that overflows them has a finite gradient.
        sizes = jnp.stack([loss, norm, optax.tree.norm(own), optax.tree.norm(moving)])
        good = jnp.isfinite(sizes).all()
        new = {"params": {**fixed, **own}, "stats": stats, "opt": opt}
        if ema_decay:
            new["ema"] = _average(state["ema"], {"params": own, "stats": moving}, number, ema_decay)
        old = {name: state[name] for name in new}
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        one = good.astype(jnp.float32)
        fresh = number % log_every == 0
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
    train_step: Callable[[dict, Batch], tuple[dict, dict]],
    state: dict,
    mesh: Mesh,
    network: Any = None,
    *,
    donate: bool = True,
) -> Callable[[dict, Batch], tuple[dict, dict]]:
    """`train_step`, jitted for the mesh; it donates the state unless told not to."""
    return jax.jit(
        train_step,
        donate_argnums=(0,) if donate else (),
        out_shardings=(
            mesh_lib.state_shardings(mesh, state, network),
            mesh_lib.replicated(mesh),
        ),
        compiler_options=mesh_lib.compiler_options(),
    )


def make_gather(mesh: Mesh, batch: int) -> Callable[[Array, Array, Array, Array], Batch]:
    """A jitted (images (N, H, W, C), labels (N,), order (N,), first) → the batch of the examples
    order[first : first + batch], split over `data`, of a training split whole on every device."""
    over_data = mesh_lib.batch_sharding(mesh)

    def gather(images: Array, labels: Array, order: Array, first: Array) -> Batch:
        ids_B = jax.lax.dynamic_slice(order, (first,), (batch,))
        ids_B = jax.lax.with_sharding_constraint(ids_B, over_data)
        return images[ids_B], labels[ids_B], ids_B

    return jax.jit(gather, out_shardings=over_data)


def place_state(
    state_fn: Callable[..., dict],
    mesh: Mesh,
    network: Any = None,
    *arguments: Any,
) -> dict:
    """Makes a state of the arguments where it lives: each group's parameters on its own devices."""
    shapes = jax.eval_shape(state_fn, *arguments)
    shardings = mesh_lib.state_shardings(mesh, shapes, network)
    options = mesh_lib.compiler_options(runs=False)
    return jax.jit(state_fn, out_shardings=shardings, compiler_options=options)(*arguments)


def state_template(state_fn: Callable[[], dict], mesh: Mesh, network: Any = None) -> dict:
    """Shapes, dtypes and shardings of a plain state, for a checkpoint to be restored into."""
    plain = jax.eval_shape(lambda: to_plain(state_fn()))
    shardings = mesh_lib.state_shardings(mesh, plain, network)
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
