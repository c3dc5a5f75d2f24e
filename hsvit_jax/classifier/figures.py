"""Figures of a network's views of an image: `figures` draws one for each kind."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsvit_jax import artifacts, data
from hsvit_jax import config as config_lib
from hsvit_jax.classifier.classifier import Classifier
from hsvit_jax.classifier.views import Groups, Sequences, Views
from hsvit_jax.runtime import coordination
from hsvit_jax.text import printable

KINDS = ("votes", "maps", "looks", "matrices", "heads", "features")

_MAPS, _HEADS, _CLASSES, _FEATURES = 12, 8, 20, 10  # the most that are drawn side by side


def figures(
    views: Views, image_HWC: np.ndarray, classes: tuple[str, ...], title: str
) -> Iterator[tuple[str, Any]]:
    """Draws every kind of view that the network has.

    Args:
      title: of every figure; the predicted class is added.

    Yields:
      the kind, of `KINDS`, and its figure.
    """
    odds = np.exp(views.logits_K - views.logits_K.max())
    best = int(odds.argmax())
    title = f"{title}: taken for {classes[best]} ({odds[best] / odds.sum():.0%})"
    if views.votes_GK is not None:
        yield "votes", _votes(views.votes_GK, views.logits_K, image_HWC, classes, title)
    if views.groups is not None:
        yield "maps", _maps(views.groups, image_HWC, title)
    s = views.sequences
    if s is None:
        return
    if s.attention:
        heads = min(len(s.attention[0]), _HEADS)
        maps = [np.stack([by_head.mean(0), *by_head[:heads]]) for by_head in s.attention]
        names = ["all heads", *(f"head {n}" for n in range(heads))]
        yield "looks", _attention(s.blocks, maps, names, image_HWC, title, s.queries)
        yield "matrices", _matrices(s, title)
    if s.head_tokens:
        names = [f"head {n}" for n in range(len(s.head_tokens[0]))]
        whose = "each head's own token"
        yield "heads", _attention(s.blocks, s.head_tokens, names, image_HWC, title, whose)
    if s.features:
        yield "features", _features(s, image_HWC, title)


def write(network: Classifier, paths: Sequence[Path], out: Path) -> tuple[list[Path], list[str]]:
    """Writes the PNGs of every image file: OUT/NAME-votes.png and the other kinds there are.

    Returns:
      the paths of the PNGs, and the errors of files that are no images.

    Raises:
      ValueError: the network has nothing to show, or `out` is a file.
    """
    by = f" by {config_lib.title(network.config.model)}, step {network.step:,}"
    views_too = network.config.eval.tta != "none"
    alone = ", without its other views" if views_too else ""  # which predict averages
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
        views = network.explain(image_HWC[None])[0]
        if not coordination.is_lead():
            continue
        title = printable(f"{Path(*path.parts[-2:])}{by}{alone}")
        for kind, figure in figures(views, image_HWC, network.class_names, title):
            written.append(out / f"{stem}-{kind}.png")
            artifacts.save_figure(figure, written[-1])
    return written, errors


def names(paths: Sequence[Path], out: Path) -> set[Path]:
    """Names the files that `write` may write."""
    return {out / f"{stem}-{kind}.png" for stem in _stems(paths) for kind in KINDS}


def _stems(paths: Sequence[Path]) -> list[str]:
    """A unique file name stem for each image, numbered where images share a name."""
    taken: set[str] = set()  # without capitals, which make no other file on macOS and Windows
    out = []
    for path in paths:
        stems = itertools.chain([path.stem], (f"{path.stem}-{n}" for n in itertools.count(2)))
        out.append(next(stem for stem in stems if stem.casefold() not in taken))
        taken.add(out[-1].casefold())
    return out


def _figure(width: float, height: float, title: str) -> Any:
    """An empty figure in inches; a `$` in its title is only a dollar sign."""
    figure = artifacts.figure(width, height, dpi=110)
    figure.suptitle(title, parse_math=False)
    return figure


def _show_image(axes: Any, image_HWC: np.ndarray, *, title: str = "image") -> None:
    grey = image_HWC.shape[2] == 1
    axes.imshow(image_HWC[..., 0] if grey else image_HWC, cmap="gray", vmin=0, vmax=255)
    _bare(axes, title)


def _bare(axes: Any, title: str = "") -> None:
    axes.set_title(title, fontsize=9)
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
    width, height = 4.5 + 0.55 * classes, max(4.0, 2.2 + 0.28 * groups)
    figure = _figure(width, height, title)
    left, right = figure.subplots(1, 2, width_ratios=(1, 0.12 + 0.22 * classes))
    _show_image(left, image_HWC)
    rows = np.concatenate([votes_GK, logits_K[None]])
    limit = np.nanmax(np.abs(rows[:, order])) or 1.0
    # An empty row sets the network's answer apart.
    table = np.concatenate([votes_GK, np.full((1, len(logits_K)), np.nan), logits_K[None]])
    drawn = right.imshow(table[:, order], cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    place = {int(k): i for i, k in enumerate(order)}
    lost_G = np.isnan(votes_GK[:, 0])
    choices = np.where(np.append(lost_G, False), -1, rows.argmax(1))
    for row, choice in zip([*range(groups), groups + 1], choices, strict=True):
        if int(choice) in place:
            right.plot(place[int(choice)], row, "o", color="black", markersize=5)
    agree, voters = int((choices[:-1] == choices[-1]).sum()), int((~lost_G).sum())
    right.set_title(f"logits of each group's CLS alone: {agree} of {voters} agree", fontsize=9)
    step = max(1, groups // 32)
    right.set_yticks([*range(0, groups, step), groups + 1])
    right.set_yticklabels([f"group {g}" for g in range(0, groups, step)] + ["all groups"])
    right.set_xticks(range(classes))
    right.set_xticklabels(
        [names[k] for k in order], rotation=45, ha="right", rotation_mode="anchor", parse_math=False
    )
    right.tick_params(labelsize=8)
    figure.colorbar(drawn, ax=right, label="logit (dot: first choice)")
    return figure


def _maps(groups: Groups, image_HWC: np.ndarray, title: str) -> Any:
    """A row for each group: its kernels' maps, those that its CLS attends to most first."""
    count, kernels = groups.shares_GC.shape
    columns = min(kernels, _MAPS)
    figure = _figure(1.6 + 0.95 * columns, 1.0 + 1.05 * count, title)
    grid = figure.subplots(count, columns + 1, squeeze=False)
    for g, row in enumerate(grid):
        if g:
            row[0].axis("off")
        else:
            _show_image(row[0], image_HWC)
        row[0].text(-0.15, 0.5, f"group {g}", transform=row[0].transAxes, ha="right", va="center")
        top = groups.maps_GCHW[g].max() or 1.0
        order = np.argsort(-groups.shares_GC[g], kind="stable")[:columns]
        for axes, c in zip(row[1:], order, strict=True):
            axes.imshow(groups.maps_GCHW[g, c], cmap="viridis", vmin=0, vmax=top)
            _bare(axes, f"{g * kernels + c}: {groups.shares_GC[g, c]:.1%}")
    figure.supxlabel("kernel: attention its map gets from the group's last CLS", fontsize=9)
    return figure


