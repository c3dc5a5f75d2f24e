"""Tests serving: answers are predict's, a mistake gets a sentence, no load compiles programs."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import httpx2
import jax
import ml_collections
import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient
from support import small_runs
from support.data_files import encoded
from uvicorn.protocols.http import h11_impl

from hsvit_jax import classifier as classifier_lib
from hsvit_jax import main
from hsvit_jax.classifier import views
from hsvit_jax.serve import app, batching, ray_parts, server, votes
from hsvit_jax.serve.admission import Limits
from hsvit_jax.train import evaluate

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
FILES = [("files", (f"{i}.png", encoded(image))) for i, image in enumerate(IMAGES)]


@pytest.fixture(scope="module")
def network(stored_weights):
    return votes.Network(classifier_lib.load(stored_weights, devices=jax.devices()[:1]))


def client_of(network, *, batch=4, limits=None, **more):
    batcher = batching.Batcher(network, network, batching.sizes_up_to(batch), wait=0.001)
    served = app.Interface(batcher, limits or Limits(), **more)
    return TestClient(served.app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(network):
    with client_of(network, limits=Limits(request_bytes=5 << 20, files=6)) as client:
        yield client


def probabilities(prediction):
    return {one["label"]: one["probability"] for one in prediction["top"]}


def test_answers_are_those_of_predict(client, network):
    compiled = network._contributions._cache_size(), network._elected._cache_size()
    answer = client.post("/predict", files=FILES).json()["predictions"]
    p_BK = network.classifier.predict(IMAGES[..., None])
    for i, one in enumerate(answer):
        assert one["file"] == f"{i}.png" and one["votes"] == {"voted": 8, "of": 8}
        best = np.argsort(-p_BK[i])[:5]
        assert list(probabilities(one)) == [network.classifier.class_names[k] for k in best]
        np.testing.assert_allclose([*probabilities(one).values()], p_BK[i][best], rtol=1e-4)
    assert (network._contributions._cache_size(), network._elected._cache_size()) == compiled


def test_lost_parts_do_not_vote(client, network):
    c, votes_G = network.classifier, np.ones(8, np.float32)
    votes_G[[1, 6]] = 0
    forward = evaluate.make_forward(c.model, c.mesh, c.config, votes_G=votes_G)
    p_K = jax.nn.softmax(forward(c.params, c.stats, IMAGES[:1, ..., None]))[0]
    found = client.post("/explain", files=FILES[:1], data={"lost": ["1", "6"]}).json()
    assert found["votes"] == {"voted": 6, "of": 8}
    np.testing.assert_allclose([*probabilities(found).values()], np.sort(p_K)[:-6:-1], rtol=1e-4)
    assert [part["name"] for part in found["parts"]] == [f"group {g}" for g in range(8)]
    shown = c.explain(IMAGES[0])
    for part, logits_K in zip(found["parts"], shown.votes_GK, strict=True):
        assert part["top"]["label"] == c.class_names[int(logits_K.argmax())]
    assert len(found["maps"]) == 9 and len(found["maps"][0]["rows"]) == 2


@pytest.mark.parametrize("model", [{"ablation": "conv_only"}, {"towers": 2, "votes": "learned"}])
def test_networks_of_other_parts(model):
    """A network without groups has one vote; lost towers take all their groups."""
    settings = {f"model__{key}": value for key, value in model.items()}
    c = small_runs.made_up_classifier(tuple("abcdefg"), **settings)
    network = votes.Network(c)
    ballot = network.contributions(IMAGES[..., None])
    voted_PB, votes_G = np.ones((len(network.parts), len(IMAGES))), None
    if "towers" in model:
        assert [part.groups for part in network.parts] == [4, 4]
        voted_PB[0], votes_G = 0, np.repeat([0.0, 1], 4)
    forward = evaluate.make_forward(c.model, c.mesh, c.config, votes_G=votes_G)
    expected = jax.nn.softmax(forward(c.params, c.stats, IMAGES[..., None]))
    p_BK = network.elect(network.parts, ballot.cls_VPBD, voted_PB)
    np.testing.assert_allclose(p_BK, expected, rtol=1e-4)


def test_a_part_that_was_lost_in_training_has_no_vote():
    c = small_runs.made_up_classifier(tuple("abcdefg"), model__votes="learned")
    c.params["groups"]["vote"][2] = 0
    with client_of(votes.Network(c), batch=1) as client:
        found = client.post("/explain", files=FILES[:1]).json()
    assert found["votes"] == {"voted": 7, "of": 7}
    assert [g for g, part in enumerate(found["parts"]) if part["top"] is None] == [2]
    assert all(part["milliseconds"] > 0 for part in found["parts"])


def test_maps_lie_where_their_towers_look():
    """Eight groups of four towers, each of which sees a quarter of the image."""
    seen = views.Groups(np.ones((8, 1, 1, 2)), np.arange(1, 9)[:, None])
    classifier = types.SimpleNamespace(
        config=ml_collections.ConfigDict({"model": {"tiles": (2, 2)}}),
        model=types.SimpleNamespace(units=4),
        explain=lambda _: [views.Views(np.zeros(1), groups=seen)],
    )
    first, *groups = (one["rows"] for one in app.maps(classifier, np.zeros((2, 4, 1), np.uint8)))
    sums = np.repeat([[3, 7], [11, 15]], 2, 1)
    assert first == app._bytes(sums).tolist()
    assert groups[5] == [[0] * 4, [255, 255, 0, 0]]  # of tower 2


def form(charset, name, image=b""):
    """A form of one file whose name has a charset of the client's choice."""
    head = b'Content-Disposition: form-data; name="files"; filename="%s"' % name
    kind = f"multipart/form-data; boundary=x; charset={charset}"
    content = b"--x\r\n%s\r\n\r\n%s\r\n--x--\r\n" % (head, image)
    return {"content": content, "headers": {"content-type": kind}}


