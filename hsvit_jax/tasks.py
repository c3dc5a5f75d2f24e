"""What a network learns (one class, several labels, or numbers), and losses and metrics by name.

B batch, N examples, K classes, labels or columns of numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hsvit_jax.text import few, printable

Array = jax.Array
#: A loss or a metric: (outputs (B, K), targets (B, K), weights (B,)) → a scalar.
Function = Callable[[Array, Array, Array], Array]

#: Figures that are shown in percent, and names of figures in messages.
_SHARES = ("accuracy", "label_accuracy", "map", "macro_f1", "micro_f1")
_NAMES = {"map": "mAP", "r2": "R²", "mae": "MAE", "macro_f1": "macro F1", "micro_f1": "micro F1"}


class Classify:
    """One class an image: targets are one-hot rows, answers are probabilities.

    Attributes:
      noun: what the outputs are.
      losses: names of its losses, the default first.
      figure: selects the best checkpoint; a larger one is better.
      step_figure: stands beside the loss in training.
      reported: its figures in a model card.
      outputs: names of the outputs and the answers of an exported program.
      unit: what an answer to an image holds for each output.
      most: how many outputs an answer shows; None for all that are part of it.
      dtype: of answers in NumPy.
    """

    noun = "classes"
    losses: tuple[str, ...] = ("cross_entropy", "binary_cross_entropy")
    figure = step_figure = "accuracy"
    reported: tuple[str, ...] = ("accuracy",)
    outputs = ("logits", "probabilities")
    unit = "probability"
    most: int | None = 5
    dtype: type = np.float32

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def encode(self, labels: np.ndarray) -> np.ndarray:
        """Returns labels as the training step takes them: int32 (N,), or float32 (N, K)."""
        return labels.astype(np.int32)

    def answer(self, outputs: Any) -> Any:
        """Computes answers (…, K) of outputs: in float64 of a NumPy array, else traceable."""
        if not isinstance(outputs, np.ndarray):
            return jax.nn.softmax(outputs, -1)
        outputs = outputs.astype(np.float64)
        odds = np.exp(outputs - outputs.max(-1, keepdims=True))
        return odds / odds.sum(-1, keepdims=True)

    def step_value(self, outputs_BK: Array, targets_BK: Array) -> Array:
        """Computes `step_figure` of a batch."""
        hits_B = outputs_BK.argmax(1) == targets_BK.argmax(1)
        return hits_B.astype(jnp.float32).mean()

    def ranked(self, answer_K: np.ndarray) -> np.ndarray:
        """Returns the outputs in the order in which they are shown."""
        return np.argsort(-answer_K, kind="stable")

    def chosen(self, answer_K: np.ndarray) -> np.ndarray:
        """Returns the outputs that are part of the answer, in the order of `ranked`."""
        return self.ranked(answer_K)

    def rows(
        self, answer_K: np.ndarray, names: Sequence[str], most: int | None = None
    ) -> list[dict[str, Any]]:
        """Returns an image's answer as rows of a label and its probability or value."""
        chosen = self.chosen(answer_K)[:most].tolist()
        return [{"label": names[k], self.unit: float(answer_K[k])} for k in chosen]

    def said(self, answer_K: np.ndarray, names: Sequence[str]) -> str:
        """Formats an answer for a title: the likeliest class, the labels, or the numbers."""
        row, *_ = self.rows(answer_K, names, 1)
        return f"predicted as {row['label']} ({row['probability']:.0%})"

    def text(self, target_K: np.ndarray, names: Sequence[str]) -> str:
        """Names the classes of a target, with their shares if images are mixed."""
        top = [int(k) for k in np.argsort(-target_K, kind="stable")[:2] if target_K[k] > 0.05]
        shares = [f" {target_K[k]:.0%}" * (len(top) > 1) for k in top]
        return " + ".join(printable(names[k]) + share for k, share in zip(top, shares, strict=True))


