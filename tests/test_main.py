"""The command line from end to end, as a new user would meet it."""

import contextlib
import csv
import dataclasses
import errno
import functools
import inspect
import io
import json
import os
import pydoc
import re
import shlex
import signal
import stat
import subprocess
import sys
import types
import unittest.mock
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import logging_config
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image
from support import small_runs
from support.data_files import class_folders

import hsvit_jax
from hsvit_jax import checkpoint, classifier, cli, commands, main, train
from hsvit_jax import config as config_lib
from hsvit_jax.classifier import other_data
from hsvit_jax.models import FAMILIES
from hsvit_jax.run_report import measures
from hsvit_jax.runtime import compile_cache, signals
from hsvit_jax.train import metrics

# The smallest network and run that go through everything.
SMALL = (
    *("--config.train.steps=2", "--config.model.depth=1", "--config.mesh.data=1"),
    *("--config.model.embed_dim=8", "--config.data.image_size=8,8"),
)
CONFIG = f"--config={Path(__file__).resolve().parents[1]}/configs/c2a2.py:digits,tiny"


def call(capfd, *words):
    """(exit code, stdout, stderr) of a command line."""
    capfd.readouterr()
    code = main.main(["main", *words])
    return (code, *capfd.readouterr())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("main") / "my run"
    assert main.main(["main", CONFIG, *SMALL, f"--workdir={folder}"]) == 0
    return folder


def test_a_curve_of_votes(capfd, run, tmp_path, monkeypatch):
    png, batches = tmp_path / "votes.png", small_runs.spy_on_batches(monkeypatch)
    words = ("--mode=eval", f"--checkpoint={run}", f"--curve={png}")
    code, out, err = call(capfd, *words)
    assert batches == {32}  # as in training
    assert code == 0 and str(tmp_path / "votes.csv") in err and png.is_file()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["lost_groups"] for line in lines] == [0, 1, 2, 3]
    whole = call(capfd, *words[:2])[1]
    assert lines[0]["mean"] == json.loads(whole)["accuracy"]
    assert lines[0]["interval"] == json.loads(whole)["interval"]


# --- usage and mistakes -------------------------------------------------------------------------


def test_no_arguments_print_the_usage(capfd):
    code, out, err = call(capfd)
    assert (code, err) == (2, "") and all(f"\n  {name} " in out for name in commands.COMMANDS)


def completed(*words):
    """What bash proposes for the last word."""
    line = shlex.join(words)
    code = 'eval "$(cat)"; COMP_WORDS=(' + line + "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "
    code += "_hsvit 2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\""
    with contextlib.redirect_stdout(io.StringIO()) as script:
        assert main.main(["hsvit", "completion", "bash"]) == 0
    script = script.getvalue()
    done = subprocess.run(["bash", "-c", code], input=script, capture_output=True, text=True)
    return done.stdout.split()


def test_completion():
    """Bash gives '=' as a word of its own; zsh, by bashcompinit, does not."""
    assert completed("hsvit", "cr") == ["crossval"]
    assert completed("hsvit", "export", "--qu") == ["--quantize="]
    assert completed("hsvit", "export", "--format", "=", "st") == ["stablehlo"]
    assert {"onnx", "hub"} < {*completed("hsvit", "export", "--format", "=")}
    assert completed("hsvit", "train", "--config.optim.learn") == ["--config.optim.learning_rate="]
    assert completed("hsvit", "train", "--config.optim.name", "=", "mu") == ["muon"]
    assert completed("hsvit", "predict", "--config.optim.n") == []  # it does not read the key


def test_the_script_is_printed_for_two_shells(capfd):
    for shell in ("bash", "zsh"):
        assert main.main(["hsvit", "completion", shell]) == 0
        out = capfd.readouterr().out
        assert out.startswith("autoload" if shell == "zsh" else "_hsvit() {")
    assert main.main(["hsvit", "completion", "fish"]) == 2
    assert "name bash or zsh" in capfd.readouterr().err


