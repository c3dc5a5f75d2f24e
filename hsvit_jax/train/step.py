"""The training state, and the compiled step from one state to the next.

Every random number of a step is a function of (seed, epoch or step, example index, group index), so
a run depends neither on the number of devices nor on where it was interrupted.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import serialization

from hsvit_jax import augment, tasks
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train.run_spec import Run

Array = jax.Array

# Uses of randomness, each with a stream of its own.
INIT, ORDER, AUGMENT, MIX, DROPOUT = range(5)

#: (inputs, labels (B,) or targets (B, K), ids (B,)): uint8 images (B, H, W, C), or float features
#: (B, …) computed from them; ids are the examples' indices in the training split.
Batch = tuple[Array, Array, Array]


def run_key(seed: int, use: int) -> Array:
    """Derives the key of one use of randomness from a run's seed, whatever jax's default kind."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), use)


def init_state(
    model: Any,
    tx: optax.GradientTransformation,
    config: ml_collections.ConfigDict,
    start: tuple[dict, dict] | None = None,
) -> dict:
    """Builds the training state at step 0.

    Args:
        start: (params, stats); None draws them by the seed.

    Returns:
        a nested dict of arrays: `step`, steps taken; `params`, `stats`, `opt`; `ema`, averaged
        params and stats if train.ema_decay is set; `bad`, consecutive non-finite steps; `skipped`,
        all non-finite steps; `meter`, sums since the last log line. Parts that stay frozen have
        neither `opt` nor `ema`.
    """
    params, stats = start or model.init(run_key(config.seed, INIT))
    frozen = frozenset() if config.init.unfreeze_after else model.frozen
    figure = tasks.of(config).step_figure
    state = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "stats": stats,
        "opt": tx.init(trainable(params, frozen)),
        "bad": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "meter": {name: jnp.zeros((), jnp.float32) for name in ("loss", figure, "steps")},
    }
    if config.train.ema_decay > 0:
        moving = {"params": params, "stats": stats}
        moving = {name: trainable(tree, frozen) for name, tree in moving.items()}
        state["ema"] = jax.tree.map(jnp.array, moving)
    return state


def trainable(tree: dict, frozen: Collection[str]) -> dict:
    """Selects the parts of a tree of params or stats that are not frozen."""
    return {name: part for name, part in tree.items() if name not in frozen}


def with_leaves(tree: Any, others: Any) -> Any:
    """Returns a tree with the leaves that another one has at the same paths."""
    found = dict(jax.tree_util.tree_flatten_with_path(others)[0])
    return jax.tree_util.tree_map_with_path(lambda path, leaf: found.get(path, leaf), tree)


def restarted(run: Run, state: dict) -> dict:
    """Returns the state with the optimizer's moments and counts anew, but for the schedule's."""

    def is_count(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState)

    def restart(params: dict, opt: Any) -> Any:
        kept, fresh = lambda old, new: old if is_count(old) else new, run.tx.init(params)
        return jax.tree.map(kept, opt, fresh, is_leaf=is_count)

    shardings = mesh_lib.state_shardings(run.mesh, run.state_shape, run.model)["opt"]
    options = mesh_lib.compiler_options(runs=False)
    make = jax.jit(restart, out_shardings=shardings, compiler_options=options)
    return {**state, "opt": make(state["params"], state["opt"])}


def to_plain(state: dict) -> dict:
    """Converts the optimizer's state to plain dicts, as a checkpoint holds it."""
    return {**state, "opt": serialization.to_state_dict(state["opt"])}


def from_plain(plain: dict, like: dict) -> dict:
    """Inverts `to_plain`; `like` is a state of the same optimizer, or its shapes."""
    return {**plain, "opt": serialization.from_state_dict(like["opt"], plain["opt"])}