@pytest.mark.parametrize(
    ("status", "sends"),
    {
        "nothing": (415, {}),
        "no file": (400, {"data": {"lost": "1"}, "files": [("other", b"x")]}),
        "not an image": (422, {"files": [FILES[0], ("files", ("a.png", b"<html>"))]}),
        "cut off": (422, {"files": {"files": ("a.png", FILES[0][1][1][:60])}}),
        "a bomb": (422, {"files": {"files": ("a.png", encoded(np.zeros((9000, 3000), bool)))}}),
        "too many": (400, {"files": FILES + FILES}),
        "too large": (413, {"files": {"files": b"x" * (5 << 20)}}),
        "no boundary": (400, {"content": b"x", "headers": {"content-type": "multipart/form-data"}}),
        "a slow charset": (400, form("punycode", b"a")),
        "another one": (400, form("idna", b"a")),
        "a charset without text": (400, form("utf-7", b"+2AA-")),
        "a long field": (400, {"files": FILES[:1], "data": {"lost": "1," * 600}}),
        "no end": (400, {**(cut := form("utf-8", b"a")), "content": cut["content"][:-6]}),
        "no field": (400, {"files": FILES[:1], "data": {"lots": "1"}}),
        "no file in files": (400, {"files": [FILES[0]], "data": {"files": "1"}}),
        "no text in lost": (400, {"files": [FILES[0], ("lost", FILES[1][1])]}),
        "in the address": (400, {"files": FILES[:1], "params": {"lost": "1"}}),
        "no part": (400, {"files": FILES[:1], "data": {"lost": "8" * 6000}}),
        "no part left": (400, {"files": FILES[:1], "data": {"lost": "0,1,2,3,4,5,6,7"}}),
    }.values(),
)
def test_a_mistake_gets_a_sentence(client, status, sends):
    answer = client.post("/predict", **sends)
    assert answer.status_code == status
    assert re.fullmatch(r"[^\n]{10,250}", answer.json()["error"])


@pytest.mark.parametrize("charset", ["utf-8", "UTF8", "latin-1", "ISO-8859-1", "us-ascii"])
def test_charsets_of_a_form(client, charset):
    name = "a.png" if charset == "us-ascii" else "é.png"
    answer = client.post("/predict", **form(charset, name.encode(charset), FILES[0][1][1]))
    assert answer.json()["predictions"][0]["file"] == name


def test_uploads_stay_in_memory(client, monkeypatch):
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", None)
    noise = np.random.default_rng(1).integers(0, 256, (1100, 1100, 3), np.uint8)
    assert client.post("/predict", files={"files": encoded(noise)}).status_code == 200