def test_help(capfd):
    """Flags and the keys that are read, with their values by --config where it is there."""
    for word in ("--help", "-h", "--helpshort", "-help", "--helpfull"):
        code, out, err = call(capfd, word, "--config.train.batch=5")
        assert (code, err) == (0, "")
        every = word == "--helpfull"
        assert ("--config.optim.beta2=" in out) == every != ("train --helpfull" in out)
        assert every or len(out.splitlines()) <= 80
        assert every or set(re.findall(r"--config\.([\w.]+)=", out)) == {"KEY", *config_lib.FIRST}
        assert "\n  --workdir=" in out and "--split" not in out
        assert "--config.train.batch=5\n" in out and "--config.model.family=" not in out
    out = call(capfd, "--helpfull", CONFIG)[1]
    assert "--config.data.name=digits" in out
    assert "\n  --seeds=0 " in call(capfd, "compare", "--help")[1]  # as the flag takes it


@pytest.mark.parametrize(("place", "named"), [("pets", "."), ("pets/train", "..")])
def test_a_run_does_not_become_a_class(capfd, tmp_path, monkeypatch, place, named):
    folder = class_folders(tmp_path / place, ["cat", "dog"])
    monkeypatch.chdir(folder)
    code, out, err = call(capfd, f"--config=c2a2:folder={named},tiny")
    assert (code, out) == (1, "") and "would be taken for a class" in err
    assert sorted(path.name for path in folder.iterdir()) == ["cat", "dog"]


def test_a_bug_is_not_taken_for_a_mistake(capfd, monkeypatch):
    for bug in (lambda request: int("x"), lambda request: np.zeros(2).reshape(3)):
        command = dataclasses.replace(commands.COMMANDS["summary"], work=bug)
        monkeypatch.setitem(commands.COMMANDS, "summary", command)
        with pytest.raises(ValueError):
            call(capfd, CONFIG, "--mode=summary")


