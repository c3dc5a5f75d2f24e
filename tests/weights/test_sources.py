"""Weights by name, from a hub on the loopback interface that speaks HTTP as the real one does."""

import hashlib
import http.server
import json
import threading

import numpy as np
import pytest
from huggingface_hub import constants
from support import small_runs

from hsvit_jax import data, train
from hsvit_jax.train import init_from
from hsvit_jax.weights import files as weight_files
from hsvit_jax.weights import read, sources
from hsvit_jax.weights.stored import stored_network

COMMIT = hashlib.sha1(b"one").hexdigest()
DESCRIPTION = {"image_mean": [0.25], "image_std": [0.125]}


class Hub(http.server.ThreadingHTTPServer):
    """Serves files as /OWNER/NAME/resolve/REVISION/FILE, and counts what it is asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(None)

    def do_GET(self):
        self.answer(self.wfile)

    def answer(self, body):
        *model, kind, revision, file = ["", "", "", *self.path.strip("/").split("/")][-5:]
        self.server.asked.append((self.command, file))
        content = self.server.files.get(file)
        if model != ["ada", "net"]:
            code, headers = 404, {"X-Error-Code": "RepoNotFound"}
        elif kind != "resolve" or revision not in ("main", COMMIT):
            code, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        elif content is None:
            code, headers = 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
        else:
            code, headers = 200, {"X-Repo-Commit": COMMIT}
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        self.send_response(code)
        content = content if code == 200 else b""
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body is not None:
            body.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(stored_weights, tmp_path, monkeypatch):
    """A hub with one model, which is a run's network under our own names."""
    stored = stored_network(stored_weights)
    about = {"config": stored.config.to_dict(), "class_names": list(stored.class_names), "step": 0}
    trees = {"params": stored.params, "stats": stored.stats}
    files = {
        "model.safetensors": weight_files.pack(trees, about),
        "preprocessor_config.json": json.dumps(DESCRIPTION).encode(),
    }
    with Hub(files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()


def test_a_run_starts_from_the_hub(hub, monkeypatch):
    config = small_runs.small_config(init__from="hub:ada/net")
    run = train.prepare(config, dataset=small_runs.small_dataset())
    assert run.config.init["from"] == f"hub:ada/net@{COMMIT}"
    assert (run.config.data.mean, run.config.data.std) == ((0.25,), (0.125,))
    start = init_from.load(run.config, run.model)
    assert "pixels are normalised as preprocessor_config.json says" in start.notes
    # The network is fetched once, and is there without the hub.
    assert hub.asked.count(("GET", "model.safetensors")) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = init_from.load(run.config, run.model)
    np.testing.assert_array_equal(*(s.params["head"]["norm_scale"] for s in (start, again)))
    assert sources.pinned("hub:ada/net") == run.config.init["from"]
    with pytest.raises(ValueError, match=r"hub:ada/other: .* cannot be read: .*Entry"):
        sources.locate("hub:ada/other")


def test_what_the_hub_has_not_is_said(hub):
    said = (
        r"init.from=hub:ada/nut: hub:ada/nut: .* cannot be read: .* make sure you are authenticated"
    )
    with pytest.raises(ValueError, match=said):
        init_from.of_weights(small_runs.small_config(init__from="hub:ada/nut"))
    with pytest.raises(ValueError, match="RevisionNotFoundError"):
        sources.locate("hub:ada/net@v2")
    with pytest.raises(ValueError, match="HFValidationError"):
        sources.locate("hub:a/b/c/../d")
    del hub.files["model.safetensors"]
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*EntryNotFound"):
        sources.locate("hub:ada/net")


_EFFICIENTNET = {
    "image_processor_type": "EfficientNetImageProcessor",
    "image_mean": [0.5],
    "image_std": [0.5],
}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"pretrained_cfg": {"mean": [0.5], "std": [0.2]}}, ((0.5,), (0.2,), False, "config.json")),
        ({"do_normalize": False}, ((0.0,), (1.0,), False, "config.json")),
        ({"do_flip_channel_order": True}, ((0.0,) * 3, (1.0,) * 3, True, "config.json")),
        ({"model_type": "resnet"}, None),
        (_EFFICIENTNET, ((0.5,), (0.25,), False, "config.json")),
        ({**_EFFICIENTNET, "include_top": False}, ((0.5,), (0.5,), False, "config.json")),
        ({"pretrained_cfg": None}, None),
        (  # of pixels from -1 to 1, and from 0 to 255
            {"image_mean": [0.5], "image_std": [0.5], "rescale_factor": 1 / 127.5}
            | {"rescale_offset": True},
            ((0.75,), (0.25,), False, "config.json"),
        ),
        (
            {"image_mean": [51], "image_std": [102], "do_rescale": False},
            ((0.2,), (0.4,), False, "config.json"),
        ),
    ],
)
def test_pixels(described, expected, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(described))
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert sources.pixels(str(source)) == expected


def test_a_damaged_description_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    for text in (
        *(
            "[]",
            '{"image_mean": ["a"], "image_std": [1]}',
            "{",
            '{"image_mean": [], "image_std": []}',
        ),
        *('{"image_mean": [123], "image_std": [58]}', '{"image_mean": [0.5], "image_std": [1.5]}'),
        '{"image_mean": [0.5], "image_std": [0.5], "rescale_factor": 0}',
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json (does not say|is not)"):
            sources.pixels(str(tmp_path))


def test_a_folder_may_be_called_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hub", "zoo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"")
        assert sources.locate(name).name == "model.safetensors"


def test_a_home_that_nobody_has():
    with pytest.raises(ValueError, match=r"~nobody-at-all/run does not exist"):
        stored_network("~nobody-at-all/run")
    with pytest.raises(ValueError, match=r"~nobody-at-all/a\.csv"):
        data.load("csv=~nobody-at-all/a.csv")


def test_a_stem_that_reads_blue_first():
    tensors = {"stem": np.arange(24.0).reshape(2, 3, 2, 2), "deep": np.ones((4, 2, 1, 1))}
    turned = read.red_first(tensors)
    np.testing.assert_array_equal(turned["stem"][:, 0], tensors["stem"][:, 2])
    assert turned["deep"] is tensors["deep"]
    with pytest.raises(ValueError, match="0 convolutions read three channels"):
        read.red_first({"deep": tensors["deep"]})
