"""Networks of every family as ONNX, at two sizes of batch. `make test-onnx` has an environment for
them: jax2onnx needs an older Orbax than the package takes elsewhere."""

import json

import jax
import numpy as np
import pytest
from support import small_runs

import hsvit_jax
from hsvit_jax import data, export, main, models
from hsvit_jax.export import programs, quantize

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("jax2onnx")
interpreter = pytest.importorskip("ai_edge_litert.interpreter")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TILES = ("model.towers=4", "model.tiles=2,2", "model.votes=learned")
NETWORKS = [
    ("c2a2", "model.convolution=separable"),
    ("c2a2", "model.towers=4", "model.dtype=bfloat16"),
    ("c2a2", *TILES),
    *(("vix", f"model.mixer={name}") for name in ("performer", "linformer", "nystrom")),
    ("vix", "model.mixer=mlp_mixer"),
    *((name,) for name in models.FAMILIES if name != "hsvit"),
    *((name, "eval.tta=shift") for name in ("c2a2", "vix")),
]


def images(side):
    return np.random.default_rng(3).integers(0, 256, (7, side, side, 3), np.uint8)


def answers(network):
    """The network's own, in float32, as onnxruntime computes."""
    network.model.dtype = np.dtype(np.float32)
    (program,) = programs.whole(network, "own")
    return jax.jit(program.closed)(images(network.model.config.image_size[0]))


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options)


@pytest.mark.parametrize("words", NETWORKS, ids=" ".join)
def test_logits_are_the_network_s(words, tmp_path):
    side = 64 if words == ("mobilevit",) else 32  # at 32 its last map has to be resized
    network = small_runs.stored(*words, side=side)
    export.write(network, {}, tmp_path / "a.onnx", "onnx")
    run, wanted = session(tmp_path / "a.onnx").run, answers(network)
    for count in (1, 7):
        for ours, theirs in zip(wanted, run(None, {"images": images(side)[:count]}), strict=True):
            size = np.abs(ours).max()
            np.testing.assert_allclose(theirs, ours[:count], rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("words", [("c2a2",), ("c2a2", *TILES)], ids=" ".join)
def test_parts_are_the_network(words, tmp_path):
    network = small_runs.stored(*words)
    export.write(network, {}, tmp_path / "two", "onnx", 2)
    parts = [session(tmp_path / "two" / f"part{k}.onnx") for k in range(2)]
    head, (logits, _) = session(tmp_path / "two" / "head.onnx"), answers(network)
    for count in (1, 7):
        sums = [part.run(None, {"images": images(32)[:count]}) for part in parts]
        total, weight = (np.asarray(sum(of)) for of in zip(*sums, strict=True))
        found, _ = head.run(None, {"total": total, "weight": weight})
        np.testing.assert_allclose(found, logits[:count], rtol=0, atol=1e-5 * np.abs(logits).max())


@pytest.mark.parametrize(
    ("words", "message"),
    [(("vix", "model.mixer=fnet"), "Only 1D FFT"), (("mobilevit",), "requires a constant")],
)
def test_what_cannot_be_converted_says_why(words, message, tmp_path):
    with pytest.raises(ValueError, match=f"use --format=stablehlo: .*{message}"):
        export.write(small_runs.stored(*words), {}, tmp_path / "a.onnx", "onnx")
    assert not [*tmp_path.iterdir()]


def predicted(path, images_NHWC):
    """Classes by onnxruntime or LiteRT from a file."""
    if path.suffix == ".onnx":
        return session(path).run(None, {"images": images_NHWC})[0].argmax(1)
    run = interpreter.Interpreter(str(path)).get_signature_runner()
    return np.array([run(images=image[None])["logits"].argmax() for image in images_NHWC])


def test_int8_costs_what_the_file_says(tmp_path, capsys):
    """On scikit-learn's digits, with which the package's zoo was trained."""
    out = tmp_path / "digits.onnx"
    assert main.main(["hsvit", "export", "zoo:c2a2-digits", str(out), "--quantize=int8"]) == 0
    described = json.loads((tmp_path / "digits.onnx.json").read_text())
    (row,) = described["programs"]
    assert row["bytes"] == out.stat().st_size < row["float_bytes"] / 3
    config = hsvit_jax.get_config("c2a2:digits", "data.image_size=32,32")
    test = data.load("digits", image_size=(32, 32), channels=1).test
    network = hsvit_jax.load("zoo:c2a2-digits")
    ours = network.predict(test.gather(range(len(test)))).argmax(1)
    found = predicted(out, test.gather(range(len(test))))
    costs = {cost["split"]: cost for cost in described["int8"]}
    assert costs["test"]["int8"] == pytest.approx((found == test.labels).mean()) and len(test) > 170
    assert costs["test"]["float32"] == pytest.approx((ours == test.labels).mean())
    assert costs["test"]["other_answers"] == (ours != found).sum() <= 2
    assert {"val", "test"} == {*costs} and config.data.name == described["config"]["data"]["name"]
    printed = capsys.readouterr().err
    assert f"{costs['test']['int8']:.2%}" in printed and "int8 925" in printed


@pytest.mark.parametrize(
    "words", [("vit",), ("resnet",), ("mobilenet_v2",), ("swin",)], ids=" ".join
)
def test_int8_of_other_networks_is_near(words, tmp_path):
    """The scores stay in their order, up to the rounding of 256 levels."""
    network = small_runs.stored(*words, side=32)
    (program,) = programs.whole(network, "own")
    given = np.random.default_rng(5).integers(0, 256, (64, 32, 32, 3), np.uint8)
    (tmp_path / "a.onnx").write_bytes(quantize.quantise(programs.onnx(program), given))
    ours = jax.jit(program.closed)(given)[0]
    theirs = session(tmp_path / "a.onnx").run(None, {"images": given})[0]
    centred = [np.asarray(x) - np.mean(x) for x in (ours, theirs)]
    assert np.corrcoef(*map(np.ravel, centred))[0, 1] > 0.98


def test_litert_s_converter_says_what_it_cannot(tmp_path):
    """Its matrix product of a map and a 1×1 kernel; in one line, without the program."""
    with pytest.raises(ValueError, match=r"use --format=stablehlo: .*tfl.batch_matmul.*") as error:
        export.write(small_runs.stored("resnet"), {}, tmp_path / "a.tflite", "tflite")
    assert "\n" not in str(error.value) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("words", [("c2a2",), ("vit",), ("cvt",)], ids=" ".join)
def test_litert_has_the_network_s_logits(words, tmp_path):
    network = small_runs.stored(*words, side=32)
    export.write(network, {}, tmp_path / "a.tflite", "tflite")
    run = interpreter.Interpreter(str(tmp_path / "a.tflite")).get_signature_runner()
    wanted, _ = answers(network)
    for image, ours in zip(images(32), np.asarray(wanted), strict=True):
        theirs = run(images=image[None])["logits"][0]
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4 * np.abs(wanted).max())
