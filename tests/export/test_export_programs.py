"""Exported programs: run where only jax is imported, with any batch, whole and in parts."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from jax import export
from support import small_runs

import hsvit_jax
from hsvit_jax import checkpoint, main, models, train
from hsvit_jax.export import programs
from hsvit_jax.weights import files

ONLY_JAX = """
import sys, jax, numpy as np
from jax import export
program = export.deserialize(open(sys.argv[1], "rb").read())
images = np.load(sys.argv[2])
for batch in (images, images[:1]):
    print(np.argmax(program.call(batch)[1], 1).tolist())
assert not {"hsvit_jax", "flax"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def images():
    side = small_runs.SIDE
    return np.random.default_rng(5).integers(0, 256, (7, side, side, 1), np.uint8)


@pytest.fixture(scope="module")
def predicted(stored_weights, images):
    return hsvit_jax.load(stored_weights).predict(images)


def exported(*words):
    assert main.main(["main", "--mode=export", *map(str, words)]) == 0


def test_stablehlo_needs_jax_alone(stored_weights, images, predicted, tmp_path):
    exported(stored_weights, tmp_path / "a.stablehlo")  # whose ending names the format
    written = (tmp_path / "a.stablehlo").read_bytes()
    program = export.deserialize(written)
    assert b"/hsvit_jax/" not in written and b"/site-packages/" not in written
    assert program.platforms == ("cpu", "cuda", "tpu") and "while" not in program.mlir_module()
    np.save(tmp_path / "images.npy", images)
    words = [sys.executable, "-c", ONLY_JAX, tmp_path / "a.stablehlo", tmp_path / "images.npy"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    best = predicted.argmax(1).tolist()
    assert out.splitlines() == [str(best), str(best[:1])]
    np.testing.assert_allclose(program.call(images)[1], predicted, atol=1e-5)
    about = json.loads((tmp_path / "a.stablehlo.json").read_text())
    assert about["class_names"][0] == "row 0" and about["programs"][0]["flops"] > 0


@pytest.mark.parametrize("tta", ["flip", "shift"])
def test_a_program_has_the_views_that_its_figures_are_of(images, tmp_path, tta):
    """Parts answer one view each, and PyTorch's code knows none: there the figures are left out."""
    config = small_runs.small_config(augment__flip=True, eval__tta=tta)
    dataset, named = small_runs.small_dataset(), tmp_path / "run"
    info = dataclasses.replace(dataset.info, flip=True)
    run = train.prepare(config, dataset=dataclasses.replace(dataset, info=info))
    state = dict(zip(("params", "stats"), small_runs.made_up_values(run.model), strict=True))
    with checkpoint.Checkpoints(named / "checkpoints") as checkpoints:
        checkpoints.save(1, state, run.meta, metric=0.9, wait=True)
    line = {"step": 1, "split": "test", "loss": 0.5, "accuracy": 0.75, "examples": 4}
    (named / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    network = hsvit_jax.load(named)
    assert network.config.eval.tta == tta
    exported(named, tmp_path / "a.stablehlo", "--format=stablehlo")
    program = export.deserialize((tmp_path / "a.stablehlo").read_bytes())
    for some in (images, images[:1]):
        found = np.asarray(program.call(some)[1])
        np.testing.assert_allclose(found, network.predict(some), atol=1e-6)
    plain = dataclasses.replace(network, config=network.config.copy_and_resolve_references())
    plain.config.eval.tta = "none"
    assert np.abs(plain.predict(images) - network.predict(images)).max() > 1e-4
    about = json.loads((tmp_path / "a.stablehlo.json").read_text())
    assert about["measured"]["test"]["accuracy"] == 0.75
    if tta == "flip":
        exported(named, tmp_path / "two", "--format=stablehlo", "--parts=2")
        assert json.loads((tmp_path / "two" / "parts.json").read_text())["measured"] == {}
        exported(named, tmp_path / "b.safetensors", "--format=reference")
        assert files.read(tmp_path / "b.safetensors")[1]["measured"] == {}


def test_parts_are_programs_of_their_own(stored_weights, images, predicted, tmp_path, capsys):
    exported(stored_weights, tmp_path / "two", "--format=stablehlo", "--parts=2")
    printed = capsys.readouterr().out
    rows = {
        row["file"]: row
        for row in json.loads((tmp_path / "two" / "parts.json").read_text())["programs"]
    }
    assert [*rows] == ["part0.stablehlo", "part1.stablehlo", "head.stablehlo"]
    assert rows["part1.stablehlo"]["groups"] == [4, 5, 6, 7]
    for name, row in rows.items():
        assert name in printed and row["flops"] > 0
        assert row["bytes"] == (tmp_path / "two" / name).stat().st_size > 4 * row["parameters"]
    *parts, head = (export.deserialize((tmp_path / "two" / n).read_bytes()) for n in rows)
    totals, weights = zip(*(part.call(images) for part in parts), strict=True)
    np.testing.assert_allclose(head.call(sum(totals), sum(weights))[1], predicted, atol=1e-5)
    words = ["main", "--mode=export", str(stored_weights), str(tmp_path / "two"), "--parts=2"]
    assert main.main([*words, "--format=stablehlo"]) == 0  # the same again
    sheet = tmp_path / "two" / "parts.json"
    sheet.write_text(sheet.read_text().replace('"step": ', '"step": 1'))
    capsys.readouterr()
    assert main.main([*words, "--format=stablehlo"]) == 1
    assert "another network" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name != "hsvit"])
def test_every_family_has_a_free_batch(family):
    (program,) = programs.whole(small_runs.stored(family), family)
    exported = export.deserialize(programs.stablehlo(program))
    assert [str(out.shape) for out in exported.out_avals] == ["(batch, 10)"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a.bin", "--format=stablehlo"), "OUT must end in .stablehlo; got /"),
        (("a", "--format=stablehlo", "--parts=3"), "8 groups cannot split into 3 parts"),
        (("a", "--parts=2"), "--parts=2 needs --format=stablehlo|onnx"),
    ],
)
def test_what_cannot_be_written_says_so(words, message, stored_weights, tmp_path, capsys):
    out, *rest = words
    argv = ["main", "--mode=export", str(stored_weights), str(tmp_path / out), *rest]
    assert main.main(argv) > 0
    assert message in capsys.readouterr().err and not [*tmp_path.iterdir()]
