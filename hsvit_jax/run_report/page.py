"""The report as one HTML file: page.html filled in, with its pictures inside."""

import base64
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import artifacts
from hsvit_jax.run_report import charts, measures
from hsvit_jax.run_report.findings import Example, Findings
from hsvit_jax.train import metrics
from hsvit_jax.train.batches import target_text

_MATRIX = 20  # the most classes of a confusion matrix, and the most confusions of a list
_SMALL = 96  # pixels, up to which an image is shown without smoothing


def render(
    found: Findings,
    names: Sequence[str],
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    size: Sequence[int],
    **texts: Any,
) -> str:
    """Renders a report as HTML.

    Args:
      found: what was computed.
      names: of the classes.
      folder: of the page, which links to files are relative to.
      lines: of metrics.jsonl.
      size: rows and columns of an image.
      texts: what the page shows as it is given: title, table_name, split, facts, counts, settings,
        environment.
    """
    counts_KK = found.confusion_KK
    drawn = [("loss (nats)", "loss"), ("accuracy", "accuracy"), ("learning rate", "learning_rate")]
    of_all = (
        ("Most wrong", "The prediction's probability exceeds the true one's.", found.wrong),
        ("Least sure", "The two highest probabilities are close.", found.unsure),
    )
    fitted = found.fitted
    both = (("as trained", found.as_trained), (f"temperature {fitted.temperature:.2f}", fitted))
    return artifacts.filled(
        Path(__file__).with_name("page.html"),
        names=list(names),
        digest=_digest,
        aspect=f"{size[1]} / {size[0]}",
        pixels="pixels" if max(size) <= _SMALL else "",
        columns=max((len(row) for row in found.augmented), default=1),
        curves=[
            chart
            for title, key in drawn
            for chart in charts.lines(title, metrics.series(lines, key), key == "accuracy")
        ],
        counts_KK=counts_KK.tolist(),
        confusions=measures.frequent_confusions(counts_KK, _MATRIX)
        if len(names) > _MATRIX
        else None,
        by_class=measures.by_class(counts_KK),
        calibrations=[
            charts.reliability(f"{title}: ECE {c.ece:.1%}, loss {c.loss:.4f}", c.bins)
            for title, c in both
        ],
        examples=[
            (title, note, [_card(example, folder) for example in examples])
            for title, note, examples in of_all
        ],
        augmented=[
            [
                (_data_uri(x), "as it is" if target is None else target_text(target, names))
                for x, target in row
            ]
            for row in found.augmented
        ],
        **texts,
    )


def _card(example: Example, folder: Path) -> dict[str, Any]:
    """Returns an example as the page shows it, with its likeliest classes first."""
    p_K, heat_RR, name = example.probabilities_K, example.heat_RR, example.name
    return {
        "label": example.label,
        "p": p_K,
        "order": np.argsort(-p_K, kind="stable")[:3].tolist(),
        "image": _data_uri(example.image_HWC),
        "heat": "" if heat_RR is None else _data_uri(_heat(heat_RR)),
        "fall": 0 if heat_RR is None else 100 * max(heat_RR.max(), 0),
        "file": "/".join(Path(name).parts[-2:]),
        "link": os.path.relpath(name, folder) if os.path.isfile(name) else "",
        "votes": example.votes,
    }


def _heat(heat_RR: np.ndarray) -> np.ndarray:
    """Returns red where the probability falls, blue where it rises, and clear elsewhere."""
    strength_RR = heat_RR / max(np.abs(heat_RR).max(), 1e-6)
    red, blue = np.array([255, 32, 0]), np.array([0, 96, 255])
    color = np.where(strength_RR[..., None] > 0, red, blue)
    alpha = np.round(190 * np.abs(strength_RR))[..., None]
    return np.concatenate([color, alpha], -1).astype(np.uint8)


def _data_uri(pixels: np.ndarray) -> str:
    """Returns an image as text: JPEG for a large one, else PNG."""
    from PIL import Image

    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    kind = "JPEG" if max(pixels.shape) > _SMALL else "PNG"
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _digest(script: str) -> str:
    """Returns what a page's policy calls a script that may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
