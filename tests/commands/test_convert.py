"""PyTorch weights: goldens through the command line, any constructor, all kinds of bad files."""

import io
import json
import pickle
import re
import sys
import zipfile
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import state_dicts, torch_files

from hsvit_jax import classifier, export, main, models
from hsvit_jax import config as configs
from hsvit_jax.checkpoint import load_tree
from hsvit_jax.weights import convert, files
from hsvit_jax.weights.stored import stored_network

SMALL = state_dicts.CASES["hsvit"]["constructor"]


def npz(path, tensors, constructor=None, **entries):
    """Writes a state dict as a golden is written."""
    if constructor is not None and "config" not in entries:
        entries["config"] = json.dumps({"family": "HSViT", "constructor": constructor})
    np.savez(path, **tensors, **entries)
    return path


def rebuild(out):
    """Model, parameters and statistics from nothing but a converted folder, as eval does it."""
    step, state, meta = load_tree(out)
    config = configs.from_json(json.dumps(meta["config"]))
    assert step == 0 and configs.from_json((out / "config.json").read_text()) == config
    data = config.data
    model = models.build(
        config.model,
        image_size=data.image_size,
        channels=data.channels,
        num_classes=data.num_classes,
    )
    return model, state, meta


def answers(model, state, images_BCHW):
    trees = state["params"], state.get("stats", {})
    return jax.jit(model.apply)(*trees, images_BCHW.transpose(0, 2, 3, 1))[0]


def test_golden_through_the_command_line(golden_dir, tmp_path, capsys):
    source = golden_dir / "hsvit-convattn.npz"
    assert main.main(["hsvit", "convert", str(source), str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    with np.load(source) as golden:
        count = json.loads(golden["config"].item())["n_params"]
        images, logits = golden["input"], golden["logits"]
    assert out.count("\n") == 1 and err == ""
    assert report["parameters"] == count
    assert report["max_abs_logit"] == pytest.approx(np.abs(logits).max())
    assert report["max_abs_error"] <= 1e-9 * report["max_abs_logit"]
    model, state, meta = rebuild(tmp_path / "out")
    ours = answers(model, state, images)
    np.testing.assert_allclose(ours, logits, rtol=0, atol=2e-5 * np.abs(logits).max())
    assert meta["class_names"] == [str(i) for i in range(10)]
    assert meta["config"]["data"]["mean"] == [0.5] * 3


@pytest.mark.parametrize(("name", "step"), [("hsvit-convonly", 5), ("vix-viprope", 9)])
def test_a_weight_changed_by_a_thousandth_is_refused(name, step, golden_dir, tmp_path, capsys):
    """Of every few tensors the largest; some others feed a ReLU that is 0 for these images."""
    with np.load(golden_dir / f"{name}.npz") as golden:
        tensors = {k: golden[k] for k in golden.files}
    weights = [k for k, v in tensors.items() if v.dtype == np.float32 and v.size > 1]
    weights = [k for k in weights if not re.match("input|logits|train|grad|after", k)]
    source, out = tmp_path / "a.npz", tmp_path / "out"
    for key in weights[2::step]:
        changed = tensors[key].copy()
        changed[np.unravel_index(np.abs(changed).argmax(), changed.shape)] *= 1.001
        np.savez(source, **{**tensors, key: changed})
        assert main.main(["hsvit", "convert", str(source), str(out)]) == 1, key
        printed = capsys.readouterr()
        assert "differ" in printed.err and not out.exists()
        assert json.loads(printed.out)["max_abs_error"] > 0


def test_an_answer_that_depends_on_its_batch_is_noted(golden_dir, tmp_path, capsys):
    words = [str(golden_dir / "vix-viprope.npz"), str(tmp_path / "b")]
    assert main.main(["hsvit", "convert", *words]) == 0
    assert "batch_coupling" in capsys.readouterr().err


#: Of parts that other constructors have too; the longer suite's.
SLOW = re.compile(
    r"(ccx|cvx|levix|pix) (?!softmax)|vix .*(one head|linformer)|dhvt patch|hvt 2-D con"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * bool(SLOW.match(name)))
        for name, case in state_dicts.CASES.items()
        if "model" in case
    ],
)
def test_any_constructor(name, tmp_path):
    """Of every family: its settings, its tensors' places and, to 1e-9, its logits."""
    case = state_dicts.CASES[name]
    report = convert.convert(state_dicts.write(tmp_path / "any.npz", name))
    assert report["max_abs_error"] <= 1e-6 * report["max_abs_logit"]
    assert report["parameters"] == case["parameters"]
    assert report["checkpoint"] == str(tmp_path / "any-jax")
    model, state, meta = rebuild(tmp_path / "any-jax")
    written = json.loads(json.dumps(meta["config"]))
    assert {k: written["model"][k] for k in case["model"]} == case["model"]
    data = written["data"]
    assert [data["channels"], *data["image_size"]] == case["input"][1:]
    ours = model.init_shapes()
    assert jax.tree.map(np.shape, ours[0]) == jax.tree.map(np.shape, state["params"])


