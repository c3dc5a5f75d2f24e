"""The report as one HTML file: text escaped, pictures inside, nothing fetched.

`page.html` and `page.js` beside this module are its frame, style and filter by class.
"""

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import io
import os
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from hsvit_jax.run_report import charts, measures
from hsvit_jax.run_report.findings import Example, Findings
from hsvit_jax.run_report.measures import ClassMeasures, Measure
from hsvit_jax.text import printable
from hsvit_jax.train.batches import target_text

_MATRIX, _CONFUSIONS, _VOTES = 20, 20, 3  # the most classes, confusions and voted classes shown
_SMALL = 96  # pixels, up to which an image is shown without smoothing


@dataclasses.dataclass(frozen=True)
class Page:
    """The content of a report.

    Attributes:
      folder: of the page, which links to files are relative to.
      table: the file of all mistakes there.
      split: that was evaluated.
      class_names: of the logits.
      facts: figures at the head, by their labels.
      curves: the lines of metrics.jsonl.
      counts: images by split and class.
      findings: what was computed.
      settings: the configuration as text.
      environment: facts of the run, by their names.
    """

    title: str
    folder: Path
    table: str
    split: str
    class_names: Sequence[str]
    facts: Mapping[str, str]
    curves: Sequence[Mapping[str, Any]]
    counts: Mapping[str, np.ndarray]
    findings: Findings
    settings: str
    environment: Mapping[str, str]


def render(page: Page) -> str:
    """Renders a report as HTML."""
    shown = [*page.findings.wrong, *page.findings.unsure]
    height, width = shown[0].image_HWC.shape[:2] if shown else (1, 1)
    sections = (_head, _curves, _confusion, _by_class, _calibration, _examples, _augmentation)
    body = "\n".join(section(page) for section in (*sections, _data, _run))
    script = _beside("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return string.Template(_beside("page.html")).substitute(
        title=_text(page.title),
        script_hash=f"sha256-{digest}",
        aspect=f"{width} / {height}",
        columns=1 + max((len(row[1]) for row in page.findings.augmented), default=0),
        script=script,
        body=body,
    )


