"""Charts in the numbers that page.html draws: places in a plot whose y axis points down."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hsvit_jax.run_report.measures import Bin

_WIDTH, _HEIGHT = 358, 206
_MOST_POINTS = 400  # of a line

Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """A chart: ticks as places with labels, and either lines or bars."""

    title: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: Sequence[dict[str, Any]] = ()
    bars: Sequence[dict[str, Any]] = ()
    width: int = _WIDTH
    height: int = _HEIGHT


def lines(title: str, series: Mapping[str, Points], percent: bool) -> list[Chart]:
    """Returns a chart of lines over steps, a single point as a dot; none without a point."""
    points = [point for of_one in series.values() for point in of_one]
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    top, form, last = (1.0, ".0%", ".2%") if percent else (1.05 * max(*ys, 1e-9), ",.6g", ".4g")
    x, x_ticks = _axis(min(0, *xs), max(*xs, 1), 0, _WIDTH, ",.6g")
    y, y_ticks = _axis(0.0, top, _HEIGHT, 0, form)
    drawn = []
    for number, (name, of_one) in enumerate(series.items()):
        if of_one:
            some = [*of_one[: -1 : -(-len(of_one) // _MOST_POINTS)], of_one[-1]]
            places = [(x(step), y(value)) for step, value in some]
            key = {"number": number, "name": name, "last": format(of_one[-1][1], last)}
            drawn.append(key | {"points": places})
    return [Chart(title, "step", x_ticks, y_ticks, lines=drawn)]


def reliability(title: str, bins: Sequence[Bin]) -> Chart:
    """Returns a chart of accuracy by confidence; a bar's opacity is its share of the images."""
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
    """Returns the map from values to places, and the places of the ticks with their labels."""

    def at(value: float) -> float:
        return round(start + (value - low) / (high - low) * (end - start), 1)

    return at, [(at(tick), format(tick, form)) for tick in _ticks(low, high)]


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round values from low to high, in at most `most` steps."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) <= most * m * power * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
