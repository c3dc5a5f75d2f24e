"""The votes of a network's parts on a batch of images, and what they elect.

P parts, B images, V views of an image (`eval.tta`), D width of a CLS token, K classes. Section 3.1
of the HSViT paper averages the groups' CLS tokens, so the head may average those of any subset.
"""

import asyncio
import dataclasses
import time
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import augment
from hsvit_jax.classifier import Classifier
from hsvit_jax.models.network import GroupShard
from hsvit_jax.train import evaluate

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Part:
    """A voter: an attention group, a tower, or all that one node computes.

    Attributes:
      name: of the part.
      groups: how many groups' CLS tokens it adds.
      share: its weight in the average when all parts vote; the shares add up to 1.
    """

    name: str
    groups: int
    share: float


@dataclasses.dataclass(frozen=True)
class Ballot:
    """The parts' answers to a batch.

    Attributes:
      cls_VPBD: weighted sums of CLS tokens, whose sum over all parts is the average; zeros of a
        part that did not answer.
      milliseconds_P: how long each took; None of a part that did not answer.
    """

    cls_VPBD: np.ndarray
    milliseconds_P: tuple[float | None, ...]


class Voters(Protocol):
    """Parts that vote, wherever they run."""

    parts: tuple[Part, ...]

    async def vote(self, images_BHWC: np.ndarray) -> Ballot:
        """The parts' votes on uint8 images of the network's size."""


class _Recorder(GroupShard):
    """Keeps the terms of the sum over the groups, (G, B, D)."""

    def sum(self, x_GBD: Array) -> Array:
        self.terms_GBD = x_GBD
        return super().sum(x_GBD)


class Network:
    """All parts in this process: one program for the groups' votes, and the head for any subset.

    Attributes:
      parts: the groups, or towers of groups; one part, of one vote, for a network without.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier, model = classifier, classifier.model
        sizes = model.config
        groups = getattr(sizes, "groups", 0)
        towers = getattr(sizes, "towers", 1)
        count = (towers if towers > 1 else groups) or 1
        share_P = np.full(count, 1 / count)
        if groups and sizes.votes == "learned":
            home = classifier.params["towers"] if towers > 1 else classifier.params
            magnitude_G = np.abs(np.asarray(home["groups"]["vote"], np.float64)).reshape(-1)
            share_P = magnitude_G.reshape(count, -1).sum(1) / magnitude_G.sum()
        kind = "tower" if towers > 1 else "group" if groups else "network"
        self.parts = tuple(
            Part(f"{kind} {number}", max(groups // count, 1), float(share))
            for number, share in enumerate(share_P)
        )
        scale = groups if groups and sizes.votes != "learned" else 1
        config = classifier.config
        mean, std = tuple(config.data.mean), tuple(config.data.std)

        def contributions(params: dict, stats: dict, images_BHWC: Array) -> Array:
            x_BHWC = augment.normalise(images_BHWC, mean, std)
            views = []
            for view_BHWC in evaluate.tta_views(x_BHWC, config.eval.get("tta", "none")):
                shard = _Recorder()
                logits_BK, _ = model.apply(params, stats, view_BHWC, shard=shard)
                terms_GBD = shard.terms_GBD if groups else logits_BK[None]
                shape = (count, -1, *terms_GBD.shape[1:])
                views.append(terms_GBD.reshape(shape).sum(1) / scale)
            return jnp.stack(views).astype(jnp.float32)

        def elected(params: dict, cls_VPBD: Array, share_PB: Array, voted_PB: Array) -> Array:
            total_VBD = (cls_VPBD * voted_PB[None, :, :, None]).sum(1)
            share_B = (share_PB * voted_PB).sum(0)
            mean_VBD = total_VBD / jnp.where(share_B > 0, share_B, 1)[None, :, None]
            if groups:
                head = model.bind(params, {})["head"]
                mean_VBD = jnp.stack([head(mean_BD) for mean_BD in mean_VBD])
            return jax.nn.softmax(mean_VBD.mean(0).astype(jnp.float32), -1)

        self._contributions = jax.jit(contributions)
        self._elected = jax.jit(elected)

    def contributions(self, images_BHWC: np.ndarray) -> Ballot:
        """The votes of all parts, computed here."""
        started = time.perf_counter()
        c = self.classifier
        cls_VPBD = np.asarray(self._contributions(c.params, c.stats, images_BHWC))
        taken = 1000 * (time.perf_counter() - started)
        return Ballot(cls_VPBD, (taken,) * len(self.parts))

    async def vote(self, images_BHWC: np.ndarray) -> Ballot:
        """See `Voters`."""
        return await asyncio.to_thread(self.contributions, images_BHWC)

    def elect(
        self, parts: tuple[Part, ...], cls_VPBD: np.ndarray, voted_PB: np.ndarray
    ) -> np.ndarray:
        """Class probabilities (B, K) by the head, from the average of the parts that voted.

        Args:
          parts: of the ballot.
          cls_VPBD: their contributions.
          voted_PB: 1 where a part's vote on an image counts, else 0.
        """
        share_PB = np.repeat([[part.share] for part in parts], voted_PB.shape[1], 1)
        arrays = (cls_VPBD, share_PB.astype(np.float32), voted_PB.astype(np.float32))
        head = {k: v for k, v in self.classifier.params.items() if k == "head"}
        return np.asarray(self._elected(head, *arrays))
