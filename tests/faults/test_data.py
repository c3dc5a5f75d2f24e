"""Faulty data through the real command line: refused in one line, or left out when told to."""

import gzip
import io
import json
import os
import re
import signal
import subprocess
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.processes import COMMAND, ROOT, environment, run_main

CONFIG = f"--config={ROOT / 'configs/c2a2.py'}"
SIDE = 32
SHORT = ("--config.train.steps=2", "--config.model.depth=1", "--config.mesh.data=1")


def picture(seed: int) -> Image.Image:
    """Smooth noise."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def make(root: Path, count: int = 20, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """A folder of `count` good images a class."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(100 * label + i).save(root / name / f"{i:03d}.png")
    return root


@pytest.fixture
def train(tmp_path):
    """Trains on a folder or archive: (exit code, standard output, standard error)."""

    def run(path: Path, *words: str, workdir: str = "run", **variables: str):
        done = run_main(
            *(f"{CONFIG}:folder={path},tiny", f"--workdir={tmp_path / workdir}", *SHORT, *words),
            cwd=tmp_path,
            HSVIT_DATA_DIR=str(tmp_path / "data"),
            **variables,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def spoil(root: Path) -> None:
    """Eight files that are no images, in the order of their names."""
    good = (root / "cat/000.png").read_bytes()
    (root / "cat/b1-cut.png").write_bytes(good[: len(good) // 2])
    (root / "cat/b2-empty.png").touch()
    (root / "cat/b3-text.jpg").write_bytes(b"not an image")
    (root / "cat/b4-html.jpg").write_bytes(b"<!DOCTYPE html><html>404</html>")
    os.mkfifo(root / "cat/b5-pipe.jpg")
    (root / "cat/b6-device.jpg").symlink_to("/dev/zero")
    (root / "cat/b7-itself.jpg").symlink_to("b7-itself.jpg")
    (root / "cat/b8-nowhere.jpg").symlink_to("nowhere.jpg")


def test_files_that_are_no_images(tmp_path, train):
    """13: fatal before training by default, left out with a warning when told so."""
    root = make(tmp_path / "set")
    spoil(root)
    code, _, err = train(root)
    assert code == 1
    message = err[err.index("8 of 48 images") :].splitlines()
    assert [line.split("/cat/")[-1].split(":")[0] for line in message[1:6]] == [
        *("b1-cut.png", "b2-empty.png", "b3-text.jpg", "b4-html.jpg", "b5-pipe.jpg")
    ]
    assert message[6:] == [
        "  … and 3 more",
        "Repair or remove them, or leave them out with on_bad_image='skip'.",
    ]
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_files_that_are_no_images_are_left_out_when_told_so(tmp_path, train):
    spoil(make(tmp_path / "set"))
    code, out, err = train(tmp_path / "set", "--config.data.on_bad_image=skip")
    assert code == 0, err
    assert "warning: 8 of 48 images cannot be used and are left out" in err
    assert "24/8/8 images" in out + err
    bad = [f"set/cat/{name}.jpg" for name in ("b5-pipe", "b6-device")]
    for mode, written in (("predict", "set/cat/000.png  "), ("visualize", "views/")):
        words = (f"--mode={mode}", f"--checkpoint={tmp_path / 'run'}", *bad, "set/cat/000.png")
        done = run_main(*words, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr == "".join(f"{x}: cannot be read: not a regular file\n" for x in bad)
        assert done.stdout.startswith(written)


def odd(image: Image.Image, kind: str) -> tuple[bytes, str, Image.Image]:
    """(bytes, suffix, the RGB image they stand for) of an image of a rare kind."""
    file, options, suffix, stored = io.BytesIO(), {}, "png", image
    if kind in ("L", "1", "P"):
        stored = image.convert(kind)
        image = stored.convert("RGB")
    elif kind in ("LA", "RGBA"):
        stored = image.convert(kind)
        stored.putalpha(Image.linear_gradient("L").resize(image.size))
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, stored.convert("RGBA")).convert("RGB")
    elif kind == "CMYK":
        stored, suffix = image.convert("CMYK"), "tiff"
        image = stored.convert("RGB")
    elif kind == "I;16":
        grey = np.asarray(image.convert("L"))
        stored = Image.fromarray(grey.astype(np.uint16) * 257)
        image = Image.fromarray(grey).convert("RGB")
    elif kind == "EXIF":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
        stored = image.rotate(90)
    stored.save(file, suffix, **options)
    return file.getvalue(), suffix, image


@pytest.mark.slow
def test_images_of_rare_kinds(tmp_path, train):
    """14: each trains as the plain RGB image that it stands for; the same seed, the same lines."""
    kinds = ("L", "1", "P", "LA", "RGBA", "CMYK", "I;16", "EXIF")
    for label in ("cat", "dog"):
        for root in ("odd", "plain"):
            (tmp_path / root / label).mkdir(parents=True)
        for i in range(24):
            content, suffix, image = odd(picture(i + 50 * (label == "dog")), kinds[i % len(kinds)])
            (tmp_path / f"odd/{label}/{i:03d}.{suffix}").write_bytes(content)
            image.save(tmp_path / f"plain/{label}/{i:03d}.png")
    logs = []
    for root, run in (("odd", "one"), ("plain", "two")):
        code, _, err = train(tmp_path / root, workdir=run)
        assert code == 0, err
        lines = map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
        logs.append([{k: v for k, v in line.items() if "second" not in k} for line in lines])
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_sets_that_cannot_be_used(tmp_path, train):
    """15, 16: class folders, a bomb of 400 million pixels, archives: named, in one line or two."""
    names = ("empty", "alone", "strange", "bomb", "set")
    empty, alone, strange, bomb, root = (make(tmp_path / name) for name in names)
    (empty / "emu").mkdir()
    (alone / "dog").rename(tmp_path / "dog")
    (strange / "dog").rename(strange / os.fsdecode(b"d\xf6g\x1b[1m"))
    Image.new("1", (20_000, 20_000)).save(bomb / "dog/bomb.png")
    with tarfile.open(tmp_path / "cut.tar.gz", "w:gz") as archive:
        archive.add(root, "set")
    raw = (tmp_path / "cut.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(raw[: len(raw) // 2])
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 2 << 30
    packed = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT)) + gzip.compress(bytes(1 << 24)) * 128
    (tmp_path / "bomb.tar.gz").write_bytes(packed)
    for name, message in (
        ("empty", "class folders without images in .*/empty/: emu; add images"),
        ("alone", r"alone has one class, cat\. Expected PATH/CLASS/\*\.jpg"),
        ("strange", r"hold control characters: d\\udcf6g\\x1b\[1m; rename them"),
        ("bomb", r"dog/bomb.png: more than 89,478,485 pixels are refused \(decompression bomb\)"),
        ("cut.tar.gz", r"set/\w+/\d+.png, is damaged or cut off \(Compressed file ended"),
        ("bomb.tar.gz", r"is damaged or cut off \(a header of 2,147,483,648 bytes"),
    ):
        code, _, err = train(tmp_path / name)
        assert code == 1
        assert re.search(message, err)
        assert len(err.splitlines()) <= (3 if name == "bomb" else 1)


@pytest.mark.slow
def test_class_folders_of_every_sort(tmp_path, train):
    """15: loops are left out in one line, and labels follow the sorted names, whatever they are."""
    root = make(tmp_path / "set", classes=("zebra", "été", "Ant", "été 2", "猫"))
    (root / "zebra/loop").symlink_to("loop")
    (root / "zebra/up").symlink_to(root)
    (root / "zebra/.hidden.png").write_bytes(b"junk")
    (root / "zebra/Thumbs.db").write_bytes(b"junk")
    (root / ".git").mkdir()
    code, _, err = train(root)
    assert code == 0, err
    assert f"warning: links in {root} that lead in a circle are not followed: zebra/loop, z" in err
    words = ("--mode=eval", f"--checkpoint={tmp_path / 'run'}")
    done = run_main(*words, cwd=tmp_path, HSVIT_DATA_DIR=str(tmp_path / "data"))
    table = done.stderr[done.stderr.index("rows: true class") :].splitlines()[1:]
    assert table[0].split() == ["Ant", "zebra", "été", "été", "2", "猫"]


class Host(BaseHTTPRequestHandler):
    """A proxy that answers in the place of every host: half a file, or a wrong one."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * (500 if self.server.cut else 1000))

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_a_host_that_is_down_or_wrong(tmp_path):
    """17: the file, its address and its place are named, soon; nothing of it stays."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy, file = f"http://127.0.0.1:{server.server_port}", "train-images-idx3-ubyte.gz"
    place = tmp_path / "data/fashion_mnist" / file
    closed = "http://127.0.0.1:1"
    for address, server.cut, why in (
        (closed, False, "refused"),
        (proxy, True, "ended after 500 of 1,000 bytes|connection failed"),
        (proxy, False, "what came has checksum sha256:"),
    ):
        started = time.monotonic()
        done = run_main(
            *(f"{CONFIG}:fashion_mnist,tiny", "--workdir=run"),
            cwd=tmp_path,
            HSVIT_DATA_DIR=str(tmp_path / "data"),
            **dict.fromkeys(("http_proxy", "https_proxy"), address),
            no_proxy="",
        )
        assert time.monotonic() - started < 30  # 15, and the start of a process beside others
        assert done.returncode == 1
        assert re.search(f"{file} could not be downloaded: .*({why})", done.stderr)
        assert f"put it at {place}" in done.stderr
        assert "Traceback" not in done.stderr
        assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_killed_decode_leaves_nothing_for_long(tmp_path, train):
    """Its scratch folder is removed at the next start; that of a living process is not."""
    root = make(tmp_path / "set", 400)
    words = [*COMMAND, f"{CONFIG}:folder={root},tiny", f"--workdir={tmp_path / 'run'}", *SHORT]
    variables = environment(HSVIT_DATA_DIR=str(tmp_path / "data"))
    (tmp_path / "data/cache").mkdir(parents=True)

    def scratch() -> list[Path]:
        return list((tmp_path / "data/cache").glob(".*.part-*"))

    process = subprocess.Popen(words, env=variables, stderr=subprocess.DEVNULL)
    try:
        while not scratch():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        live = scratch()
        assert live
        other = make(tmp_path / "other")
        code, _, err = train(other, workdir="other")
        assert code == 0, err
        assert scratch() == live
    finally:
        process.kill()
        process.wait()
    code, _, err = train(root)
    assert code == 0, err
    assert not scratch()


@pytest.mark.slow
def test_batches_that_do_not_fit(tmp_path, train):
    """Every test image counts once in a last partial batch; no steps; a batch of too many."""
    root = make(tmp_path / "set", 23)
    code, _, err = train(root, "--config.train.batch=64", workdir="large")
    assert code == 1
    assert "train.batch=64 is larger than the training split of" in err
    code, _, err = train(root, "--config.train.steps=0", workdir="none")
    assert code == 0, err
    code, _, err = train(root, "--config.train.batch=3")
    assert code == 0, err
    done = run_main("--mode=eval", f"--checkpoint={tmp_path / 'run'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["examples"] == 8
