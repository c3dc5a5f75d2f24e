"""hsvit serve: a trained network behind HTTP, on one machine or with its parts on many."""

import os

from hsvit_jax.cli import Misuse, Request
from hsvit_jax.serve import LOOPBACK


def run(request: Request) -> int:
    """Serves until SIGTERM or Ctrl-C, and answers what is in flight; 1 where it cannot start."""
    values = request.flags
    token = os.environ.get("HSVIT_TOKEN") if values.token is None else values.token
    if token is not None and not (token := token.strip()):
        raise Misuse("the token is empty: give --token or HSVIT_TOKEN one, or leave both out")
    if values.host not in LOOPBACK and not token:
        raise Misuse(
            f"--host={values.host} is reached by other machines: set HSVIT_TOKEN or give --token, "
            "which requests must then bear, or listen at 127.0.0.1 behind a proxy that asks for one"
        )
    if values.parts and values.deadline >= values.timeout:
        raise Misuse(f"--deadline is beyond --timeout={values.timeout:g} seconds: shorten it")
    try:
        from hsvit_jax.serve import app, server

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
    started = server.serve(
        request.source,
        values.which,
        limits,
        host=values.host,
        port=values.port,
        token=token or "",
        batch=values.batch,
        wait=values.wait / 1000,
        parts=values.parts,
        deadline=values.deadline,
        resources={"num_cpus": values.part_cpus, "num_gpus": values.part_gpus},
    )
    return 0 if started else 1