#: What names the network of the case "hsvit" but for its classes and channels.
NAMED = ["--config=c2a2", "--config.model.conv_channels=5,6", "--config.model.pool_strides=1,2"]
NAMED += ["--config.model.groups=2", "--config.model.depth=1", "--config.model.embed_dim=6"]
NAMED += ["--config.model.heads=3", "--config.data.image_size=4,6"]


def test_a_bare_state_dict_needs_a_configuration(tmp_path, capsys):
    source = str(npz(tmp_path / "plain.npz", state_dicts.tensors("hsvit")))
    assert main.main(["hsvit", "convert", source]) == 1
    assert (
        "does not say what network it holds: name one, as in --config=" in capsys.readouterr().err
    )
    words = [*NAMED, "--config.data.std=0.2,0.3,0.4"]
    assert main.main(["hsvit", "convert", source, *words]) == 0
    model, state, meta = rebuild(tmp_path / "plain-jax")
    ours = answers(model, state, state_dicts.images("hsvit"))
    logits = np.array(state_dicts.CASES["hsvit"]["logits"])
    np.testing.assert_allclose(ours, logits, rtol=0, atol=2e-5 * np.abs(logits).max())
    data = meta["config"]["data"]
    assert (data["num_classes"], data["channels"], data["std"]) == (7, 3, [0.2, 0.3, 0.4])
    assert main.main(["hsvit", "convert", source, NAMED[1]]) == 2
    assert "needs --config=" in capsys.readouterr().err


def test_a_configuration_beside_a_file_s_own_must_agree(tmp_path, capsys):
    source = str(npz(tmp_path / "a.npz", state_dicts.tensors("hsvit"), SMALL))
    words = [word.replace("heads=3", "heads=2") for word in NAMED]
    assert main.main(["hsvit", "convert", source, *words]) == 1
    assert "heads: checkpoint 3, config 2" in capsys.readouterr().err
    assert main.main(["hsvit", "convert", source, *NAMED]) == 0


def test_every_misfit_is_listed_in_one_error(tmp_path):
    tensors = state_dicts.tensors("hsvit")
    del tensors["model.cls_token_embeddings"]
    key = "model.attn_encoders.1.0.attn_block.self_attn"
    tensors[f"{key}.in_proj_bias"] = tensors[f"{key}.in_proj_bias"][:-1]
    tensors[f"{key}.out_proj.bias"] = np.arange(6)
    tensors["model.embed_projection.0.bias"][2] = np.nan
    tensors["classifier.mlp_head.0.bias"] = np.full(6, 1e300)
    tensors["classifier.extra"] = np.zeros(3, np.float32)
    source = npz(
        tmp_path / "bad.npz",
        tensors,
        SMALL,
        **{"grad/x": np.zeros(1), "model.n.num_batches_tracked": np.array(3)},
    )
    with pytest.raises(ValueError, match=r"6 tensors, .* do not fit") as error:
        convert.convert(source)
    for line in (
        "missing model.cls_token_embeddings (2, 1, 1, 6)",
        f"misshapen {key}.in_proj_bias: (17,), expected (18,)",
        f"not floating point {key}.out_proj.bias: int64",
        "not finite as float32 model.embed_projection.0.bias",
        "not finite as float32 classifier.mlp_head.0.bias",
        " and 1 more",
    ):
        assert line in str(error.value)
    assert not (tmp_path / "bad-jax").exists()


def test_a_negative_variance_is_refused(tmp_path):
    """It would train, as batches have their own, and every evaluation would be NaN."""
    tensors = state_dicts.tensors("hsvit")
    key = next(name for name in tensors if name.endswith("running_var"))
    tensors[key][0] = -1e-3
    with pytest.raises(ValueError, match=f"a negative variance {re.escape(key)}"):
        convert.convert(npz(tmp_path / "bad.npz", tensors, SMALL))


