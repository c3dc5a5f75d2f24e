"""Charts as inline SVG, coloured by the page's style sheet."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence

from hsvit_jax.run_report.measures import Bin
from hsvit_jax.text import printable

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 34
_MOST_POINTS = 400  # of a line

Points = Sequence[tuple[float, float]]


def lines(title: str, series: Mapping[str, Points], x_label: str, *, percent: bool) -> str:
    """Draws lines over a shared axis, with their last values; a single point is a dot."""
    points = [point for of_one in series.values() for point in of_one]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    plot = _Axes(min(0, *xs), max(*xs, 1), 0.0, 1.0 if percent else 1.05 * max(*ys, 1e-9), percent)
    body, legend = [], []
    for i, (name, of_one) in enumerate(series.items()):
        if not of_one:
            continue
        every = -(-len(of_one) // _MOST_POINTS)
        drawn = [plot.at(*point) for point in [*of_one[:-1:every], of_one[-1]]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        x, y = drawn[-1]
        body.append(f'<polyline class="line s{i}" points="{path}"/>')
        body.append(f'<circle class="dot s{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        last = f"{of_one[-1][1]:.2%}" if percent else f"{of_one[-1][1]:.4g}"
        legend.append(f'<span class="key s{i}">{html.escape(printable(name))} {last}</span>')
    return _figure(title, [*plot.grid(x_label), *body], "".join(legend))


def reliability(title: str, bins: Sequence[Bin]) -> str:
    """Draws accuracy by confidence beside the diagonal; a bar's opacity is its share of images."""
    plot, most = _Axes(0, 1, 0, 1, True, x_percent=True), max(b.images for b in bins)
    body = []
    for i, b in enumerate(bins):
        left, top = plot.at(i / len(bins), b.accuracy)
        right, bottom = plot.at((i + 1) / len(bins), 0)
        words = f"{b.images:,} images: confidence {b.confidence:.1%}, accuracy {b.accuracy:.1%}"
        if b.images:
            body.append(
                f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{right - left - 2:.1f}"'
                f' height="{max(bottom - top, 1):.1f}"'
                f' opacity="{0.25 + 0.75 * b.images / most:.2f}"><title>{words}</title></rect>'
            )
    (x0, y0), (x1, y1) = plot.at(0, 0), plot.at(1, 1)
    body.append(f'<line class="guide" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"/>')
    return _figure(title, [*plot.grid("confidence"), *body], "")


class _Axes:
    """The map from values to places, and the grid with its ticks."""

    def __init__(
        self, left: float, right: float, low: float, high: float, percent: bool, x_percent=False
    ) -> None:
        self.x, self.y = (left, right), (low, high)
        self._percent = x_percent, percent

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a value."""
        (left, right), (low, high) = self.x, self.y
        across, up = (x - left) / (right - left), (y - low) / (high - low)
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * width, _HEIGHT - _BOTTOM - up * height

    def grid(self, x_label: str) -> Iterator[str]:
        """Lines and labels of both axes."""
        x0, y0 = self.at(self.x[0], self.y[0])
        for y in _ticks(*self.y):
            at = self.at(self.x[0], y)[1]
            ends = f'x1="{x0}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
            yield f'<line class="grid" {ends}/>'
            yield f'<text x="{x0 - 6}" y="{at + 4:.1f}" text-anchor="end">{self._text(y, 1)}</text>'
        for x in _ticks(*self.x):
            at, anchor = self.at(x, 0)[0], "end" if x == self.x[1] else "middle"
            label = self._text(x, 0)
            yield f'<text x="{at:.1f}" y="{y0 + 15}" text-anchor="{anchor}">{label}</text>'
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        yield f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{x_label}</text>'

    def _text(self, value: float, axis: int) -> str:
        return f"{value:.0%}" if self._percent[axis] else f"{value:,.6g}"


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from low to high, at most `most` steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) <= most * m * power * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _figure(title: str, body: Sequence[str], legend: str) -> str:
    name = html.escape(title)
    return (
        f'<figure class="chart"><figcaption>{name}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">'
        f'{"".join(body)}</svg><div class="legend">{legend}</div></figure>'
    )
