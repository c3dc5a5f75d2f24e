"""Tests checkpoints and files of weights that are damaged or untrusted: one line refuses them."""

import contextlib
import copy
import json
import os
import random
import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from support.processes import run_main
from support.small_runs import untrained_run

from hsvit_jax import checkpoint, main
from hsvit_jax.checkpoint import record
from hsvit_jax.weights import convert, files
from hsvit_jax.weights.stored import stored_network

RUN = ("--config=c2a2:digits,tiny", "--config.model.depth=1", "--config.mesh.data=1")
RUN += ("--config.train.steps=2",)
ODD = (None, True, -1, 0, 3, 10**9, 10**400, float("nan"), 0.5)
ODD += ("x", "\x1b[2J", "", [], [0], {}, {"a": 1})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps by the command line."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_main(*RUN, f"--workdir={folder}/run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run's checkpoint without the run."""
    return untrained_run(tmp_path_factory.mktemp("untrained"), 2)


@pytest.fixture
def stored(untrained, tmp_path):
    return shutil.copytree(untrained, tmp_path / "stored")


def reseal(step: Path, change) -> None:
    """Changes a step's record and repairs its digest, as an attacker could."""
    path = step / "meta" / "metadata"
    content = json.loads(path.read_text())["content"]
    change(content)
    text = json.dumps({"sha256": record._digest(content), "content": content})
    path.write_text(text)