def make_train_step(
    run: Run, settings: augment.Augment | None = None
) -> Callable[[dict, Batch], tuple[dict, dict]]:
    """Builds the pure training step of a run.

    A step whose loss, gradient or outcome is not finite changes only the counters.

    Args:
        settings: augmentation of images, defaults to the configuration's.

    Returns:
        `train_step(state, batch)` → the next state and scalar metrics: loss and accuracy (or the
        task's figure) as means since the last log line, grad_norm, bad, skipped. `Run.lessons`
        follow the batch.
    """
    config, model, mesh = run.config, run.model, run.mesh
    settings = augment_settings(config) if settings is None else settings
    criterion, unsmoothed = make_criterion(run, settings.label_smoothing)
    if unsmoothed:
        settings = dataclasses.replace(settings, label_smoothing=0.0)
    inputs_of = _make_inputs(run, settings)
    gradient = _make_gradient(run, criterion)
    tx, figure = optax.with_extra_args_support(run.tx), tasks.of(config).step_figure

    def train_step(state: dict, batch: Batch, *teacher: dict) -> tuple[dict, dict]:
        number = state["step"]
        examples = *inputs_of(number, batch), batch[2]
        params = trainable(state["params"], model.frozen)
        frozen = {name: part for name, part in state["params"].items() if name not in params}
        loss, accuracy, stats, grads = gradient(
            number, params, frozen, state["stats"], examples, *teacher
        )
        # Without the barrier, fusion with the update makes the sums' rounding depend on the mesh.
        loss, stats, grads = jax.lax.optimization_barrier((loss, stats, grads))
        norm = (
            mesh_lib.ordered_norm(mesh, grads, model)
            if config.mesh.aggregate == "ordered" and model.group_axis_limit
            else optax.tree.norm(grads)
        )
        # Parts that train later have moments already, which this step neither reads nor changes.
        opt = with_leaves(jax.eval_shape(tx.init, params), state["opt"])
        updates, opt = tx.update(grads, opt, params, norm=norm)
        opt = with_leaves(state["opt"], opt)
        params = optax.apply_updates(params, updates)
        moving = {"params": params, "stats": trainable(stats, model.frozen)}
        # A learning rate may overflow the new parameters though the gradient is finite.
        sizes = [loss, norm, *(optax.tree.norm(tree) for tree in moving.values())]
        good = jnp.isfinite(jnp.stack(sizes)).all()
        new = {"params": {**frozen, **params}, "stats": stats, "opt": opt}
        if config.train.ema_decay:
            ema = {name: trainable(tree, model.frozen) for name, tree in state["ema"].items()}
            ema = _average(ema, moving, number, config.train.ema_decay)
            new["ema"] = {name: {**tree, **ema[name]} for name, tree in state["ema"].items()}
        old = {name: state[name] for name in new}
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        new |= _count(state, good, loss, (figure, accuracy), config.train.log_every)
        meter = new["meter"]
        means = {name: meter[name] / meter["steps"] for name in ("loss", figure)}
        return new, {**means, "grad_norm": norm, "bad": new["bad"], "skipped": new["skipped"]}

    return train_step


def _make_inputs(
    run: Run, settings: augment.Augment
) -> Callable[[Array, Batch], tuple[Array, Array]]:
    """Builds `inputs(step number, batch)` → the network's inputs and targets (B, K)."""
    augment_key, mix_key = (run_key(run.config.seed, use) for use in (AUGMENT, MIX))

    def inputs(number: Array, batch: Batch) -> tuple[Array, Array]:
        inputs, labels_B, ids_B = batch
        if jnp.issubdtype(inputs.dtype, jnp.floating):
            classes, spread = settings.num_classes, settings.label_smoothing
            return inputs, augment.one_hot_targets(labels_B, classes, spread)
        epoch = run.position(number) // run.steps_per_epoch
        keys = augment_key, epoch, jax.random.fold_in(mix_key, number)
        length = run.total_steps + run.length_offset
        late = number + run.length_offset >= round(settings.mix_until * length)
        return augment.train_batch(settings, *keys, inputs, labels_B, ids_B, late)

    return inputs


