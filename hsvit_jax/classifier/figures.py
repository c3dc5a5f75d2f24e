"""Figures of a network's views of an image: `figures` draws one for each kind."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import artifacts, data, tasks
from hsvit_jax import config as config_lib
from hsvit_jax.classifier.classifier import Classifier
from hsvit_jax.classifier.views import Groups, Sequences, Views
from hsvit_jax.runtime import coordination
from hsvit_jax.text import printable

KINDS = ("votes", "gradcam", "maps", "looks", "matrices", "heads", "features")

_MAPS, _HEADS, _CLASSES, _FEATURES = 12, 8, 20, 10  # most panels side by side


def figures(
    views: Views,
    image_HWC: np.ndarray,
    classes: tuple[str, ...],
    title: str,
    task: tasks.Classify,
) -> Iterator[tuple[str, Any]]:
    """Yields each kind of view that the network has, and its figure.

    Args:
      title: title of every figure, before the answer.
      task: answers the logits.
    """
    answer_K = task.answer(np.asarray(views.logits_K))
    title = f"{title}: predicted as {task.said(answer_K, classes)}"
    if views.votes_GK is not None:
        votes = _votes(views.votes_GK, views.logits_K, image_HWC, classes, title)
        if task.unit == "value":  # columns have no first choice
            votes.axes[1].set_title("standardised numbers of each group's CLS alone", fontsize=9)
            votes.axes[2].set_ylabel("deviations from the mean")
            for dot in [*votes.axes[1].lines]:
                dot.remove()
        yield "votes", votes
    if views.cam_HW is not None:
        explained = classes[int(views.logits_K.argmax())]  # also of several labels, or numbers
        yield "gradcam", _cam(views.cam_HW, image_HWC, explained, title)
    if views.groups is not None:
        yield "maps", _maps(views.groups, image_HWC, title)
    s = views.sequences
    if s is None:
        return
    if s.attention:
        maps = [np.stack([by_head.mean(0), *by_head[:_HEADS]]) for by_head in s.attention]
        yield "looks", _attention(s.blocks, maps, True, image_HWC, title, s.queries)
        yield "matrices", _matrices(s, title)
    if s.head_tokens:
        whose = "each head's own token"
        yield "heads", _attention(s.blocks, s.head_tokens, False, image_HWC, title, whose)
    if s.features:
        yield "features", _features(s, image_HWC, title)


def write(network: Classifier, paths: Sequence[Path], out: Path) -> tuple[list[Path], list[str]]:
    """Writes the PNGs of every image file: OUT/NAME-votes.png and the other kinds.

    Returns:
      the paths of the PNGs, and the errors of files that are no images.

    Raises:
      ValueError: `out` is a file.
    """
    by = f" by {config_lib.title(network.config.model)}, step {network.step:,}"
    by += ", without its other views" * (network.config.eval.tta != "none")
    written, errors = [], []
    for path, stem in zip(paths, _stems(paths), strict=True):
        image_HWC = None
        try:
            image_HWC = network.read(path)
        except data.BadImage as error:
            errors.append(str(error))
        coordination.check_same("list of images", "" if image_HWC is None else str(path))
        if image_HWC is None:
            continue
        heat_BHW = network.grad_cam(image_HWC[None])
        views = network.explain(image_HWC[None])[0]
        if heat_BHW is not None:
            views = dataclasses.replace(views, cam_HW=heat_BHW[0])
        if not coordination.is_lead():
            continue
        title = printable(f"{Path(*path.parts[-2:])}{by}")
        answer = network.class_names, title, tasks.of(network.config)
        for kind, figure in figures(views, image_HWC, *answer):
            written.append(out / f"{stem}-{kind}.png")
            artifacts.save_figure(figure, written[-1])
    return written, errors


def names(paths: Sequence[Path], out: Path) -> set[Path]:
    """Returns the files that `write` may write."""
    return {out / f"{stem}-{kind}.png" for stem in _stems(paths) for kind in KINDS}


def _stems(paths: Sequence[Path]) -> list[str]:
    """A unique file name stem for each image, also where file names ignore case."""
    taken: set[str] = set()
    out = []
    for path in paths:
        stems = itertools.chain([path.stem], (f"{path.stem}-{n}" for n in itertools.count(2)))
        out.append(next(stem for stem in stems if stem.casefold() not in taken))
        taken.add(out[-1].casefold())
    return out


def _figure(width: float, height: float, title: str) -> Any:
    """An empty figure in inches; `$` in its title is plain text."""
    figure = artifacts.figure(width, height, dpi=110)
    figure.suptitle(title, parse_math=False)
    return figure


def _show(axes: Any, array: np.ndarray, title: str, **style: Any) -> None:
    """Draws an array or, without a style, an image."""
    if not style:
        array = array[..., 0] if array.shape[2] == 1 else array
        style = {"cmap": "gray", "vmin": 0, "vmax": 255}
    axes.imshow(array, **style)
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.set(xticks=[], yticks=[])


def _votes(
    votes_GK: np.ndarray,
    logits_K: np.ndarray,
    image_HWC: np.ndarray,
    names: tuple[str, ...],
    title: str,
) -> Any:
    """Groups × classes, the network's own logits below; a dot marks each row's first choice."""
    order = np.argsort(-logits_K, kind="stable")[:_CLASSES]
    order = np.sort(order) if len(order) == len(names) else order
    groups, classes = len(votes_GK), len(order)
    figure = _figure(4.5 + 0.55 * classes, max(4.0, 2.2 + 0.28 * groups), title)
    left, right = figure.subplots(1, 2, width_ratios=(1, 0.12 + 0.22 * classes))
    _show(left, image_HWC, "image")
    rows = np.concatenate([votes_GK, logits_K[None]])
    limit = np.nanmax(np.abs(rows[:, order])) or 1.0
    table = np.insert(rows, groups, np.nan, axis=0)  # an empty row before the network's logits
    drawn = right.imshow(table[:, order], cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    place = {int(k): i for i, k in enumerate(order)}
    lost_G = np.isnan(votes_GK[:, 0])
    choices = np.where(np.append(lost_G, False), -1, rows.argmax(1))
    for row, choice in zip([*range(groups), groups + 1], choices.tolist(), strict=True):
        if choice in place:
            right.plot(place[choice], row, "o", color="black", markersize=5)
    agree, voters = int((choices[:-1] == choices[-1]).sum()), int((~lost_G).sum())
    right.set_title(f"logits of each group's CLS alone: {agree} of {voters} agree", fontsize=9)
    shown = range(0, groups, max(1, groups // 32))
    right.set_yticks([*shown, groups + 1], [*(f"group {g}" for g in shown), "all groups"])
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor", "parse_math": False}
    right.set_xticks(range(classes), [names[k] for k in order], **turned)
    right.tick_params(labelsize=8)
    figure.colorbar(drawn, ax=right, label="logit (dot: first choice)")
    return figure


def _rows(
    rows: dict[str, list[tuple]],
    image_HWC: np.ndarray,
    inches: tuple[float, float],
    title: str,
    foot: str,
) -> Any:
    """A figure with a row of panels (array, title, style) for each label, beside the image."""
    columns = 1 + max(map(len, rows.values()))
    figure = _figure(inches[0] * columns, 0.8 + inches[1] * len(rows), title)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (label, panels) in zip(grid, rows.items(), strict=True):
        _show(line[0], image_HWC, label)
        for axes, (array, name, style) in zip(line[1:], panels, strict=True):
            _show(axes, array, name, **style)
    figure.supxlabel(foot, fontsize=9)
    return figure


def _maps(groups: Groups, image_HWC: np.ndarray, title: str) -> Any:
    """A row for each group: its kernels' maps, the ones with most attention first."""
    rows = {}
    for g, (maps_CHW, shares_C) in enumerate(zip(groups.maps_GCHW, groups.shares_GC, strict=True)):
        style = {"cmap": "viridis", "vmin": 0, "vmax": maps_CHW.max() or 1.0}
        order, first = np.argsort(-shares_C, kind="stable")[:_MAPS], g * len(shares_C)
        panels = [(maps_CHW[c], f"{first + c}: {shares_C[c]:.1%}", style) for c in order]
        rows[f"group {g}"] = panels
    foot = "kernel: attention its map gets from the group's last CLS"
    return _rows(rows, image_HWC, (1.05, 1.15), title, foot)


