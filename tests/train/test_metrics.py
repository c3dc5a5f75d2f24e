"""JSON lines, TensorBoard events, progress with and without a terminal, curves."""

import json
import os
import pty
import struct
import sys
import threading
import warnings

import numpy as np
import pytest

from hsvit_jax import artifacts
from hsvit_jax.train import metrics
from hsvit_jax.train.metrics import loggers

TRAIN = {"loss": 1.5, "accuracy": 0.25, "epoch": 0}
TEST = {"split": "test", "loss": 0.5, "accuracy": 0.75, "top5": 1.0, "examples": 7}


def lines(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, *steps, start_step=0):
    with metrics.MetricLog(folder, start_step=start_step) as log:
        for step, values in steps:
            log.write(step, values)


def test_every_line_has_its_step_and_is_on_disk_at_once(tmp_path):
    """JSON has no NaN."""
    with metrics.MetricLog(tmp_path) as log:
        log.write(1, TRAIN)
        assert lines(tmp_path) == [{"step": 1, **TRAIN}]
        log.write(np.int32(2), {"loss": np.float32(0.5), "accuracy": float("nan")})
        log.write(2, TEST | {"loss": -np.inf})
    wanted = [{"step": 2, "loss": 0.5, "accuracy": None}, {"step": 2, **TEST, "loss": None}]
    assert lines(tmp_path)[1:] == wanted
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == lines(tmp_path)


def test_a_resumed_run_tells_every_step_once(tmp_path):
    write(tmp_path, (1, TRAIN), (2, TRAIN), (2, TEST), (3, TRAIN), (4, TRAIN))
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 5, "lo')  # killed while writing
    write(tmp_path, (3, {"loss": 9.0}), (2, TEST), start_step=2)
    assert [(x["step"], x.get("split"), x["loss"]) for x in lines(tmp_path)] == [
        (1, None, 1.5),
        (2, None, 1.5),
        (2, "test", 0.5),
        (3, None, 9.0),
    ]
    assert [p.name for p in tmp_path.glob("*.tmp")] == []
    # A finished run is evaluated again, in another way: its last line counts.
    for loss in (0.25, 0.25, 0.5):
        write(tmp_path, (3, TRAIN), (3, TEST | {"loss": loss}), start_step=3)
    found = [x["loss"] for x in lines(tmp_path) if x["step"] == 3 and "split" in x]
    assert found == [0.25, 0.5]
    read = metrics.read_metrics(file)
    assert [x["loss"] for x in read if "split" in x] == [0.5, 0.5]  # of steps 2 and 3


def test_evaluations_without_a_finite_loss_are_left_out(tmp_path):
    val = {"split": "val", "accuracy": 0.9}
    with metrics.MetricLog(tmp_path) as log:
        log.write(10, val | {"loss": 1.0})
        log.write(20, val | {"loss": float("nan")})
        log.write(30, val | {"loss": 0.5, "accuracy": float("nan")})
        assert log.evaluations("val", "accuracy") == {10: 0.9}


@pytest.mark.parametrize("last", [{"split": "val", "accuracy": 0.5}, {"epoch": 1, "loss": 1.0}])
def test_lines_of_a_run_whose_checkpoints_are_gone_are_kept(tmp_path, last):
    """Of one that was evaluated, or was not yet but had come to its second epoch."""
    path, beside = tmp_path / "metrics.jsonl", tmp_path / "metrics.before"
    with metrics.MetricLog(tmp_path, start_step=0) as log:
        log.write(1, {"epoch": 0, "loss": 1.0})
    with metrics.MetricLog(tmp_path, start_step=0) as log:  # killed before the first checkpoint
        log.write(1, last)
    before = path.read_bytes()
    assert not beside.exists()
    told = pytest.warns(UserWarning, match=r"begins anew.* are kept in .*metrics\.before")
    with told, metrics.MetricLog(tmp_path, start_step=0):
        pass
    assert (path.read_bytes(), beside.read_bytes()) == (b"", before)