def _by_block(
    blocks: list[int], columns: int, inches: tuple[float, float], image_HWC: np.ndarray, title: str
) -> tuple[Any, np.ndarray]:
    """A figure with a row for each block, and its panels beside the image."""
    figure = _figure(inches[0] * (columns + 1), 0.8 + inches[1] * len(blocks), title)
    grid = figure.subplots(len(blocks), columns + 1, squeeze=False)
    for row, block in zip(grid, blocks, strict=True):
        _show_image(row[0], image_HWC, title=f"block {block}")
    return figure, grid[:, 1:]


def _attention(
    blocks: list[int],
    maps: list[np.ndarray],
    names: list[str],
    image_HWC: np.ndarray,
    title: str,
    whose: str,
) -> Any:
    """Maps on scales of their own; their titles compare them with even attention to all tokens."""
    figure, grid = _by_block(blocks, len(names), (1.5, 1.85), image_HWC, title)
    for row, maps_NHW in zip(grid, maps, strict=True):
        for axes, weights_HW, name in zip(row, maps_NHW, names, strict=True):
            drawn = weights_HW / weights_HW.mean()
            low, high = drawn.min(), drawn.max()
            axes.imshow(drawn, cmap="inferno", vmin=low, vmax=max(high, 1.05 * low))
            _bare(axes, f"{name}: {weights_HW.sum():.0%}\n×{low:.2g} to ×{high:.2g}")
    scale = "% of all attention, × of an even share; dark: least, bright: most"
    figure.supxlabel(f"attention of {whose} to the patches ({scale})", fontsize=9)
    return figure


def _matrices(s: Sequences, title: str) -> Any:
    """Tokens × tokens, mean over heads; lines part CLS, patches and head tokens."""
    figure = _figure(max(4.5, 3.4 * len(s.blocks) + 0.4), 3.4, title)
    grid = figure.subplots(1, len(s.blocks), squeeze=False)[0]
    for axes, block, by_head, weights_TS in zip(
        grid, s.blocks, s.attention, s.matrices, strict=True
    ):
        low, high = np.quantile(weights_TS, (0.005, 0.995))  # a few bright tokens hide the rest
        drawn = axes.imshow(
            weights_TS, cmap="inferno", vmin=low, vmax=high, interpolation="nearest"
        )
        extra, (queries, keys) = len(s.head_tokens[0]) if s.head_tokens else 0, weights_TS.shape
        before = keys - extra - by_head[0].size  # of each block: a CvT has a CLS in its last stage
        for line, tokens in ((axes.axvline, keys), (axes.axhline, queries)):
            for place in {before, tokens - extra} - {0, tokens}:
                line(place - 0.5, color="white", linewidth=0.6)
        axes.set_title(f"block {block}", fontsize=9)
        axes.tick_params(labelsize=7)
        figure.colorbar(drawn, ax=axes, shrink=0.6)
    order = [*(["CLS"] if s.before else []), "patches", *(["head tokens"] if s.head_tokens else [])]
    grid[0].set_ylabel("from token")
    figure.supxlabel(f"to token ({', '.join(order)}); attention, mean over heads", fontsize=9)
    return figure


def _features(s: Sequences, image_HWC: np.ndarray, title: str) -> Any:
    """A row for each block: the channels of its tokens that vary most over the image."""
    columns = min(s.features[0].shape[2], _FEATURES)
    figure, grid = _by_block(s.feature_blocks, columns, (1.15, 1.35), image_HWC, title)
    for row, x_HWD in zip(grid, s.features, strict=True):
        order = np.argsort(-x_HWD.std((0, 1)), kind="stable")[:columns]
        for axes, d in zip(row, order, strict=True):
            x_HW = x_HWD[..., d] - np.median(x_HWD[..., d])
            limit = np.abs(x_HW).max() or 1.0
            axes.imshow(x_HW, cmap="RdBu_r", vmin=-limit, vmax=limit)
            _bare(axes, f"channel {d}")
    figure.supxlabel("channels of the tokens that vary most, less their median", fontsize=9)
    return figure
