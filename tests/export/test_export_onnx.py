"""Networks of every family as ONNX, at two sizes of batch. `make test-onnx` has an environment for
them: jax2onnx needs an older Orbax than the package takes elsewhere."""

import jax
import numpy as np
import pytest
from support import small_runs

from hsvit_jax import export, models
from hsvit_jax.export import programs

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("jax2onnx")

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
