"""Configurations: read by name or from a file, checked, completed by the data set, stored.

    from hsvit_jax import config

    settings = config.get_config("c2a2:digits,tiny", "train.batch=64")

A name is imported at its first use: networks and jax are slow to import, and the command line
reports mistakes that need neither.
"""

import importlib
from typing import Any

# Module of this package → the names it exports.
_NAMES = {
    "words": "DATA_SETS RECIPES SWITCHES is_word parse_argument",
    "layers": "Contradiction Settings",
    "resolution": "Weights base build_model eval_batch per_channel resolve selection title "
    "total_steps validate",
    "schema": "FIRST all_keys describe leaves refuse_unread shown",
    "load": "for_network get_config named_model override",
    "recipes": "own_dropout",
    "synonyms": "meant",
    "variants": "is_registered",
    "stored": "completed default_workdir from_json names_run to_json to_tree",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
