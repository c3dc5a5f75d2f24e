"""Accuracy of a trained network against the number of attention groups lost.

A group's CLS token is one vote, so a network that lost devices can answer with the surviving
groups. Each batch goes through the network once; the votes' average and the head run per subset.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import artifacts, data, tasks
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.classifier.classifier import Classifier
from hsvit_jax.train import evaluate as evaluate_lib

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Point:
    """Accuracy over `subsets` subsets that have lost equally many groups; std is 0 for one."""

    lost_groups: int
    subsets: int
    mean: float
    std: float
    lowest: float
    highest: float


def units(model: Any) -> np.ndarray:
    """Returns the units that are lost together, (U, G) with 1 for each group of a unit.

    A unit is a group, or all groups of a tower.

    Raises:
      ValueError: the network has no attention groups.
    """
    if not model.voters:
        raise ValueError("this network has no independent attention groups, so none can be lost")
    return np.repeat(np.eye(model.units, dtype=np.float32), model.voters // model.units, axis=1)


def subsets(units_UG: np.ndarray, most: int, seed: int) -> list[tuple[int, np.ndarray]]:
    """Chooses the subsets to evaluate, for 0 to U − 1 lost units in that order.

    Args:
      most: most subsets per number of lost units; `seed` draws them if there are more.

    Returns:
      the number of lost groups, those of no unit included, and the votes (G,) of each subset.
    """
    (count, groups), voters_G = units_UG.shape, units_UG.sum(0)
    chosen = []
    for lost in range(count):
        if math.comb(count, lost) <= most:
            losses = list(itertools.combinations(range(count), lost))
        else:
            rng, drawn = np.random.default_rng([seed, lost]), set()
            while len(drawn) < most:
                drawn.add(tuple(sorted(rng.choice(count, lost, replace=False).tolist())))
            losses = sorted(drawn)
        for units_lost in losses:
            votes_G = voters_G - units_UG[list(units_lost)].sum(0)
            chosen.append((groups - int(votes_G.sum()), votes_G))
    return chosen


def evaluate(network: Classifier, split: data.Split, lost: Sequence[str]) -> Any:
    """Evaluates `split` without the attention groups of these numbers.

    Raises:
      ValueError: the network has no such groups, or none is left.
    """
    groups = network.model.voters
    numbers = {g for g in range(groups) if str(g) in map(str.strip, lost)}
    votes_G = np.array([float(g not in numbers) for g in range(groups)], np.float32)
    if len(numbers) < len(set(lost)) or not (votes_G * network.voters_G).any():
        raise ValueError(
            f"--drop_groups={','.join(lost)}: this network has {groups or 'no'} independent "
            "attention groups; list their numbers from 0, but not all that vote"
        )
    how = network.model, network.mesh, network.config, network.aggregate
    evaluator = evaluate_lib.make_evaluator(*how, votes_G=votes_G)
    batch = config_lib.eval_batch(network.config)
    return evaluator(network.params, network.stats, split, batch)


def make_counter(network: Classifier) -> Callable[..., Array]:
    """Compiles the count of correct answers.

    Returns:
      a function of params, stats, images uint8 (B, H, W, C), labels (B,), valid (B,) and votes
      (S, G). It returns the correct answers of each subset, int32 (S,).
    """

    def count(params, stats, images_BHWC, labels_B, valid_B, votes_SG) -> Array:
        def answers(votes_G: Array) -> Array:
            how = network.model, network.mesh, network.config, network.aggregate
            forward = evaluate_lib.make_forward(*how, votes_G)
            logits_BK = forward(params, stats, images_BHWC)
            finite_B = jnp.isfinite(logits_BK).all(1)  # else argmax calls it the first class
            return jnp.where(finite_B, logits_BK.argmax(1), -1)

        right_SB = (jax.vmap(answers)(votes_SG) == labels_B[None]) & valid_B[None]
        return right_SB.sum(1)

    return jax.jit(count, out_shardings=mesh_lib.replicated(network.mesh))


def curve(network: Classifier, split: data.Split, most: int = 16) -> list[Point]:
    """Returns a point for each number of lost units, from 0 to all but one.

    Args:
      network: its seed draws the subsets.
      split: one example or more.
      most: see `subsets`.

    Raises:
      ValueError: the network has no groups.
    """
    tasks.refuse_others(network.config, "--curve")
    units_UG = units(network.model)
    sets = subsets(units_UG[units_UG @ network.voters_G > 0], most, network.config.seed)
    votes_SG = np.stack([votes_G for _, votes_G in sets])
    counter, mesh = make_counter(network), network.mesh
    batch = config_lib.eval_batch(network.config)
    right_S = np.zeros(len(sets), np.int64)
    for examples in evaluate_lib.padded_batches(split, batch, mesh.shape[mesh_lib.DATA]):
        arrays = (mesh_lib.put_batch(mesh, a) for a in examples)
        right_S += np.asarray(counter(network.params, network.stats, *arrays, votes_SG))
    accuracies: dict[int, list[float]] = {}
    for (lost, _), right in zip(sets, right_S, strict=True):
        accuracies.setdefault(lost, []).append(float(right) / len(split))
    return [
        Point(lost, len(a), float(np.mean(a)), float(np.std(a)), float(np.min(a)), float(np.max(a)))
        for lost, a in accuracies.items()
    ]


def write(points: list[Point], path: Path, title: str) -> tuple[Path, Path]:
    """Writes the points as a CSV beside the PNG `path`; returns the paths of both."""
    rows = [[round(x, 6) for x in dataclasses.astuple(point)] for point in points]
    head, table = [field.name for field in dataclasses.fields(Point)], path.with_suffix(".csv")
    artifacts.save_csv(table, [head, *rows])
    figure = artifacts.figure(6.4, 4.2, dpi=110)
    axes = figure.subplots()
    lost, _, mean, std, lowest, highest = np.array(rows).T
    axes.fill_between(lost, lowest, highest, alpha=0.15, color="C0", label="lowest to highest")
    axes.fill_between(lost, mean - std, mean + std, alpha=0.3, color="C0", label="mean ± std")
    axes.plot(lost, mean, marker=".", color="C0", label="mean over subsets")
    axes.set(xlabel="attention groups lost", ylabel="accuracy", ylim=(0, 1.02))
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    artifacts.save_figure(figure, path)
    return table, path