def flip(step: Path) -> None:
    """One bit of the largest file of arrays."""
    path = max((p for p in step.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_step_is_named_and_the_one_before_is_used(run):
    """Of a copy of step 2 as step 1."""
    steps = run / "checkpoints"
    shutil.copytree(steps / "2", steps / "1")
    reseal(steps / "1", lambda content: content.update(step=1))
    flip(steps / "2")
    done = run_main(*RUN, f"--workdir={run}", cwd=run)
    assert done.returncode == 0, done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert f"step 2 in {steps} is damaged, passed over: " in warning
    assert sorted(os.listdir(steps)) == ["1", "2.damaged"]


def one_line(read, quiet: bool = True) -> bool:
    """Returns whether `read` succeeds; it may raise only a ValueError of one line."""
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        try:
            read()
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            return False
    return True


def mutate(draw: random.Random, tree, below: tuple):
    """Copies a tree of dicts and lists, with one item below a path removed or replaced."""
    tree = copy.deepcopy(tree)
    paths = []

    def walk(node, path):
        paths.append(path)
        items = node.items() if isinstance(node, dict) else ()
        for key, value in enumerate(node) if isinstance(node, list) else items:
            walk(value, (*path, key))

    walk(tree, ())
    inner = [path for path in paths if len(path) > len(below) and path[: len(below)] == below]
    *parents, last = draw.choice(inner)
    node = tree
    for key in parents:
        node = node[key]
    if draw.random() < 0.25:
        del node[last]
    else:
        node[last] = copy.deepcopy(draw.choice(ODD))
    return tree


def test_an_untrusted_record_is_a_network_or_one_line(stored):
    """Every part of the record is changed, with the right digest."""
    draw = random.Random(0)
    path = stored / "checkpoints" / "2" / "meta" / "metadata"
    content = json.loads(path.read_text())["content"]
    parts = ((), ("leaves",), ("meta",), ("meta", "config"), ("meta", "config", "model"))
    parts += (("meta", "config", "data"), ("meta", "class_names"))
    outcomes = set()
    for _ in range(25):
        changed = mutate(draw, content, draw.choice(parts))
        with contextlib.suppress(ValueError):  # 10**400 is too long a number for a checksum
            digest = record._digest(changed)
        path.write_text(json.dumps({"sha256": digest, "content": changed}))
        outcomes.add(one_line(lambda: stored_network(stored)))
    assert outcomes == {True, False}


def test_an_untrusted_record_is_refused_with_its_fault(stored):
    path = stored / "checkpoints" / "2" / "meta" / "metadata"
    original = path.read_text()
    for change, message in (
        (lambda c: c["leaves"][0].__setitem__(2, [2**44]), "far more than"),
        (lambda c: c["leaves"][0].__setitem__(2, [2**28]), "another shape than its record"),
        (lambda c: c["leaves"].append(c["leaves"][0]), "do not make a tree"),
        (lambda c: c["leaves"].append([["params"], "float32", [], ""]), "do not make a tree"),
        (lambda c: c["leaves"][0].__setitem__(1, "O"), "dtype 'O'"),
        (lambda c: c.update(metric=float("nan")), "its metric or metadata are of another kind"),
        (lambda c: c.pop("leaves"), "KeyError: 'leaves'"),
        (lambda c: c["meta"].pop("config"), "(KeyError: 'config')"),
        (lambda c: c["meta"]["config"].pop("data"), "does not describe a network"),
        (lambda c: c["meta"]["config"]["model"].update(embed_dim=8), "different: params."),
        (lambda c: c["meta"].update(class_names=["cat"] * 11), "11 class names for 10 classes"),
        (lambda c: c["meta"].update(class_names=[]), "0 class names for 10 classes"),
        (lambda c: c["meta"].update(class_names=3), "has no len"),
    ):
        path.write_text(original)
        reseal(stored / "checkpoints" / "2", change)
        with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
            warnings.simplefilter("ignore")
            stored_network(stored)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_untrusted_class_names_are_escaped(stored, tmp_path, capfd):
    """Missing names are numbered."""
    reseal(
        stored / "checkpoints" / "2",
        lambda content: content["meta"].update(class_names=["\x1b]0;owned\x07\x9b31m"]),
    )
    Image.new("L", (32, 32)).save(tmp_path / "image.png")
    for form in ("table", "json"):
        words = ("--mode=predict", f"--checkpoint={stored}", str(tmp_path / "image.png"))
        assert main.main(["main", *words, f"--format={form}", "--top_k=10"]) == 0
        out, err = capfd.readouterr()
        assert not set(out + err) & set("\x1b\x07\x9b")
        assert "owned" in out and "unnamed 9" in out


@pytest.mark.slow
def test_untrusted_metadata_of_a_resumed_run_is_one_line(run):
    reseal(run / "checkpoints" / "2", lambda content: content["meta"].update(config=[], shapes=3))
    done = run_main(*RUN, f"--workdir={run}", cwd=run)
    assert done.returncode == 1
    assert done.stderr.startswith(f"the metadata of the checkpoint in {run} are not ")
    assert done.stderr.count("\n") == 1


def test_a_step_with_a_device_in_it_is_damaged(stored):
    (stored / "checkpoints" / "2" / "state" / "more").symlink_to("/dev/zero")
    with pytest.warns(checkpoint.CheckpointWarning, match="neither a file nor a folder"):
        assert not one_line(lambda: stored_network(stored), quiet=False)


def safetensors(path: Path, header: dict, data: bytes) -> Path:
    """Writes a file with any header."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_floats_of_eight_bits_are_refused(tmp_path, capsys):
    for kind in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        header = {"\x1b[2J": {"dtype": kind, "shape": [4], "data_offsets": [0, 4]}}
        path = safetensors(tmp_path / "w.safetensors", header, bytes(4))
        assert main.main(["hsvit", "convert", str(path)]) == 1
        assert capsys.readouterr().err == (
            f"{path} holds tensors of type {kind}, which cannot be read here: save its "
            "weights as F32, F16 or BF16\n"
        )


def test_an_archive_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    """Zeros compress a thousandfold."""
    monkeypatch.setattr(files, "_PLAUSIBLE", 2**20)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, a=np.zeros(2**24, np.uint8))
    with pytest.raises(ValueError, match="it would unpack to 16,777,344 bytes"):
        files.read(path)


def test_an_untrusted_file_of_weights_is_a_network_or_one_line(tmp_path, golden_dir, monkeypatch):
    """One or two of header, constructor, tensors and bytes are changed at a time."""
    monkeypatch.setattr(convert, "_write", lambda *_: None)
    draw, outcomes, path = random.Random(0), set(), tmp_path / "w.npz"
    for name in ("vix-fnet", "hsvit-convonly", "hf-vit-p4"):
        tensors, description = files.read(golden_dir / f"{name}.npz")
        tensors = {k: v for k, v in tensors.items() if not k.startswith(("input", "logits"))}
        for _ in range(20):
            changed = dict(tensors)
            key = draw.choice(sorted(changed))
            array, how = changed.pop(key), draw.randrange(7)
            other = (
                lambda a: a.astype("i8" if np.isfinite(a).all() else "c8"),
                lambda a: a.reshape(-1),
                lambda a: a[:0],
                lambda a: np.full(a.shape, np.nan, np.float32),
                lambda a: np.array("\x1b[2J"),
            )
            if how < len(other):
                changed[key] = other[how](np.atleast_1d(array))
            changed |= {"\x1b[2J": array} if how == 5 else {}
            described = mutate(draw, description, ()) if draw.random() < 0.6 else description
            np.savez(path, config=json.dumps(described), **changed)
            outcomes.add(one_line(lambda: convert.convert(path)))
    assert outcomes == {True, False}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_damaged_bytes_of_a_file_of_weights_are_one_line(tmp_path, golden_dir, suffix):
    """Bytes are cut off or flipped, or the header changes; a file may remain valid."""
    path, draw = tmp_path / f"w{suffix}", random.Random(0)
    tensors, description = files.read(golden_dir / "vix-fnet.npz")
    if suffix == ".npz":
        np.savez(path, config=json.dumps(description), **tensors)
    else:
        floats = {k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}
        save_file(floats, path, metadata={"config": json.dumps(description)})
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(200):
        data = bytearray(whole)
        if suffix == ".safetensors" and draw.random() < 0.5:
            header = mutate(draw, json.loads(whole[8 : 8 + length]), ())
            with contextlib.suppress(ValueError):
                safetensors(path, header, whole[8 + length :])
        else:
            for _ in range(draw.choice((0, 1, 1, 8))):
                place = draw.randrange(draw.choice((300, len(data))))
                data[place] ^= 1 << draw.randrange(8)
            path.write_bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data))))])
        one_line(lambda: files.read(path))
