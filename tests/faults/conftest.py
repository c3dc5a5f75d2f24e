"""Runs in processes of their own, with a fault that is asked for."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from support.processes import COMMAND, ROOT, environment


@pytest.fixture
def command():
    """Starts a run of the command line in a process; none outlives the test.

    twist: what goes wrong in it, see support/faulty_process.py.
    host: words before the command, of `hosts`.
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


class Hosts(list):
    """Two hosts with a link, as far as their network goes: the words that start a program there."""

    def __init__(self):
        self.names = [f"hsvit-{os.getpid()}-{i}" for i in range(2)]
        rename = 'hostname "$0" && exec "$@"'  # Gloo listens at the address of this name
        for i, name in enumerate(self.names):
            start = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename]
            self.append([*start, self.address(i)])
            self.ip("netns", "add", name)
        one, other = (["netns", name] for name in self.names)
        self.ip("link", "add", "link0", *one, "type", "veth", "peer", "name", "link1", *other)
        for i, name in enumerate(self.names):
            self.ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", f"link{i}")
            for device in ("lo", f"link{i}"):
                self.ip("-n", name, "link", "set", device, "up")

    @staticmethod
    def address(i):
        return f"10.9.0.{i + 1}"

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def cut(self, seconds):
        """Cuts the link; 0 for good."""
        self.ip("-n", self.names[0], "link", "set", "link0", "down")
        if seconds:
            time.sleep(seconds)
            self.ip("-n", self.names[0], "link", "set", "link0", "up")


@pytest.fixture
def hosts():
    if not shutil.which("ip") or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("network namespaces need Debian's iproute2, and root")
    made = Hosts()
    yield made
    for name in made.names:
        Hosts.ip("netns", "del", name)
