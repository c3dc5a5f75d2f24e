"""What a network learns (one class, several labels, or numbers), and losses and metrics by name.

B batch, N examples, K classes, labels or columns of numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax.text import few, printable

Array = jax.Array
#: A loss or a metric: (outputs (B, K), targets (B, K), weights (B,)) → a scalar.
Function = Callable[[Array, Array, Array], Array]
#: A table of figures by label or column, (K,) each.
Table = dict[str, np.ndarray]

#: Figures that are shown in percent, and names of figures in texts.
_SHARES = ("accuracy", "label_accuracy", "map", "macro_f1", "micro_f1")
_NAMES = {"map": "mAP", "r2": "R²", "mae": "MAE", "macro_f1": "macro F1", "micro_f1": "micro F1"}


class Classify:
    """One class an image: targets are one-hot rows, answers are probabilities.

    Attributes:
      noun: what the outputs are.
      losses: names of its losses, the default first.
      reported: its figures; the first selects the best checkpoint, the larger the better.
      step_figure: stands beside the loss in training.
      outputs: names of the outputs and the answers of an exported program.
      unit: what an answer to an image holds for each output.
      most: how many outputs an answer shows; None for all that are part of it.
      dtype: of answers in NumPy.
    """

    noun, step_figure, unit = "classes", "accuracy", "probability"
    losses: tuple[str, ...] = ("cross_entropy", "binary_cross_entropy")
    reported: tuple[str, ...] = ("accuracy",)
    outputs = ("logits", "probabilities")
    most: int | None = 5
    dtype: type = np.float32

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def encode(self, labels: np.ndarray) -> np.ndarray:
        """Returns labels as the training step takes them: int32 (N,), or float32 (N, K)."""
        return labels.astype(np.int32 if labels.ndim == 1 else np.float32)

    def answer(self, outputs: Any) -> Any:
        """Computes answers (…, K) of outputs: in float64 of a NumPy array, else traceable."""
        if not isinstance(outputs, np.ndarray):
            return jax.nn.softmax(outputs, -1)
        outputs = outputs.astype(np.float64)
        odds = np.exp(outputs - outputs.max(-1, keepdims=True))
        return odds / odds.sum(-1, keepdims=True)

    def step_value(self, outputs_BK: Array, targets_BK: Array) -> Array:
        """Computes `step_figure` of a batch."""
        return (outputs_BK.argmax(1) == targets_BK.argmax(1)).astype(jnp.float32).mean()

    def ranked(self, answer_K: np.ndarray) -> np.ndarray:
        """Returns the outputs in the order in which they are shown."""
        return np.argsort(-answer_K, kind="stable")

    def over(self, answers: np.ndarray) -> np.ndarray:
        """Returns which outputs are part of the answers, bool (…, K)."""
        return np.ones(answers.shape, bool)

    def rows(
        self, answer_K: np.ndarray, names: Sequence[str], most: int | None = None
    ) -> list[dict[str, Any]]:
        """Returns an image's answer as rows of a label and its probability or value."""
        order = self.ranked(answer_K)
        chosen = order[self.over(answer_K)[order]][:most].tolist()
        return [{"label": names[k], self.unit: float(answer_K[k])} for k in chosen]

    def said(self, answer_K: np.ndarray, names: Sequence[str]) -> str:
        """Formats an answer for a title: the likeliest class, the labels, or the numbers."""
        rows = self.rows(answer_K, names, 1 if self.most else None)
        form = " ({:.0%})" if self.unit == "probability" else " {:.5g}"
        return few(row["label"] + form.format(row[self.unit]) for row in rows)

    def text(self, target_K: np.ndarray, names: Sequence[str]) -> str:
        """Names the classes of a target, with their shares if images are mixed."""
        top = [int(k) for k in np.argsort(-target_K, kind="stable")[:2] if target_K[k] > 0.05]
        return " + ".join(printable(names[k]) + f" {target_K[k]:.0%}" * (len(top) > 1) for k in top)


