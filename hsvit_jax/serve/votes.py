"""The votes of a network's parts on a batch of images, and what they elect.

P parts, B images, V views of an image (`eval.tta`), D width of a CLS token, K classes. Section 3.1
of the HSViT paper averages the groups' CLS tokens, so the head may average those of any subset.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import augment
from hsvit_jax.classifier import Classifier
from hsvit_jax.train import evaluate

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Part:
    """A voter: an attention group, a tower, or all that one node computes.

    Attributes:
      name: of the part.
      groups: how many groups' CLS tokens it adds, but those without weight.
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


def parts_of(cuts: Sequence[Any], kind: str = "") -> tuple[tuple[Part, ...], float]:
    """The voters that `Classifier.cut` made, and the sum of their weights.

    Args:
      cuts: a network's parts.
      kind: of their names, which are numbered; else they are named by their groups.
    """
    total = sum(cut.weight for cut in cuts)
    names = [
        f"{kind} {number}" if kind else f"groups {cut.groups[0]}-{cut.groups[-1]}"
        for number, cut in enumerate(cuts)
    ]
    found = zip(names, cuts, strict=True)
    return tuple(Part(name, cut.voters, cut.weight / total) for name, cut in found), total


class Network:
    """All parts in this process: one program for the groups' votes, and the head for any subset.

    Attributes:
      parts: the groups, or towers of groups; one part, of one vote, for a network without.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier, model = classifier, classifier.model
        groups = model.voters
        self.parts, scale = (Part("network", 1, 1.0),), 1.0
        if groups:
            towers = model.splits == "towers"
            cuts, _ = classifier.cut(model.config.towers if towers else groups)
            self.parts, scale = parts_of(cuts, "tower" if towers else "group")
        count = len(self.parts)
        config = classifier.config
        mean, std = tuple(config.data.mean), tuple(config.data.std)

        def contributions(params: dict, stats: dict, images_BHWC: Array) -> Array:
            def of_view(view_BHWC: Array) -> Array:
                if not groups:
                    return model.apply(params, stats, view_BHWC)[0][None]
                terms_GBD = model.terms(params, stats, view_BHWC)
                shape = (count, -1, *terms_GBD.shape[1:])
                return terms_GBD.reshape(shape).sum(1) / scale

            x_BHWC = augment.normalise(images_BHWC, mean, std)
            views_VBHWC = evaluate.tta_views(x_BHWC, config.eval.tta)
            return jax.lax.map(of_view, views_VBHWC).astype(jnp.float32)

        def elected(params: dict, cls_VPBD: Array, share_PB: Array, voted_PB: Array) -> Array:
            total_VBD = (cls_VPBD * voted_PB[None, :, :, None]).sum(1)
            share_B = (share_PB * voted_PB).sum(0)
            mean_VBD = total_VBD / jnp.where(share_B > 0, share_B, 1)[None, :, None]
            if groups:
                head = model.bind(params, {})["head"]
                mean_VBD = jnp.stack([head(mean_BD) for mean_BD in mean_VBD])
            return jax.nn.softmax(mean_VBD.mean(0).astype(jnp.float32), -1)

        # Its own: large images may keep all of asyncio's threads busy.
        self._thread = ThreadPoolExecutor(1)
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
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.contributions, images_BHWC)

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