def make_criterion(
    run: Run, smoothing: float
) -> tuple[Callable[[Array, Array], tuple[Array, Array]], bool]:
    """Builds `criterion(outputs (B, K), targets (B, K))` → the loss and the figure of a batch, and
    returns whether it smooths the targets itself."""
    config, task, loss = run.config, tasks.of(run.config), tasks.loss(run.config)
    weights_K = class_weights(run) if config.data.balance == "weights" else None

    def plain(logits_BK: Array, targets_BK: Array) -> tuple[Array, Array]:
        own_BK = targets_BK if weights_K is None else weighed(targets_BK, weights_K, smoothing)
        loss = optax.softmax_cross_entropy(logits_BK, own_BK).mean()
        return loss, task.step_value(logits_BK, targets_BK)

    def named(outputs_BK: Array, targets_BK: Array) -> tuple[Array, Array]:
        weights_B = jnp.ones(len(targets_BK)) if weights_K is None else targets_BK @ weights_K
        return loss(outputs_BK, targets_BK, weights_B), task.step_value(outputs_BK, targets_BK)

    if loss is tasks.LOSSES["cross_entropy"]:
        return plain, weights_K is not None
    return named, False


def _make_gradient(
    run: Run, criterion: Callable[[Array, Array], tuple[Array, Array]]
) -> Callable[..., tuple[Array, Array, dict, dict]]:
    """Builds `gradient(step number, params, frozen params, stats, examples, *teacher)`.

    It returns loss, accuracy, stats and gradients of a batch, computed in train.accumulate parts.
    """
    config = run.config
    apply = mesh_lib.spread(run.model, run.mesh, config.mesh.aggregate, config.mesh.gradients)
    dropout_key = run_key(config.seed, DROPOUT)
    if run.teacher:
        ask = mesh_lib.spread(run.teacher.network, run.mesh, config.mesh.aggregate)
    count, weight = config.train.accumulate, config.train.distill_weight

    def gradient(
        number: Array, params: dict, frozen: dict, stats: dict, examples: tuple, *teacher: dict
    ) -> tuple[Array, Array, dict, dict]:
        @functools.partial(jax.value_and_grad, has_aux=True)
        def of_part(
            params: dict, stats: dict, inputs: Array, targets_BK: Array, ids_B: Array
        ) -> tuple[Array, tuple[Array, dict]]:
            logits_BK, stats = apply(
                {**frozen, **params},
                stats,
                inputs,
                train=True,
                dropout_key=jax.random.fold_in(dropout_key, number),
                example_ids_B=ids_B,
            )
            loss, accuracy = criterion(logits_BK, targets_BK)
            if teacher:
                temperature, taught_BK = config.train.distill_temperature, ask(*teacher, inputs)[0]
                soft = distillation(logits_BK, taught_BK, temperature)
                loss = (1.0 - weight) * loss + weight * soft
            return loss, (accuracy, stats)

        if count == 1:
            (loss, (accuracy, stats)), grads = of_part(params, stats, *examples)
            return loss, accuracy, stats, grads

        def add_part(sums: tuple, part: tuple) -> tuple[tuple, None]:
            stats, *before = sums
            (loss, (accuracy, stats)), grads = of_part(params, stats, *part)
            return (stats, *jax.tree.map(jnp.add, before, [loss, accuracy, grads])), None

        # Part n holds the examples n, n + count, …, so that every device has a share of it.
        parts = [x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1) for x in examples]
        zero = jnp.zeros((), jnp.float32)
        zeros = zero, zero, jax.tree.map(jnp.zeros_like, params)
        (stats, *sums), _ = jax.lax.scan(add_part, (stats, *zeros), parts)
        loss, accuracy, grads = jax.tree.map(lambda x: x / count, sums)
        return loss, accuracy, stats, grads

    return gradient


