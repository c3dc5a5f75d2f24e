"""Exact evaluation: every example of a split counts once, on any number of devices."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh

from hsvit_jax import artifacts, augment, tasks
from hsvit_jax import mesh as mesh_lib

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Results on one split; loss in nats, accuracy and top5 as fractions of `examples`."""

    loss: float
    accuracy: float
    top5: float
    examples: int
    # int64; rows: the true class, columns: the predicted one
    confusion_KK: np.ndarray = dataclasses.field(repr=False)
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)  # train.metrics

    @property
    def macro_f1(self) -> float:
        """The mean of the classes' F1 scores, over those with an example or a prediction."""
        return macro_f1(self.confusion_KK)

    @property
    def figures(self) -> dict[str, Any]:
        """Its figures by name; top5 needs six classes, an interval few images."""
        line = {"loss": self.loss, "accuracy": self.accuracy}
        ends = artifacts.interval(self.accuracy, self.examples)
        line |= {"interval": list(ends)} if ends else {}
        line |= {"macro_f1": self.macro_f1}
        line |= {"top5": self.top5} if len(self.confusion_KK) > 5 else {}
        return line | {**self.own, "examples": self.examples}

    def __str__(self) -> str:
        return f"accuracy {artifacts.accuracy_text(self.accuracy, self.examples)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Results on one split for several labels or numbers an image.

    Attributes:
        values: the task's figures and the registered metrics, by name.
        by_output: columns of a table by label or by column of numbers, (K,) each.
    """

    loss: float
    examples: int
    values: Mapping[str, float]
    by_output: Mapping[str, np.ndarray] = dataclasses.field(repr=False)

    @property
    def figures(self) -> dict[str, Any]:
        """Its figures by name."""
        return {"loss": self.loss, **self.values, "examples": self.examples}

    def __str__(self) -> str:
        return ", ".join(tasks.shown(name, value) for name, value in self.values.items())

    def table(self, names: Sequence[str]) -> str:
        """Formats the table by label or column, which `names` names."""
        cells = [[f"{x:.4g}" for x in column.tolist()] for column in self.by_output.values()]
        rows = zip(names, *cells, strict=True)
        return "\n".join(artifacts.aligned([("", *self.by_output), *rows]))


def macro_f1(confusion_KK: np.ndarray) -> float:
    """Returns the mean of the classes' F1 scores, over those with an example or a prediction."""
    both_K = confusion_KK.sum(0) + confusion_KK.sum(1)
    if not both_K.any():  # no logits were finite
        return 0.0
    return float(np.mean(2 * np.diag(confusion_KK)[both_K > 0] / both_K[both_K > 0]))


def make_forward(
    model: Any,
    mesh: Mesh,
    config: ml_collections.ConfigDict,
    aggregate: str = "psum",
    votes_G: Array | None = None,
) -> Callable[[dict, dict, Array], Array]:
    """Jits a network's forward pass in inference.

    Args:
        config: resolved; its data.mean, data.std and eval.tta count.
        aggregate: see `mesh.spread`.
        votes_G: weight of each attention group's CLS in the average, 0 for a lost one.

    Returns:
        `forward(params, stats, images uint8 (B, H, W, C) split over data)` → logits (B, K), the
        mean over an image's views. Float features are not normalised.
    """
    apply = mesh_lib.spread(model, mesh, aggregate)
    mean, std = tuple(config.data.mean), tuple(config.data.std)

    def forward(params: dict, stats: dict, inputs: Array) -> Array:
        if not jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = augment.normalise(inputs, mean, std)
        views_VBHWC = tta_views(inputs, config.eval.tta)
        # Views run in turn: the network is compiled once, and they share memory.
        logits_VBK = jax.lax.map(lambda x: apply(params, stats, x, votes_G=votes_G)[0], views_VBHWC)
        return logits_VBK.mean(0)

    return jax.jit(forward)


def tta_views(x_BHWC: Array, tta: str) -> Array:
    """Returns the views (V, B, H, W, C) of eval.tta: plain, mirrored, moved by a pixel."""
    views = [x_BHWC]
    if tta == "shift":
        height, width = x_BHWC.shape[1:3]
        padded = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
        corners = [(0, 0), (0, 2), (2, 0), (2, 2)]
        views += [padded[:, y : y + height, x : x + width] for y, x in corners]
    if tta != "none":
        views += [x[:, :, ::-1] for x in views]
    return jnp.stack(views)