def test_requests_are_batched_and_bounded(network, monkeypatch):
    """While two batches are computed, others wait for the next, up to the queue's length."""
    sizes, gate, under_way = [], threading.Event(), threading.Semaphore(0)
    plain = votes.Network.contributions

    def contributions(self, images_BHWC):
        sizes.append(len(images_BHWC))
        under_way.release()
        assert gate.wait(20)
        return plain(self, images_BHWC)

    def send():
        return client.post("/predict", files=FILES[:1]).status_code

    with client_of(network, limits=Limits(queue=6, seconds=20)) as client:
        monkeypatch.setattr(votes.Network, "contributions", contributions)
        with ThreadPoolExecutor(6) as pool:
            found = []
            for _ in range(2):
                found.append(pool.submit(send))
                assert under_way.acquire(timeout=20)
            found += [pool.submit(send) for _ in range(4)]
            while "hsvit_queue_images 4.0" not in client.get("/metrics").text:
                time.sleep(0.01)
            assert send() == 429
            gate.set()
        never = client.post("/predict", files=FILES[:1] * 7)
        assert never.status_code == 413 and "6 files at most" in never.json()["error"]
    assert [f.result() for f in found] == [200] * 6 and sizes == [1, 1, 4]


def test_large_images_keep_nobody_waiting(network, monkeypatch):
    """Every decoding thread is busy: small images are answered, and the queue is bounded."""
    gate, reading, read = threading.Event(), threading.Semaphore(0), []
    plain, count = app.data.read_image, app._THREADS

    def read_image(raw, *shape, name, **how):
        if name == "large":
            reading.release()
            assert gate.wait(60)
            read.append(raw)
        return plain(FILES[0][1][1], *shape, name=name, **how)

    monkeypatch.setattr(app.data, "read_image", read_image)
    large = [("files", ("large", b"x" * app._SMALL_BYTES))] * 2
    limits = Limits(seconds=6, memory_bytes=(2 * count + 1) * (app._SMALL_BYTES + 500))

    def send(files):
        return client.post("/predict", files=files).status_code

    with client_of(network, batch=1, limits=limits) as client:
        with ThreadPoolExecutor(count) as pool:
            found = [pool.submit(send, large) for _ in range(count)]
            assert all(reading.acquire(timeout=20) for _ in found)
            assert (send(large), send(FILES[:1])) == (429, 200)
        assert send(FILES[:1]) == 200
        gate.set()
    assert [f.result() for f in found] == [503] * count
    assert len(read) == count  # nobody waits for their second images


def test_a_late_answer_and_a_dead_network_are_503(network, monkeypatch):
    with client_of(network, batch=1, limits=Limits(seconds=0.2)) as client:
        ballot = network.contributions(IMAGES[:1, ..., None])

        async def late(self, images):
            await asyncio.sleep(30)

        async def empty(self, images):
            return ballot._replace(milliseconds_P=(None,) * 8)

        async def failing(self, images):
            raise RuntimeError("out of memory")

        async def endless(self, images):
            return ballot._replace(cls_VPBD=ballot.cls_VPBD * np.nan)

        for vote, status in ((failing, 500), (endless, 500), (empty, 503), (late, 503)):
            with monkeypatch.context() as patch:
                patch.setattr(votes.Network, "vote", vote)
                assert client.post("/predict", files=FILES[:1]).status_code == status
                health = client.get("/healthz")
            assert (health.status_code, health.json()["status"]) == (
                (503, "failing") if status == 500 else (200, "ok")
            )


def test_who_may_ask(network):
    with client_of(network, batch=1, token="söcret") as client:
        assert client.get("/").status_code == client.get("/healthz").status_code == 200
        for path in ("/predict", "/explain"):
            assert client.post(path, files=FILES[:1]).status_code == 401
        for wrong in ("Bearer no", "Basic söcret".encode()):
            assert client.get("/metrics", headers={"Authorization": wrong}).status_code == 401
        assert client.get("/predict/").status_code == 404  # and leads nowhere
        bearer = {"Authorization": "bearer söcret".encode()}
        assert client.post("/predict", files=FILES[:1], headers=bearer).status_code == 200
    # DNS rebinding: another page's name may lead to this address.
    with client_of(network, batch=1, hosts=["localhost"]) as client:
        refused = client.get("/healthz")
        assert refused.status_code == 400 and "--token" in refused.json()["error"]
        assert client.get("/healthz", headers={"Host": "localhost:8000"}).status_code == 200


OWN = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (403, {"origin": "http://example.org"}),
        (403, {"origin": "null"}),
        (403, {"origin": "http://127.0.0.1:8001"}),  # of another server of this machine
        (403, {"sec-fetch-site": "same-site"}),
        (403, {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "cross-site"}),
        (200, {"origin": "http://127.0.0.1:8000"}),
        (200, {"origin": "https://example.org", "sec-fetch-site": "same-origin"}),  # by a proxy
        (200, {"origin": "http://example.org", "x-forwarded-host": "example.org"}),
    ],
)
def test_a_page_of_another_server_may_not_ask(client, status, headers):
    answer = client.post("/predict", files=FILES[:1], headers=OWN | headers)
    assert answer.status_code == status
    assert client.get("/healthz", headers=OWN | headers).status_code == 200


