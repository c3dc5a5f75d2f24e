"""The HTTP interface: routes, limits and metrics; uploads stay in memory."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import numpy as np
import prometheus_client as prometheus
from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hsvit_jax import data
from hsvit_jax.serve.batching import Answer, Batcher, NoVotes, part_of
from hsvit_jax.text import few

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # what any client can send

_TOP = 5
# An image that is decoded sooner than handed to a thread.
_SMALL_BYTES, _SMALL_PIXELS = 1 << 15, 1 << 16
_THREADS = 3
# Others take minutes for a megabyte, as punycode does, or give what is no text.
_CHARSETS = {b"utf-8", b"utf8", b"latin-1", b"latin1", b"iso-8859-1", b"ascii", b"us-ascii"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_Handler = Callable[[Request], Awaitable[Response]]
_UNANSWERED = {
    TimeoutError: (503, "No answer in time (--timeout); try again later."),
    NoVotes: (503, "None of the network's parts has answered."),
    ClientDisconnect: (400, "The connection was closed too early."),
}
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/openapi.json": ("openapi.json", "application/json"),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes:
      request_bytes, files, pixels: of a request; pixels of each of its images.
      queue: requests at a time, and images that wait.
      memory_bytes: of all requests whose images are not decoded yet.
      seconds: from the first byte to the answer.
    """

    request_bytes: int = 1 << 25
    files: int = 64
    pixels: int = 25_000_000
    queue: int = 256
    memory_bytes: int = 1 << 28
    seconds: float = 30.0


