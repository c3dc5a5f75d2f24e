"""How a trained network does with fewer voters: accuracy against the number of groups lost.

A group's CLS token is one vote, so a network whose devices are lost can answer with those that are
left. Each batch goes through the network once; only the average of the votes and the head are
computed for every set of voters.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsvit_jax import augment, report
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train import evaluate

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Point:
    """Accuracies, fractions of all examples, of the sets of voters in which as many are lost.

    std: over the sets, of which there are `subsets`; 0 where there is only one.
    """

    lost_groups: int
    subsets: int
    mean: float
    std: float
    lowest: float
    highest: float


def units(model: Any) -> np.ndarray:
    """Units that are lost whole, a group or a tower's groups: float32 (U, G), 1 for its groups.

    Raises ValueError for a network without attention groups.
    """
    groups = getattr(model.config, "groups", 0)
    if not groups:
        raise ValueError(
            "this network has no attention groups, so none can be lost: a curve of votes needs a "
            "network with groups"
        )
    towers = model.config.towers
    count = towers if towers > 1 else groups
    return np.repeat(np.eye(count, dtype=np.float32), groups // count, axis=1)


def subsets(units_UG: np.ndarray, most: int, seed: int) -> list[tuple[int, np.ndarray]]:
    """(groups lost, votes float32 (G,)) for 0 to U − 1 lost units, in that order.

    All subsets where there are at most `most` of a number, else `most` different ones drawn by
    `seed`. Raises ValueError for `most` below 1.
    """
    if most < 1:
        raise ValueError(f"most is {most}, expected at least 1 subset per number of lost groups")
    count, groups = units_UG.shape
    found = []
    for lost in range(count):
        if math.comb(count, lost) <= most:
            chosen = list(itertools.combinations(range(count), lost))
        else:
            rng, drawn = np.random.default_rng([seed, lost]), set()
            while len(drawn) < most:
                drawn.add(tuple(sorted(rng.choice(count, lost, replace=False).tolist())))
            chosen = sorted(drawn)
        for gone in chosen:
            found.append((lost * groups // count, 1 - units_UG[list(gone)].sum(0)))
    return found


def make_counter(
    model: Any, mesh: Mesh, mean: tuple[float, ...], std: tuple[float, ...]
) -> Callable[..., Array]:
    """A jitted (params, stats, images uint8 (B, H, W, C), labels (B,), valid (B,), votes (S, G)) →
    correct answers of each of the S sets of voters, int32 (S,)."""
    apply = mesh_lib.spread(model, mesh)

    def count(
        params: dict,
        stats: dict,
        images_BHWC: Array,
        labels_B: Array,
        valid_B: Array,
        votes_SG: Array,
    ) -> Array:
        x_BHWC = augment.normalise(images_BHWC, mean, std)

        def answers(votes_G: Array) -> Array:
            return apply(params, stats, x_BHWC, votes_G=votes_G)[0].argmax(1)

        right_SB = (jax.vmap(answers)(votes_SG) == labels_B[None]) & valid_B[None]
        return right_SB.sum(1)

    return jax.jit(count)


def curve(
    model: Any,
    mesh: Mesh,
    params: dict,
    stats: dict,
    split: Any,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch: int,
    most: int = 16,
    seed: int = 0,
) -> list[Point]:
    """Accuracy on every example of `split` with 0 to all but one of the units lost.

    most, seed: see `subsets`. Raises ValueError for an empty split or a network without groups.
    """
    if not len(split):
        raise ValueError("cannot evaluate on an empty split: hold some examples out for it")
    sets = subsets(units(model), most, seed)
    votes_SG = jnp.asarray(np.stack([votes_G for _, votes_G in sets]))
    counter = make_counter(model, mesh, mean, std)
    right_S = np.zeros(len(sets), np.int64)
    for images, labels, valid in evaluate.padded_batches(split, batch, mesh.shape[mesh_lib.DATA]):
        arrays = (mesh_lib.put_batch(mesh, a) for a in (images, labels, valid))
        right_S += np.asarray(counter(params, stats, *arrays, votes_SG))
    accuracies: dict[int, list[float]] = {}
    for (lost, _), right in zip(sets, right_S, strict=True):
        accuracies.setdefault(lost, []).append(float(right) / len(split))
    return [
        Point(lost, len(a), float(np.mean(a)), float(np.std(a)), float(np.min(a)), float(np.max(a)))
        for lost, a in accuracies.items()
    ]


def write(points: list[Point], path: Path, title: str) -> Path:
    """Draws `path` (a PNG) and writes the numbers beside it as CSV, whose path it returns.

    Raises ValueError for a path that does not end in .png. A `$` in the title is a dollar sign.
    """
    table = check_path(path).with_suffix(".csv")
    head = [field.name for field in dataclasses.fields(Point)]
    rows = [
        [round(v, 6) if isinstance(v, float) else v for v in dataclasses.astuple(point)]
        for point in points
    ]
    report.save_csv(table, [head, *rows])
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lost = [p.lost_groups for p in points]
    mean, std = (np.array([getattr(p, k) for p in points]) for k in ("mean", "std"))
    lowest, highest = ([getattr(p, k) for p in points] for k in ("lowest", "highest"))
    axes.fill_between(lost, lowest, highest, alpha=0.15, color="C0", label="lowest to highest")
    axes.fill_between(lost, mean - std, mean + std, alpha=0.3, color="C0", label="mean ± std")
    axes.plot(lost, mean, marker=".", color="C0", label="mean over sets of voters")
    axes.set(xlabel="attention groups lost", ylabel="accuracy", ylim=(0, 1.02))
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    report.save_figure(figure, path)
    return table


def check_path(path: Path) -> Path:
    """`path` if it ends in .png, with its folder made. Raises ValueError if it does not."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--curve={path}: expected the name of a PNG to draw, such as votes.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