def test_a_shell_leaves_the_home_folder_to_us(capfd, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call(capfd, "curves", str(run), "--out=~/c.png")[:2] == (0, f"{tmp_path}/c.png\n")
    assert call(capfd, "eval", "--checkpoint=~/x")[2].startswith(f"{tmp_path}/x does not exist")


def test_other_ends(capfd, monkeypatch):
    ends = [
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
        (signals.Interrupted(signal.SIGTERM, 7), 42, "after step 7"),
        (signals.Interrupted(signal.SIGINT, 7), 130, "To go on, give the same command again"),
        (signals.Diverged("not finite"), 3, "not finite"),
        (OSError(28, "No space left on device", "/x/y"), 1, "No space left on device: /x/y"),
        (OSError(errno.ELOOP, "Too many levels", "/x/y"), 1, "Too many levels: /x/y"),
    ]
    for error, code, message in ends:
        work = unittest.mock.Mock(side_effect=error)
        command = dataclasses.replace(commands.COMMANDS["train"], work=work)
        monkeypatch.setitem(commands.COMMANDS, "train", command)
        found, out, err = call(capfd, CONFIG, "--config.data.dir=a b")
        assert (found, out) == (code, "") and message in err and "Traceback" not in err
        if isinstance(error, signals.Interrupted):
            assert f"  python -m hsvit_jax train {CONFIG} '--config.data.dir=a b'" in err


def test_warnings_are_one_line_and_told_once(capfd, monkeypatch):
    import warnings

    def mode(_):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for step in (5, 5, 6):  # each once
                text = f"step {step} is damaged"
                warnings.warn(text, checkpoint.CheckpointWarning, stacklevel=1)
        return 0

    command = dataclasses.replace(commands.COMMANDS["train"], work=mode)
    monkeypatch.setitem(commands.COMMANDS, "train", command)
    before = warnings.showwarning
    said = "warning: step 5 is damaged\nwarning: step 6 is damaged\n"
    assert call(capfd, CONFIG) == (0, "", said)
    assert warnings.showwarning is before


def test_a_pipe_that_closes_is_no_error(run, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main.main(["main", "--mode=eval", f"--checkpoint={run}"]) == 141


# --- the modes ----------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(run):
    config = json.loads((run / "config.json").read_text())
    assert config["data"]["image_size"] == [8, 8] and config["data"]["num_classes"] == 10
    assert (config["train"]["steps"], config["train"]["epochs"]) == (2, 0)
    saved = checkpoint.load_tree(run)[2]["config"]
    assert config == json.loads(json.dumps(saved))
    rows = metrics.read_metrics(run / "metrics.jsonl")
    places = [(1, None), (2, None), (2, "val"), (2, "test")]
    assert [(r["step"], r.get("split")) for r in rows] == places
    for row in rows:
        assert np.isfinite(row["loss"]) and 0 <= row["accuracy"] <= 1
        assert "split" not in row or 0 <= row["accuracy"] <= row["top5"] <= 1
    assert list((run / "tensorboard").iterdir())
    with Image.open(run / "curves.png") as image:
        assert image.format == "PNG"


def test_the_names_are_listed(capfd):
    code, out, err = call(capfd, "list")
    words = set(re.split(r"[\s:,]+", out))
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    families = {f.config_file or name for name, f in FAMILIES.items() if name != "hsvit"}
    variants = {variant for f in FAMILIES.values() for variant in f.variants}
    named = {*config_lib.DATA_SETS, *config_lib.RECIPES, *config_lib.SWITCHES}
    assert words >= families | variants | named | {"folder=<path>", "c2a2-digits"}


def test_a_run_is_named_by_place_or_by_a_flag(capfd, run, tmp_path):
    picture = class_folders(tmp_path, ["one"], 1) / "one/0.png"
    for words in (["predict", str(picture)], ["eval", "--config=c2a2:digits"]):
        placed = call(capfd, words[0], str(run), *words[1:])
        assert placed[0] == 0, placed[2]
        assert call(capfd, words[0], f"--checkpoint={run}", *words[1:]) == placed
        assert call(capfd, words[0], f"--workdir={run}", *words[1:]) == placed
    out = tmp_path / "a.safetensors"
    assert call(capfd, "export", f"--workdir={run}", str(out))[0] == 0
    assert call(capfd, "export", str(out), str(tmp_path / "b.safetensors"))[0] == 0
    assert call(capfd, "report", str(run), CONFIG)[0] == 2


def test_data_that_moved_are_named_again(tmp_path, monkeypatch):
    """The message has the command that resumes with them."""
    gone = config_lib.get_config("c2a2:folder=gone")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="--config=NETWORK:folder=NEW --workdir='a b'"):
        train.train(gone, "a b")


def test_a_slow_compilation_raises_no_alarm(monkeypatch):
    """XLA's level of logging is fatal errors meanwhile, and warnings before and after."""
    levels, before = [], jax.config.jax_logging_level
    monkeypatch.setattr(logging_config.utils, "absl_set_min_log_level", levels.append)
    with compile_cache.quiet():
        assert levels == [3]
    assert levels == [3, 1] and jax.config.jax_logging_level == before


def test_a_report(capfd, run, tmp_path):
    assert "Most wrong" in (run / "report.html").read_text("utf-8")  # written by training
    assert "python" in json.loads((run / "environment.json").read_text())["command"]
    out = tmp_path / "test.html"
    assert call(capfd, "report", str(run), "--split=test", f"--out={out}")[:2] == (0, f"{out}\n")
    assert "test accuracy on 179 images" in out.read_text("utf-8")
    code, _, err = call(capfd, "report", str(run), f"--out={tmp_path}")
    assert code == 1 and f"--out={tmp_path}" in err


def test_the_same_command_again_is_done_at_once(capfd, run):
    before = (run / "metrics.jsonl").read_text()
    code, out, err = call(capfd, CONFIG, *SMALL, f"--workdir={run}", "--noreport")
    assert code == 0 and "from step 2" in err
    assert f"  curves    {run}/curves.png\n" in out and "  report" not in out
    assert out.splitlines()[0].startswith("done: test accuracy")
    assert f"eval '{run}'\n" in out  # ready to paste, in spite of the space
    assert (run / "metrics.jsonl").read_text() == before


def test_eval_prints_one_line_of_json(capfd, run, monkeypatch):
    batches = small_runs.spy_on_batches(monkeypatch)
    for split, examples in (("train", 1439), ("val", 179), ("test", 179)):
        words = ("--mode=eval", f"--split={split}", "--which=2", "--checkpoint", str(run))
        code, out, err = call(capfd, *words, CONFIG, "--config.eval.batch=100")
        assert code == 0 and batches == {100}
        line = json.loads(out)
        figures = {"loss", "accuracy", "interval", "macro_f1", "top5"}
        assert set(line) == {"step", "split", "examples", *figures}
        low, high = line["interval"]
        assert 0 <= low < line["accuracy"] < high <= 1
        assert (line["step"], line["split"], line["examples"]) == (2, split, examples)
        assert "rows: true class" in err
        for row in metrics.read_metrics(run / "metrics.jsonl"):
            if row.get("split") == split:
                assert line["accuracy"] == row["accuracy"]
                assert line["loss"] == pytest.approx(row["loss"], rel=1e-5)


def test_a_trained_network_on_a_mesh(capfd, run, tmp_path):
    """Groups and images over devices: the answers are one device's."""
    picture = class_folders(tmp_path, ["one"], 1) / "one/0.png"
    answers = []
    for mesh in ([], ["--config.mesh.group=2", "--config.mesh.data=2"]):
        code, out, err = call(capfd, "--mode=eval", f"--checkpoint={run}", *mesh)
        assert code == 0 and "note:" not in err, err
        line = json.loads(out)
        answers.append([line["accuracy"], line["loss"]])
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-5)
    words = ("--mode=visualize", f"--checkpoint={run}", "--config.mesh.group=4", str(picture))
    code, out, err = call(capfd, *words, f"--out={tmp_path / 'views'}")
    assert code == 0 and len(out.splitlines()) == 3, err
    code, out, err = call(capfd, "--mode=eval", f"--checkpoint={run}", "--config.mesh.group=3")
    assert code == 1 and "3 devices" in err


