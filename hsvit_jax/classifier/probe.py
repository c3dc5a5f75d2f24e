"""Measures how well a network's embeddings separate the classes of any data set.

N training images, M others, D numbers of an embedding, K classes.
"""

from typing import Any

import numpy as np
from scipy import optimize, special

from hsvit_jax import artifacts, data
from hsvit_jax import config as config_lib
from hsvit_jax.classifier.classifier import Classifier
from hsvit_jax.train import evaluate

_TEMPERATURE = 0.07
#: Penalties that `measure` tries in turn, each from the weights of the one before.
PENALTIES = tuple(10.0**power for power in range(1, -7, -1))


def embeddings(network: Classifier, part: data.Split) -> np.ndarray:
    """Computes the embeddings of a split, float32 (N, D)."""
    batch = config_lib.eval_batch(network.config)
    padded = evaluate.padded_batches(part, batch, 1)
    return np.concatenate([network.embed(images)[valid] for images, _, valid in padded])


def knn(bank_ND: np.ndarray, labels_N: np.ndarray, x_MD: np.ndarray, k: int = 20) -> np.ndarray:
    """Classifies embeddings by their k nearest neighbours, int (M,).

    A neighbour of cosine similarity s votes exp(s / 0.07) for its class. Source: Wu et al. 2018,
    arXiv 1805.01978, section 3.4; k and temperature as in DINO, arXiv 2104.14294.
    """
    sizes = (np.linalg.norm(x, axis=1, keepdims=True) for x in (bank_ND, x_MD))
    bank_ND, x_MD = (x / np.maximum(s, 1e-12) for x, s in zip((bank_ND, x_MD), sizes, strict=True))
    is_class_NK, found = np.eye(labels_N.max() + 1)[labels_N], []
    for x_BD in np.array_split(x_MD, -(-len(x_MD) // 1024)):  # all similarities may exceed memory
        s_BN = x_BD @ bank_ND.T
        nearest_BK = np.argsort(-s_BN, axis=1, kind="stable")[:, :k]
        votes_BK = np.exp(np.take_along_axis(s_BN, nearest_BK, 1) / _TEMPERATURE)
        found.append(np.einsum("bn,bnk->bk", votes_BK, is_class_NK[nearest_BK]).argmax(1))
    return np.concatenate(found)


def fit_linear(
    x_ND: np.ndarray, labels_N: np.ndarray, penalty: float, start: np.ndarray | None = None
) -> np.ndarray:
    """Fits multinomial logistic regression by L-BFGS, float64 (D + 1, K); the last row is the bias.

    It minimises the mean cross-entropy plus penalty / 2 · Σ w², without the bias, from `start`.
    """
    targets_NK = np.eye(labels_N.max() + 1)[labels_N]
    x_NE = np.pad(x_ND.astype(np.float64), ((0, 0), (0, 1)), constant_values=1)
    shape = x_NE.shape[1], targets_NK.shape[1]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w_EK = flat.reshape(shape)
        log_p_NK = special.log_softmax(x_NE @ w_EK, axis=1)
        decayed_EK = penalty * np.pad(w_EK[:-1], ((0, 1), (0, 0)))
        value = -(targets_NK * log_p_NK).sum() / len(x_NE) + (decayed_EK * w_EK).sum() / 2
        return value, (x_NE.T @ (np.exp(log_p_NK) - targets_NK) / len(x_NE) + decayed_EK).ravel()

    first = np.zeros(shape) if start is None else start
    options = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": 1000, "maxfun": 2000}}
    return optimize.minimize(loss, first.ravel(), **options).x.reshape(shape)


def measure(network: Classifier, dataset: data.Dataset, k: int = 20) -> dict[str, Any]:
    """Fits both classifiers on the training images and counts correct answers on the test images.

    Embeddings are standardised for the linear one, and the validation images choose its penalty.

    Args:
      dataset: of the network's image size and channels, with any classes.

    Returns:
      numbers of images, both accuracies with 95 % intervals, and the penalty.

    Raises:
      ValueError: a split has no images.
    """
    if dataset.info.task != "classify":
        raise ValueError(f"probe needs classes, and data.task={dataset.info.task}: remove it")
    splits = {name: getattr(dataset, name) for name in ("train", "val", "test")}
    if empty := [name for name, part in splits.items() if not len(part)]:
        raise ValueError(
            f"{dataset.info.name} has no {empty[0]} split: add images, or raise data.val_fraction"
        )
    x, y = {n: embeddings(network, part) for n, part in splits.items()}, dataset.train.labels
    neighbours = knn(x["train"], y, x["test"], k)
    mean_D, std_D = x["train"].mean(0), x["train"].std(0)
    x = {n: (x_ND - mean_D) / np.where(std_D > 0, std_D, 1.0) for n, x_ND in x.items()}
    fits: dict[float, np.ndarray | None] = {0.0: None}
    for penalty in PENALTIES:
        fits[penalty] = fit_linear(x["train"], y, penalty, [*fits.values()][-1])
    right = {p: (linear(fits[p], x["val"]) == dataset.val.labels).mean() for p in PENALTIES}
    chosen = max(right, key=right.get)  # the largest penalty of equals
    weights = fits[chosen]
    line: dict[str, Any] = {name: len(part) for name, part in splits.items()}
    for name, answers in (("knn", neighbours), ("linear", linear(weights, x["test"]))):
        line[name] = float((answers == dataset.test.labels).mean())
        line[f"{name}_interval"] = list(artifacts.interval(line[name], len(dataset.test)) or ())
    return line | {"k": k, "penalty": chosen, "width": x["train"].shape[1]}


def linear(w_EK: np.ndarray, x_MD: np.ndarray) -> np.ndarray:
    """Classifies embeddings by the weights of `fit_linear`, int (M,)."""
    return (x_MD @ w_EK[:-1] + w_EK[-1:]).argmax(1)
