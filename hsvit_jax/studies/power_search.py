"""hsvit power-search: learns how many tokens each block of a DeiT keeps, the second of PoWER's
three steps; the first trains the network, the third trains it on with the tokens found."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from hsvit_jax import artifacts, cli, train
from hsvit_jax import config as config_lib
from hsvit_jax.models.vit import deit, token_pruning
from hsvit_jax.runtime import signals
from hsvit_jax.train import batches, init_from, resume, step
from hsvit_jax.weights import release


def search(
    config: ml_collections.ConfigDict, penalty: float, rate: float
) -> tuple[tuple[int, ...], float, bytes]:
    """Trains a network, from `init.from`, together with the retention of its tokens.

    The token of rank k after block l's attention is multiplied by r_lk, from 0 to 1, and the loss
    is that of training plus penalty · Σ_l l · Σ_k r_lk. Source: PoWER-BERT, section 3.3.

    Args:
      config: of a DeiT that keeps all tokens; its recipe and length are the search's.
      penalty: λ.
      rate: learning rate of the retention, by Adam.

    Returns:
      the tokens that each block keeps, their share of the multiply-adds, and the network's file:
      its bytes, with the weights that were trained beside.

    Raises:
      ValueError: another network, no weights to start from, or as `hsvit_jax.train.prepare`.
    """
    model = config.model
    if model.family != "deit" or model.retained or model.flops_share != 1:
        raise ValueError(
            f"power-search learns the tokens of a DeiT that keeps all of them; {model.variant} "
            f"({model.family}) is another network: say --config=deit:ti or deit:s"
        )
    run = train.prepare(config_lib.override(config, ["train.ema_decay=0"]))
    if not run.total_steps:
        raise ValueError("power-search takes no step so: give --epochs above 0")
    start, _ = resume.start(run, False)
    if start is None:
        raise ValueError(
            "power-search starts from a trained network: name it with --config.init.from=RUN"
        )
    soft = deit.SoftlyPruned(run.model.config, run.model.dtype).with_frozen(run.model.frozen)
    fresh, _ = soft.init(step.run_key(config.seed, step.INIT))
    start = {**start[0], "retention": fresh["retention"]}, start[1]
    tx = optax.partition(
        {"retention": _projected_adam(penalty, rate), "weights": run.tx},
        lambda params: {name: name if name == "retention" else "weights" for name in params},
    )
    shape = jax.eval_shape(lambda: step.init_state(soft, tx, run.config))
    searched = dataclasses.replace(run, model=soft, tx=tx, state_shape=shape)
    state, train_step = step.first_state(searched, start), step.jit_step(searched)
    for batch in itertools.islice(batches.source(searched, 0), run.total_steps):
        state, _ = train_step(state, batch)
    if (skipped := int(state["skipped"])) >= run.config.train.bad_steps_limit:
        raise signals.Diverged(
            f"{skipped} of {run.total_steps} steps were not finite, and nothing was written: lower "
            "optim.learning_rate"
        )
    params = jax.device_get(state["params"])
    retained = token_pruning.learned_schedule(
        np.asarray(params.pop("retention")["ranks"]), cls=run.model.config.cls
    )
    pruned = run.config.filled({"model.retained": retained})
    about = {**run.meta, "config": config_lib.to_tree(pruned), "step": run.total_steps}
    sizes = run.model.config
    every = (sizes.tokens,) * sizes.depth
    share = deit.multiply_adds(sizes, retained) / deit.multiply_adds(sizes, every)
    trees = {"params": params, "stats": jax.device_get(state["stats"])}
    return retained, share, release.pack(trees, about)


def _projected_adam(penalty: float, rate: float) -> optax.GradientTransformation:
    """Adam on the loss with its penalty, whose gradient is constant, within 0 to 1."""

    def penalised(gradients: Any, _: Any) -> Any:
        return jax.tree.map(
            lambda g_LP: g_LP + penalty * jnp.arange(1, len(g_LP) + 1)[:, None], gradients
        )

    def projected(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, p: jnp.clip(p + u, 0.0, 1.0) - p, updates, params)

    return optax.chain(
        optax.stateless(penalised),
        optax.scale_by_adam(),
        optax.scale_by_learning_rate(rate),
        optax.stateless(projected),
    )


def run(request: cli.Request) -> None:
    """Searches, writes the network, and prints what it keeps and the command of the third step."""
    values, path = request.flags, cli.ending(request.flags.out, ".safetensors")
    if any(setting.startswith(("train.epochs=", "train.steps=")) for setting in request.settings):
        raise cli.Misuse("power-search trains for --epochs: leave --config.train.* out")
    artifacts.prepare_for(path)  # before the work, as it may fail
    if path.exists():
        raise ValueError(f"--out={path} is there already: move it away, or name another file")
    config = config_lib.override(request.config, [f"train.epochs={values.epochs}"])
    retained, share, file = search(config, values.penalty, values.rate)
    artifacts.write_file(path, file)
    kept = ",".join(map(str, retained))
    changes = {"init.from": str(path), "model.retained": kept}
    if config.init.classifier != "keep":  # the search has trained it
        changes["init.classifier"] = "keep"
    published = init_from.with_weights(config).data
    if published.mean != config.data.mean:  # of which the file written says nothing
        changes |= {f"data.{key}": ",".join(map(str, published[key])) for key in ("mean", "std")}
    print(
        f"tokens after each block's attention: {kept}, {share:.0%} of the multiply-adds\n"
        f"  network  {path}\n"
        f"  train    {request.train_line(**changes)}"
    )
