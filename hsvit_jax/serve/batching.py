"""Answers images of all connections in batches, whose few sizes are compiled at the start."""

import asyncio
import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hsvit_jax.serve.admission import NoVotes
from hsvit_jax.serve.votes import Ballot, Network, Part, Voters


class Answer(NamedTuple):
    """An image's prediction, the number of groups that voted, and its place in a ballot."""

    probabilities_K: np.ndarray
    voted: int
    ballot: Ballot
    index: int


class _Waiting(NamedTuple):
    """An image in the queue, its lost parts, and the future of its answer."""

    image_HWC: np.ndarray
    lost: frozenset[int]
    answer: asyncio.Future


class Batcher:
    """A queue of images that are answered in batches.

    Args:
      voters: the parts.
      network: computes what they elect.
      sizes: of batches, see `sizes_up_to`.
      wait: seconds that the first image of a batch waits for others.

    Attributes:
      failed: whether the last batch ended in an error, such as a device's.
    """

    def __init__(self, voters: Voters, network: Network, sizes: Sequence[int], wait: float) -> None:
        self.voters, self.network, self.sizes, self.wait = voters, network, sizes, wait
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._arrived = asyncio.Event()
        self.failed = False

    def __len__(self) -> int:
        return len(self._queue)

    async def warm_up(self) -> None:
        """Compiles the programs of every size."""
        shape = (*self.network.classifier.image_size, self.network.classifier.channels)
        for size in self.sizes:
            ballot = await self.voters.vote(np.zeros((size, *shape), np.uint8))
            self._elect(ballot, [frozenset()] * size)
        self.alone(Answer(np.zeros(0), 0, ballot, 0))

    async def answer(self, images: list[np.ndarray], lost: frozenset[int]) -> list[Answer]:
        """Answers uint8 images (H, W, C) without the lost parts; raises NoVotes without any."""
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(image, lost, loop.create_future()) for image in images]
        self._queue += waiting
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(one.answer for one in waiting)))
        finally:
            for one in waiting:  # Cancel the remaining images of an abandoned request.
                one.answer.cancel()

    async def run(self) -> None:
        """Answers batches until it is cancelled, several at once if the voters can."""
        places = asyncio.Semaphore(self.voters.at_once)
        async with asyncio.TaskGroup() as batches:
            while True:
                await places.acquire()
                self._arrived.clear()
                if not self._queue:
                    await self._arrived.wait()
                    await asyncio.sleep(self.wait)
                task = batches.create_task(self._answer(self._take()))
                task.add_done_callback(lambda _: places.release())

    def _take(self) -> list[_Waiting]:
        """Takes the next batch, at least three quarters full: padding costs as much on a CPU."""
        while self._queue and self._queue[0].answer.done():
            self._queue.popleft()
        count = min(len(self._queue), self.sizes[-1])
        larger = next(size for size in self.sizes if size >= count)
        if 4 * count <= 3 * larger:
            count = max(size for size in self.sizes if size <= count) if count else 0
        batch = [self._queue.popleft() for _ in range(count)]
        return [one for one in batch if not one.answer.done()]

    async def _answer(self, batch: list[_Waiting]) -> None:
        if not batch:  # its requests were abandoned
            return
        size = next(size for size in self.sizes if size >= len(batch))
        rows = [*range(len(batch)), *[0] * (size - len(batch))]
        try:
            images_BHWC = np.stack([batch[row].image_HWC for row in rows])
            ballot = await self.voters.vote(images_BHWC)
            probabilities_BK, voted_B = self._elect(ballot, [batch[row].lost for row in rows])
            if not np.isfinite(probabilities_BK).all():
                raise ValueError("the network's logits are not finite: serve another checkpoint")
            answers = [
                Answer(p_K, int(voted), ballot, index) if voted else NoVotes()
                for index, (p_K, voted) in enumerate(zip(probabilities_BK, voted_B, strict=True))
            ]
            self.failed = False
        except Exception as error:  # the requests fail, the server does not
            answers, self.failed = [error] * len(batch), True
        for one, found in zip(batch, answers, strict=False):  # padding has no request
            if not one.answer.done():
                failed = isinstance(found, Exception)
                (one.answer.set_exception if failed else one.answer.set_result)(found)

    def _elect(
        self, ballot: Ballot, lost_of: list[frozenset[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns class probabilities (B, K), and the number of groups that voted (B,)."""
        parts = self.voters.parts
        answered_P = np.array([taken is not None for taken in ballot.milliseconds_P])
        voted_PB = np.repeat(answered_P[:, None], len(lost_of), 1)
        for image, lost in enumerate(lost_of):
            voted_PB[list(lost), image] = False
        groups_P = np.array([part.groups for part in parts])
        return self.network.elect(parts, ballot.cls_VPBD, voted_PB), groups_P @ voted_PB

    def alone(self, answer: Answer) -> np.ndarray:
        """Returns the class probabilities (P, K) of each part's vote alone."""
        parts = self.voters.parts
        one_VP1D = answer.ballot.cls_VPBD[:, :, answer.index : answer.index + 1]
        cls_VPPD = np.repeat(one_VP1D, len(parts), 2)
        return self.network.elect(parts, cls_VPPD, np.eye(len(parts)))


def sizes_up_to(largest: int) -> list[int]:
    """Returns the powers of four below `largest`, and `largest`."""
    return [*(1 << i for i in range(0, (largest - 1).bit_length(), 2)), largest]


def part_of(parts: tuple[Part, ...], text: str) -> frozenset[int]:
    """Parses numbers of some parts, such as '0,3'; raises ValueError for others, or for all."""
    places = {str(k): k for k in range(len(parts))}
    words = (word.strip() for word in text.split(","))
    numbers = {places.get(word, -1) for word in words if word}
    if not numbers < {*places.values()}:
        numbered = f"some parts from 0 to {len(parts) - 1}"
        raise ValueError(f"lost={text[:40]!r} must be {numbered}, such as 0,3, and not all")
    return frozenset(numbers)
