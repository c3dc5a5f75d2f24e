"""Runs in processes of their own, with a fault that is asked for."""

import os
import subprocess
import sys

import pytest
from support.hosts import Hosts, missing
from support.processes import COMMAND, ROOT, environment


@pytest.fixture
def command():
    """Starts a run of the command line in a process; none outlives the test.

    twist: what goes wrong in it, see support/faulty_process.py.
    host: words before the command, see support/hosts.py.
    """
    started = []

    def start(workdir, *settings, twist=(), flags=(), host=(), **variables):
        faulty = [sys.executable, "tests/support/faulty_process.py", *map(str, twist)]
        words = ["--config=configs/c2a2.py:digits,tiny", f"--workdir={workdir}", "--noreport"]
        words += [*flags, *(f"--config.{setting}" for setting in settings)]
        process = subprocess.Popen(
            [*host, *(faulty if twist else COMMAND), *words],
            cwd=ROOT,
            env=environment(**variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.communicate()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Four hosts and no bucket."""
    if reason := missing():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts"), 4) as made:
        yield made