def _beside(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def _head(page: Page) -> str:
    facts = (f"<div><b>{_text(v)}</b><span>{_text(k)}</span></div>" for k, v in page.facts.items())
    options = (f'<option value="{i}">{_text(n)}</option>' for i, n in enumerate(page.class_names))
    return (
        f'<h1>{_text(page.title)}</h1><div class="facts">{"".join(facts)}</div>'
        f'<p class="filter"><label>Class <select id="filter"><option value="">all</option>'
        f"{''.join(options)}</select></label></p>"
    )


def _curves(page: Page) -> str:
    by_split: dict[str, list[Mapping[str, Any]]] = {}
    for line in page.curves:
        by_split.setdefault(line.get("split", "train, augmented"), []).append(line)

    def series(key: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [(row["step"], row[key]) for row in rows if isinstance(row.get(key), float)]
            for name, rows in by_split.items()
        }

    drawn = charts.lines("loss (nats)", series("loss"), "step", percent=False)
    drawn += charts.lines("accuracy", series("accuracy"), "step", percent=True)
    drawn += charts.lines("learning rate", series("learning_rate"), "step", percent=False)
    return f'<h2>Curves</h2><div class="charts">{drawn}</div>'


def _confusion(page: Page) -> str:
    counts_KK, names = page.findings.confusion_KK, page.class_names
    if len(names) > _MATRIX:
        rows = [
            ([true, predicted], [str(count), names[true], names[predicted]])
            for count, true, predicted in measures.frequent_confusions(counts_KK, _CONFUSIONS)
        ]
        table = _table(["images", "true class", "predicted"], rows, style="words")
        return f"<h2>Most frequent confusions</h2>{table}"
    shares_KK = counts_KK / np.maximum(counts_KK.sum(1, keepdims=True), 1)
    rows = []
    for i, row in enumerate(counts_KK):
        cells = (
            f'<td class="{"zero" if not n else "right" if i == j else ""}" '
            f'style="background: rgba(var(--heat), {0.75 * shares_KK[i, j]:.2f})" '
            f'title="{_text(names[i])} → {_text(names[j])}: {shares_KK[i, j]:.1%}">{n}</td>'
            for j, n in enumerate(row)
        )
        rows.append(f'<tr data-classes="{i}"><th>{_text(names[i])}</th>{"".join(cells)}</tr>')
    heads = "".join(f'<th title="{_text(n)}">{_text(n)}</th>' for n in names)
    return (
        "<h2>Confusion matrix</h2><p>Rows: the true class; columns: the predicted one. Shaded by "
        f'the share of the row.</p><div class="wide"><table class="confusion"><thead><tr><th></th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _by_class(page: Page) -> str:
    def cell(measure: Measure | None) -> str:
        if measure is None:
            return "–"
        low, high = 100 * measure.low, 100 * measure.high
        return f"{measure.value:.1%} <small>{low:.0f}–{high:.0f}</small>"

    def row(of_class: ClassMeasures) -> list[str]:
        return [f"{of_class.images:,}", *map(cell, of_class[1:])]

    found = measures.by_class(page.findings.confusion_KK)
    rows = [([k], [page.class_names[k], *row(of_class)]) for k, of_class in enumerate(found)]
    table = _table(["class", f"{page.split} images", "precision", "recall", "F1"], rows, plain=2)
    return (
        "<h2>By class</h2><p>Small: 95 % Wilson intervals; that of F1 follows from the one of its "
        f"Jaccard index.</p>{table}"
    )


def _calibration(page: Page) -> str:
    raw, fitted = page.findings.as_trained, page.findings.fitted
    drawn = "".join(
        charts.reliability(f"{name}: ECE {c.ece:.1%}, loss {c.loss:.4f}", c.bins)
        for name, c in (("as trained", raw), (f"temperature {fitted.temperature:.2f}", fitted))
    )
    itself = page.split == "val" or not page.counts["val"].sum()
    source = "on these very images" if itself else "on the validation split"
    return (
        "<h2>Calibration</h2><p>Accuracy of the images by confidence, their highest probability; "
        "bars on the dashed line are calibrated, bars below it too sure. The temperature, by which "
        f"logits are divided, was fitted {source}. ECE: expected calibration error.</p>"
        f'<div class="charts">{drawn}</div>'
    )


def _examples(page: Page) -> str:
    out = []
    notes = (
        ("Most wrong", page.findings.wrong, "The prediction's probability exceeds the true one's."),
        ("Least sure", page.findings.unsure, "The two highest probabilities are close."),
    )
    for title, examples, note in notes:
        cards = "".join(_card(example, page) for example in examples)
        out.append(
            f"<section data-shown><h2>{title}</h2><p>{note} Right: how far the prediction's "
            "probability falls (red) or rises (blue) when a part of the image is covered.</p>"
            f'<p class="soft"><output>{len(examples)} of {len(examples)} shown</output>; '
            f"{_text(page.table)} lists all that are wrong</p>"
            f'<div class="cards">{cards}</div></section>'
        )
    return "".join(out)


def _card(example: Example, page: Page) -> str:
    p_K, names, heat_RR = example.probabilities_K, page.class_names, example.heat_RR
    order = np.argsort(-p_K, kind="stable")[:3].tolist()
    best, image = order[0], _picture(example.image_HWC)
    heat = falls = ""
    if heat_RR is not None:
        heat = f'{image}<img alt="" src="{_data_uri(_heat(heat_RR))}">'
        heat = f'<div class="picture">{heat}</div>'
        falls = f"; covering a part takes up to {100 * max(heat_RR.max(), 0):.0f} points off"
    file = _text("/".join(Path(example.name).parts[-2:]))
    if os.path.isfile(example.name):
        place = quote(os.path.relpath(example.name, page.folder))
        file = f'<a href="{place}">{file}</a>'
    verdict = "" if best == example.label else ' class="wrong"'
    others = ", ".join(f"{_text(names[k])} {p_K[k]:.1%}" for k in order[1:])
    groups = sum(example.votes.values())
    votes = "".join(
        f'<li><span title="{_text(names[k])}">{_text(names[k])}</span>'
        f'<meter max="{groups}" value="{n}"></meter><span>{n}</span></li>'
        for k, n in list(example.votes.items())[:_VOTES]
    )
    return (
        f'<figure class="card" data-classes="{example.label} {best}"><div class="pair">'
        f'<div class="picture">{image}</div>{heat}</div><p class="soft">{file}</p>'
        f"<p><b{verdict}>{_text(names[best])} {p_K[best]:.1%}</b>, is {_text(names[example.label])}"
        f' <span class="soft">({p_K[example.label]:.1%})</span></p>'
        f'<p class="soft">then {others or "nothing"}{falls}</p>'
        + f'<p class="soft">votes of {groups} groups</p><ul class="votes">{votes}</ul>'
        * bool(votes)
        + "</figure>"
    )


def _heat(heat_RR: np.ndarray) -> np.ndarray:
    """Red where the probability falls, blue where it rises, clear where nothing changes."""
    strength_RR = heat_RR / max(np.abs(heat_RR).max(), 1e-6)
    red, blue = np.array([255, 32, 0]), np.array([0, 96, 255])
    colour = np.where(strength_RR[..., None] > 0, red, blue)
    alpha = np.round(190 * np.abs(strength_RR))[..., None]
    return np.concatenate([colour, alpha], -1).astype(np.uint8)


def _augmentation(page: Page) -> str:
    rows, names = page.findings.augmented, page.class_names
    if not rows:
        return ""

    def cell(image_HWC: np.ndarray, caption: str) -> str:
        picture = f'<div class="picture">{_picture(image_HWC)}</div>'
        return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"

    cells = "".join(
        cell(image, "as it is")
        + "".join(cell(x, _text(target_text(t, names))) for x, t in variants)
        for image, variants in rows
    )
    return (
        "<h2>Augmentation of the recipe</h2><p>Training images, and each as in five batches with "
        f'its target.</p><div class="wide augmented"><div class="recipe">{cells}</div></div>'
    )


def _data(page: Page) -> str:
    rows = [
        ([k], [name, *(f"{counts_K[k]:,}" for counts_K in page.counts.values())])
        for k, name in enumerate(page.class_names)
    ]
    total = ["all", *(f"{counts_K.sum():,}" for counts_K in page.counts.values())]
    table = _table(["class", *page.counts], [(None, total), *rows])
    return f"<h2>Images by split</h2>{table}"


def _run(page: Page) -> str:
    rest = [(None, [k, v]) for k, v in page.environment.items() if k != "command"]
    command = _text(page.environment.get("command", "not recorded"))
    return (
        f'<h2>Command</h2><pre class="command">{command}</pre>'
        f"<h2>Environment</h2>{_table(['', ''], rest, style='words')}"
        f"<h2>Settings</h2><details><summary>every setting, with its meaning and range</summary>"
        f"<pre>{_text(page.settings)}</pre></details>"
    )


def _table(
    heads: Iterable[str],
    rows: Iterable[tuple[list[int] | None, list[str]]],
    plain: int | None = None,
    style: str = "",
) -> str:
    """A table of rows with their classes for the filter (None: always shown) and their cells, which
    from number `plain` on are HTML already; `style` is a class of the style sheet."""
    out = []
    for classes, cells in rows:
        tag = "" if classes is None else f' data-classes="{" ".join(map(str, classes))}"'
        first, *rest = [
            cell if plain is not None and i >= plain else _text(cell)
            for i, cell in enumerate(cells)
        ]
        out.append(f"<tr{tag}><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return (
        f'<div class="wide"><table class="{style}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(out)}</tbody></table></div>"
    )


def _picture(image_HWC: np.ndarray) -> str:
    kind = "pixels" if max(image_HWC.shape) <= _SMALL else ""
    return f'<img class="{kind}" alt="" src="{_data_uri(image_HWC)}">'


def _data_uri(pixels: np.ndarray) -> str:
    """An image inside a page: JPEG for large ones, else PNG."""
    from PIL import Image

    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    kind = "JPEG" if max(pixels.shape) > _SMALL else "PNG"
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