def test_damaged_lines_are_kept_aside(tmp_path):
    """Any byte may have changed; figures of a foreign kind are not drawn."""
    good = b'{"step": 1, "loss": 2.0}\n'
    bad = [b"\xff\xfe", b"5", b'{"loss": 1}', b"[1]", b"[" * 100_000, b'{"step": true}']
    bad += [b'{"step": 2, "split": []}', b'{"step": -1}', b'{"step": 1%s}' % (b"0" * 20)]
    bad += [b'{"step": %s}' % (b"1" * 5000)]
    file = tmp_path / "metrics.jsonl"
    odd = b'{"step": 2, "loss": "\\u001b[2J", "accuracy": 1e999}\n'
    file.write_bytes(b"\n".join(bad) + b"\n\n" + good + odd + b'{"step": 3, "lo')
    assert metrics.read_metrics(file)[0] == {"step": 1, "loss": 2.0}
    with pytest.warns(UserWarning, match=r"damaged lines of .* were moved to .*metrics\.damaged"):
        write(tmp_path, (3, TRAIN), start_step=2)
    assert (tmp_path / "metrics.damaged").read_bytes() == b"\n".join(bad) + b"\n"
    assert [line["step"] for line in metrics.read_metrics(file)] == [1, 2, 3]
    assert metrics.draw_curves(tmp_path, "odd") is not None
    assert metrics.read_metrics(tmp_path / "none.jsonl") == []


def test_other_processes_write_and_print_nothing(tmp_path, capsys):
    with (
        metrics.MetricLog(tmp_path, enabled=False) as log,
        metrics.Progress(100, 0, 30, enabled=False) as progress,
    ):
        log.write(1, TRAIN)
        progress.update(10, VALUES)
        progress.say("hello")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def events(folder):
    """(step, tag, value) of every scalar, read by TensorBoard's record format."""
    from tensorboardX.proto import event_pb2

    found = []
    for file in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            data = data[12 + size + 4 :]
    return found


def test_tensorboard_events_can_be_read_back(tmp_path):
    write(tmp_path, (1, TRAIN), (2, TEST), (3, {"loss": float("nan")}))
    assert events(tmp_path) == [
        (1, "train/loss", 1.5),
        (1, "train/accuracy", 0.25),
        (2, "test/loss", 0.5),
        (2, "test/accuracy", 0.75),
        (2, "test/top5", 1.0),
    ]


@pytest.mark.parametrize("fault", ["full", "hangs", "hangs at the end"])
def test_a_logger_that_fails_is_dropped_with_one_warning(tmp_path, monkeypatch, fault):
    """Training never waits for it, and metrics.jsonl has every line."""
    released = threading.Event()

    def failing(*_):
        if fault == "full":
            raise OSError(28, "No space left on device")
        return lambda *_: released.wait(60), lambda: None

    monkeypatch.setitem(loggers.KNOWN, "tensorboard", ("tensorboardX", failing))
    monkeypatch.setattr(loggers, "_MOST_WAITING", 4 if fault == "hangs" else 100)
    monkeypatch.setattr(loggers, "_PATIENCE", 0.1)
    warned = pytest.warns(UserWarning, match="no more figures for tensorboard: .*goes on")
    with warned as told, metrics.MetricLog(tmp_path) as log:
        for step in range(1, 21):
            log.write(step, TRAIN)
    released.set()
    assert len(told) == 1
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))


def test_each_fault_has_its_own_warning_with_its_cure(tmp_path, monkeypatch):
    """Of two loggers and a full disk: who mends the first is not to wait for the next."""

    def failing(*_):
        raise RuntimeError(f"{'a' * 300}\nset THIS=1 to go on")

    monkeypatch.setitem(loggers.KNOWN, "tensorboard", ("tensorboardX", failing))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with metrics.MetricLog(tmp_path, names=("tensorboard", "wandb")) as log:
            log._file.close()
            log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
            log.write(1, TRAIN)
            log.write(2, TRAIN)
    told = sorted(str(one.message) for one in told)
    assert len(told) == 3
    assert told[0].startswith("/dev/full waits for space")
    assert "tensorboard: RuntimeError: aaa" in told[1] and "a set THIS=1 to go on; " in told[1]
    assert "no more figures for wandb: ModuleNotFoundError" in told[2]


def test_services_get_every_figure(tmp_path, monkeypatch):
    """Of both libraries no more is used than these stand-ins have."""
    seen, ids = [], []

    class Service:
        class errors:
            UsageError = RuntimeError

        def init(self, mode="online", **settings):
            if mode == "online":
                raise RuntimeError("No API key configured")  # shown later, by `wandb sync`
            seen.append(("init", settings["name"], settings["config"]))
            ids.append(settings["id"])
            return self

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, scalars):
            seen.append((scalars.pop("step"), scalars))

        def finish(self):
            seen.append("end")

    monkeypatch.setitem(sys.modules, "wandb", Service())
    config = {"seed": 7}
    with metrics.MetricLog(tmp_path, names=("wandb",), config=config) as log:
        log.write(1, TRAIN)
        log.write(2, TEST)
    scalars = {"test/loss": 0.5, "test/accuracy": 0.75, "test/top5": 1.0}
    assert seen[0] == ("init", tmp_path.name, config) and seen[-1] == "end"
    assert seen[1:3] == [(1, {"train/loss": 1.5, "train/accuracy": 0.25}), (2, scalars)]
    metrics.MetricLog(tmp_path, start_step=1, names=("wandb",)).__exit__()  # resumed
    write(tmp_path, (2, TEST), start_step=1)
    with pytest.warns(UserWarning, match="begins anew"):  # without its checkpoints
        metrics.MetricLog(tmp_path, names=("wandb",)).__exit__()
    metrics.MetricLog(tmp_path, names=("wandb",)).__exit__()  # killed before its first one
    assert ids[0] == ids[1] != ids[2] == ids[3]
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"pip install 'hsvit_jax\[mlflow\]'"):
        loggers.check(("tensorboard", "mlflow"))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("store", ["database", "files"])