@pytest.fixture(scope="module")
def port(network):
    """Of a server that is reached by sockets."""
    batcher = batching.Batcher(network, network, [1], wait=0.001)
    how = {"http": server.Protocol, "loop": "asyncio", "log_level": "warning"}
    running = uvicorn.Server(uvicorn.Config(app.Interface(batcher, Limits()).app, **how))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(running.run, [listener])
        yield listener.getsockname()[1]
        running.should_exit = True


def answers_of(port, *pieces, ends=True):
    """Statuses and JSON of all answers to bytes, after which a client may close its half."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        for piece in pieces:
            client.sendall(piece)
        if ends:
            client.shutdown(socket.SHUT_WR)
        raw = b"".join(iter(lambda: client.recv(1 << 16), b""))
    found = re.findall(rb"HTTP/1.1 (\d+).*?\r\n\r\n(\{.*?\})(?=HTTP|$)", raw, re.S)
    return [(int(status), json.loads(text)) for status, text in found]


def posted(framing=None):
    body = form("utf-8", b"a.png", FILES[0][1][1])["content"]
    framing = framing or b"Content-Length: %d" % len(body)
    kind = b"Content-Type: multipart/form-data; boundary=x"
    lines = (b"POST /predict HTTP/1.1", b"Host: localhost", kind, framing, b"", b"")
    return b"\r\n".join(lines), body


def test_a_client_that_closed_its_half_is_answered(port):
    whole = b"".join(posted())
    assert [status for status, _ in answers_of(port, whole)] == [200]
    assert [status for status, _ in answers_of(port, whole * 3)] == [200] * 3
    for cut in (whole[:-3], whole[:60]):
        early = {"error": "The connection was closed too early."}
        assert answers_of(port, cut) == [(400, early)]
    assert answers_of(port) == []


def test_what_is_no_http_is_refused_in_json_and_logged_once(port, caplog):
    logger = logging.getLogger("uvicorn.error")
    server._written.clear()
    long = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 40_000 + b"\r\n"
    head, _ = posted(framing=b"Transfer-Encoding: chunked")
    chunked = [head + b"no size\r\n", head + b"3\r\nbad\r\nno size\r\n"]
    logger.addHandler(caplog.handler)
    try:
        for sent in [b"\x16\x03\x01\r\n\r\n"] * 20 + [long, *chunked]:
            ((status, answer),) = answers_of(port, sent, ends=False)
            assert status == 400 and "error" in answer
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert len({record.created for record in caplog.records}) <= 2  # a minute may end meanwhile
    for message in ("one fault", "another"):
        records = [logging.makeLogRecord({"msg": message}) for _ in range(3)]
        assert [server.is_news(record) for record in records] == [True, False, False]


def test_no_connection_is_read_for_long(port, monkeypatch):
    """Bytes after a mistake are dropped; all others are parsed in small pieces."""
    sizes, plain = [], h11_impl.H11Protocol.data_received

    def data_received(self, data):
        sizes.append(len(data))
        plain(self, data)

    monkeypatch.setattr(h11_impl.H11Protocol, "data_received", data_received)
    head, body = posted(framing=b"Transfer-Encoding: chunked")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert [status for status, _ in answers_of(port, head, chunks, b"0\r\n\r\n")] == [200]
    head, _ = posted(framing=b"Content-Length: 4000000")
    assert [status for status, _ in answers_of(port, head, b"x" * 4_000_000)] == [400]
    assert max(sizes) <= 1 << 14 < sum(sizes)
    sizes.clear()
    assert [status for status, _ in answers_of(port, b"\0" * 4_000_000)] == [400]
    assert sum(sizes) <= 1 << 15


def test_pages_name_no_other_address(client):
    folder = resources.files("hsvit_jax.serve")
    for name in ("page.html", "page.css", "page.js"):
        assert not re.search("https?:|//[a-z]", (folder / name).read_text("utf-8"))
    policy = client.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    api = json.loads((folder / "openapi.json").read_text("utf-8"))
    paths = {route.path for route in client.app.routes}
    assert set(api["paths"]) == paths - {"/", *app._FILES}


def test_what_cannot_be_served(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("HSVIT_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = ["hsvit", "serve", "zoo:c2a2-digits", f"--port={port}"]
        for flag, code, names in (
            ("--host=0.0.0.0", 2, "--token"),
            ("--token=", 2, "token is empty"),
            ("--parts=4", 1, "hsvit_jax[ray]"),
            ("--batch=512", 1, "choose another --port"),
            ("--max_pixels=90000000", 2, "89478485"),
        ):
            assert main.main([*here, flag]) == code
            assert names in capsys.readouterr().err
        for token, code in (("", 2), (" \n", 2), ("secret", 1)):  # of which only the port is taken
            monkeypatch.setenv("HSVIT_TOKEN", token)
            assert main.main([*here, "--host=0.0.0.0"]) == code
            assert ("token is empty" in capsys.readouterr().err) == (code == 2)
    first = server.bound("127.0.0.1", 0)  # as two servers that start at one time
    with first, pytest.raises(ValueError, match="choose another --port"):
        server.bound("127.0.0.1", first.getsockname()[1])


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray with parts that other servers left, at this address and another."""
    ray = unittest.mock.MagicMock()
    for name, module in (("ray", ray), ("ray.serve", ray.serve)):
        monkeypatch.setitem(sys.modules, name, module)
    exceptions = types.SimpleNamespace(RayServeException=KeyError)
    monkeypatch.setitem(sys.modules, "ray.serve.exceptions", exceptions)
    left = dict.fromkeys(["hsvit-host-80-1-0", "hsvit-host-80-1-1", "hsvit-host-801-2-0", "other"])
    ray.serve.status.return_value.applications = left
    ray.available_resources.return_value = {"CPU": 1.0}
    handler = signal.getsignal(signal.SIGTERM)
    yield ray
    signal.signal(signal.SIGTERM, handler)