def _cam(cam_HW: np.ndarray, image_HWC: np.ndarray, name: str, title: str) -> Any:
    """The image, and Grad-CAM over it, from none to the largest value."""
    figure = _figure(6.4, 3.6, title)
    left, right = figure.subplots(1, 2)
    _show(left, image_HWC, "image")
    _show(right, image_HWC, f"what speaks for {printable(name)} (Grad-CAM)")
    rows, columns = image_HWC.shape[:2]
    place = {"extent": (-0.5, columns - 0.5, rows - 0.5, -0.5), "interpolation": "bilinear"}
    right.imshow(cam_HW, cmap="inferno", alpha=0.6, vmin=0, vmax=cam_HW.max() or 1.0, **place)
    return figure


def _attention(
    blocks: list[int],
    maps: list[np.ndarray],
    mean_first: bool,
    image_HWC: np.ndarray,
    title: str,
    whose: str,
) -> Any:
    """Maps on scales of their own; their titles compare them with even attention to all tokens."""
    rows = {}
    for block, maps_NHW in zip(blocks, maps, strict=True):
        heads = [f"head {n}" for n in range(len(maps_NHW) - mean_first)]
        rows[f"block {block}"] = panels = []
        for weights_HW, name in zip(maps_NHW, ["all heads"] * mean_first + heads, strict=True):
            drawn = weights_HW / weights_HW.mean()
            low, high = drawn.min(), drawn.max()
            style = {"cmap": "inferno", "vmin": low, "vmax": max(high, 1.05 * low)}
            name = f"{name}: {weights_HW.sum():.0%}\n×{low:.2g} to ×{high:.2g}"
            panels.append((drawn, name, style))
    scale = "% of all attention, × of an even share; dark: least, bright: most"
    foot = f"attention of {whose} to the patches ({scale})"
    return _rows(rows, image_HWC, (1.5, 1.85), title, foot)