class Multilabel(Classify):
    """Any number of labels an image: targets are rows of 0 and 1, answers are probabilities."""

    noun, step_figure, most = "labels", "label_accuracy", None
    losses = ("binary_cross_entropy",)
    reported = ("map", "macro_f1", "micro_f1")

    def answer(self, outputs: Any) -> Any:
        if not isinstance(outputs, np.ndarray):
            return jax.nn.sigmoid(outputs)
        return 0.5 + 0.5 * np.tanh(0.5 * outputs.astype(np.float64))  # exp overflows

    def step_value(self, outputs_BK: Array, targets_BK: Array) -> Array:
        return ((outputs_BK > 0) == (targets_BK > 0.5)).astype(jnp.float32).mean()

    def over(self, answers: np.ndarray) -> np.ndarray:
        return answers >= np.broadcast_to(self.config.eval.threshold, answers.shape[-1:])

    def text(self, target_K: np.ndarray, names: Sequence[str]) -> str:
        shares = [(names[k], float(share)) for k, share in enumerate(target_K) if share > 0.05]
        return printable(" + ".join(n + f" {x:.0%}" * (x < 0.95) for n, x in shares)) or "none"

    def error(self, outputs_NK: np.ndarray, labels_NK: np.ndarray) -> np.ndarray:
        """Measures how wrong each answer is, (N, K): in probability, or in deviations."""
        return np.abs(self.answer(outputs_NK) - labels_NK)

    def measure(
        self, outputs_NK: np.ndarray, labels_NK: np.ndarray
    ) -> tuple[dict[str, float], Table]:
        """Computes the figures by name, and a table by label or column.

        Labels without a positive image have no average precision, and those that are neither there
        nor predicted no F1; neither counts in a mean. R² of a column with one value only is 0.
        """
        there_NK, over_NK = labels_NK > 0.5, self.over(self.answer(outputs_NK))
        right_K, both_K = (there_NK & over_NK).sum(0), there_NK.sum(0) + over_NK.sum(0)
        columns = zip(outputs_NK.T, there_NK.T, strict=True)
        table = {"images": there_NK.sum(0)}
        table["average precision"] = np.array([average_precision(*pair) for pair in columns])
        with np.errstate(invalid="ignore", divide="ignore"):
            table["precision"], table["recall"] = (right_K / x.sum(0) for x in (over_NK, there_NK))
            table["F1"] = 2 * right_K / both_K
        means = [table[name][~np.isnan(table[name])] for name in ("average precision", "F1")]
        macro = (float(x.mean()) if len(x) else 0.0 for x in means)
        micro = float(2 * right_K.sum() / max(both_K.sum(), 1))
        return dict(zip(self.reported, (*macro, micro), strict=True)), table


class Regress(Multilabel):
    """Numbers of an image: targets are standardised, answers are in the unit of the data."""

    noun, step_figure, unit = "numbers", "mae", "value"
    losses = ("squared", "huber")
    reported = ("r2", "mae")
    outputs = ("standardised", "values")
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
        value = (jnp.abs(outputs_BK - targets_BK).mean(0) * self.std_K.astype(np.float32)).mean()
        return jnp.where(jnp.isfinite(value), value, 0.0)  # such a step is skipped

    def ranked(self, answer_K: np.ndarray) -> np.ndarray:
        return np.arange(len(answer_K))

    over = Classify.over

    def text(self, target_K: np.ndarray, names: Sequence[str]) -> str:
        return printable(", ".join(f"{n} {x:.5g}" for n, x in zip(names, target_K, strict=True)))

    def error(self, outputs_NK: np.ndarray, labels_NK: np.ndarray) -> np.ndarray:
        return super().error(outputs_NK, labels_NK) / self.std_K

    def measure(
        self, outputs_NK: np.ndarray, labels_NK: np.ndarray
    ) -> tuple[dict[str, float], Table]:
        errors_NK = self.answer(outputs_NK) - labels_NK
        spread_K = labels_NK.var(0)
        share_K = (errors_NK**2).mean(0) / np.where(spread_K > 0, spread_K, 1.0)
        table = {"R²": np.where(spread_K > 0, 1 - share_K, 0.0), "MAE": np.abs(errors_NK).mean(0)}
        figures = {"r2": float(table["R²"].mean()), "mae": float(table["MAE"].mean())}
        return figures, table | {"mean": labels_NK.mean(0), "deviation": labels_NK.std(0)}


TASKS = {"classify": Classify, "multilabel": Multilabel, "regress": Regress}
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


