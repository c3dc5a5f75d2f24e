"""hsvit serve: a trained network behind HTTP, on one machine or with its parts on many."""

import os

from absl import flags

from hsvit_jax.cli import Command, Misuse, Request
from hsvit_jax.commands.trained import RUN


@Command(
    "Serves a trained network over HTTP, with a page to try it on.",
    "$ runs/c2a2-digits-strong-seed0 --port=8000\n$ zoo:c2a2-digits --host=0.0.0.0 --token=SECRET",
    (
        *RUN,
        (
            flags.DEFINE_string,
            "host",
            "127.0.0.1",
            "Address; beyond loopback set --token or HSVIT_TOKEN.",
        ),
        (flags.DEFINE_integer, "port", 8000, "Port; 0 for a free one.", 0, 65535),
        (flags.DEFINE_string, "token", None, "Token of every request; default: HSVIT_TOKEN."),
        (flags.DEFINE_integer, "batch", 64, "Most images of a batch.", 1, 4096),
        (flags.DEFINE_float, "wait", 2.0, "Milliseconds that an image waits for others.", 0.0),
        (flags.DEFINE_integer, "queue", 256, "Most requests and waiting images at a time.", 1),
        (flags.DEFINE_float, "timeout", 30.0, "Seconds until a request is cancelled.", 0.1),
        (flags.DEFINE_integer, "max_megabytes", 32, "Most megabytes of a request.", 1, 256),
        (flags.DEFINE_integer, "max_pixels", 25_000_000, "Most pixels of an image.", 1, 89_478_485),
        (flags.DEFINE_integer, "parts", 0, "Ray deployments to cut it into; 0: none.", 0),
        (flags.DEFINE_float, "deadline", 1.0, "--parts: seconds that a part may take.", 0.01),
        (flags.DEFINE_float, "part_cpus", 0.0, "--parts: Ray CPUs of each.", 0.0),
        (flags.DEFINE_float, "part_gpus", 0.0, "--parts: GPUs of each.", 0.0),
    ),
)
def serve(request: Request) -> int:
    """Serves until SIGTERM or Ctrl-C, and answers what is in flight."""
    from hsvit_jax.serve import LOOPBACK, admission, server

    values = request.flags
    token = os.environ.get("HSVIT_TOKEN") if values.token is None else values.token
    if token is not None and not (token := token.strip()):
        raise Misuse("the token is empty: set --token or HSVIT_TOKEN, or remove both")
    if values.host not in LOOPBACK and not token:
        raise Misuse(f"other machines reach --host={values.host}: set --token or HSVIT_TOKEN")
    if values.parts and values.deadline >= values.timeout:
        raise Misuse(f"--deadline exceeds --timeout={values.timeout:g} seconds: lower it")
    if values.parts:
        import ray.serve  # noqa: F401
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
        token=token or "",
        wait=values.wait / 1000,
        resources={"num_cpus": values.part_cpus, "num_gpus": values.part_gpus},
        **{name: values[name].value for name in ("host", "port", "batch", "parts", "deadline")},
    )
    return 0 if started else 1