def test_digits_are_never_mirrored(capfd, run):
    """The run's own way of evaluating, unless a setting changes it."""
    words = ("eval", f"--checkpoint={run}")
    code, alone, _ = call(capfd, *words)
    assert code == 0 and '"accuracy": ' in alone
    assert call(capfd, *words, "--config=c2a2:digits,fast")[:2] == (0, alone)
    code, out, _ = call(capfd, *words, CONFIG, "--config.eval.tta=flip")
    assert code == 0 and out != alone


def test_eval_on_other_data(capfd, run, tmp_path):
    """Images of the same classes are evaluated, all of them; other classes are refused."""
    class_folders(tmp_path / "digits", [str(i) for i in range(10)])
    class_folders(tmp_path / "part/test", [str(i) for i in range(10)], 1)
    class_folders(tmp_path / "some", ["7", "3"], 5)
    words = ("--mode=eval", f"--checkpoint={run}", f"--config.data.dir={tmp_path}")
    for folder, more, part in (
        ("digits", [], (120, "all")),
        ("digits", ["--split=test"], (20, "test")),
        ("part", [], (10, "all")),
        ("some", [], (10, "all")),
    ):
        config = f"--config=c2a2:folder={tmp_path / folder}"
        code, out, err = call(capfd, *words, config, *more)
        assert code == 0, err
        line = json.loads(out)
        assert (line["examples"], line["split"]) == part
        assert f"split {part[1]}: {part[0]} of {120 if folder == 'digits' else 10} images" in err
    pets = class_folders(tmp_path / "pets", ["cat", "dog"])
    code, out, err = call(capfd, *words, f"--config=c2a2:folder={pets}")
    assert (code, out) == (1, "")
    assert "cat, dog" in err and "0, 1, 2, 3, 4 and 5 more" in err
    code, out, err = call(capfd, *words[:2], "--split=all")
    assert code == 0 and json.loads(out)["examples"] == 1797
    assert "note: these are the images of the training; set --split=test" in err


def test_other_data_are_not_cut_to_the_share_that_was_trained_on():
    """Its own data are split as they were, its own way of evaluating stays, unless given."""
    own = ("c2a2:folder=own", "data.dir=there", "data.val_fraction=0.3", "data.fraction=0.1")
    network = types.SimpleNamespace(config=config_lib.get_config(*own, "eval.batch=4"))
    network.trained_on = lambda config: False
    other = config_lib.get_config("c2a2:folder=other", "data.dir=here")
    config, known = other_data.configured(network, other, other.user)
    assert not known and (config.data.fraction, config.data.val_fraction) == (1.0, 0.1)
    assert (config.data.name, config.data.dir, config.eval.batch) == ("folder=other", "here", 4)
    for given, batch in (([], 4), (["eval.batch=2"], 2)):
        same = config_lib.get_config("c2a2:folder=own", *given)
        config, known = other_data.configured(network, same, same.user)
        assert known and (config.data.fraction, config.data.val_fraction) == (0.1, 0.3)
        assert (config.data.dir, config.eval.batch) == ("there", batch)


