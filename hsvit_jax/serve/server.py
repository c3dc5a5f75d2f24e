"""Runs a network and its voters behind uvicorn, from a free address to the last answer."""

import asyncio
import collections
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import h11
import jax
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from hsvit_jax import classifier
from hsvit_jax import config as config_lib
from hsvit_jax.runtime import signals
from hsvit_jax.serve import LOOPBACK, admission, app, batching, ray_parts, votes
from hsvit_jax.text import note

# Seconds, more than a load balancer's (nginx and AWS 60, Google 600): it answers 502 if it sends a
# request while its idle connection is being closed.
_KEEP_ALIVE = 620
_NOTICE = b"\nrequests in flight are answered; a second signal stops at once\n"
_written: collections.deque[tuple] = collections.deque(maxlen=1000)  # lines of the log


def serve(
    source: str,
    which: str,
    limits: admission.Limits,
    *,
    host: str,
    port: int,
    token: str,
    batch: int,
    wait: float,
    parts: int = 0,
    deadline: float = 1.0,
    resources: dict[str, float] | None = None,
) -> bool:
    """Serves a network until SIGTERM or Ctrl-C, and answers requests in flight.

    Args:
      source, which: the run and its checkpoint.
      limits: of requests.
      host, port: address to listen at.
      token: that requests must bear; '' for none, from this machine only.
      batch: maximum number of images computed together.
      wait: seconds that an image waits for others.
      parts: number of Ray deployments; 0 for none.
      deadline: seconds that a part may take.
      resources: options of a part's Ray actor.

    Returns:
      whether it could start.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bound(host, port))
        host, port = listener.getsockname()[:2]
        trained = classifier.load(source, which, devices=jax.devices()[:1])
        voters = network = votes.Network(trained)
        sizes = batching.sizes_up_to(min(batch, limits.queue))
        if parts:
            front = f"hsvit-{socket.gethostname()}-{host.replace(':', '.')}-{port}"
            how = (deadline, sizes, resources or {}, front)
            # Ray's own handlers of signals abort the process; ours follow below.
            voters = stack.enter_context(ray_parts.RayParts(trained, parts, *how))
        batcher = batching.Batcher(voters, network, sizes, wait)
        names = None if token else [*LOOPBACK, "[::1]"]
        settings = uvicorn.Config(
            app.Interface(batcher, limits, token, names).app,
            http=Protocol,  # h11 bounds headers; httptools may be installed too
            loop="asyncio",  # uvloop would read up to 8 MB of a connection at a time
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(limits.seconds) + 1,
        )
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        server = _Server(settings, f"{config_lib.title(trained.config.model)} at {where}")
        with contextlib.suppress(SystemExit):  # uvicorn's code 3 is ours for diverged training
            server.run([listener])
        return server.started


class _Server(uvicorn.Server):
    """A server that stops like the package's other commands, and notes its address."""

    def __init__(self, settings: uvicorn.Config, greeting: str) -> None:
        super().__init__(settings)
        self._greeting = greeting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop() -> None:
            self.should_exit = True

        with signals.StopRequests(stop, _NOTICE):
            yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            note(self._greeting)


def bound(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises ValueError if the address is taken or unknown."""
    how: dict[str, Any] = {"backlog": 2048}
    if ":" in host:
        how |= {"family": socket.AF_INET6, "dualstack_ipv6": socket.has_dualstack_ipv6()}
    try:
        return socket.create_server((host, port), **how)
    except (OSError, TypeError, UnicodeError) as error:  # a name that cannot be encoded
        raise ValueError(f"{host}:{port}: {error}; choose another --port or --host") from error


class Protocol(H11Protocol, asyncio.BufferedProtocol):
    """A connection that is parsed in small pieces and refuses in JSON."""

    def get_buffer(self, sizehint: int) -> bytearray:
        self._piece = bytearray(1 << 14)  # in chunks of one byte it takes 0.05 s
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        if self.conn.their_state is not h11.ERROR:
            self.data_received(bytes(self._piece[:nbytes]))

    def eof_received(self) -> bool:
        """Returns whether the connection stays open: a client may close its half early."""
        asked = self.cycle is not None and not self.cycle.response_complete
        if asked and not self.cycle.more_body:
            self.timeout_keep_alive = 0  # closes after the last answer
            return True
        if asked or self.conn.trailing_data[0]:
            self.send_400_response("The connection was closed too early.")
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not HTTP."""
        if self.cycle is not None:  # nobody else answers
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = JSONResponse({"error": msg}, headers={"connection": "close"})
            head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=answer.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.write_eof()
        self.loop.call_later(2, self.transport.close)  # a client that still sends reads it


def is_news(record: logging.LogRecord) -> bool:
    """Returns whether a line of the log is the first of its kind in a minute."""
    kind = record.getMessage(), str(record.exc_info and record.exc_info[1]), time.monotonic() // 60
    first = kind not in _written
    _written.append(kind)
    return first


logging.getLogger("uvicorn.error").addFilter(is_news)
