"""State dicts of the references for many constructors, with the logits that they give.

`golden/constructors.json` holds, by name, each one's family and constructor, its tensors' names and
shapes, its images' shape, and the logits of evaluation, computed in float64 by networks in NumPy
that were written from the papers and agreed with all goldens to 1e-12. The values of tensors and
images are drawn here, from a generator whose raw stream never changes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CASES: Mapping[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "golden" / "constructors.json").read_text()
)


def uniform(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values in [-1, 1)."""
    raw = np.random.PCG64(seed).random_raw(math.prod(shape))
    return (raw / 2.0**63 - 1).reshape(shape)


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors of these names and shapes, of which every one matters and signals survive."""
    out = {}
    for number, (key, shape) in enumerate(shapes.items()):
        u = uniform(tuple(shape), 1000 * seed + number)
        if key.endswith("running_var"):
            u = 1 + 0.5 * u
        elif key.endswith((".g", "alpha")) or (key.endswith("weight") and u.ndim == 1):
            u = 1 + 0.3 * u
        elif u.ndim > 1 and key.endswith(("weight", "_matrix", "proj_k")):
            u = u * math.sqrt(3 / u[0].size)
        else:
            u = u / 2
        out[key] = u.astype(np.float32)
    return out


def tensors(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The state dict of a case, with the counters that the reference saves too."""
    shapes = CASES[name]["tensors"]
    out = drawn({k: s for k, s in shapes.items() if not k.endswith("tracked")}, seed)
    return out | {k: np.array(3) for k in shapes if k.endswith("tracked")}


def images(name: str) -> np.ndarray:
    """The images (B, C, H, W) that a case's logits are of, float32."""
    return (2 * uniform(tuple(CASES[name]["input"]), 999)).astype(np.float32)


def write(path: Path, name: str, described: bool = True) -> Path:
    """Writes a case as a golden is written."""
    case = CASES[name]
    description = {"family": case["family"], "variant": case["variant"]}
    if described:
        description["constructor"] = case["constructor"]
    entries = {"input": images(name), "logits_f64": np.array(case["logits"])}
    np.savez(path, **tensors(name), **entries, config=json.dumps(description))
    return path
