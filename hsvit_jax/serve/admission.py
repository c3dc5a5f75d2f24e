"""Admits requests: token, names of the host, and limits of size, number and time."""

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import re
import threading
from collections.abc import AsyncIterator

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hsvit_jax.text import few

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # what any client can send

# Other charsets take minutes for a megabyte, as punycode does, or decode to no text.
_CHARSETS = {b"utf-8", b"utf8", b"latin-1", b"latin1", b"iso-8859-1", b"ascii", b"us-ascii"}
_FIELDS = (
    "Send images as files in the field 'files', lost parts as text in 'lost', and nothing else"
)
#: Headers of every answer that a browser might show.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
      request_bytes, files: of a request.
      pixels: of an image.
      queue: simultaneous requests, and waiting images.
      memory_bytes: of all requests whose images are not decoded yet.
      seconds: from the first byte to the answer.
    """

    request_bytes: int = 1 << 25
    files: int = 64
    pixels: int = 25_000_000
    queue: int = 256
    memory_bytes: int = 1 << 28
    seconds: float = 30.0


class NoVotes(Exception):
    """No part that should vote has answered."""


def refusal(status: int, sentence: str) -> JSONResponse:
    """Returns a refusal with its reason."""
    return JSONResponse({"error": sentence}, status, HEADERS)


def full() -> HTTPException:
    """Returns the refusal of a request that the client may repeat."""
    return HTTPException(429, "The queue is full; try again in a second.", {"Retry-After": "1"})


def own_names(app: ASGIApp, hosts: list[str] | None) -> ASGIApp:
    """Refuses host names outside `hosts`, if given, and forms sent by other servers' pages."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, forwarded = headers.get("host", "").lower(), headers.get("x-forwarded-host")
            origin = headers.get("origin", f"//{host}").partition("//")[2]
            site = headers.get("sec-fetch-site", "none" if origin in (host, forwarded) else "other")
            if hosts and re.sub(r":\d+$", "", host) not in hosts:
                names = f"This server answers only as {', '.join(hosts)}"
                answering = refusal(400, f"{names}: send such a Host, or start it with --token.")
            elif scope["method"] == "POST" and site not in ("same-origin", "none"):
                page = "Pages of other servers may not send forms: open this server's own page"
                answering = refusal(403, f"{page}, or let its proxy send X-Forwarded-Host.")
        await answering(scope, receive, send)

    return answer


class Admission:
    """Admits requests and reads their forms; a token of '' admits all."""

    def __init__(self, limits: Limits, token: str) -> None:
        self.limits, self._token = limits, token.encode()
        self._requests = self._bytes = 0

    def authorise(self, request: Request) -> None:
        """Raises 401 for a request without the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode("latin-1"), self._token)
        if self._token and not (same and scheme.lower() == "bearer"):
            sentence = "Send the header Authorization: Bearer TOKEN."
            raise HTTPException(401, sentence, {"WWW-Authenticate": "Bearer"})

    @contextlib.asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[None]:
        """Holds a place for a request.

        Raises:
          HTTPException: the token is wrong, the queue is full, or the time is up.
        """
        self._requests += 1
        try:
            self.authorise(request)
            if self._requests > self.limits.queue:
                raise full()
            async with asyncio.timeout(self.limits.seconds):
                yield
        except TimeoutError:
            raise HTTPException(503, "No answer in time (--timeout); try again later.") from None
        except NoVotes:
            raise HTTPException(503, "No part of the network has answered.") from None
        except ClientDisconnect:
            raise HTTPException(400, "The connection was closed too early.") from None
        finally:
            self._requests -= 1

    @contextlib.asynccontextmanager
    async def form(self, request: Request) -> AsyncIterator[tuple[list[str], list[bytes], str]]:
        """Yields the names and bytes of a form's files and its lost parts; its bytes count so long.

        Raises:
          HTTPException: it is no such form, or exceeds a limit.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data":
            raise HTTPException(415, f"{_FIELDS}, as multipart/form-data.")
        if options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
            raise HTTPException(400, "The form's charset may be utf-8, latin-1 or ascii.")
        request.state.bytes, ended = 0, threading.Event()
        most = {"max_files": self.limits.files, "max_fields": 4, "max_part_size": 1 << 10}
        parser = MultiPartParser(request.headers, self._body(request, ended), **most)
        parser.spool_max_size = 1 << 40  # files stay in memory, up to `limits.request_bytes`
        parser.on_end = ended.set
        try:
            form = await parser.parse()
            try:
                files, lost = form.getlist("files"), form.getlist("lost")
                others = [*request.query_params, *({*form} - {"files", "lost"})]
                if not files or others or str in map(type, files) or {*map(type, lost)} - {str}:
                    got = few([*form, *request.query_params])
                    raise HTTPException(400, f"{_FIELDS}; got {got}.")
                raws = [await file.read() for file in files]
            finally:
                await form.close()
            yield [file.filename or "" for file in files], raws, ",".join(lost)
        except MultiPartException as error:
            raise HTTPException(400, f"The form cannot be read: {error}") from None
        finally:
            self._bytes -= request.state.bytes

    async def _body(self, request: Request, ended: threading.Event) -> AsyncIterator[bytes]:
        """Yields the request's body while it and all that are held stay within the limits."""
        largest = self.limits.request_bytes
        too_large = HTTPException(413, f"A request may have at most {largest:,} bytes.")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > largest:
            raise too_large
        async for chunk in request.stream():
            request.state.bytes += len(chunk)
            self._bytes += len(chunk)
            if request.state.bytes > largest:
                raise too_large
            if self._bytes > self.limits.memory_bytes:
                raise full()
            yield chunk
        if not ended.is_set():
            raise MultiPartException("it ends without its last boundary")