def test_the_images_of_the_training_are_known_by_any_path(tmp_path, monkeypatch, capsys):
    """Split as the run split them, though the share that it held out or took was its own."""
    pets = class_folders(tmp_path / "pets", ["cat", "dog"], 40)
    monkeypatch.setenv("HSVIT_DATA_DIR", str(tmp_path / "data"))
    settings = "data.val_fraction=0.3", "data.fraction=0.5", "data.image_size=8,8"
    trained = config_lib.get_config(f"c2a2:folder={pets}", *settings)
    network = types.SimpleNamespace(config=trained, class_names=("cat", "dog"))
    network.fingerprint = train.load_data(trained).fingerprint
    network.relabelled = lambda split, info: split
    for name in ("trained_on", "_load_data"):
        setattr(network, name, functools.partial(getattr(classifier.Classifier, name), network))
    other = config_lib.get_config(f"c2a2:folder={pets.parent}/./pets")
    for split, images in ((None, 80), ("val", 12), ("test", 8)):
        assert len(other_data.load(network, other, split, named=True)[2]) == images
        assert ("images of the training" in capsys.readouterr().err) == (images == 80)
    assert len(network._load_data(other.data.name).train) == 24
    (pets / "cat/0.png").unlink()
    assert len(network._load_data(other.data.name).test) == 79


def test_each_command_reads_keys_that_exist():
    keys = dict(config_lib.leaves(config_lib.get_config("c2a2")))
    for command in commands.COMMANDS.values():
        for name in command.config.split():
            assert name == cli.EVERYTHING or any(f"{k}.".startswith(f"{name}.") for k in keys), name


def test_eval_notes_data_that_changed(capfd, run, monkeypatch):
    load = train.load_data
    monkeypatch.setattr(
        train,
        "load_data",
        lambda config, **more: dataclasses.replace(load(config, **more), fingerprint="other"),
    )
    for words in ([], ["--config=c2a2:digits"]):
        code, _, err = call(capfd, "--mode=eval", f"--checkpoint={run}", *words)
        assert code == 0 and "note: digits has changed since this network was trained" in err


def test_predict(capfd, run, tmp_path):
    folder = class_folders(tmp_path, ["some"], 3) / "some"
    Image.new("RGB", (40, 30), (200, 10, 90)).save(folder / "photo.jpg")  # for one channel
    words = ("--mode=predict", f"--checkpoint={run}", str(folder))
    code, out, err = call(capfd, *words, "--top_k=2")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [
        str(folder / name) for name in ("0.png", "1.png", "2.png", "photo.jpg")
    ]
    (folder / "bad.png").write_bytes(b"")
    code, out, err = call(capfd, *words, "--top_k=2", "--format=csv")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 1 and len(rows) == 8 and {r["rank"] for r in rows} == {"1", "2"}
    assert len(err.splitlines()) == 1 and "bad.png" in err


def test_confusions_of_many_classes():
    confusion_KK = np.zeros((30, 30), int)
    confusion_KK[3, 4], confusion_KK[5, 5], confusion_KK[7, 0] = 2, 99, 9
    text = measures.confusion_table(confusion_KK, tuple(f"k{i}" for i in range(30)))
    assert text.splitlines() == [
        "most frequent confusions:",
        "     9 × k7 taken for k0",
        "     2 × k3 taken for k4",
    ]


# --- from Python, and the process itself ----------------------------------------------------------


def test_a_network_that_is_built_has_its_paper_s_dropout():
    assert hsvit_jax.build_model("c4a8").config.dropout == 0.2
    assert hsvit_jax.build_model("mobilevit:xxs").config.dropout == 0.1
    network = hsvit_jax.build_model("c2a2:tiny")
    with pytest.raises(ValueError, match=r"built for at least one image"):
        network.apply(*network.init(jax.random.key(0)), jnp.zeros((0, 32, 32, 3)))


