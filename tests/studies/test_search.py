"""The search for settings: what may vary, which trials there are, and what ends them."""

import csv
import json
import math
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
from support.processes import COMMAND, PATIENCE, environment, finish

from hsvit_jax import main, train
from hsvit_jax.studies import space

pytest.importorskip("optuna")
from hsvit_jax.studies import search

SPEC = "c2a2:digits,tiny,conv_only"
SMALL = ("mesh.data=1", "model.embed_dim=8", "data.image_size=8,8")
RATE = "--config.optim.learning_rate=1e-4..1e-1:log"


@pytest.mark.parametrize(
    ("settings", "fixed", "spans"),
    [
        (["seed=1"], ["seed=1"], {}),
        (["a.b=1e-4..1e-2:log"], [], {"a.b": (("1e-4", "1e-2"), True, True)}),
        (["a.b=-1..2.5"], [], {"a.b": (("-1", "2.5"), True, False)}),
        (["o.n=adamw", "o.n=muon"], [], {"o.n": (("adamw", "muon"), False, False)}),
        (["o.n={adamw,muon}"], [], {"o.n": (("adamw", "muon"), False, False)}),
        (["m.w=1,2", "m.w=3,4"], [], {"m.w": (("1,2", "3,4"), False, False)}),
        (["m.w=1,{2,4}"], [], {"m.w": (("1,2", "1,4"), False, False)}),
        (["data.image_size=32,48"], ["data.image_size=32,48"], {}),  # a tuple
        (["init.from=../runs/a..b"], ["init.from=../runs/a..b"], {}),  # a path
        (["init.from=zoo:c2a2-digits"], ["init.from=zoo:c2a2-digits"], {}),
        (["seed=1", "seed=1"], ["seed=1"], {}),
    ],
)
def test_what_varies(settings, fixed, spans):
    found = space.split(settings)
    assert found == (fixed, {key: space.Span(*span) for key, span in spans.items()})


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ((), "add one"),
        (("--config.optim.learning_rate=1e-2..1e-4",), "Set LOW..HIGH"),
        (("--config.optim.weight_decay=0..1e-1:log",), "low > 0"),
        (("--config.model.dropout=0.1..1.5",), "below 1; got '1.5'"),
        (("--config.model.dropout=0.1..",), "got '0.1..'"),
        (("--config.optim.name={adamw,adamm}",), "got 'adamm'"),
        (("--config.data.val_fraction=0.1..0.5",), "data.val_fraction"),
        ((RATE, "--config.train.select_on=test"), "set train.select_on=val or macro_f1"),
    ],
)
def test_what_cannot_vary(words, fix, tmp_path, capsys):
    words = (f"--config={SPEC}", *words, f"--workdir={tmp_path / 'out'}")
    assert main.main(["hsvit", "search", *words]) == 2
    error = capsys.readouterr().err
    assert fix in error and error.count("\n") == 2
    assert not (tmp_path / "out").exists()


class Trainer:
    """Stands for `train.train`: a run's curve rises to 1 − |log10(rate) + 2| / 4 in four epochs.

    Its best rate is 1e-2, and it is stopped in the middle of the trials that `stops` counts.
    """

    def __init__(self, stops=()):
        self.rates, self.stops, self.calls = [], set(stops), 0

    def __call__(self, config, folder, *, dataset, callbacks, as_begun, evaluate_test):
        assert as_begun and not evaluate_test and len(dataset.test)
        self.calls += 1
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        rate, path = config.optim.learning_rate, folder / "metrics.jsonl"
        if rate > 0.08:
            raise train.Diverged("not finite")
        best = 1 - abs(math.log10(rate) + 2) / 4
        begun = len(path.read_text().splitlines()) if path.exists() else 0
        for epoch in range(begun, 4):
            if epoch == 2 and self.calls in self.stops:
                raise KeyboardInterrupt
            line = {"step": epoch, "split": "val", "accuracy": best * (epoch + 1) / 4, "loss": 1.0}
            callbacks[0].on_evaluation(epoch, "val", SimpleNamespace(figures=line))
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return SimpleNamespace(validation=SimpleNamespace(figures={"accuracy": best}))


