"""hsvit serve: a trained network behind HTTP, on one machine or with its parts on many."""

import os

from absl import flags

from hsvit_jax.cli import Command, Misuse, Request
from hsvit_jax.commands.trained import RUN

COMMAND = Command(
    "Serves a trained network over HTTP, with a page to try it on.",
    __name__,
    "$ runs/c2a2-digits-strong-seed0 --port=8000\n$ zoo:c2a2-digits --host=0.0.0.0 --token=SECRET",
    (
        *RUN,
        (flags.DEFINE_string, "host", "127.0.0.1", "Address; beyond loopback with --token."),
        (flags.DEFINE_integer, "port", 8000, "Port; 0 for a free one.", 0, 65535),
        (flags.DEFINE_string, "token", None, "Requests must bear it; or give HSVIT_TOKEN."),
        (flags.DEFINE_integer, "batch", 64, "The most images computed together.", 1, 4096),
        (flags.DEFINE_float, "wait", 2.0, "Milliseconds that an image waits for others.", 0.0),
        (flags.DEFINE_integer, "queue", 256, "Requests at a time, and images that wait.", 1),
        (flags.DEFINE_float, "timeout", 30.0, "Seconds until a request is given up.", 0.1),
        (flags.DEFINE_integer, "max_megabytes", 32, "Of a request.", 1, 256),
        (flags.DEFINE_integer, "max_pixels", 25_000_000, "Of an image.", 1, 89_478_485),
        (flags.DEFINE_integer, "parts", 0, "Ray deployments to cut it into; 0: none.", 0),
        (flags.DEFINE_float, "deadline", 1.0, "--parts: seconds that a part may take.", 0.01),
        (flags.DEFINE_float, "part_cpus", 0.0, "--parts: CPUs of each, as Ray counts.", 0.0),
        (flags.DEFINE_float, "part_gpus", 0.0, "--parts: GPUs of each.", 0.0),
    ),
)


def run(request: Request) -> int:
    """Serves until SIGTERM or Ctrl-C, and answers what is in flight; 1 where it cannot start."""
    from hsvit_jax.serve import LOOPBACK

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
        from hsvit_jax.serve import admission, server

        if values.parts:
            import ray.serve  # noqa: F401
    except ImportError as error:
        extra = "ray" if error.name.startswith("ray") else "serve"
        raise ValueError(
            f"hsvit serve needs {error.name}: pip install 'hsvit_jax[{extra}]'"
        ) from error
    limits = admission.Limits(
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