def test_lazy_names():
    shown = pydoc.plain(pydoc.render_doc(hsvit_jax))
    for name in ("fit", "load", "get_config", "build_model", "Classifier"):
        assert callable(getattr(hsvit_jax, name)) and name in dir(hsvit_jax)
        assert f"    {name}(" in shown or f"class {name}(" in shown
    declared = {
        line.split()[-1] for line in inspect.getsource(hsvit_jax).splitlines() if " as " in line
    }
    assert declared >= {*hsvit_jax.__all__}  # to type checkers, which see no others


def test_the_process(tmp_path):
    """`python -m`: exit code, the cache of compiled programs, and no jax for a mistake's sake."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ""}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    words = [sys.executable, "-m", "hsvit_jax.main", CONFIG, "--mode=predict", "nothing.png"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "no such file or folder: nothing.png\n"
    (folder,) = (tmp_path / "hsvit_jax").iterdir()
    assert folder.name.startswith("xla-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_compilation_cache_is_trusted(tmp_path, monkeypatch, capsys):
    """JAX runs what lies there: nobody else may write to the folder or any above it."""
    tmp_path = tmp_path.resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    variable = "JAX_COMPILATION_CACHE_DIR"

    def chosen(named=None):
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, str(named))
        compile_cache.remember_compilations()
        return os.environ.get(variable)

    smallest = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    monkeypatch.setenv(smallest, "2")
    folder = Path(chosen())
    assert os.environ[smallest] == "2"
    monkeypatch.delenv(smallest)
    compile_cache.remember_compilations()
    assert os.environ[smallest] == "0"  # what compiles in no time is kept as well
    assert folder.parent == tmp_path / "cache" / "hsvit_jax"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.parents[:2])}
    assert modes == {0o700}
    assert chosen(folder) == str(folder)
    (tmp_path / "link").symlink_to(tmp_path / "cache")  # our own, as /home often is
    assert chosen(tmp_path / "link" / "own") == str(tmp_path / "cache" / "own")
    assert (chosen("gs://mine"), chosen("")) == ("gs://mine", "")
    assert capsys.readouterr().err == ""
    for path in (folder, folder.parent, tmp_path / "cache"):
        for mode in (0o720, 0o702, 0o1777):
            path.chmod(mode)
            sticky = mode == 0o1777 and path != folder
            for named in (None, folder):
                assert chosen(named) == (str(folder) if sticky else None)
                said = f"note: compiled programs are not kept: {path} is another user's or writable"
                assert capsys.readouterr().err.startswith("" if sticky else said)
        path.chmod(0o700)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for bad in ("loop", "file"):
        assert chosen(tmp_path / bad / "below") is None
        assert "not kept" in capsys.readouterr().err


def test_a_compiled_program_that_was_cut_off_is_made_anew(tmp_path, monkeypatch, capsys):
    """As by a full disk: JAX writes over none that is there, and would warn at every start."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    settings = {"jax_compilation_cache_dir": str(tmp_path)}
    settings["jax_persistent_cache_min_compile_time_secs"] = 0.0
    before = {name: getattr(jax.config, name) for name in settings}

    def entry() -> Path:
        jax.clear_caches()
        jax.jit(lambda x: jnp.cos(x) @ x.T)(jnp.ones((3, 5)))
        (path,) = tmp_path.glob("jit__lambda*-cache")
        return path

    try:
        compilation_cache.reset_cache()
        for name, value in settings.items():
            jax.config.update(name, value)
        whole = entry().read_bytes()
        entry().write_bytes(whole[:50])
        with cli._plain_warnings(lambda: True):
            warnings.simplefilter("default")
            assert len(entry().read_bytes()) > len(whole) / 2
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_another_users_folder_is_not_trusted(tmp_path):
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir()
    link.symlink_to(theirs)
    os.chown(theirs, 12345, 12345)
    for path in (theirs, link):
        with pytest.raises(ValueError, match="theirs is another user's"):
            compile_cache.trusted_folder(path / "programs")
    assert not list(theirs.iterdir())
