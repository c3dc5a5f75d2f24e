"""Who may ask, and how much: token, names of the host, and bounds of size, number and time."""

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

# Others take minutes for a megabyte, as punycode does, or give what is no text.
_CHARSETS = {b"utf-8", b"utf8", b"latin-1", b"latin1", b"iso-8859-1", b"ascii", b"us-ascii"}
_FIELDS = (
    "Send images as files in the field 'files', lost parts as text in 'lost', and nothing else"
)
#: Of every answer that a browser might show.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
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


class NoVotes(Exception):
    """None of the parts that were to vote has answered."""


def refusal(status: int, sentence: str) -> JSONResponse:
    """Returns a refusal that says why."""
    return JSONResponse({"error": sentence}, status, HEADERS)


def full() -> HTTPException:
    """Returns the refusal of a request that may be sent again."""
    return HTTPException(429, "The queue is full; try again in a second.", {"Retry-After": "1"})


def own_names(app: ASGIApp, hosts: list[str] | None) -> ASGIApp:
    """Refuses names of the host but some, if any are given, and forms that another server's page
    sends: a browser says what page asks, or whose it is."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, forwarded = headers.get("host", "").lower(), headers.get("x-forwarded-host")
            origin = headers.get("origin", f"//{host}").partition("//")[2]
            site = headers.get("sec-fetch-site", "none" if origin in (host, forwarded) else "other")
            if hosts and re.sub(r":\d+$", "", host) not in hosts:
                names = f"This server answers to the names {', '.join(hosts)} only"
                proxy = "let a proxy send one of them as Host, or start the server with --token"
                answering = refusal(400, f"{names}: {proxy}.")
            elif scope["method"] == "POST" and site not in ("same-origin", "none"):
                page = "A page of another server may not ask: open this server's own"
                answering = refusal(403, f"{page}, or let its proxy send X-Forwarded-Host.")
        await answering(scope, receive, send)

    return answer


class Admission:
    """Lets requests in, one by one, and reads their forms.

    Args:
      limits: of requests.
      token: that they must bear, if any.
    """

    def __init__(self, limits: Limits, token: str) -> None:
        self.limits, self._token = limits, token.encode()
        self._requests = self._bytes = 0

    def authorise(self, request: Request) -> None:
        """Raises 401 for a request that does not bear the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode("latin-1"), self._token)
        if self._token and not (same and scheme.lower() == "bearer"):
            sentence = "Send the header Authorization: Bearer TOKEN."
            raise HTTPException(401, sentence, {"WWW-Authenticate": "Bearer"})

    @contextlib.asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[None]:
        """Holds a place for a request, for as long as it may take.

        Raises:
          HTTPException: it may not ask, or there is no place, or no answer in time.
        """
        self._requests += 1
        try:
            self.authorise(request)
            if self._requests > self.limits.queue:
                raise full()
            async with asyncio.timeout(self.limits.seconds):
                yield
        except TimeoutError:
            sentence = "No answer in time (--timeout); try again later."
            raise HTTPException(503, sentence) from None
        except NoVotes:
            raise HTTPException(503, "None of the network's parts has answered.") from None
        except ClientDisconnect:
            raise HTTPException(400, "The connection was closed too early.") from None
        finally:
            self._requests -= 1

    @contextlib.asynccontextmanager
    async def form(self, request: Request) -> AsyncIterator[tuple[list[str], list[bytes], str]]:
        """Reads a form, whose bytes count until this ends: files' names and bytes, and lost parts.

        Raises:
          HTTPException: it is no such form, or beyond a limit.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data":
            raise HTTPException(415, f"{_FIELDS}, as multipart/form-data.")
        if options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
            raise HTTPException(400, "The form's charset may be utf-8, latin-1 or ascii.")
        request.state.bytes, ended = 0, threading.Event()
        most = {"max_files": self.limits.files, "max_fields": 4, "max_part_size": 1 << 10}
        parser = MultiPartParser(request.headers, self._body(request, ended), **most)
        parser.spool_max_size = 1 << 40  # in memory, where `limits.request_bytes` bounds them all
        parser.on_end = ended.set
        try:
            form = await parser.parse()
            try:
                files, lost = form.getlist("files"), form.getlist("lost")
                others = [*request.query_params, *({*form} - {"files", "lost"})]
                if not files or others or str in map(type, files) or {*map(type, lost)} - {str}:
                    raise HTTPException(
                        400, f"{_FIELDS}; got {few([*form, *request.query_params])}."
                    )
                raws = [await file.read() for file in files]
            finally:
                await form.close()
            yield [file.filename or "" for file in files], raws, ",".join(lost)
        except MultiPartException as error:
            raise HTTPException(400, f"The form cannot be read: {error}") from None
        finally:
            self._bytes -= request.state.bytes

    async def _body(self, request: Request, ended: threading.Event) -> AsyncIterator[bytes]:
        """Yields the request's body, while it and all that are held stay within the limits."""
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
                raise full()
            yield chunk
        if not ended.is_set():
            raise MultiPartException("it ends without its last boundary")