def test_mlflow_has_one_run_of_a_training(tmp_path, monkeypatch, store):
    """The real one, with the store that it takes by itself, or without SQLAlchemy."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if store == "files":
        monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"seed": 7, "train": {"epochs": 2, **{f"key{i}": "" for i in range(120)}}}
    killed = metrics.MetricLog(folder, names=("mlflow",), config=config)
    killed.write(1, TRAIN)
    killed.write(1, TEST)
    killed.write(2, TRAIN)
    killed._each_logger(lambda logger: logger.close())
    changed = {**config, "train": {**config["train"], "epochs": 4}}
    with metrics.MetricLog(folder, start_step=1, names=("mlflow",), config=changed) as log:
        log.write(1, {**TEST, "loss": 9.5})  # lost groups may give an evaluation other figures
        log.write(2, {**TRAIN, "images_per_second": 7.0})  # again, at another pace
        log.write(2, TEST)
    client = mlflow.MlflowClient(None if store == "database" else str(tmp_path / "mlruns"))
    (run,) = client.search_runs([client.get_experiment_by_name("hsvit_jax").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["seed"] == "7" and len(run.data.params) == 122
    assert (run.data.params["train.epochs"], run.data.tags["train.epochs"]) == ("2", "4")
    assert (run.data.metrics["train/loss"], run.data.metrics["test/top5"]) == (1.5, 1.0)
    for key, steps in (("train/loss", [1, 2]), ("test/loss", [1, 1, 2]), ("test/top5", [1, 2])):
        history = client.get_metric_history(run.info.run_id, key)
        assert sorted(figure.step for figure in history) == steps, key
    (kept,) = client.list_artifacts(run.info.run_id)
    assert kept.path == "config.json"
    client.delete_run(run.info.run_id)  # and so not to be gone on with
    with metrics.MetricLog(folder, start_step=2, names=("mlflow",), config=config) as log:
        log.write(3, TRAIN)
    (other,) = client.search_runs([run.info.experiment_id])
    assert other.info.run_id != run.info.run_id and other.data.metrics["train/loss"] == 1.5


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_the_figures_of_who_has_not_logged_in(tmp_path, monkeypatch):
    """The real one, which is offline then."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for start in (0, 1):
        with metrics.MetricLog(tmp_path, start_step=start, names=("wandb",)) as log:
            log.write(start + 1, TRAIN)
    kept = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(kept) == 2 and len({path.name for path in kept}) == 1
    assert any(b"train/loss" in path.read_bytes() for path in kept)


def test_lines_wait_for_space_on_a_full_disk(tmp_path, monkeypatch):
    """Half a line is written, then nothing, then all that is missing."""
    with metrics.MetricLog(tmp_path) as log:
        log.write(1, TRAIN)
        file, full = log._file, [True]

        class Disk:
            name = file.name
            close = staticmethod(file.close)
            fileno = staticmethod(file.fileno)

            def write(self, data):
                if not full:
                    return file.write(data)
                if full.pop():
                    full.append(False)
                    return file.write(data[:10])
                full.append(False)
                raise OSError(28, "No space left on device")

        log._file = Disk()
        with pytest.warns(UserWarning, match="waits for space on its disk") as told:
            log.write(2, TRAIN)
            log.write(3, TRAIN)
        full.clear()
        log.write(4, TRAIN)
    assert len(told) == 1
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


VALUES = {"loss": 1.25, "accuracy": 0.5, "learning_rate": 5e-4}
VALUES |= {"images_per_second": 1234.0, "seconds_left": 90_061.0}