def _matrices(s: Sequences, title: str) -> Any:
    """Tokens × tokens, mean over heads; lines part CLS, patches and head tokens."""
    figure = _figure(max(4.5, 3.4 * len(s.blocks) + 0.4), 3.4, title)
    grid = figure.subplots(1, len(s.blocks), squeeze=False)[0]
    extra = len(s.head_tokens[0]) if s.head_tokens else 0
    for axes, block, by_head, weights_TS in zip(
        grid, s.blocks, s.attention, s.matrices, strict=True
    ):
        low, high = np.quantile(weights_TS, (0.005, 0.995))  # a few bright tokens hide the rest
        style = {"cmap": "inferno", "vmin": low, "vmax": high, "interpolation": "nearest"}
        drawn = axes.imshow(weights_TS, **style)
        queries, keys = weights_TS.shape
        before = keys - extra - by_head[0].size  # by block: a CvT has a CLS in its last stage only
        for line, tokens in ((axes.axvline, keys), (axes.axhline, queries)):
            for place in {before, tokens - extra} - {0, tokens}:
                line(place - 0.5, color="white", linewidth=0.6)
        axes.set_title(f"block {block}", fontsize=9)
        axes.tick_params(labelsize=7)
        figure.colorbar(drawn, ax=axes, shrink=0.6)
    order = ", ".join(["CLS"] * bool(s.before) + ["patches"] + ["head tokens"] * bool(extra))
    grid[0].set_ylabel("from token")
    figure.supxlabel(f"to token ({order}); attention, mean over heads", fontsize=9)
    return figure


def _features(s: Sequences, image_HWC: np.ndarray, title: str) -> Any:
    """A row for each block: the channels of its tokens that vary most over the image."""
    rows = {}
    for block, x_HWD in zip(s.feature_blocks, s.features, strict=True):
        rows[f"block {block}"] = panels = []
        for d in np.argsort(-x_HWD.std((0, 1)), kind="stable")[:_FEATURES]:
            x_HW = x_HWD[..., d] - np.median(x_HWD[..., d])
            limit = np.abs(x_HW).max() or 1.0
            style = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
            panels.append((x_HW, f"channel {d}", style))
    foot = "channels of the tokens that vary most, less their median"
    return _rows(rows, image_HWC, (1.15, 1.35), title, foot)
