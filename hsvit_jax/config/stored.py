"""A run's configuration on disk: the name of its folder, and JSON."""

import json
import re
from collections.abc import Sequence
from typing import Any

import ml_collections

from hsvit_jax.config import defaults

# Settings that are in a run's folder name already, or that leave its results as they are.
_NO_OTHER_RUN = (
    "seed",
    "init.cache",
    "data.name",
    "data.dir",
    "mesh.data",
    "mesh.group",
    "train.log_every",
    "eval.batch",
    "checkpoint.every",
    "checkpoint.keep_best",
    "checkpoint.keep_latest",
)


def names_run(key: str) -> bool:
    """Whether a setting decides the name that `default_workdir` gives."""
    return key in ("seed", "data.name") or key not in _NO_OTHER_RUN


def default_workdir(
    config: ml_collections.ConfigDict, spec: str, settings: Sequence[str] = ()
) -> str:
    """A readable folder under runs/: configuration, data set, recipe, switches, changes and seed.

    spec: the configuration's file or name with the words after the colon; settings: the KEY=VALUE
    texts that changed it. The same command gives the same folder, so that a second run goes on
    where the first stopped, and another setting gives another, so that runs do not mix.
    """
    place, _, argument = spec.partition(":")
    stem = place.rsplit("/", 1)[-1].removesuffix(".py")
    kind, _, path = config.data.name.partition("=")
    data = f"{kind}-{path.rstrip('/').rsplit('/', 1)[-1]}" if path else kind
    given = [word.strip() for word in argument.split(",")]
    variant = [config.model.variant] if config.model.family != "hsvit" else []
    words = [
        stem,
        *variant,
        data,
        config.recipe,
        *(word for word in defaults.SWITCHES if word in given),
    ]
    last = dict(setting.partition("=")[::2] for setting in settings)
    for key, value in sorted(last.items()):
        if key == "init.from":
            value = value.rstrip("/").rpartition("/")[2]
        if key not in _NO_OTHER_RUN:
            words.append(key.rpartition(".")[2] + value)
    name = "-".join([*words, f"seed{config.seed}"])
    return "runs/" + re.sub(r"[^\w.=-]+", "_", name)[:200]


def to_json(config: ml_collections.ConfigDict) -> str:
    """The configuration as indented JSON, to be read by people and by `from_json`."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True)


def from_json(text: str) -> ml_collections.ConfigDict:
    """A configuration written by `to_json`; lists come back as tuples.

    Raises ValueError if the text holds no JSON object.
    """

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: tuples(v) for k, v in value.items()}
        return tuple(tuples(v) for v in value) if isinstance(value, list) else value

    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError(f"a configuration is a JSON object; got {type(tree).__name__}")
    return ml_collections.ConfigDict(tuples(tree)).lock()
