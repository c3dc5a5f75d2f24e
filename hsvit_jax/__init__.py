"""HSViT in JAX: horizontally scalable vision transformers for small data sets.

From Python, without flags:

    import numpy as np, hsvit_jax

    model = hsvit_jax.build_model("c2a2", image_size=32, channels=3, num_classes=10)

    config = hsvit_jax.get_config("c2a2:digits,tiny")   # or "configs/c2a2.py:cifar100,paper"
    hsvit_jax.fit(config, "runs/from-python")           # trains, or resumes

    classifier = hsvit_jax.load("runs/from-python")     # the best checkpoint
    probabilities = classifier.predict(np.zeros((4, 32, 32), np.uint8))  # or paths, or pictures

`model.init(key)` gives plain nested dicts (params, stats); `model.apply(params, stats, images)`
gives (logits, stats). Each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsvit_jax.augment import register_transform as register_transform
    from hsvit_jax.classifier import Classifier as Classifier
    from hsvit_jax.classifier import build_model as build_model
    from hsvit_jax.classifier import load as load
    from hsvit_jax.config import get_config as get_config
    from hsvit_jax.data import from_arrays as from_arrays
    from hsvit_jax.data import from_csv as from_csv
    from hsvit_jax.data import from_examples as from_examples
    from hsvit_jax.models import Family as Family
    from hsvit_jax.models import register as register
    from hsvit_jax.run_report import fit as fit
    from hsvit_jax.tasks import register_loss as register_loss
    from hsvit_jax.tasks import register_metric as register_metric
    from hsvit_jax.train import Callback as Callback

__version__ = "0.1.0"

# Module → the names that it offers here.
_NAMES = {
    "augment": "register_transform",
    "classifier": "Classifier build_model load",
    "config": "get_config",
    "data": "from_arrays from_csv from_examples",
    "models": "Family register",
    "run_report": "fit",
    "tasks": "register_loss register_metric",
    "train": "Callback",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a name at its first use (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'hsvit_jax' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"hsvit_jax.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "importlib"})