def searched(tmp_path, monkeypatch, name, trials=14, stops=()):
    """Gives the command until the search has ended; its rows, and how often it was given."""
    trainer = Trainer(stops)
    monkeypatch.setattr(search.train, "train", trainer)
    words = ["hsvit", "search", f"--config={SPEC}", RATE, f"--trials={trials}"]
    codes = [main.main([*words, f"--workdir={tmp_path / name}"])]
    while codes[-1] == 130:
        codes += [main.main([*words, f"--workdir={tmp_path / name}"])]
    assert codes[-1] == 0
    with (tmp_path / name / "search.csv").open() as file:
        return list(csv.DictReader(file)), len(codes)


def test_an_interrupted_search_takes_the_trials_of_a_whole_one(tmp_path, monkeypatch, capsys):
    whole, _ = searched(tmp_path, monkeypatch, "whole")
    printed = capsys.readouterr().out
    cut, times = searched(tmp_path, monkeypatch, "cut", stops=(3, 4, 6))
    assert times == 4 and cut == whole
    assert len({row["optim.learning_rate"] for row in whole}) == len(whole) == 14
    assert searched(tmp_path, monkeypatch, "more", 12)[0] != whole  # and two more
    assert searched(tmp_path, monkeypatch, "more")[0] == whole

    values = [float(row["accuracy"]) for row in whole if not row["ended"]]
    assert values == sorted(values, reverse=True)
    pruned = [row for row in whole if row["ended"] == "early"]
    assert pruned and all(int(row["evaluations"]) < 4 for row in pruned)
    assert whole[-len(pruned) :] == pruned
    best = whole[0]["trial"]
    kept = [path.parent.name for path in (tmp_path / "whole").glob("trial*/checkpoints")]
    assert kept == [best] and len(list((tmp_path / "whole").glob("trial*"))) == 14
    line = f"hsvit train --config={SPEC} --config.optim.learning_rate="
    line += f"{whole[0]['optim.learning_rate']} --workdir={tmp_path / 'whole' / best}"
    assert f"  {line}\n" in printed
    assert (tmp_path / "whole" / "search.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_holds_one_search(tmp_path, monkeypatch, capsys):
    searched(tmp_path, monkeypatch, "out", 2)
    words = ["hsvit", "search", f"--config={SPEC}", RATE, "--config.train.batch=8"]
    assert main.main([*words, f"--workdir={tmp_path / 'out'}"]) == 1
    assert "name another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_searches_go_on_and_never_look_at_the_test_split(tmp_path, capsys):
    """Killed in the second trial; its run resumes, and training the best one only tests it."""
    settings = (*SMALL, "train.steps=90", "train.epochs=0", "train.batch=64")
    words = [f"--config={SPEC}", *(f"--config.{x}" for x in settings), RATE, "--trials=3"]

    def start(out):
        command = [*COMMAND, "--mode=search", *words, f"--workdir={out}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes)

    process, path = start("cut"), tmp_path / "cut" / "trial1" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while '"split": "val"' not in (path.read_text() if path.exists() else ""):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    for out in ("cut", "whole"):
        code, errors = finish(start(out))
        assert code == 0, errors
    tables = [(tmp_path / out / "search.csv").read_text() for out in ("cut", "whole")]
    assert tables[0] == tables[1]
    for path in tmp_path.glob("*/trial*/metrics.jsonl"):
        assert '"split": "test"' not in path.read_text()
    best = tables[0].splitlines()[1].split(",")[0]
    rate = f"--config.optim.learning_rate={tables[0].splitlines()[1].split(',')[1]}"
    folder = tmp_path / "cut" / best
    before = (folder / "metrics.jsonl").read_text()
    assert main.main(["hsvit", "train", *words[:-2], rate, f"--workdir={folder}"]) == 0
    assert "done: test accuracy" in capsys.readouterr().out
    after = (folder / "metrics.jsonl").read_text()
    assert after.startswith(before) and after.count("\n") == before.count("\n") + 1
