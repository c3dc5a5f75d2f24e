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
    from hsvit_jax.train import Callback as Callback

__version__ = "0.1.0"

# Name offered here → (module, name there).
_LAZY = {
    "Callback": ("train", "Callback"),
    "Classifier": ("classifier", "Classifier"),
    "Family": ("models", "Family"),
    "build_model": ("classifier", "build_model"),
    "fit": ("run_report", "fit"),
    "from_arrays": ("data", "from_arrays"),
    "from_csv": ("data", "from_csv"),
    "from_examples": ("data", "from_examples"),
    "get_config": ("config", "get_config"),
    "load": ("classifier", "load"),
    "register": ("models", "register"),
}
__all__ = sorted(_LAZY)

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a name at its first use (PEP 562)."""
        if name not in _LAZY:
            raise AttributeError(f"module 'hsvit_jax' has no attribute {name!r}")
        module, attribute = _LAZY[name]
        value = getattr(importlib.import_module(f"hsvit_jax.{module}"), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "importlib"})
