"""Fills in page.html, with the pictures of a report inside."""

import base64
import hashlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hsvit_jax import artifacts, tasks
from hsvit_jax.run_report import measures
from hsvit_jax.run_report.findings import Findings, Scored
from hsvit_jax.train import metrics

_MATRIX = 20  # the most classes of a confusion matrix, and the most confusions of a list
_SMALL = 96  # pixels, up to which an image is shown without smoothing
_WIDTH, _HEIGHT = 358, 206  # of a chart, whose y axis points down
_MOST_POINTS = 400  # of a line


class Chart(NamedTuple):
    """A chart: ticks as places with labels, and lines, bars or dots."""

    title: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: Sequence[dict[str, Any]] = ()
    bars: Sequence[dict[str, Any]] = ()
    dots: Sequence[tuple[float, float]] = ()
    width: int = _WIDTH
    height: int = _HEIGHT


def render(
    found: Findings | Scored,
    names: Sequence[str],
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    size: Sequence[int],
    task: tasks.Classify,
    **texts: Any,
) -> str:
    """Renders a report as HTML.

    Args:
      found: what was computed.
      names: of the classes.
      folder: of the page; links to files are relative to it.
      lines: of metrics.jsonl.
      size: rows and columns of an image.
      task: names the targets.
      texts: title, table_name, split, facts, counts, settings, environment.
    """
    drawn = [("loss (nats)", "loss"), *((tasks.name_of(x), x) for x in task.reported)]
    drawn += [("learning rate", "learning_rate")]
    of_task = _of_classes(found) if isinstance(found, Findings) else _of_outputs(found, names, task)
    return artifacts.filled(
        Path(__file__).with_name("page.html"),
        **of_task,
        names=list(names),
        digest=_digest,
        picture_of=_data_uri,
        heat_of=_heat,
        likeliest=lambda p_K: np.argsort(-p_K, kind="stable")[:3].tolist(),
        link=lambda name: os.path.relpath(name, folder) if os.path.isfile(name) else "",
        target_text=lambda target_K: task.text(target_K, names),
        aspect=f"{size[1]} / {size[0]}",
        pixels="pixels" if max(size) <= _SMALL else "",
        columns=max((len(row) for row in found.augmented), default=1),
        curves=[
            chart
            for title, key in drawn
            for chart in line_charts(title, metrics.series(lines, key), tasks.form(key) == ".2%")
        ],
        augmented=found.augmented,
        **texts,
    )


def _of_classes(found: Findings) -> dict[str, Any]:
    """Returns what the page shows of classes."""
    fitted, classes = found.fitted, len(found.confusion_KK)
    both = (("as trained", found.as_trained), (f"temperature {fitted.temperature:.2f}", fitted))
    most = measures.frequent_confusions(found.confusion_KK, _MATRIX)
    return {
        "by_output": None,
        "counts_KK": found.confusion_KK.tolist(),
        "confusions": most if classes > _MATRIX else None,
        "by_class": measures.by_class(found.confusion_KK),
        "calibrations": [
            reliability_chart(f"{title}: ECE {c.ece:.1%}, loss {c.loss:.4f}", c.bins)
            for title, c in both
        ],
        "wrong": found.wrong,
        "unsure": found.unsure,
    }


def _of_outputs(found: Scored, names: Sequence[str], task: tasks.Classify) -> dict[str, Any]:
    """Returns what the page shows of labels or numbers."""
    columns = [[f"{x:.4g}" for x in column.tolist()] for column in found.by_output.values()]
    numbers = names[: _MATRIX * (task.unit == "value")]
    pairs = zip(numbers, found.true_NK.T, found.answers_NK.T, strict=False)
    shown = {"heads": [task.noun, *found.by_output], "rows": list(zip(*columns, strict=True))}
    shown["charts"] = [scatter_chart(*pair) for pair in pairs]
    return {"by_output": shown, "worst": found.worst}


