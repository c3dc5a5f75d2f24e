"""The search for the tokens that each block of a DeiT keeps: the second of PoWER's three steps.

The first step trains the network. The third resumes its training with the tokens found.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from hsvit_jax import config as config_lib
from hsvit_jax import train
from hsvit_jax.models.vit import deit
from hsvit_jax.studies import engine
from hsvit_jax.train import resume, step
from hsvit_jax.weights import files


class Found(NamedTuple):
    """The tokens that each block keeps.

    Attributes:
      share: share of the multiply-adds.
      file: bytes of the network with its trained weights.
      changes: settings of the third step, besides the file's path.
    """

    retained: tuple[int, ...]
    share: float
    file: bytes
    changes: dict[str, str]


def search(config: ml_collections.ConfigDict, penalty: float, rate: float) -> Found:
    """Trains a network, from `init.from`, together with the retention of its tokens.

    The token of rank k after block l's attention is multiplied by r_lk, from 0 to 1. The loss is
    that of training plus penalty · Σ_l l · Σ_k r_lk. Source: PoWER-BERT, section 3.3.

    Args:
      config: a DeiT that keeps all tokens, with the recipe and length of the search.
      penalty: λ.
      rate: learning rate of the retention, by Adam.

    Raises:
      ValueError: another network, no weights to start from, or as `hsvit_jax.train.prepare`.
    """
    model = config.model
    if model.family != "deit" or model.retained or model.flops_share != 1:
        raise ValueError(
            f"power-search needs a DeiT that keeps all tokens, not {model.variant} "
            f"({model.family}): set --config=deit:ti or deit:s"
        )
    run = train.prepare(config_lib.override(config, ["train.ema_decay=0"]))
    if not run.total_steps:
        raise ValueError("power-search takes no step: set --epochs above 0")
    start, _ = resume.start(run, False)
    if start is None:
        raise ValueError("power-search needs a trained network: set --config.init.from=RUN")
    soft = deit.SoftlyPruned(run.model.config, run.model.dtype).with_frozen(run.model.frozen)
    fresh, _ = soft.init(step.run_key(config.seed, step.INIT))
    start = {**start[0], "retention": fresh["retention"]}, start[1]
    tx = optax.partition(
        {"retention": _projected_adam(penalty, rate), "weights": run.tx},
        lambda params: {name: name if name == "retention" else "weights" for name in params},
    )
    for state, _ in engine.steps(run, start, model=soft, tx=tx):  # noqa: B007
        pass
    if (skipped := int(state["skipped"])) >= run.config.train.bad_steps_limit:
        raise train.Diverged(
            f"{skipped} of {run.total_steps} steps were not finite, and nothing was written: lower "
            "optim.learning_rate"
        )
    params = jax.device_get(state["params"])
    ranks_LP = np.asarray(params.pop("retention")["ranks"])
    sizes = run.model.config
    retained = deit.learned_schedule(ranks_LP, cls=sizes.cls)
    pruned = run.config.filled({"model.retained": retained})
    about = {**run.meta, "config": config_lib.to_tree(pruned), "step": run.total_steps}
    every = deit.multiply_adds(sizes, (sizes.tokens,) * sizes.depth)
    trees = {"params": params, "stats": jax.device_get(state["stats"])}
    changes = {"model.retained": ",".join(map(str, retained))}
    if config.init.classifier != "keep":  # the search has trained it
        changes["init.classifier"] = "keep"
    share = deit.multiply_adds(sizes, retained) / every
    return Found(retained, share, files.pack(trees, about), changes)


def _projected_adam(penalty: float, rate: float) -> optax.GradientTransformation:
    """Adam, within 0 to 1, on the loss with its penalty, whose gradient is constant."""

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
