"""The HTTP interface: what each address answers. Uploads stay in memory."""

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from hsvit_jax import artifacts, data, tasks
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import Classifier
from hsvit_jax.serve import admission
from hsvit_jax.serve.batching import Answer, Batcher, part_of

# An image of this size is decoded faster than a thread gets it.
_SMALL_BYTES, _SMALL_PIXELS = 1 << 15, 1 << 16
_THREADS = 3
_FILES = {
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/openapi.json": ("openapi.json", "application/json"),
}
_Handler = Callable[[Request], Awaitable[Response]]


class Interface:
    """The addresses of a server; its ASGI application is `app`.

    Args:
      batcher: answers images.
      limits: of requests.
      token: that requests must bear; '' for none.
      hosts: names of the server that a browser may use; None for any.
    """

    def __init__(
        self,
        batcher: Batcher,
        limits: admission.Limits,
        token: str = "",
        hosts: list[str] | None = None,
    ) -> None:
        self.batcher, self.limits = batcher, limits
        self.admission = admission.Admission(limits, token)
        self._classifier = batcher.network.classifier
        self._task = tasks.of(self._classifier.config)
        self._page = artifacts.filled(Path(__file__).with_name("page.html"), **self._about())
        self._metrics = own = prometheus.CollectorRegistry()
        self._seconds = prometheus.Histogram(
            "hsvit_request_seconds", "Seconds of requests by status.", ["status"], registry=own
        )
        self._images = prometheus.Counter("hsvit_images", "Images classified.", registry=own)
        waiting = prometheus.Gauge("hsvit_queue_images", "Images that wait.", registry=own)
        waiting.set_function(lambda: len(batcher))
        self.app = Starlette(
            routes=[
                Route("/", self.page),
                *(Route(path, _file) for path in _FILES),
                Route("/healthz", self.health),
                Route("/metrics", self.metrics),
                Route("/predict", self._guarded(self.predict), methods=["POST"]),
                Route("/explain", self._guarded(self.explain), methods=["POST"]),
            ],
            middleware=[Middleware(admission.own_names, hosts)],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _refusal, Exception: _fault},
        )
        self.app.router.redirect_slashes = False  # a proxy may serve another path

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # A thread that decodes 25 million transparent pixels holds half a gigabyte.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        await self.batcher.warm_up()
        c = self._classifier
        await asyncio.to_thread(maps, c, np.zeros((*c.image_size, c.channels), np.uint8))
        work = asyncio.create_task(self.batcher.run())
        gc.freeze()  # the collector would halt requests to search what jax has made
        yield
        work.cancel()
        gc.unfreeze()

    def _guarded(self, handler: _Handler) -> _Handler:
        """Returns a handler behind admission that measures its requests."""

        async def guarded(request: Request) -> Response:
            started, status = time.perf_counter(), 500
            try:
                async with self.admission.admitted(request):
                    response = await handler(request)
                status = response.status_code
                return response
            except HTTPException as error:
                status = error.status_code
                raise
            finally:
                self._seconds.labels(status).observe(time.perf_counter() - started)

        return guarded

    async def predict(self, request: Request) -> Response:
        """Answers each image of a form."""
        names, _, answers = await self._answers(request)
        predictions = [self._prediction(*one) for one in zip(names, answers, strict=True)]
        return JSONResponse({"predictions": predictions})

    async def explain(self, request: Request) -> Response:
        """Answers the first image, with each part's vote and the maps of attention."""
        names, images, answers = await self._answers(request)
        answer = answers[0]
        times_P, p_PK = answer.ballot.milliseconds_P, self.batcher.alone(answer)
        votes = [
            {
                "name": part.name,
                "groups": part.groups,
                "milliseconds": taken,
                "top": self._first(p_K) if part.groups and taken is not None else None,
            }
            for part, taken, p_K in zip(self.batcher.voters.parts, times_P, p_PK, strict=True)
        ]
        seen = await asyncio.to_thread(maps, self._classifier, images[0])
        return JSONResponse({**self._prediction(names[0], answer), "parts": votes, "maps": seen})

    async def page(self, _: Request) -> Response:
        """Answers the page on which a user tries the network."""
        return HTMLResponse(self._page, headers=admission.HEADERS)

    async def health(self, _: Request) -> Response:
        """Describes network and parts; answers 503 while batches fail."""
        return JSONResponse(self._about(), 503 if self.batcher.failed else 200)

    def _about(self) -> dict[str, Any]:
        c = self._classifier
        return {
            "status": "failing" if self.batcher.failed else "ok",
            "network": config_lib.title(c.config.model),
            "step": c.step,
            "image_size": c.image_size,
            "channels": c.channels,
            "fit": c.config.data.fit,
            "task": c.config.data.task,
            "classes": len(c.class_names),
            "parts": [dataclasses.asdict(part) for part in self.batcher.voters.parts],
        }

    async def metrics(self, request: Request) -> Response:
        """Answers Prometheus."""
        self.admission.authorise(request)
        text = prometheus.generate_latest(self._metrics)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _answers(self, request: Request) -> tuple[list[str], list[np.ndarray], list[Answer]]:
        """Returns the names, pixels and answers of a form's images."""
        async with self.admission.form(request) as (names, raws, text):
            try:
                lost = part_of(self.batcher.voters.parts, text)
            except ValueError as error:
                raise HTTPException(400, f"{error}.") from None
            if len(raws) > self.limits.queue:
                sentence = f"A request may have {self.limits.queue} files at most (--queue)."
                raise HTTPException(413, sentence)
            if len(self.batcher) + len(raws) > self.limits.queue:
                raise admission.full()
            images = await self._decoded(names, raws)
        answers = await self.batcher.answer(images, lost)
        self._images.inc(len(answers))
        return names, images, answers

    async def _decoded(self, names: list[str], raws: list[bytes]) -> list[np.ndarray]:
        """Decodes images in a thread, a small one at once; raises 422 for no image."""
        c, given_up = self._classifier, threading.Event()  # a thread outlives its request

        def decode(pixels: int) -> list[np.ndarray]:
            how = {"fit": c.config.data.fit, "max_pixels": pixels}
            return [
                data.read_image(raw, c.image_size, c.channels, name=name, **how)
                for name, raw in zip(names, raws, strict=True)
                if not given_up.is_set()
            ]

        if len(raws) == 1 and len(raws[0]) < _SMALL_BYTES:
            with contextlib.suppress(data.BadImage):  # it may have many pixels
                return decode(min(self.limits.pixels, _SMALL_PIXELS))
        try:
            return await asyncio.to_thread(decode, self.limits.pixels)
        except data.BadImage as error:
            raise HTTPException(422, f"{error}.") from None
        finally:
            given_up.set()

    def _prediction(self, name: str, answer: Answer) -> dict[str, Any]:
        groups = sum(part.groups for part in self.batcher.voters.parts)
        votes = {"voted": answer.voted, "of": groups}
        top = self._task.rows(answer.probabilities_K, self._classifier.class_names, self._task.most)
        return {"file": name, "top": top, "votes": votes}

    def _first(self, answer_K: np.ndarray) -> dict[str, Any]:
        """Returns the likeliest label, or the first number, of one part."""
        k = self._task.ranked(answer_K)[0]
        return {"label": self._classifier.class_names[k], self._task.unit: float(answer_K[k])}


