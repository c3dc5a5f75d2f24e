"""The server: a network, its voters and uvicorn, from a free address to the last answer."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import jax
import uvicorn

from hsvit_jax import classifier
from hsvit_jax import config as config_lib
from hsvit_jax.runtime import signals
from hsvit_jax.serve import LOOPBACK, admission, app, batching, ray_parts, transport, votes
from hsvit_jax.text import note

# Seconds, more than a load balancer's (nginx and AWS 60, Google 600): one that sends a request
# while its idle connection is being closed answers 502.
_KEEP_ALIVE = 620
_NOTICE = b"\nrequests in flight are answered; a second signal stops at once\n"


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
    """Serves a network until SIGTERM or Ctrl-C, and answers what is in flight.

    Args:
      source, which: the run and its checkpoint.
      limits: of requests.
      host, port: where to listen.
      token: that requests must bear; '' for none, from this machine only.
      batch: the most images computed together.
      wait: seconds that an image waits for others.
      parts: Ray deployments to cut the network into; 0 for none.
      deadline: seconds that a part may take.
      resources: of a part, options of a Ray actor.

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
            # Before signals are handled below: Ray's own handlers abort the process.
            voters = stack.enter_context(ray_parts.RayParts(trained, parts, *how))
        batcher = batching.Batcher(voters, network, sizes, wait)
        names = None if token else [*LOOPBACK, "[::1]"]
        settings = uvicorn.Config(
            app.Interface(batcher, limits, token, names).app,
            http=transport.Protocol,  # of h11, whatever else is installed: it bounds headers
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
        with contextlib.suppress(SystemExit):  # uvicorn's code 3, with us that of diverged training
            server.run([listener])
        return server.started


class _Server(uvicorn.Server):
    """Stops as the package's other commands do, and says when it listens."""

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
    """Returns a socket that listens, so that a port in use is found before a network is loaded.

    Raises:
      ValueError: the address is not to be had.
    """
    how: dict[str, Any] = {"backlog": 2048}
    if ":" in host:
        how |= {"family": socket.AF_INET6, "dualstack_ipv6": socket.has_dualstack_ipv6()}
    try:
        return socket.create_server((host, port), **how)
    except (OSError, TypeError, UnicodeError) as error:  # of a name that cannot be encoded
        raise ValueError(f"{host}:{port}: {error}; choose another --port or --host") from error
