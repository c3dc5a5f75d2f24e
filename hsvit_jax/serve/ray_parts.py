"""Runs a network's parts as Ray Serve deployments, on this machine or on a cluster's nodes."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import numpy as np

from hsvit_jax.classifier import Classifier
from hsvit_jax.serve.votes import Ballot, parts_of
from hsvit_jax.text import note
from hsvit_jax.train import evaluate

# Ray replaces a replica that fails three checks in a row, 2 s apart and of 5 s each.
_LIFE = {"health_check_period_s": 2, "health_check_timeout_s": 5, "graceful_shutdown_timeout_s": 1}
_TOKEN = "; set RAY_AUTH_MODE=token if `ray start` asks for tokens"


class Replica:
    """A part on its node, compiled for every size of a batch.

    Args:
      part: of `Classifier.cut`; the node needs no file of the run.
      shape: of an image.
      sizes: of batches.
      tta: views of an image, see `evaluate.tta_views`.
    """

    def __init__(self, part: Any, shape: tuple[int, ...], sizes: Sequence[int], tta: str) -> None:
        def total(images_BHWC: jax.Array) -> jax.Array:
            views_VBHWC = evaluate.tta_views(images_BHWC, tta)
            return jax.lax.map(lambda view_BHWC: part(view_BHWC)[0], views_VBHWC)

        self._total = jax.jit(total)
        for size in sizes:
            self(np.zeros((size, *shape), np.uint8))

    def __call__(self, images_BHWC: np.ndarray) -> np.ndarray:
        """Returns the part's weighted sums of CLS tokens (V, B, D) for uint8 images."""
        return np.asarray(self._total(images_BHWC))


class RayParts:
    """A context of voters in Ray deployments; Ray restarts a part that dies.

    A batch waits for all parts, but no longer than the deadline. A part gets its next batch after
    its last answer; if all parts are late, the next batch waits for one.

    Args:
      classifier: the network.
      count: of parts, each of equally many groups.
      deadline: seconds.
      sizes: of batches.
      resources: options of a part's Ray actor.
      front: the server's address; parts that an ended server left there are deleted.
    """

    at_once = 1  # a part without its next batch would miss it

    def __init__(
        self,
        classifier: Classifier,
        count: int,
        deadline: float,
        sizes: Sequence[int],
        resources: dict[str, float],
        front: str,
    ) -> None:
        cuts, _ = classifier.cut(count)
        self.parts = parts_of(cuts)
        self._deadline, self._resources, self._front = deadline, resources, front
        shape = (*classifier.image_size, classifier.channels)
        tta, start = classifier.config.eval.tta, secrets.token_hex(4)  # names no other server's
        self._replicas = {
            f"{front}-{start}-{k}": (cut, shape, sizes, tta) for k, cut in enumerate(cuts)
        }
        views = len(evaluate.tta_views(np.zeros((1, *shape)), tta))
        self._views, self._width = views, classifier.model.config.embed_dim
        self._handles: list[Any] = []
        self._asked: dict[int, asyncio.Future] = {}

    def __enter__(self) -> Self:
        """Starts the deployments on the cluster of RAY_ADDRESS or on this machine."""
        with contextlib.ExitStack() as started:  # Ctrl-C too would leave parts in the cluster
            started.push(self.__exit__)
            try:
                self._start()
            except (ConnectionError, RuntimeError, ValueError) as error:
                hint = _TOKEN if isinstance(error, ConnectionError) else ""
                raise ValueError(f"Ray cannot start the parts: {error}{hint}") from error
            started.pop_all()
        return self

    def _start(self) -> None:
        import ray
        from ray import serve

        _check_reachable(os.environ.get("RAY_ADDRESS", ""))
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of forks, which only execute
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        # Ray's own handler would abort the process.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        orphans = [n for n in serve.status().applications if n.startswith(f"{self._front}-")]
        _delete(orphans)
        deployment = serve.deployment(
            Replica, max_ongoing_requests=2, ray_actor_options=self._resources, **_LIFE
        )
        targets = [
            serve.RunTarget(deployment.bind(*arguments), name=name, route_prefix=None)
            for name, arguments in self._replicas.items()
        ]
        free = ray.available_resources()
        for option, unit in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            asked = len(targets) * self._resources[option]
            if asked > free.get(unit, 0):
                have = f"the cluster has {free.get(unit, 0):g} free"
                note(f"the parts need {asked:g} {unit}s and {have}: they wait for more")
        self._handles = serve.run_many(targets)

    def __exit__(self, *_: object) -> None:
        import ray

        if not ray.is_initialized():
            return
        try:
            _delete(self._replicas)
        finally:
            ray.shutdown()

    async def vote(self, images_BHWC: np.ndarray) -> Ballot:
        """See `Voters`."""
        asked = {}
        if len(self._asked) == len(self._handles):
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(self._asked.values(), timeout=self._deadline, return_when=first)
        for k, handle in enumerate(self._handles):
            if k not in self._asked:
                asked[k] = self._asked[k] = asyncio.ensure_future(self._ask(handle, images_BHWC))
                asked[k].add_done_callback(lambda _, k=k: self._asked.pop(k))
        if asked:
            await asyncio.wait(asked.values(), timeout=self._deadline)
        answers = {k: f.result() for k, f in asked.items() if f.done() and f.result() is not None}
        # One shape, whoever answers: the head would be compiled again for another.
        shape = (self._views, len(self.parts), len(images_BHWC), self._width)
        cls_VPBD = np.zeros(shape, np.float32)
        for k, (total_VBD, _) in answers.items():
            cls_VPBD[:, k] = total_VBD
        taken_P = tuple(answers[k][1] if k in answers else None for k in range(len(self.parts)))
        return Ballot(cls_VPBD, taken_P)

    async def _ask(self, handle: Any, images_BHWC: np.ndarray) -> tuple[np.ndarray, float] | None:
        """Returns a part's answer and its milliseconds; None for a part that died."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        started = time.perf_counter()
        try:
            total_VBD = await handle.remote(images_BHWC)
        except (RayError, RayServeException) as error:
            logging.getLogger(__name__).warning("a part failed: %s", type(error).__name__)
            return None
        return total_VBD, 1000 * (time.perf_counter() - started)


def _delete(names: Iterable[str]) -> None:
    """Deletes applications of Ray Serve together, and waits until they are gone."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    for wait in (False, True):
        for name in names:
            # They end without us after a minute; Serve may not have started.
            with contextlib.suppress(TimeoutError, RayServeException):
                serve.delete(name, _blocking=wait)


def _check_reachable(address: str) -> None:
    """Raises ValueError if nothing listens at a cluster's address: Ray would wait forever."""
    if address in ("", "auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise ValueError(f"nothing answers at RAY_ADDRESS={address} ({error})") from error