def make_evaluator(
    model: Any,
    mesh: Mesh,
    config: ml_collections.ConfigDict,
    aggregate: str = "psum",
    votes_G: Array | None = None,
) -> Callable[..., Evaluation]:
    """Builds an evaluation, which compiles once per batch size; see `make_forward`.

    Returns:
        `evaluate(params, stats, split, batch, before_batch)` → `Evaluation`. Padding counts for
        nothing. before_batch() may raise to give up. An empty split raises ValueError.
    """
    forward = make_forward(model, mesh, config, aggregate, votes_G)
    num_classes, task = config.data.num_classes, tasks.of(config)
    tasks.check(config)
    gathers = config.data.task != "classify" or tasks.has_own(config) or config.train.loss

    def count(
        params: dict, stats: dict, images_BHWC: Array, labels_B: Array, valid_B: Array
    ) -> dict:
        logits_BK = forward(params, stats, images_BHWC)
        if labels_B.ndim == 2:
            return {"outputs": logits_BK}
        rank_B = _rank(logits_BK, labels_B)
        finite_B = jnp.isfinite(logits_BK).all(1)
        log_p_BK = jax.nn.log_softmax(logits_BK)
        loss_B = -jnp.take_along_axis(log_p_BK, labels_B[:, None], 1)[:, 0]
        # The host counts pairs, as the matrix of 22,000 classes is 2 GB, moved for each batch.
        # Non-finite logits predict nothing, though argmax returns the first class.
        counted_B = valid_B & finite_B
        pairs_2B = jnp.stack([jnp.where(counted_B, labels_B, -1), logits_BK.argmax(1)])
        return {
            "loss": jnp.where(valid_B, loss_B, 0.0).sum(),
            "top5": ((rank_B < 5) & counted_B).sum(),
            "pairs": pairs_2B,
        } | ({"outputs": logits_BK} if gathers else {})

    options = mesh_lib.compiler_options()
    compiled = jax.jit(count, out_shardings=mesh_lib.replicated(mesh), compiler_options=options)

    def evaluate(
        params: dict,
        stats: dict,
        split: Any,
        batch: int,
        before_batch: Callable[[], None] = lambda: None,
    ) -> Evaluation | Scores:
        total = len(split)
        if not total:
            raise ValueError("cannot evaluate on an empty split: hold out some examples")
        loss, top5, confusion_KK = 0.0, 0, np.zeros((num_classes, num_classes), np.int64)
        outputs, own = list[np.ndarray](), dict[str, float]()
        multiple = mesh.shape[mesh_lib.DATA]
        size = _size(split, batch, multiple)
        rows = mesh_lib.local_rows(mesh, size)
        for local in padded_batches(split, batch, multiple, rows):
            before_batch()
            local = local[0], task.encode(local[1]), local[2]
            arrays = (mesh_lib.put_rows(mesh, a, size) for a in local)
            sums = jax.device_get(compiled(params, stats, *arrays))
            outputs += [sums["outputs"]] if gathers else []
            if "loss" in sums:
                loss += float(sums["loss"])
                top5 += int(sums["top5"])
                np.add.at(confusion_KK, tuple(sums["pairs"][:, sums["pairs"][0] >= 0]), 1)
        if gathers:
            outputs_NK = np.concatenate(outputs)[:total]
            loss, own = _named(config, outputs_NK, split.labels, size)
        if split.labels.ndim == 2:
            figures, by_output = task.measure(outputs_NK, split.labels)
            return Scores(loss / total, total, {**figures, **own}, by_output)
        correct = int(np.trace(confusion_KK))
        return Evaluation(loss / total, correct / total, top5 / total, total, confusion_KK, own)

    return evaluate


def _named(
    config: ml_collections.ConfigDict, outputs_NK: np.ndarray, labels: np.ndarray, batch: int
) -> tuple[float, dict[str, float]]:
    """Sums the loss, in batches without padding, and computes the metrics of train.metrics."""
    task, ones, total = tasks.of(config), np.ones(len(labels), np.float32), 0.0
    if labels.ndim == 1:
        labels = np.eye(config.data.num_classes)[labels]
    arrays = outputs_NK, task.encode(labels), ones
    for start in range(0, len(labels), batch):
        part = [x[start : start + batch] for x in arrays]
        total += float(tasks.loss(config)(*part)) * len(part[0])
    given = task.answer(outputs_NK).astype(np.float32), labels.astype(np.float32), ones
    own = {name: float(tasks.METRICS[name](*given)) for name in config.train.metrics}
    return total, own


def _rank(logits_BK: Array, labels_B: Array) -> Array:
    """Ranks the true class among the logits from 0, int32 (B,), with argmax's order of ties."""
    true_B1 = jnp.take_along_axis(logits_BK, labels_B[:, None], 1)
    earlier_BK = jnp.arange(logits_BK.shape[1])[None] < labels_B[:, None]
    return ((logits_BK > true_B1) | ((logits_BK == true_B1) & earlier_BK)).sum(1)


def padded_batches(
    split: Any, batch: int, multiple: int, rows: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields every example of a split once, in order, in batches of one size.

    Args:
        batch: examples per batch; fewer for a small split, rounded up to a multiple.
        multiple: devices of the mesh's `data` axis.
        rows: places in a batch to read, defaults to all.

    Yields:
        (images uint8 (B, H, W, C), labels (B,) or (B, K), valid bool (B,)). Copies of its first
        example pad the last batch, as they change no maximum over it (`model.batch_coupling`).
    """
    size = _size(split, batch, multiple)
    for start in range(0, len(split), size):
        index = np.arange(start, start + size)
        index = index if rows is None else index[rows]
        valid = index < len(split)
        index = np.where(valid, index, start)
        yield split.gather(index), split.labels[index], valid


def _size(split: Any, batch: int, multiple: int) -> int:
    return -(-min(batch, len(split)) // multiple) * multiple
