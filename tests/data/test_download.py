"""Downloads from a host on this machine that behaves, lies or breaks off, and from none."""

import hashlib
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hsvit_jax.data import DataUnavailable, download
from hsvit_jax.data.download import RemoteFile, fetch

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
    assert calls[-1] == (f"downloading {name}", len(BODY), len(BODY) * (name == "good.gz"))
    assert [p.name for p in path.parent.iterdir()] == [name]
    calls.clear()
    assert fetch(file, tmp_path, "set", lambda *call: calls.append(call)) == path
    assert not calls


def test_a_failed_download_leaves_nothing_behind(host, tmp_path):
    for path, body, limit, why in (
        ("good.gz", b"other", 1 << 30, "checksum sha256:.*, expected sha256:"),
        ("cut.gz", BODY, 1 << 30, "ended after 640,000 of 1,280,000 bytes|connection failed"),
        ("gone.gz", BODY, 1 << 30, "answers 404"),
        ("good.gz", BODY, 1000, "1,280,000 bytes, too many"),
        ("unknown-length.gz", BODY, 1000, "more than 1,000 bytes came"),
    ):
        with pytest.raises(DataUnavailable, match=why) as error:
            fetch(remote(f"{host}/{path}", body, limit), tmp_path, "set")
        message = str(error.value)
        assert f"{host}/{path}" in message
        assert str(tmp_path / "set" / path) in message
        assert "':digits'" in message
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_nobody_listening(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening: refused at once
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x.gz"
        with pytest.raises(DataUnavailable, match="refused"):
            fetch(remote(url), tmp_path, "set")
        assert "refused" in download.probe(url)


def test_a_name_look_up_that_hangs_is_given_up(tmp_path, monkeypatch):
    assert download.PROBE_SECONDS < 15  # what users are promised; shortened here
    monkeypatch.setattr(download, "PROBE_SECONDS", 0.2)
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: release.wait(30) and [])
    monkeypatch.setenv("no_proxy", "*")
    try:
        with pytest.raises(DataUnavailable, match=r"no answer within 0\.2 seconds"):
            fetch(remote("http://nowhere.invalid/x.gz"), tmp_path, "set")
    finally:
        release.set()
        time.sleep(0.05)  # lets the abandoned thread end inside this test


def test_wrong_files_already_here_are_reported_and_kept(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(b"half of it")
    with pytest.raises(ValueError, match=r"x\.gz is not the published file.*Remove it"):
        fetch(remote("http://127.0.0.1:1/x.gz"), tmp_path, "set")
    assert path.read_bytes() == b"half of it"


def test_leftovers_of_a_killed_download_are_removed(host, tmp_path):
    (tmp_path / "set/.good.gz.part-abc").mkdir(parents=True)
    (tmp_path / "set/.good.gz.part-abc/good.gz").write_bytes(BODY[:10])
    os.utime(tmp_path / "set/.good.gz.part-abc", (0, 0))
    assert fetch(remote(f"{host}/good.gz"), tmp_path, "set").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["good.gz"]