def maps(classifier: Classifier, image_HWC: np.ndarray) -> list[dict[str, Any]]:
    """Returns maps of attention over an image as rows of 0 to 255.

    Each of an HSViT's groups has a map too: its feature maps' sum, weighted by the attention of
    CLS, at the tile that the group's tower sees.
    """
    views = classifier.explain(image_HWC[None])[0]
    found: list[tuple[str, np.ndarray]] = []
    if views.groups is not None:
        model = classifier.config.model
        rows, columns = model.get("tiles", (1, 1))
        units = classifier.model.units if rows * columns > 1 else 1
        seen_GHW = np.einsum("gc,gchw->ghw", views.groups.shares_GC, views.groups.maps_GCHW)
        groups, height, width = seen_GHW.shape
        placed_GRHCW = np.zeros((groups, rows, height, columns, width))
        for group, seen_HW in enumerate(seen_GHW):
            tile = group * units // groups % (rows * columns)
            placed_GRHCW[group, tile // columns, :, tile % columns] = seen_HW
        placed_GHW = placed_GRHCW.reshape(groups, rows * height, columns * width)
        found.append(("attention", placed_GHW.sum(0)))
        found += [(f"group {group}", placed_HW) for group, placed_HW in enumerate(placed_GHW)]
    elif views.sequences is not None:
        blocks = zip(views.sequences.blocks, views.sequences.attention, strict=True)
        found += [(f"block {number}", heads.mean(0)) for number, heads in blocks]
    return [{"name": name, "rows": _bytes(map_HW).tolist()} for name, map_HW in found]


def _bytes(map_HW: np.ndarray) -> np.ndarray:
    """Scales a map to 0 to 255."""
    low, high = float(map_HW.min()), float(map_HW.max())
    return np.uint8(np.rint((map_HW - low) * (255 / (high - low or 1))))


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    text = Path(__file__).with_name(name).read_bytes()
    return Response(text, media_type=kind, headers=admission.HEADERS)


async def _refusal(_: Request, error: HTTPException) -> Response:
    answer = admission.refusal(error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _fault(_: Request, error: Exception) -> Response:
    return admission.refusal(500, "The server failed; its log says why.")
