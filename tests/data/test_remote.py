"""Data in object stores: fetched once, resumed, verified; shards; refusals in one line."""

import base64
import contextlib
import hashlib
import json
import time

import fsspec
import numpy as np
import pytest
from support.data_files import encoded, noise, tar_gz, write, zipped
from support.processes import free_port, run_main

from hsvit_jax import data, main
from hsvit_jax.data import remote

FILES = {
    f"set/{name}/{i}.png": encoded(noise((8, 8, 3), 9 * k + i))
    for k, name in enumerate("ab")
    for i in range(9)
}


@pytest.fixture
def store():
    """The store of memory://, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


@pytest.fixture
def load(tmp_path):
    def call(name, **options):
        options = {"image_size": (8, 8), "data_dir": str(tmp_path / "data"), **options}
        return data.load(name, **options)

    return call


def test_an_archive_is_fetched_once(store, load, tmp_path, monkeypatch):
    expected = load(f"folder={write(tmp_path / 'set', FILES)}").fingerprint
    for name, body in (("a.zip", zipped(FILES)), ("a.tar.gz", tar_gz(FILES))):
        store.pipe_file(f"/b/in/{name}", body)
        assert load(f"folder=memory://b/in/{name}").fingerprint == expected
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "cat_file", None)
        assert load("folder=memory://b/in/a.zip").fingerprint == expected
        patch.setattr(type(store), "info", lambda *_: 1 / 0)
        with pytest.warns(UserWarning, match=r"memory://b/in/a\.zip does not answer; its copy"):
            assert load("folder=memory://b/in/a.zip").fingerprint == expected
    store.pipe_file("/b/in/a.zip", zipped({k: v for k, v in FILES.items() if "8" not in k}))
    assert load("folder=memory://b/in/a.zip").fingerprint != expected


@pytest.mark.parametrize("name", ["md5Hash", "crc32c", "ETag"])
def test_a_fetch_is_resumed_and_verified(name, store, tmp_path, monkeypatch):
    body = bytes(range(256)) * 40
    store.pipe_file("/b/a.bin", body)
    value = base64.b64encode(hashlib.md5(body).digest()).decode()
    if name == "ETag":
        value = f'"{hashlib.md5(body).hexdigest()}"'
    if name == "crc32c":
        crc32c = pytest.importorskip("google_crc32c")
        value = base64.b64encode(crc32c.Checksum(body).digest()).decode()
    read, info, asked = type(store).cat_file, type(store).info, []
    state = {"fails": 2, name: value}

    def cat_file(self, path, start, end):
        asked.append(start)
        if start and state["fails"]:
            state["fails"] -= 1
            raise ConnectionResetError("reset")
        return read(self, path, start, end)

    monkeypatch.setattr(type(store), "cat_file", cat_file)
    monkeypatch.setattr(type(store), "info", lambda *a, **k: info(*a, **k) | {name: state[name]})
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    monkeypatch.setattr(remote, "_TRIES", 1)
    for expected in ([0, 4096], [4096]):
        with pytest.raises(ValueError, match="memory://b does not answer"):
            remote.fetch("memory://b/a.bin", tmp_path)
        assert asked == expected
        asked.clear()
    path, version = remote.fetch("memory://b/a.bin", tmp_path)
    assert asked == [4096, 8192] and path.read_bytes() == body and version[0] == len(body)
    assert len([*path.parent.iterdir()]) == 2  # the file and its record
    state[name] = value[:5] + ("1" if name == "ETag" else "A") + value[6:]
    with pytest.raises(ValueError, match=r"a\.bin has checksum (md5|crc32c):\w+, not"):
        remote.fetch("memory://b/a.bin", tmp_path)
    assert path.read_bytes() == body


def test_a_table_and_its_images(store, load, tmp_path):
    lines = [f"photos/{name},{name.split('/')[1]}" for name in FILES]
    text = "\n".join(["image,label", *lines])
    local = write(tmp_path / "t", {"t.csv": text.encode()})
    write(local / "photos", FILES)
    store.pipe_file("/b/t.csv", text.encode())
    for name, body in FILES.items():
        store.pipe_file(f"/b/photos/{name}", body)
    found = load("csv=memory://b/t.csv")
    assert found.fingerprint == load(f"csv={local}/t.csv").fingerprint
    store.rm("/b/photos", recursive=True)  # no longer needed, until the table changes
    assert load("csv=memory://b/t.csv").fingerprint == found.fingerprint
    store.pipe_file("/b/t.csv", f"{text}\n../c/1.png,a".encode())
    with pytest.raises(ValueError, match=r"\.\./c/1\.png: name images relative to memory://b"):
        load("csv=memory://b/t.csv")


@pytest.mark.parametrize("kind", ["number", "name", "json"])
def test_shards_are_one_set(kind, store, load, tmp_path):
    """As WebDataset writes them: a sample's files have one name up to the first dot."""
    for shard in range(3):
        files = {}
        for i in range(8):
            label = i % 2 if kind == "number" else "ab"[i % 2]
            files[f"{i:04d}.png"] = encoded(noise((8, 8, 3), 8 * shard + i))
            files[f"{i:04d}.seg.png"] = encoded(noise((8, 8, 3), 99))
            body = json.dumps({"label": label}) if kind == "json" else f"{label}\n"
            files[f"{i:04d}.{'json' if kind == 'json' else 'cls'}"] = body.encode()
        store.pipe_file(f"/b/p-{shard:05d}.tar.gz", tar_gz(files))
        write(tmp_path, {f"p-{shard:05d}.tar.gz": tar_gz(files)})
    found = load("folder=memory://b/p-{00000..00002}.tar.gz", val_fraction=0)
    assert found.info.class_names == (("0", "1") if kind == "number" else ("a", "b"))
    images = np.concatenate([found.train.images, found.test.images])
    labels = np.concatenate([found.train.labels, found.test.labels])
    seen = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    assert seen == {noise((8, 8, 3), i).tobytes(): i % 2 for i in range(24)}
    local = load(f"folder={tmp_path}/p-{{00000..00002}}.tar.gz", val_fraction=0)
    assert local.fingerprint == found.fingerprint
    assert len(load("folder=memory://b/p-00000.tar.gz", test_only=True).test) == 8
    assert data.is_there(f"{tmp_path}/p-{{00000..00002}}.tar.gz")
    del files[f"0003.{'json' if kind == 'json' else 'cls'}"]
    store.pipe_file("/b/p-00001.tar.gz", tar_gz(files))
    with pytest.raises(ValueError, match=r"1 of 24 images have no label .*p-00001.*0003\.png"):
        load("folder=memory://b/p-{00000..00002}.tar.gz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder=gss://bucket/a.zip", ["gss://", "Did you mean gs?"]),
        ("folder=memory://bucket/a.zip", ["memory://bucket/a.zip", "correct the URL"]),
        ("csv=memory://bucket/a.csv", ["memory://bucket/a.csv", "correct the URL"]),
        ("folder=memory://bucket/photos", ["memory://bucket/photos", "nor an archive"]),
        ("folder=s3://KEY:HUSH@bucket/a.zip", ["credentials"]),
        ("folder=https://host/a.zip?token=HUSH", ["credentials"]),
    ],
)
def test_places_that_cannot_be_read(name, words, store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    assert main.main(["hsvit", "train", f"--config=c2a2:{name},tiny", "--workdir=run"]) == 1
    said = capsys.readouterr()
    line = said.err.strip().splitlines()[-1]
    assert all(word in line for word in words) and time.monotonic() - begun < 30
    assert "HUSH" not in said.err + said.out and not [*tmp_path.rglob("*.json")]


def test_a_data_folder_in_a_store_is_for_tfds(store, tmp_path):
    with pytest.raises(ValueError, match=r"data\.dir=memory://sets holds sets of tfds= only"):
        data.load("cifar10", data_dir="memory://sets")


@pytest.fixture
def bucket(monkeypatch):
    """An emulated S3 bucket, 'photos', and what a process needs to reach it."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    port = free_port()
    running = server.ThreadedMotoServer(port=port, verbose=False)
    running.start()
    keys = {"AWS_ACCESS_KEY_ID": "KEYKEY", "AWS_SECRET_ACCESS_KEY": "HUSH"}
    keys |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(running.stop)
        for name, value in keys.items():
            patch.setenv(name, value)
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.mkdir("photos")
        yield files, keys


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those libraries' own
def test_a_run_from_a_bucket_of_s3(bucket, tmp_path):
    """It trains and resumes, keeps the credentials to itself, and names what is not there."""
    files, keys = bucket
    files.pipe_file("photos/in/a.zip", zipped(FILES))
    words = ("--config=c2a2:folder=s3://photos/in/a.zip,tiny", "--workdir=run")
    words += ("--config.train.steps=2", "--config.mesh.data=1")
    keys["HSVIT_DATA_DIR"] = str(tmp_path / "data")
    for more in ((), ("--config.train.steps=3",)):
        done = run_main(*words, *more, cwd=tmp_path, **keys)
        assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr + "".join(p.read_text() for p in tmp_path.rglob("run/*.json*"))
    assert "s3://photos/in/a.zip" in text and "HUSH" not in text and "KEYKEY" not in text
    for name, words in (("folder=s3://photos/b.zip", "correct"), ("csv=s3://no/a.csv", "correct")):
        done = run_main(f"--config=c2a2:{name},tiny", "--workdir=no", cwd=tmp_path, **keys)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert words in done.stderr and name.partition("=")[2] in done.stderr
