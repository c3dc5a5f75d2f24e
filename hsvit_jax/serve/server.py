"""hsvit serve: a trained network behind HTTP, on one machine or with its parts on many."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import jax

from hsvit_jax import classifier, cli
from hsvit_jax.cli import Request
from hsvit_jax.runtime import signals

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Seconds, more than a load balancer's (nginx and AWS 60, Google 600): one that sends a request
# while its idle connection is being closed answers 502.
_KEEP_ALIVE = 620
_NOTICE = b"\nrequests in flight are answered; a second signal stops at once\n"


def run(request: Request) -> int:
    """Serves until SIGTERM or Ctrl-C, and answers what is in flight; 1 where it cannot start."""
    values = request.flags
    token = os.environ.get("HSVIT_TOKEN") if values.token is None else values.token
    if token is not None and not (token := token.strip()):
        raise cli.Misuse("the token is empty: give --token or HSVIT_TOKEN one, or leave both out")
    if values.host not in _LOOPBACK and not token:
        raise cli.Misuse(
            f"--host={values.host} is reached by other machines: set HSVIT_TOKEN or give --token, "
            "which requests must then bear, or listen at 127.0.0.1 behind a proxy that asks for one"
        )
    if values.parts and values.deadline >= values.timeout:
        raise cli.Misuse(f"--deadline is beyond --timeout={values.timeout:g} seconds: shorten it")
    try:
        import uvicorn

        from hsvit_jax.commands.serve import app, batching, ray_parts, transport, votes

        if values.parts:
            import ray.serve  # noqa: F401
    except ImportError as error:
        extra = "ray" if error.name.startswith("ray") else "serve"
        raise ValueError(
            f"hsvit serve needs {error.name}: pip install 'hsvit_jax[{extra}]'"
        ) from error
    limits = app.Limits(
        request_bytes=values.max_megabytes << 20,
        pixels=values.max_pixels,
        queue=values.queue,
        seconds=values.timeout,
    )
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bound(values.host, values.port))
        trained = classifier.load(request.source, values.which, devices=jax.devices()[:1])
        voters = network = votes.Network(trained)
        sizes = batching.sizes_up_to(min(values.batch, values.queue))
        if values.parts:
            resources = {"num_cpus": values.part_cpus, "num_gpus": values.part_gpus}
            address, port = listener.getsockname()[:2]
            front = f"hsvit-{socket.gethostname()}-{address.replace(':', '.')}-{port}"
            how = (values.deadline, sizes, resources, front)
            parts = ray_parts.RayParts(trained, values.parts, *how)
            # Before signals are handled below: Ray's own handlers abort the process.
            voters = stack.enter_context(parts)
        batcher = batching.Batcher(voters, network, sizes, values.wait / 1000)
        hosts = None if token else [*_LOOPBACK, "[::1]"]
        served = app.Server(batcher, limits, token or "", hosts)
        host, port = listener.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        settings = uvicorn.Config(
            served.app,
            http=transport.Protocol,  # of h11, whatever else is installed: it bounds headers
            loop="asyncio",  # uvloop would read up to 8 MB of a connection at a time
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(values.timeout) + 1,
        )

        class Server(uvicorn.Server):
            """Stops as the package's other commands do, and says when it listens."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                def stop() -> None:
                    self.should_exit = True

                with signals.StopRequests(stop, _NOTICE):
                    yield

            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                if self.started:
                    cli.note(f"{trained.config.model.variant} at {where}")

        server = Server(settings)
        with contextlib.suppress(SystemExit):  # uvicorn's code 3, with us that of diverged training
            server.run([listener])
        return 0 if server.started else 1


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens, so that a port in use is found before a network is loaded.

    Raises:
      ValueError: the address is not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(2048)  # now: two sockets may bind to a port as long as neither listens
        except (OSError, TypeError, UnicodeError) as error:  # of a name that cannot be encoded
            raise ValueError(f"{host}:{port}: {error}; choose another --port or --host") from error
        yield listener
