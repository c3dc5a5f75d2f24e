"""Downloads from a host on this machine that behaves, lies or breaks off, and from none."""

import hashlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hsvit_jax.data import DataUnavailable, published
from hsvit_jax.data.published import RemoteFile, fetch

BODY = bytes(range(256)) * 5000


class Host(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/gone.gz":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/unknown-length.gz":
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if "cut" in self.path else BODY)

    def log_message(self, *args):
        pass


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def remote(url: str, body: bytes = BODY, max_bytes: int = 1 << 30) -> RemoteFile:
    digest = hashlib.sha256(body).hexdigest()
    return RemoteFile(url, f"sha256:{digest}", max_bytes)


@pytest.mark.parametrize("name", ["good.gz", "unknown-length.gz"])
def test_a_good_file_arrives_whole_and_only_once(name, host, tmp_path):
    calls = []
    file = remote(f"{host}/{name}")
    path = fetch(file, tmp_path, "set", lambda *call: calls.append(call))
    assert path == tmp_path / "set" / name
    assert path.read_bytes() == BODY
    assert calls[-1][0] == f"downloading {name}" and calls[-1][1] == len(BODY)
    assert [p.name for p in path.parent.iterdir()] == [name]
    calls.clear()
    assert fetch(file, tmp_path, "set", lambda *call: calls.append(call)) == path
    assert not calls


@pytest.mark.parametrize(
    ("path", "body", "limit", "why"),
    [
        ("good.gz", b"other", 1 << 30, "have checksum sha256:"),
        ("cut.gz", BODY, 1 << 30, "640,000 bytes have checksum"),
        ("gone.gz", BODY, 1 << 30, "404"),
        ("good.gz", BODY, 1000, "more than 1,000 bytes"),
        ("unknown-length.gz", BODY, 100_000, "more than 100,000 bytes"),
    ],
)
def test_a_failed_download_leaves_nothing_behind(path, body, limit, why, host, tmp_path):
    with pytest.raises(DataUnavailable, match=why) as error:
        fetch(remote(f"{host}/{path}", body, limit), tmp_path, "set")
    for way_out in (f"{host}/{path}", str(tmp_path / "set" / path), "':digits'"):
        assert way_out in str(error.value)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_name_look_up_that_hangs_is_given_up(tmp_path, monkeypatch):
    assert published.PROBE_SECONDS < 15  # what users are promised; shortened here
    monkeypatch.setattr(published, "PROBE_SECONDS", 0.2)
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: release.wait(30) and [])
    monkeypatch.setenv("no_proxy", "*")
    try:
        with pytest.raises(DataUnavailable, match="no answer for"):
            fetch(remote("http://nowhere.invalid/x.gz"), tmp_path, "set")
    finally:
        release.set()
        time.sleep(0.05)  # lets the abandoned thread end inside this test
    monkeypatch.undo()
    assert "refused" in published.probe("http://127.0.0.1:1/x.gz")


def test_wrong_files_already_here_are_reported_and_kept(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(b"half of it")
    with pytest.raises(ValueError, match=r"x\.gz is not the published file"):
        fetch(remote("http://127.0.0.1:1/x.gz"), tmp_path, "set")
    assert path.read_bytes() == b"half of it"