def ray_parts_of(network, address="hsvit-host-80"):
    resources = {"num_cpus": 1.0, "num_gpus": 0.0}
    return ray_parts.RayParts(network.classifier, 2, 1.0, [1], resources, address)


def test_a_front_has_parts_of_its_own(network, ray, monkeypatch, capsys):
    """A server deletes parts that another left at its address, and its own at its end."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = []
    for _ in range(2):
        ray.reset_mock()
        with ray_parts_of(network):
            deleted = {call.args[0] for call in ray.serve.delete.call_args_list}
            assert deleted == {"hsvit-host-80-1-0", "hsvit-host-80-1-1"}
            own = [call.kwargs["name"] for call in ray.serve.RunTarget.call_args_list]
            with pytest.raises(SystemExit) as caught:
                os.kill(os.getpid(), signal.SIGTERM)
            assert caught.value.code == 143
        assert set(own) < {call.args[0] for call in ray.serve.delete.call_args_list}
        assert ray.shutdown.called
        assert [re.fullmatch(r"hsvit-host-80-\w{8}-(\d)", name)[1] for name in own] == ["0", "1"]
        started += own
    assert len(set(started)) == 4
    assert "the parts need 2 CPUs and the cluster has 1 free" in capsys.readouterr().err


def test_a_cluster_that_cannot_be_reached(network, ray, monkeypatch):
    """Ray would wait for an address without a cluster forever."""
    ray.init.side_effect = ConnectionError("Failed to connect")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    named = ((place, f"RAY_ADDRESS={place}") for place in ("garbage", free))
    for address, message in (*named, ("auto", "RAY_AUTH_MODE=token")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ValueError, match=message):
            ray_parts_of(network).__enter__()
        assert ray.init.called == (address == "auto")


COLD = """
import sys
from hsvit_jax import main
from hsvit_jax.serve import batching

async def failing(self):
    raise RuntimeError("out of memory")

batching.Batcher.warm_up = failing
sys.exit(main.main(["hsvit", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_network_that_cannot_be_warmed_up(stored_weights):
    words = [sys.executable, "-c", COLD, "serve", str(stored_weights), "--port=0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "RuntimeError: out of memory" in done.stderr and "http://" not in done.stderr


@pytest.mark.slow
def test_sigterm_answers_what_is_in_flight(stored_weights):
    command = [sys.executable, "-m", "hsvit_jax", "serve", str(stored_weights), "--port=0"]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--wait=3000"], **pipes) as server:
        try:
            address = re.search(r"http://\S+", server.stderr.readline())[0]
            with ThreadPoolExecutor(1) as pool:
                url = f"{address}/predict"
                asked = pool.submit(httpx2.post, url, files=FILES[:2], timeout=30)
                while "hsvit_queue_images 2.0" not in httpx2.get(f"{address}/metrics").text:
                    time.sleep(0.01)
                server.send_signal(signal.SIGTERM)
            assert len(asked.result().json()["predictions"]) == 2
            assert server.wait(20) == 0
        finally:
            server.kill()
