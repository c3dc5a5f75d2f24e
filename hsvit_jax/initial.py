"""What a run's network starts from, when `init.from` names something."""

import json
from typing import Any

import ml_collections

from hsvit_jax import checkpoint, growth, models, step
from hsvit_jax import config as config_lib


def load(config: ml_collections.ConfigDict, model: Any) -> tuple[()] | tuple[tuple[dict, dict]]:
    """((params, stats),) for `model` from what `config.init` names; () when it names nothing.

    A folder of ours gives its best checkpoint, averaged as it would be evaluated; a smaller network
    is grown. config: resolved. Raises ValueError where there is no good checkpoint, or with the
    differences where the network is another.
    """
    place = config.init["from"]
    if not place:
        return ()
    try:
        _, state, meta = checkpoint.load_tree(place, "best")
    except ValueError as error:
        raise ValueError(f"init.from={place}: {error}") from error
    stored = config_lib.from_json(json.dumps(meta["config"]))
    if stored.model.family != config.model.family:
        raise ValueError(
            f"init.from={place} holds a network of the family {stored.model.family!r}; this "
            f"configuration's is {config.model.family!r}"
        )
    old = models.build(
        stored.model.to_dict(),
        image_size=tuple(stored.data.image_size),
        channels=stored.data.channels,
        num_classes=stored.data.num_classes,
    )
    source = state.get("ema", state)
    params, stats = (source.get(part, {}) for part in ("params", "stats"))
    try:
        grown = growth.grow(params, stats, old, model, step.initial_key(config.seed))
    except ValueError as error:
        raise ValueError(f"init.from={place}: {error}") from error
    return (grown,)
