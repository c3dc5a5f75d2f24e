"""The command line as its users have it: a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: How processes that tests start are compiled: as quickly as the tests, on one device.
_QUICK_FLAGS = os.environ["XLA_FLAGS"].partition(" ")[2]
COMMAND = (sys.executable, "-m", "hsvit_jax.main")
PATIENCE = 500  # seconds, on a machine that is busy


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that runs this tree on one device, compiling quickly."""
    return {
        **os.environ,
        "XLA_FLAGS": _QUICK_FLAGS,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        **variables,
    }


def run_main(
    *words: str, cwd: Path, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end in the folder ``cwd``.

    Args:
      words: the arguments.
      cwd: where it runs.
      timeout: seconds until the test fails, the process killed.
      variables: environment variables to set.
    """
    settings: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(
        [*COMMAND, *words], cwd=cwd, env=environment(**variables), timeout=timeout, **settings
    )


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def script(code: str, *arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Runs code in a Python of its own, which ends with the block; its outputs are pipes."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the standard error of a process at its end."""
    errors = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, errors