class Multilabel(Classify):
    """Any number of labels an image: targets are rows of 0 and 1, answers are probabilities."""

    noun = "labels"
    losses = ("binary_cross_entropy",)
    figure, step_figure = "map", "label_accuracy"
    reported = ("map", "macro_f1", "micro_f1")
    most = None

    def encode(self, labels: np.ndarray) -> np.ndarray:
        return labels.astype(np.float32)

    def answer(self, outputs: Any) -> Any:
        if not isinstance(outputs, np.ndarray):
            return jax.nn.sigmoid(outputs)
        return 0.5 + 0.5 * np.tanh(0.5 * outputs.astype(np.float64))  # exp overflows

    def step_value(self, outputs_BK: Array, targets_BK: Array) -> Array:
        hits_BK = (outputs_BK > 0) == (targets_BK > 0.5)
        return hits_BK.astype(jnp.float32).mean()

    def chosen(self, answer_K: np.ndarray) -> np.ndarray:
        order = self.ranked(answer_K)
        return order[self.over(answer_K)[order]]

    def said(self, answer_K: np.ndarray, names: Sequence[str]) -> str:
        return f"predicted as {few(names[k] for k in self.chosen(answer_K).tolist())}"

    def error(self, outputs_NK: np.ndarray, labels_NK: np.ndarray) -> np.ndarray:
        """Measures how wrong each answer is, (N, K): in probability, or in deviations."""
        return np.abs(self.answer(outputs_NK) - labels_NK)

    def over(self, answers: np.ndarray) -> np.ndarray:
        """Returns which probabilities (…, K) reach their labels' thresholds."""
        return answers >= np.broadcast_to(self.config.eval.threshold, answers.shape[-1:])

    def text(self, target_K: np.ndarray, names: Sequence[str]) -> str:
        shares = [(names[k], float(share)) for k, share in enumerate(target_K) if share > 0.05]
        return printable(" + ".join(n + f" {x:.0%}" * (x < 0.95) for n, x in shares)) or "none"

    def measure(
        self, outputs_NK: np.ndarray, labels_NK: np.ndarray
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Measures outputs: average precision of each label, and F1 at its threshold.

        Labels without a positive image have no average precision, and those that are neither there
        nor predicted no F1; neither counts in a mean.

        Returns:
          the figures by name, and columns of a table by label.
        """
        there_NK, over_NK = labels_NK > 0.5, self.over(self.answer(outputs_NK))
        right_K, both_K = (there_NK & over_NK).sum(0), there_NK.sum(0) + over_NK.sum(0)
        columns = zip(outputs_NK.T, there_NK.T, strict=True)
        precision_K = np.array([average_precision(*column) for column in columns])
        with np.errstate(invalid="ignore", divide="ignore"):
            f1_K = 2 * right_K / both_K
            by_label = {
                "images": there_NK.sum(0),
                "average precision": precision_K,
                "precision": right_K / over_NK.sum(0),
                "recall": right_K / there_NK.sum(0),
                "F1": f1_K,
            }
        figures = {
            "map": _mean_of_known(precision_K),
            "macro_f1": _mean_of_known(f1_K),
            "micro_f1": float(2 * right_K.sum() / max(both_K.sum(), 1)),
        }
        return figures, by_label


class Regress(Multilabel):
    """Numbers of an image: targets are standardised, answers are in the unit of the data."""

    noun = "numbers"
    losses = ("squared", "huber")
    figure, step_figure = "r2", "mae"
    reported = ("r2", "mae")
    outputs = ("standardised", "values")
    unit = "value"
    most = None
    dtype = np.float64

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.mean_K = np.array(config.data.target_mean or 0.0)
        self.std_K = np.array(config.data.target_std or 1.0)

    def encode(self, labels: np.ndarray) -> np.ndarray:
        return ((labels - self.mean_K) / self.std_K).astype(np.float32)

    def answer(self, outputs: Any) -> Any:
        if isinstance(outputs, np.ndarray):
            return outputs.astype(np.float64) * self.std_K + self.mean_K
        std, mean = (jnp.broadcast_to(x, outputs.shape) for x in (self.std_K, self.mean_K))
        return outputs * std.astype(outputs.dtype) + mean.astype(outputs.dtype)

    def step_value(self, outputs_BK: Array, targets_BK: Array) -> Array:
        errors_K = jnp.abs(outputs_BK - targets_BK).mean(0)
        value = (errors_K * self.std_K.astype(np.float32)).mean()
        return jnp.where(jnp.isfinite(value), value, 0.0)  # such a step is skipped

    def ranked(self, answer_K: np.ndarray) -> np.ndarray:
        return np.arange(len(answer_K))

    def chosen(self, answer_K: np.ndarray) -> np.ndarray:
        return self.ranked(answer_K)

    def said(self, answer_K: np.ndarray, names: Sequence[str]) -> str:
        return self.text(answer_K, names)

    def error(self, outputs_NK: np.ndarray, labels_NK: np.ndarray) -> np.ndarray:
        return np.abs(self.answer(outputs_NK) - labels_NK) / self.std_K

    def text(self, target_K: np.ndarray, names: Sequence[str]) -> str:
        return printable(", ".join(f"{n} {x:.5g}" for n, x in zip(names, target_K, strict=True)))

    def measure(
        self, outputs_NK: np.ndarray, labels_NK: np.ndarray
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Measures outputs: R² and mean absolute error of each column, and their means.

        R² of a column with one value only is 0.

        Returns:
          the figures by name, and columns of a table by column of the data.
        """
        errors_NK = self.answer(outputs_NK) - labels_NK
        spread_K = ((labels_NK - labels_NK.mean(0)) ** 2).sum(0)
        r2_K = np.where(spread_K > 0, 1 - (errors_NK**2).sum(0) / np.maximum(spread_K, 1e-300), 0.0)
        mae_K = np.abs(errors_NK).mean(0)
        by_column = {
            "R²": r2_K,
            "MAE": mae_K,
            "mean": labels_NK.mean(0),
            "deviation": labels_NK.std(0),
        }
        return {"r2": float(r2_K.mean()), "mae": float(mae_K.mean())}, by_column


TASKS: Mapping[str, type[Classify]] = {
    "classify": Classify,
    "multilabel": Multilabel,
    "regress": Regress,
}

STEP_FIGURES = {task.step_figure for task in TASKS.values()}


def of(config: Mapping[str, Any]) -> Classify:
    """Returns the task of a resolved configuration."""
    return TASKS[config.data.task](config)


def refuse_others(config: Mapping[str, Any], what: str) -> None:
    """Raises ValueError for `what`, which only classification has, and another task."""
    if config.data.task != "classify":
        raise ValueError(
            f"{what} counts right classes, and data.task={config.data.task} has none: remove it, "
            "or use a network that classifies"
        )


def shown(name: str, value: float) -> str:
    """Formats a figure with its name: 'mAP 71.20%', 'R² 0.8312'."""
    return f"{name_of(name)} {value:{form(name)}}"


def name_of(figure: str) -> str:
    """Returns the name of a figure in texts."""
    return _NAMES.get(figure, figure.replace("_", " "))


def form(name: str) -> str:
    """Returns the format of a figure's value."""
    return ".2%" if name in _SHARES else ".4g"


def average_precision(scores_N: np.ndarray, there_N: np.ndarray) -> float:
    """Returns Σ (R_n − R_(n−1)) P_n over the different scores; NaN without a positive example."""
    if not there_N.any():
        return float("nan")
    order = np.argsort(-scores_N, kind="stable")
    scores_N, found_N = scores_N[order], np.cumsum(there_N[order])
    last = np.append(np.flatnonzero(scores_N[1:] != scores_N[:-1]), len(scores_N) - 1)
    recall = found_N[last] / found_N[-1]
    return float((np.diff(recall, prepend=0.0) * found_N[last] / (last + 1)).sum())


def _mean_of_known(values_K: np.ndarray) -> float:
    known = values_K[~np.isnan(values_K)]
    return float(known.mean()) if len(known) else 0.0


# --- Losses and metrics by name ------------------------------------------------------------------


def _weighted(loss_of: Callable[[Array, Array], Array]) -> Function:
    """Makes a loss, the weighted mean over examples, of the losses (B,) of each."""

    def loss(outputs_BK: Array, targets_BK: Array, weights_B: Array) -> Array:
        return (loss_of(outputs_BK, targets_BK) * weights_B).sum() / weights_B.sum()

    return loss


_sigmoid_loss = optax.sigmoid_binary_cross_entropy
LOSSES: dict[str, Function] = {
    "cross_entropy": _weighted(optax.softmax_cross_entropy),
    "binary_cross_entropy": _weighted(lambda o, t: _sigmoid_loss(o, t).mean(1)),
    "squared": _weighted(lambda o, t: ((o - t) ** 2).mean(1)),
    "huber": _weighted(lambda o, t: optax.huber_loss(o, t).mean(1)),
}
_BUILT_IN = frozenset(LOSSES)
METRICS: dict[str, Function] = {}


def register_loss(name: str, function: Function) -> Function:
    """Adds a loss, which `train.loss` then names; one of the same name is replaced.

    Args:
        function: a pure function of (outputs (B, K), targets (B, K), weights (B,)) that returns a
            scalar. Outputs are logits, or standardised numbers; weights are those of
            `data.balance`, else 1.

    Returns:
        The function.

    Raises:
        ValueError: the name is that of a loss of this package.
    """
    if name in _BUILT_IN:
        raise ValueError(f"the loss {name!r} is one of hsvit_jax: register yours by another name")
    LOSSES[name] = function
    return function


def register_metric(name: str, function: Function) -> Function:
    """Adds a metric, which `train.metrics` then names; one of the same name is replaced.

    Args:
        function: a pure function of (answers (N, K), targets (N, K), weights (N,)) of a whole split
            that returns a scalar, larger for a better network. Answers are probabilities, or
            numbers in the unit of the data; weights are 1.

    Returns:
        The function.

    Raises:
        ValueError: the name is that of a figure of this package.
    """
    if name in ("loss", "top5", "interval", "examples", "split", *_SHARES, *_NAMES):
        raise ValueError(f"{name!r} is a figure of hsvit_jax: register yours by another name")
    METRICS[name] = function
    return function


def loss(config: Mapping[str, Any]) -> Function:
    """Returns the loss that train.loss names; raises ValueError as `check`."""
    check(config)
    return LOSSES[config.train.loss or of(config).losses[0]]


def check(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a loss or metric that nothing registered, or of another task."""
    name, own = config.train.loss, [name for name in LOSSES if name not in _BUILT_IN]
    for key, given, known in (
        ("train.loss", (name,) if name else (), (*TASKS[config.data.task].losses, *own)),
        ("train.metrics", config.train.metrics, tuple(METRICS)),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"{key}={unknown[0]} is none of data.task={config.data.task}: add "
                f"--config=FILE.py, the file that registers it, or choose from {few(known)}"
            )


def has_own(config: Mapping[str, Any]) -> bool:
    """Returns whether a file registered the loss or a metric, without which nothing evaluates."""
    return bool(config.train.metrics) or config.train.loss not in ("", *_BUILT_IN)