def scatter_chart(title: str, true_N: np.ndarray, answers_N: np.ndarray) -> Chart:
    """Returns a chart of predicted by true numbers; the dashed line is where both are equal."""
    both = np.concatenate([true_N, answers_N])
    low, high = float(both.min()), float(both.max())
    high += low == high
    x, x_ticks = _axis(low, high, 0, _WIDTH, ".6g")
    y, y_ticks = _axis(low, high, _HEIGHT, 0, ".6g")
    some = slice(None, None, -(-len(true_N) // _MOST_POINTS))
    dots = [*zip(map(x, true_N[some].tolist()), map(y, answers_N[some].tolist()), strict=True)]
    return Chart(f"{title}: predicted", "true", x_ticks, y_ticks, dots=dots)


def line_charts(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], percent: bool
) -> list[Chart]:
    """Returns a chart of lines over steps; an empty list without a point."""
    points = [point for of_one in series.values() for point in of_one]
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    top, form, last = (1.0, ".0%", ".2%") if percent else (1.05 * max(*ys, 1e-9), ",.6g", ".4g")
    x, x_ticks = _axis(min(0, *xs), max(*xs, 1), 0, _WIDTH, ",.6g")
    y, y_ticks = _axis(min(0.0, *ys), top, _HEIGHT, 0, form)
    drawn = []
    for number, (name, of_one) in enumerate(series.items()):
        if of_one:
            some = [*of_one[: -1 : -(-len(of_one) // _MOST_POINTS)], of_one[-1]]
            places = [(x(step), y(value)) for step, value in some]
            key = {"number": number, "name": name, "last": format(of_one[-1][1], last)}
            drawn.append(key | {"points": places})
    return [Chart(title, "step", x_ticks, y_ticks, lines=drawn)]


def reliability_chart(title: str, bins: Sequence[measures.Bin]) -> Chart:
    """Returns a chart of accuracy by confidence; more images make a bar more opaque."""
    x, x_ticks = _axis(0, 1, 0, _WIDTH, ".0%")
    y, y_ticks = _axis(0, 1, _HEIGHT, 0, ".0%")
    most = max(b.images for b in bins)
    bars = [
        {
            "x": x(i / len(bins)) + 1,
            "y": min(y(b.accuracy), _HEIGHT - 1),
            "width": round(_WIDTH / len(bins) - 2, 1),
            "opacity": round(0.25 + 0.75 * b.images / most, 2),
            "title": f"{b.images:,} images: confidence {b.confidence:.1%}, "
            f"accuracy {b.accuracy:.1%}",
        }
        for i, b in enumerate(bins)
        if b.images
    ]
    return Chart(title, "confidence", x_ticks, y_ticks, bars=bars)


def _axis(
    low: float, high: float, start: float, end: float, form: str
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Returns the map from values to places, and ticks (place, label) at most 5 steps apart."""

    def at(value: float) -> float:
        return round(start + (value - low) / (high - low) * (end - start), 1)

    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) <= 5 * m * power * (1 + 1e-9))
    ticks = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return at, [(at(i * step), format(i * step, form)) for i in ticks]


def _heat(heat_RR: np.ndarray) -> np.ndarray:
    """Returns red where the probability falls, blue where it rises, and clear elsewhere."""
    strength_RR = heat_RR / max(np.abs(heat_RR).max(), 1e-6)
    red, blue = np.array([255, 32, 0]), np.array([0, 96, 255])
    color = np.where(strength_RR[..., None] > 0, red, blue)
    alpha = np.round(190 * np.abs(strength_RR))[..., None]
    return np.concatenate([color, alpha], -1).astype(np.uint8)


def _data_uri(pixels: np.ndarray) -> str:
    """Returns an image as a data URI: JPEG for a large one, else PNG."""
    from PIL import Image

    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    kind = "JPEG" if max(pixels.shape) > _SMALL else "PNG"
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _digest(script: str) -> str:
    """Returns the digest that allows a script in the page's policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