def test_plain_lines_when_not_a_terminal(capsys):
    with metrics.Progress(100, 0, 30) as progress:
        progress.phase("the training step", compiling=True)
        progress.phase("evaluation", compiling=False)  # takes no time to speak of
        progress.advance(10)
        progress.update(10, VALUES)
        progress.update(20, VALUES)  # too soon after the first
        progress.best = 0.75
        progress.update(100, VALUES)  # the last is always told
        progress.say("hello \x1b[2J")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "compiling the training step ...",
        "step 10/100  epoch 1/4  loss 1.2500  accuracy 50.00%  1,234 images/s  rate 5.0e-04  "
        "1 day, 1:01:01 left",
        "step 100/100  epoch 4/4  loss 1.2500  accuracy 50.00%  best 75.00%  1,234 images/s  "
        "rate 5.0e-04  1 day, 1:01:01 left",
        "hello \\x1b[2J",
    ]


def test_a_live_bar_on_a_terminal(monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "130")
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with metrics.Progress(100, 10, 30, best=0.75) as progress:
            progress._bar.mininterval = 0  # draws every step
            progress.phase("the training step", compiling=True)
            for step in range(11, 50):
                progress.advance(step)
            progress.update(50, VALUES)
            progress.say("val accuracy 50.00% [/run]")
        terminal.flush()
    text = ""
    while "val accuracy 50.00% [/run]" not in text:  # what the terminal has so far may be a part
        text += os.read(ours, 65536).decode()
    os.close(ours)
    for part in ("compiling the training step", *(f"{step}/100" for step in range(10, 51))):
        assert part in text
    figures = "loss 1.2500  accuracy 50.00%  best 75.00%  1,234 images/s  rate 5.0e-04"
    assert "epoch 2/4" in text and figures in text


def test_a_narrow_terminal_cuts_no_figure(monkeypatch):
    """The least important ones are left out, also behind the longer text of an evaluation."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with metrics.Progress(1000, 0, 30, best=0.75) as progress:
            for what in ("", "evaluation on val"):
                progress.update(50, VALUES)
                if what:
                    progress.phase(what, compiling=True)
                drawn = progress._bar.format_meter(**progress._bar.format_dict).rstrip()
                assert "1 day, 1:01:01 left" in drawn and len(drawn) < 80
                assert progress._bar.postfix in drawn
    os.close(ours)


def test_a_notebook_has_its_own_bar(monkeypatch, capsys):
    """tqdm chooses the kind of bar; a notebook's standard error is no terminal."""
    from tqdm import auto, std

    class Widget(std.tqdm):
        pass

    monkeypatch.setattr(auto, "notebook_tqdm", Widget)
    monkeypatch.setattr(auto, "tqdm", Widget)
    with metrics.Progress(100, 0, 30) as progress:
        assert isinstance(progress._bar, Widget)
        progress.update(50, VALUES)
    assert "epoch 2/4" in capsys.readouterr().err


def test_curves_are_a_picture_with_something_on_it(tmp_path):
    from PIL import Image

    assert metrics.draw_curves(tmp_path, "nothing yet") is None
    write(tmp_path, (0, {"loss": np.nan, "accuracy": np.nan}), (0, {"split": "val"}))
    assert metrics.draw_curves(tmp_path, "no figures").stat().st_size
    steps = [(i, {"loss": 1 / i, "accuracy": 1 - 1 / i}) for i in range(1, 9)]
    write(tmp_path, *steps, (4, TEST | {"split": "val"}), (8, TEST | {"split": "val"}), (8, TEST))
    path = metrics.draw_curves(tmp_path, "a_run $5^")
    assert path == tmp_path / "curves.png"
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size == (1200, 480)
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colours = {tuple(map(int, c)) for c in np.unique(pixels, axis=0)}
    assert {(31, 119, 180), (255, 127, 14), (0, 0, 0)} <= colours  # train, val, test


def test_single_evaluations_of_two_splits_are_told_apart(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(artifacts, "save_figure", lambda figure, path: figures.append(figure))
    write(tmp_path, (8, TRAIN), (8, TEST | {"split": "val"}), (8, TEST))
    metrics.draw_curves(tmp_path, "one epoch")
    for axes in figures[0].axes:
        assert len({line.get_color() for line in axes.lines}) == 3
        assert {line.get_marker() for line in axes.lines} == {"*"}


def test_curves_that_a_full_disk_refuses_are_a_warning(tmp_path, monkeypatch):
    def refuse(figure, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts, "save_figure", refuse)
    write(tmp_path, (1, TRAIN))
    with pytest.warns(UserWarning, match=r"no curves: .*curves\.png .*No space left"):
        assert metrics.draw_curves(tmp_path, "run") is None