def test_a_network_of_bfloat16_is_compared_in_float64(golden_dir, tmp_path):
    for name in ("hsvit-convattn", "hsvithet-resnet-bottleneck-ds"):
        with np.load(golden_dir / f"{name}.npz") as golden:
            tensors = {k: golden[k] for k in golden.files}
        convert.convert(golden_dir / f"{name}.npz", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["model"]["dtype"] = "bfloat16"
        about = json.loads(tensors["config"].item()) | {"config": config}
        np.savez(tmp_path / "own.npz", **tensors | {"config": json.dumps(about)})
        report = convert.convert(tmp_path / "own.npz", tmp_path / f"{name}-own")
        assert report["max_abs_error"] <= 1e-9 * report["max_abs_logit"]
        assert rebuild(tmp_path / f"{name}-own")[2]["config"]["model"]["dtype"] == "bfloat16"


def test_classes_get_names(tmp_path, capsys):
    source = str(npz(tmp_path / "a.npz", state_dicts.tensors("hsvit"), SMALL))
    assert main.main(["hsvit", "convert", source, "--class_names=a,b,c,d,e,f,g"]) == 0
    network = classifier.load(tmp_path / "a-jax")
    assert network.class_names == tuple("abcdefg")
    assert main.main(["hsvit", "convert", source, str(tmp_path / "n")]) == 0
    data = SimpleNamespace(class_names=("b", "g"), name="photos")
    with pytest.raises(ValueError, match="--class_names"):
        classifier.load(tmp_path / "n").relabelled(None, data)
    assert main.main(["hsvit", "convert", source, "x", "--class_names=a,a,b,c,d,e,f"]) == 1
    assert "--class_names" in capsys.readouterr().err


def described(**changes):
    return {"config": json.dumps({"constructor": {**SMALL, **changes}})}


def named(names):
    return {"config": json.dumps({"constructor": SMALL, "class_names": names})}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"input": np.zeros((2, 6, 4, 3), "f4"), "logits": np.zeros((2, 7), "f4")}, "do not fit"),
        ({"config": "{"}, "not JSON"),
        ({"config": json.dumps({"constructor": 3})}, "not a JSON object"),
        ({"config": json.dumps({"family": "alexnet"})}, "unknown family 'alexnet'; known: hsvit"),
        (named([*"abcdefgh"]), "are 8 of 7 classes"),
        (named(["a", 1]), "must be a list of texts"),
        (described(attn_num="2"), "model.groups must"),
        (described(image_size=5), "do not fit this"),
        (described(conv_kernel_sizes=[4, 3]), "conv_kernels"),
    ],
)
def test_contradictions_are_clear_errors(entries, message, tmp_path, capsys):
    source = npz(tmp_path / "a.npz", state_dicts.tensors("hsvit"), SMALL, **entries)
    assert main.main(["hsvit", "convert", str(source)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and str(source) in err and message in err
    assert not (tmp_path / "a-jax").exists()


class _Trap:
    """What a pickle would do if it were read."""

    def __reduce__(self):
        return (pytest.fail, ("it was run",))


def _foreign_and_damaged(tmp_path):
    """Contents that are no state dict, by what they are."""
    good = npz(tmp_path / "good.npz", state_dicts.tensors("hsvit"), SMALL).read_bytes()
    text, array, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Trap()))
    np.save(array, np.zeros(3))
    np.savez(objects, a=np.array([{}], dtype=object))
    return {
        "pickle": pickle.dumps(_Trap()),
        "html": b"<!DOCTYPE html><html><body>404 not found</body></html>",
        "half": good[: len(good) // 2],
        "flipped": good[:900] + bytes([good[900] ^ 1]) + good[901:],
        "empty": b"",
        "PyTorch archive": text.getvalue(),
        "bare array": array.getvalue(),
        "objects": objects.getvalue(),
        "long header": (2**63).to_bytes(8, "little") + b"{}",
    }


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_foreign_and_damaged_files(suffix, tmp_path, capsys):
    source = tmp_path / f"weights{suffix}"
    for name, content in _foreign_and_damaged(tmp_path).items():
        source.write_bytes(content)
        assert main.main(["hsvit", "convert", str(source)]) == 1, name
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, name
        assert f"{source} is not a whole {suffix} file" in err, name
    assert not (tmp_path / "weights-jax").exists()


def test_files_that_are_no_one_network(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` fail
    for name in ("a.h5", "a.ckpt"):
        (tmp_path / name).write_bytes(b"x")
    tensors = state_dicts.tensors("hsvit")
    both = {f"{owner}.{k}": v for owner in ("ema", "net") for k, v in tensors.items()}
    npz(tmp_path / "two.npz", both, SMALL)
    for name, message in (
        ("nothing.npz", r"nothing\.npz is not a file"),
        ("a.h5", r"ending in \.npz, \.safetensors"),
        ("a.ckpt", r"Install torch, or.*numpy\.savez"),
        ("two.npz", r"extra (ema|net)"),
    ):
        with pytest.raises(ValueError, match=message):
            convert.convert(tmp_path / name)


def test_safetensors_with_a_wrapper_prefix_in_half_precision(tmp_path):
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    tensors = {k: v.astype(bfloat16) for k, v in state_dicts.tensors("hsvit").items()}
    source = tmp_path / "w.safetensors"
    wrapped = {f"_orig_mod.net.{k}": v for k, v in tensors.items()}
    save_file(wrapped, source, metadata={"config": json.dumps({"constructor": SMALL})})
    convert.convert(source)
    _, state, _ = rebuild(tmp_path / "w-jax")
    kernel = state["params"]["head"]["linear"]["kernel"]
    assert kernel.dtype == np.float32
    theirs = tensors["classifier.mlp_head.1.weight"].astype(np.float32)
    np.testing.assert_array_equal(kernel, theirs.T)
    wrapped["input"] = state_dicts.images("hsvit").astype(bfloat16)
    logits = np.array(state_dicts.CASES["hsvit"]["logits"])
    for dtype in (bfloat16, np.float32):
        wrapped["logits"] = logits.astype(dtype)
        save_file(wrapped, source, metadata={"config": json.dumps({"constructor": SMALL})})
        report = convert.convert(source, tolerance=0.1)
        assert 0 < report["max_abs_error"] < 0.1 * report["max_abs_logit"]


def test_lightning_checkpoint_is_read_with_weights_only(tmp_path, monkeypatch):
    tensors = {
        f"model.{k}": torch_files.FakeTensor(v) for k, v in state_dicts.tensors("hsvit").items()
    }
    asked = {}

    def load(path, **options):
        asked.update(options)
        return {"epoch": 3, "state_dict": tensors}

    fake = torch_files.fake_torch(load)
    monkeypatch.setitem(sys.modules, "torch", fake)
    source = tmp_path / "last.ckpt"
    source.write_bytes(b"x")
    arguments = [str(source), *NAMED, "--std=0.2,0.3,0.4"]
    assert main.main(["hsvit", "convert", *arguments]) == 0
    assert asked == {"map_location": "cpu", "weights_only": True}
    model, _, _ = rebuild(tmp_path / "last-jax")
    assert model.config.image_size == (4, 6) and model.config.heads == 3
    card = export.card(export.describe(stored_network(tmp_path / "last-jax"), ""), 1)
    assert "Converted from PyTorch weights; " in card and "was selected" not in card

    tensors["logits_f64"] = torch_files.FakeTensor(np.array([[1 / 3]]))
    assert files.read(source)[0]["logits_f64"] == 1 / 3  # compared to 1e-9, so not rounded
    tensors["model.scaled"] = torch_files.FakeTensor(np.ones(1, np.float16), width=1)
    with pytest.raises(ValueError, match=r"tensors of type torch\.f8, which cannot be read"):
        files.read(source)

    def refuse(path, **options):
        raise pickle.UnpicklingError("Weights only load failed")

    fake.load = refuse
    with pytest.raises(ValueError, match=r"not a whole \.ckpt file"):
        convert.convert(source)


def test_what_is_in_the_way_is_kept(tmp_path):
    source = npz(tmp_path / "a.npz", state_dicts.tensors("hsvit"), SMALL)
    first = convert.convert(source)
    assert convert.convert(source) == first  # the same again changes nothing
    named = json.dumps({"constructor": SMALL, "class_names": ["cat"]})
    npz(tmp_path / "a.npz", state_dicts.tensors("hsvit"), SMALL, config=named)
    with pytest.raises(ValueError, match="with other class names: remove it"):
        convert.convert(source)
    npz(tmp_path / "a.npz", state_dicts.tensors("hsvit", seed=1), SMALL)
    with pytest.raises(ValueError, match="step 0"):
        convert.convert(source)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("kept")
    with pytest.raises(ValueError, match="already holds something else"):
        convert.convert(source, other)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


def test_mean_and_std_must_fit(tmp_path):
    source = npz(tmp_path / "a.npz", state_dicts.tensors("hsvit"), SMALL)
    with pytest.raises(ValueError, match=r"--mean takes 1 value or 3, one per channel; got"):
        convert.convert(source, mean=(0.5, 0.5))
    assert main.main(["hsvit", "convert", f"{tmp_path}/{300 * 'x'}.npz"]) == 1  # too long a name
    with pytest.raises(ValueError, match=r"data\.std must be"):
        convert.convert(source, std=(0.0,))
