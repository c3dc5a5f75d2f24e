"""Votes of a network's parts on a batch of images, and what they elect.

P parts, B images, V views of an image (`eval.tta`), D width of a CLS token, K classes. Section 3.1
of the HSViT paper averages the groups' CLS tokens, so the head may average those of any subset.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hsvit_jax import augment, tasks
from hsvit_jax.classifier import Classifier
from hsvit_jax.models.hsvit.votes import tally
from hsvit_jax.models.network import UNSHARDED
from hsvit_jax.train import evaluate

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Part:
    """A voter: an attention group, a tower, or all groups of one node.

    Attributes:
      groups: number of groups whose CLS tokens it adds, except those of weight 0.
      weight: of its votes among those of all parts.
    """

    name: str
    groups: int
    weight: float


class Ballot(NamedTuple):
    """The parts' answers to a batch; a part without an answer has zeros and None.

    Attributes:
      cls_VPBD: weighted sums of CLS tokens.
      milliseconds_P: time that each part took.
    """

    cls_VPBD: np.ndarray
    milliseconds_P: tuple[float | None, ...]


class Voters(Protocol):
    """Parts that vote, wherever they run.

    Attributes:
      at_once: batches that they can vote on at the same time.
    """

    parts: tuple[Part, ...]
    at_once: int

    async def vote(self, images_BHWC: np.ndarray) -> Ballot:
        """Returns the parts' votes on uint8 images of the network's size."""


def parts_of(cuts: Sequence[Any], kind: str = "") -> tuple[Part, ...]:
    """Returns the voters of a network's cuts, named by number and kind or else by groups."""
    names = [f"groups {cut.groups[0]}-{cut.groups[-1]}" for cut in cuts]
    if kind:
        names = [f"{kind} {number}" for number in range(len(cuts))]
    return tuple(Part(name, c.voters, c.weight) for name, c in zip(names, cuts, strict=True))


class Network:
    """Voters in this process: one program for all votes, and the head for any subset.

    Attributes:
      parts: the groups or towers; a network without groups is one part with one vote.
    """

    at_once = 2  # one batch's serial parts leave a CPU idle, and one's copies an accelerator

    def __init__(self, classifier: Classifier) -> None:
        self.classifier, model, config = classifier, classifier.model, classifier.config
        self.parts, head = (Part("network", 1, 1.0),), None
        if model.voters:
            cuts, head = classifier.cut(model.units)
            self.parts = parts_of(cuts, model.splits.removesuffix("s"))
        task = tasks.of(config)
        count, mean, std = len(self.parts), tuple(config.data.mean), tuple(config.data.std)

        def contributions(params: dict, stats: dict, images_BHWC: Array) -> Array:
            def of_view(view_BHWC: Array) -> Array:
                if head is None:
                    return model.apply(params, stats, view_BHWC)[0][None]
                terms_GBD = model.terms(params, stats, view_BHWC)
                return terms_GBD.reshape(count, -1, *terms_GBD.shape[1:]).sum(1)

            x_BHWC = augment.normalise(images_BHWC, mean, std)
            views_VBHWC = evaluate.tta_views(x_BHWC, config.eval.tta)
            return jax.lax.map(of_view, views_VBHWC).astype(jnp.float32)

        def elected(params: dict, cls_VPBD: Array, weights_PB: Array) -> Array:
            def of_view(cls_PBD: Array) -> Array:
                voted_PB = (weights_PB > 0).astype(cls_PBD.dtype)
                total_BD, _ = tally(cls_PBD, voted_PB, UNSHARDED)
                if head is None:
                    return total_BD
                whole = dataclasses.replace(head, params=params)
                return whole(total_BD, weights_PB.sum(0)[:, None])[0]

            return task.answer(jnp.stack([*map(of_view, cls_VPBD)]).mean(0))

        # Large images may keep all of asyncio's threads busy.
        self._threads = ThreadPoolExecutor(self.at_once)
        self._contributions = jax.jit(contributions)
        self._elected = jax.jit(elected)

    def contributions(self, images_BHWC: np.ndarray) -> Ballot:
        """Computes the votes of all parts."""
        started = time.perf_counter()
        c = self.classifier
        cls_VPBD = np.asarray(self._contributions(c.params, c.stats, images_BHWC))
        taken = 1000 * (time.perf_counter() - started)
        return Ballot(cls_VPBD, (taken,) * len(self.parts))

    async def vote(self, images_BHWC: np.ndarray) -> Ballot:
        """See `Voters`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.contributions, images_BHWC)

    def elect(
        self, parts: tuple[Part, ...], cls_VPBD: np.ndarray, voted_PB: np.ndarray
    ) -> np.ndarray:
        """Returns the answers (B, K) of the average of the parts with `voted_PB` = 1."""
        weights_PB = np.float32([[part.weight] for part in parts]) * np.float32(voted_PB)
        params = {name: x for name, x in self.classifier.params.items() if name == "head"}
        return np.asarray(self._elected(params, cls_VPBD, weights_PB))