def name_of(figure: str) -> str:
    """Returns the name of a figure in texts."""
    return _NAMES.get(figure, figure.replace("_", " "))


def form(figure: str) -> str:
    """Returns the format of a figure's value."""
    return ".2%" if figure in _SHARES else ".4g"


def shown(figure: str, value: float) -> str:
    """Formats a figure with its name: 'mAP 71.20%', 'R² 0.8312'."""
    return f"{name_of(figure)} {value:{form(figure)}}"


def average_precision(scores_N: np.ndarray, there_N: np.ndarray) -> float:
    """Returns Σ (R_n − R_(n−1)) P_n over the different scores; NaN without a positive example."""
    if not there_N.any():
        return float("nan")
    order = np.argsort(-scores_N, kind="stable")
    scores_N, found_N = scores_N[order], np.cumsum(there_N[order])
    last = np.append(np.flatnonzero(scores_N[1:] != scores_N[:-1]), len(scores_N) - 1)
    recall = found_N[last] / found_N[-1]
    return float((np.diff(recall, prepend=0.0) * found_N[last] / (last + 1)).sum())


# --- Losses and metrics by name ------------------------------------------------------------------


def _weighted(loss_of: Callable[[Array, Array], Array]) -> Function:
    """Makes a loss, the weighted mean over examples, of the losses (B, K) or (B, 1) of each."""

    def loss(outputs_BK: Array, targets_BK: Array, weights_B: Array) -> Array:
        return (loss_of(outputs_BK, targets_BK).mean(1) * weights_B).sum() / weights_B.sum()

    return loss


LOSSES: dict[str, Function] = {
    "cross_entropy": _weighted(lambda o, t: -(t * jax.nn.log_softmax(o)).sum(1, keepdims=True)),
    "binary_cross_entropy": _weighted(lambda o, t: jax.nn.softplus(o) - o * t),
    "squared": _weighted(lambda o, t: (o - t) ** 2),
    "huber": _weighted(lambda o, t: jnp.where(abs(o - t) < 1, (o - t) ** 2 / 2, abs(o - t) - 0.5)),
}
METRICS: dict[str, Function] = {}
_TAKEN = {*LOSSES, *_SHARES, *_NAMES, "loss", "top5", "interval", "examples", "split"}


def register_loss(name: str, function: Function) -> Function:
    """Adds and returns a loss for `train.loss`; yours of the same name is replaced.

    Args:
        function: pure, of (outputs (B, K), targets (B, K), weights (B,)) to a scalar. Outputs are
            logits, or standardised numbers; weights are those of `data.balance`, else 1.

    Raises:
        ValueError: the name is one of this package.
    """
    return _add(LOSSES, name, function)


def register_metric(name: str, function: Function) -> Function:
    """Adds and returns a metric for `train.metrics`; see `register_loss`.

    Args:
        function: pure, of (answers (N, K), targets (N, K), weights (N,)) of a whole split to a
            scalar, larger for a better network. Answers are probabilities, or numbers in the unit
            of the data; weights are 1.
    """
    return _add(METRICS, name, function)


def _add(registry: dict[str, Function], name: str, function: Function) -> Function:
    if name in _TAKEN:
        raise ValueError(f"{name!r} is a name of hsvit_jax: register yours by another")
    registry[name] = function
    return function


def loss(config: Mapping[str, Any]) -> Function:
    """Returns the loss that train.loss names; raises ValueError as `check`."""
    check(config)
    return LOSSES[config.train.loss or TASKS[config.data.task].losses[0]]


def check(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a loss or metric that nothing registered, or of another task."""
    own = [name for name in LOSSES if name not in _TAKEN]
    losses = ("", *TASKS[config.data.task].losses, *own)
    for key, names, known in (
        ("train.loss", (config.train.loss,), losses),
        ("train.metrics", config.train.metrics, METRICS),
    ):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"{key}={unknown[0]} is none of data.task={config.data.task}: add "
                f"--config=FILE.py, the file that registers it, or choose from "
                f"{few(filter(None, known))}"
            )


def has_own(config: Mapping[str, Any]) -> bool:
    """Returns whether a file registered the loss or a metric, without which nothing evaluates."""
    return bool(config.train.metrics) or config.train.loss not in ("", *_TAKEN)