def _own_names(app: ASGIApp, hosts: list[str] | None) -> ASGIApp:
    """Answers to some names of a host only, if to any, and to no form that another server's page
    sends: a browser says what page asks, or whose it is."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, forwarded = headers.get("host", "").lower(), headers.get("x-forwarded-host")
            origin = headers.get("origin", f"//{host}").partition("//")[2]
            site = headers.get("sec-fetch-site", "none" if origin in (host, forwarded) else "other")
            if hosts and re.sub(r":\d+$", "", host) not in hosts:
                text = f"This server answers to the names {', '.join(hosts)} only: let a "
                text += "proxy send one of them as Host, or start the server with --token."
                answering = JSONResponse({"error": text}, 400, _PAGE_HEADERS)
            elif scope["method"] == "POST" and site not in ("same-origin", "none"):
                text = "A page of another server may not ask: open this server's own, or let its "
                text += "proxy send X-Forwarded-Host."
                answering = JSONResponse({"error": text}, 403, _PAGE_HEADERS)
        await answering(scope, receive, send)

    return answer


class Server:
    """The application and what it counts.

    Args:
      batcher: answers images.
      limits: of requests.
      token: that requests must bear, if any.
      hosts: names by which a browser may call the server; None for any.
    """

    def __init__(
        self, batcher: Batcher, limits: Limits, token: str = "", hosts: list[str] | None = None
    ) -> None:
        self.batcher, self.limits, self._token = batcher, limits, token.encode()
        self._classifier = batcher.network.classifier
        self._requests = self._bytes = 0
        self._last: Answer | None = None
        self._metrics = prometheus.CollectorRegistry()
        counter, gauge, histogram = (
            functools.partial(kind, registry=self._metrics)
            for kind in (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
        )
        self._answered = counter("hsvit_requests", "Requests by status.", ["status"])
        self._seconds = histogram("hsvit_request_seconds", "Seconds of answered requests.")
        self._images = counter("hsvit_images", "Images classified.")
        self._votes = gauge("hsvit_votes", "Groups that voted on the last image.")
        answered = "Whether a part answered the last batch."
        self._parts = gauge("hsvit_part_answered", answered, ["part"])
        waiting = gauge("hsvit_queue_images", "Images that wait.")
        waiting.set_function(lambda: len(batcher))
        routes = [Route(path, self._file) for path in _FILES]
        routes += [
            Route("/healthz", self._health),
            Route("/metrics", self._show_metrics),
            Route("/predict", self._guarded(self._predict), methods=["POST"]),
            Route("/explain", self._guarded(self._explain), methods=["POST"]),
        ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(_own_names, hosts)],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _refusal, Exception: _fault},
        )
        self.app.router.redirect_slashes = False  # to a path that a proxy may not have

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # A thread that decodes may hold half a gigabyte, of 25 million pixels with transparency.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        await self.batcher.warm_up()
        c = self._classifier
        await asyncio.to_thread(self._maps, np.zeros((*c.image_size, c.channels), np.uint8))
        work = asyncio.create_task(self.batcher.run())
        yield
        work.cancel()

    def _guarded(self, handler: _Handler) -> _Handler:
        """A handler behind token, limits and metrics."""

        async def guarded(request: Request) -> Response:
            started, status = time.perf_counter(), 500
            self._requests += 1
            try:
                self._authorise(request)
                if self._requests > self.limits.queue:
                    raise self._full()
                async with asyncio.timeout(self.limits.seconds):
                    response = await handler(request)
                status = response.status_code
                self._seconds.observe(time.perf_counter() - started)
                return response
            except (HTTPException, *_UNANSWERED) as error:
                if type(error) in _UNANSWERED:
                    error = HTTPException(*_UNANSWERED[type(error)])
                status = error.status_code
                raise error from None
            finally:
                self._requests -= 1
                self._answered.labels(status).inc()

        return guarded

    def _authorise(self, request: Request) -> None:
        """Raises 401 for a request that does not bear the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode("latin-1"), self._token)
        if self._token and not (same and scheme.lower() == "bearer"):
            raise HTTPException(
                401, "Send the header Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"}
            )

    def _full(self) -> HTTPException:
        return HTTPException(429, "The queue is full; try again in a second.", {"Retry-After": "1"})

    async def _body(self, request: Request, ended: threading.Event) -> AsyncIterator[bytes]:
        """The request's body, while it and all that are held stay within the limits."""
        largest = self.limits.request_bytes
        too_large = HTTPException(413, f"A request may have {largest:,} bytes at most.")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > largest:
            raise too_large
        async for chunk in request.stream():
            request.state.bytes += len(chunk)
            self._bytes += len(chunk)
            if request.state.bytes > largest:
                raise too_large
            if self._bytes > self.limits.memory_bytes:
                raise self._full()
            yield chunk
        if not ended.is_set():
            raise MultiPartException("it ends without its last boundary")

    async def _form(self, request: Request) -> tuple[list[str], list[np.ndarray], frozenset[int]]:
        """Names and pixels of the field `files`, and the parts of the field `lost`."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data":
            raise HTTPException(
                415, "Send multipart/form-data with one or several images as field 'files'."
            )
        if options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
            raise HTTPException(400, "The form's charset may be utf-8, latin-1 or ascii.")
        limits = self.limits
        most = {"max_files": limits.files, "max_fields": 4, "max_part_size": 1 << 10}
        ended = threading.Event()
        parser = MultiPartParser(request.headers, self._body(request, ended), **most)
        parser.spool_max_size = 1 << 40  # in memory, where `limits.request_bytes` bounds them all
        parser.on_end = ended.set
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise HTTPException(400, f"The form cannot be read: {error}") from None
        try:
            files, lost = form.getlist("files"), form.getlist("lost")
            if others := [*request.query_params, *({*form} - {"files", "lost"})]:
                raise ValueError(
                    "A form with the fields 'files' and 'lost' is read, and no parameters of the "
                    f"address; got {few(others)}"
                )
            if str in map(type, files) or {*map(type, lost)} - {str}:
                raise ValueError("The field 'files' takes files, and 'lost' text")
            names = [file.filename or "" for file in files]
            raws = [await file.read() for file in files]
            lost = part_of(self.batcher.voters.parts, ",".join(lost))
        except ValueError as error:
            raise HTTPException(400, f"{error}.") from None
        finally:
            await form.close()
        if not files:
            raise HTTPException(400, "The form has no file in its field 'files'.")
        if len(files) > limits.queue:
            raise HTTPException(413, f"A request may have {limits.queue} files at most (--queue).")
        if len(self.batcher) + len(files) > limits.queue:
            raise self._full()
        given_up = threading.Event()  # a thread outlives its request
        if len(raws) == 1 and len(raws[0]) < _SMALL_BYTES:
            with contextlib.suppress(data.BadImage):  # it may be one of many pixels
                pixels = min(limits.pixels, _SMALL_PIXELS)
                return names, self._decode(names, raws, pixels, given_up), lost
        try:
            decoding = asyncio.to_thread(self._decode, names, raws, limits.pixels, given_up)
            return names, await decoding, lost
        except data.BadImage as error:
            raise HTTPException(422, f"{error}.") from None
        finally:
            given_up.set()

    def _decode(
        self, names: list[str], raws: list[bytes], pixels: int, given_up: threading.Event
    ) -> list[np.ndarray]:
        c = self._classifier
        how = {"fit": c.config.data.fit, "max_pixels": pixels}
        return [
            data.read_image(raw, c.image_size, c.channels, name=name, **how)
            for name, raw in zip(names, raws, strict=True)
            if not given_up.is_set()
        ]

    async def _answers(self, request: Request) -> tuple[list[str], list[np.ndarray], list[Answer]]:
        request.state.bytes = 0
        try:
            names, images, lost = await self._form(request)
        finally:
            self._bytes -= request.state.bytes
        answers = await self.batcher.answer(images, lost)
        self._images.inc(len(answers))
        self._last = answers[-1]
        return names, images, answers

    def _prediction(self, name: str, answer: Answer) -> dict[str, Any]:
        of = sum(part.groups for part in self.batcher.voters.parts)
        return {
            "file": name,
            "top": self._top(answer.probabilities_K),
            "votes": {"voted": answer.voted, "of": of},
        }

    def _top(self, probabilities_K: np.ndarray, most: int = _TOP) -> list[dict[str, Any]]:
        order = np.argsort(-probabilities_K, kind="stable")[:most]
        names = self._classifier.class_names
        return [{"label": names[k], "probability": float(probabilities_K[k])} for k in order]

    async def _predict(self, request: Request) -> Response:
        names, _, answers = await self._answers(request)
        predictions = [self._prediction(*one) for one in zip(names, answers, strict=True)]
        return JSONResponse({"predictions": predictions})

    async def _explain(self, request: Request) -> Response:
        """The answer for the first image, each part's vote, and what the network sees."""
        names, images, answers = await self._answers(request)
        answer, parts = answers[0], self.batcher.voters.parts
        alone_PK = self.batcher.alone(answer)
        taken_P = answer.ballot.milliseconds_P
        votes = [
            {
                "name": part.name,
                "groups": part.groups,
                "milliseconds": taken,
                "top": self._top(p_K, 1)[0] if part.groups and taken is not None else None,
            }
            for part, taken, p_K in zip(parts, taken_P, alone_PK, strict=True)
        ]
        maps = await asyncio.to_thread(self._maps, images[0])
        return JSONResponse({**self._prediction(names[0], answer), "parts": votes, "maps": maps})

    def _maps(self, image_HWC: np.ndarray) -> list[dict[str, Any]]:
        """Attention over the image as uint8 rows; of an HSViT for each group, too: the sum of its
        feature maps, weighted by the attention of CLS to them, where the group's tower looks."""
        try:
            views = self._classifier.explain(image_HWC[None])[0]
        except ValueError:  # the network has nothing to show
            return []
        found: list[tuple[str, np.ndarray]] = []
        if views.groups is not None:
            model = self._classifier.config.model
            rows, columns = model.get("tiles", (1, 1))
            seen_GHW = np.einsum("gc,gchw->ghw", views.groups.shares_GC, views.groups.maps_GCHW)
            groups, height, width = seen_GHW.shape
            placed_GRHCW = np.zeros((groups, rows, height, columns, width))
            for group, seen_HW in enumerate(seen_GHW):
                tile = group * model.get("towers", 1) // groups % (rows * columns)
                placed_GRHCW[group, tile // columns, :, tile % columns] = seen_HW
            placed_GHW = placed_GRHCW.reshape(groups, rows * height, columns * width)
            found.append(("attention", placed_GHW.sum(0)))
            found += [(f"group {group}", placed_HW) for group, placed_HW in enumerate(placed_GHW)]
        elif views.sequences is not None:
            blocks = zip(views.sequences.blocks, views.sequences.attention, strict=True)
            found += [(f"block {number}", heads.mean(0)) for number, heads in blocks]
        return [{"name": name, "rows": _bytes(map_HW).tolist()} for name, map_HW in found]

    async def _health(self, _: Request) -> Response:
        """Network and parts; 503 while batches fail, for whoever restarts a server."""
        failed = self.batcher.failed
        model = self._classifier.config.model
        parts = [dataclasses.asdict(part) for part in self.batcher.voters.parts]
        return JSONResponse(
            {
                "status": "failing" if failed else "ok",
                "network": model.variant,
                "step": self._classifier.step,
                "image_size": self._classifier.image_size,
                "channels": self._classifier.channels,
                "fit": self._classifier.config.data.fit,
                "classes": len(self._classifier.class_names),
                "parts": parts,
            },
            503 if failed else 200,
        )

    async def _show_metrics(self, request: Request) -> Response:
        self._authorise(request)
        if self._last is not None:
            self._votes.set(self._last.voted)
            taken_P = self._last.ballot.milliseconds_P
            for part, taken in zip(self.batcher.voters.parts, taken_P, strict=True):
                self._parts.labels(part.name).set(taken is not None)
        text = prometheus.generate_latest(self._metrics)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _file(self, request: Request) -> Response:
        name, kind = _FILES[request.url.path]
        text = (resources.files(__package__) / name).read_bytes()
        return Response(text, media_type=kind, headers=_PAGE_HEADERS)


def _bytes(map_HW: np.ndarray) -> np.ndarray:
    """A map scaled to 0 to 255."""
    low, high = float(map_HW.min()), float(map_HW.max())
    return np.uint8(np.rint((map_HW - low) * (255 / (high - low or 1))))


async def _refusal(_: Request, error: HTTPException) -> Response:
    headers = {**(error.headers or {}), **_PAGE_HEADERS}
    return JSONResponse({"error": error.detail}, error.status_code, headers)


async def _fault(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": "The server failed; its log says why."}, 500)
