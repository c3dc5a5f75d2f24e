"""The search for a learning rate: the loss of a short run whose rate grows with every step."""

import math
from pathlib import Path

import jax
import ml_collections
import numpy as np

from hsvit_jax import artifacts, train
from hsvit_jax import config as config_lib
from hsvit_jax.studies import engine
from hsvit_jax.train import optim, resume

LOWEST, HIGHEST = 1e-6, 10.0
_DIVERGED = 4.0  # times the lowest smoothed loss
_SMOOTHING = 0.9  # weight of earlier steps in the exponential average


def search(config: ml_collections.ConfigDict, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Takes steps at rates from `LOWEST` to `HIGHEST`, evenly in their logarithm (Smith, 2017).

    Args:
      config: configuration of a new run; its schedule is not used.
      steps: most steps; a loss that is not finite or far above the lowest ends the search.

    Returns:
      rates of the steps that were taken, and their smoothed training losses, float (S,).

    Raises:
      ValueError: as `hsvit_jax.train.prepare`, or the loss was never finite.
    """
    run = train.prepare(config_lib.override(config, ["train.log_every=1"]))

    def rate(number: jax.Array) -> jax.Array:
        return LOWEST * (HIGHEST / LOWEST) ** (number / max(steps - 1, 1))

    tx = optim.build(run.config.optim, rate, run.model)
    start, _ = resume.start(run, False)
    average, losses = 0.0, []
    taken = engine.steps(run, start, schedule=rate, tx=tx, total_steps=steps)
    for number, (_, values) in enumerate(taken, 1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * float(values["loss"])
        loss = average / (1 - _SMOOTHING**number)
        if not math.isfinite(loss) or loss > _DIVERGED * min(losses, default=loss):
            break
        losses.append(loss)
    if len(losses) < 2:
        raise ValueError("the loss is not finite from the start: check the data and the network")
    return np.array([float(rate(n)) for n in range(len(losses))]), np.array(losses)


def choose(rates_S: np.ndarray, losses_S: np.ndarray) -> tuple[float, float]:
    """Returns the rate of the steepest fall before the lowest loss, and the lowest loss's rate.

    Raises:
      ValueError: the loss is lowest at the start.
    """
    first = min(round(1 / (1 - _SMOOTHING)), len(losses_S) // 3)  # an average of several batches
    lowest = first + int(losses_S[first:].argmin())
    if lowest == first:
        raise ValueError("the loss never fell: raise --steps or train.batch, or check the data")
    slopes_S = np.gradient(losses_S, np.log(rates_S))
    steepest = first + int(slopes_S[first:lowest].argmin())
    return float(rates_S[steepest]), float(rates_S[lowest])


def draw(rates_S: np.ndarray, losses_S: np.ndarray, steepest: float, path: Path) -> None:
    """Draws loss against rate, and marks the steepest fall."""
    figure = artifacts.figure(6.4, 4.0)
    axes = figure.subplots()
    axes.plot(rates_S, losses_S)
    axes.axvline(steepest, color="grey", linestyle="--")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss, smoothed")
    axes.set_title(f"steepest at {steepest:.1e}")
    axes.grid(alpha=0.3)
    artifacts.save_figure(figure, path)