def distillation(logits_BK: Array, teacher_BK: Array, temperature: float) -> Array:
    """Returns T² · KL(softmax(teacher / T) ‖ softmax(logits / T)) in nats, the batch's mean.

    The factor keeps the size of its gradient at any T. Source: Hinton et al. 2015, section 2.
    """
    log_p_BK, log_q_BK = (jax.nn.log_softmax(x / temperature) for x in (teacher_BK, logits_BK))
    divergence_B = optax.losses.kl_divergence_with_log_targets(log_q_BK, log_p_BK)
    return temperature**2 * divergence_B.mean()


def _count(
    state: dict, good: Array, loss: Array, figure: tuple[str, Array], log_every: int
) -> dict:
    """Advances the counters, and adds a good step to the sums since the last log line."""
    number, one = state["step"], good.astype(jnp.float32)
    sums = {"loss": jnp.where(good, loss, 0.0), figure[0]: figure[1] * one, "steps": one}
    fresh = number % log_every == 0
    return {
        "step": number + 1,
        "bad": jnp.where(good, 0, state["bad"] + 1),
        "skipped": state["skipped"] + (~good).astype(jnp.int32),
        "meter": {k: jnp.where(fresh, v, state["meter"][k] + v) for k, v in sums.items()},
    }


def class_weights(run: Run) -> np.ndarray:
    """Returns N / (K · images of the class), float32 (classes,); K classes have images."""
    labels, classes = run.dataset.train.labels, run.config.data.num_classes
    counts = np.bincount(labels, minlength=classes)
    return (len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))).astype(np.float32)


def weighed(targets_BK: Array, weights_K: np.ndarray, smoothing: float) -> Array:
    """Multiplies target rows by their classes' weights, then smooths them.

    The evenly spread share has the example's weight: with a rare class's weight it could exceed the
    share of the example's own class.
    """
    own_BK = targets_BK * weights_K[None]
    return (1.0 - smoothing) * own_BK + smoothing * own_BK.mean(1, keepdims=True)


def _average(ema: dict, new: dict, number: Array, decay: float) -> dict:
    """Averages exponentially, faster at first to forget the start."""
    rate = jnp.minimum(decay, (1.0 + number) / (10.0 + number))
    return jax.tree.map(lambda a, b: rate * a + (1.0 - rate) * b, ema, new)


def jit_step(
    run: Run, settings: augment.Augment | None = None, *, donate: bool = True
) -> jax.stages.Wrapped:
    """Jits `make_train_step` for the run's mesh; the state is donated unless `donate` is False."""
    return jax.jit(
        make_train_step(run, settings),
        donate_argnums=(0,) if donate else (),
        out_shardings=(
            mesh_lib.state_shardings(run.mesh, run.state_shape, run.model),
            mesh_lib.replicated(run.mesh),
        ),
        compiler_options=mesh_lib.compiler_options(run.mesh),
    )


def first_state(run: Run, start: tuple[dict, dict] | None = None) -> dict:
    """Builds `init_state` with each array on its devices."""
    make = jax.jit(
        lambda start: init_state(run.model, run.tx, run.config, start),
        out_shardings=mesh_lib.state_shardings(run.mesh, run.state_shape, run.model),
        compiler_options=mesh_lib.compiler_options(runs=False),
    )
    return make(start)


def state_template(run: Run) -> dict:
    """Returns shapes, dtypes and shardings of a plain state, to restore a checkpoint into."""
    plain = to_plain(run.state_shape)
    shardings = mesh_lib.state_shardings(run.mesh, plain, run.model)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), plain, shardings
    )


def augment_settings(config: ml_collections.ConfigDict) -> augment.Augment:
    """Returns the augmentation of a resolved configuration."""
    return augment.Augment(
        size=tuple(config.data.image_size) if config.data.train_size else (),
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        num_classes=config.data.num_classes,
        **config.augment.to_dict(),
    )
