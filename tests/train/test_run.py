"""The whole run in one process: what it evaluates and saves, when it stops, what it refuses."""

import dataclasses
import errno
import fcntl
import functools
import itertools
import json
import os
import re
import signal
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data_files import class_folders
from support.small_runs import losses, metric_lines, small_config, small_dataset, spy_on_batches

import hsvit_jax
from hsvit_jax import artifacts, augment, checkpoint, run_report, train
from hsvit_jax import config as config_lib
from hsvit_jax.runtime import coordination, signals
from hsvit_jax.train import evaluate, loop, metrics
from hsvit_jax.train import step as step_lib
from hsvit_jax.train import workdir as workdir_lib


def run(workdir, *, dataset=None, **settings):
    """A quiet run on one device."""
    config = small_config(**settings)
    return train.train(config, workdir, dataset=dataset or small_dataset(), verbose=False)


def around_evaluations(monkeypatch, around):
    """Each evaluation becomes `around(evaluate, params, split)`, where `evaluate()` does it."""
    make = evaluate.make_evaluator

    def patched(*args, **kwargs):
        evaluator = make(*args, **kwargs)
        return lambda params, stats, split, *rest: around(
            lambda: evaluator(params, stats, split, *rest), params, split
        )

    monkeypatch.setattr(evaluate, "make_evaluator", patched)


@pytest.fixture
def spy(monkeypatch):
    """Names the split of every evaluation, by its size."""
    seen = []

    def around(evaluate, params, split):
        seen.append({70: "train", 21: "val", 23: "test"}[len(split)])
        return evaluate()

    around_evaluations(monkeypatch, around)
    return seen


def test_the_first_batch_is_drawn_as_it_is_trained_on(tmp_path, monkeypatch):
    """But not again when the run goes on."""
    seen, real = [], augment.train_batch

    def spied(*arguments):
        made = real(*arguments)
        jax.debug.callback(lambda *arrays: seen.append(arrays), *made)
        return made

    monkeypatch.setattr(augment, "train_batch", spied)
    config = small_config(train__steps=1, augment__mixup=0.4)
    train.train(config, tmp_path, dataset=small_dataset())
    picture, first = seen
    for drawn, trained in zip(picture, first, strict=True):
        np.testing.assert_allclose(drawn, trained, atol=1e-5)
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "batch.png").unlink()
    train.train(config, tmp_path, dataset=small_dataset())
    assert len(seen) == 2 and not (tmp_path / "batch.png").exists()


def test_pictures_that_cannot_be_drawn_cost_nothing_else(tmp_path, monkeypatch):
    def refuse(figure, path):
        raise RuntimeError("out of ink")

    monkeypatch.setattr(artifacts, "save_figure", refuse)
    config = small_config(train__steps=1)
    with pytest.warns(UserWarning) as told:
        result = hsvit_jax.fit(config, tmp_path, dataset=small_dataset(), report=False)
    assert result.step == 1 and result.curves is None
    told = sorted(str(one.message) for one in told)
    assert [text.partition(" (")[0].partition(":")[0] for text in told] == [
        *("no curves", "no picture of the first batch")
    ]
    assert all("RuntimeError: out of ink" in text for text in told)


def test_the_time_told_counts_the_report(tmp_path, monkeypatch):
    ended = []

    def write(*_):
        time.sleep(0.5)
        ended.append(time.monotonic())

    monkeypatch.setattr(run_report, "write_after_training", write)
    config, begun = small_config(train__steps=1), time.monotonic()
    options = {"dataset": small_dataset(), "verbose": False}
    assert hsvit_jax.fit(config, tmp_path, **options).seconds > ended[0] - begun - 0.25


def test_a_run_from_start_to_end(whole, spy, monkeypatch):
    """6 steps of an epoch of 4: evaluated at 4 and at the end; the test split once, at the end."""
    folder, result = whole.folder, whole.result
    steps = [(i, ["accuracy", "grad_norm", "loss"]) for i in range(1, 7)]
    ends = [(6, "val"), (result.best_step, "test"), result]
    assert whole.told == [*steps[:4], (4, "val"), *steps[4:], *ends]
    lines = metric_lines(folder)
    assert [line["step"] for line in lines if "split" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in lines if "split" not in line] == [0, 0, 0, 0, 1, 1]
    figures = {line["step"]: line["accuracy"] for line in lines if line.get("split") == "val"}
    assert set(figures) == {4, 6}
    assert result.best_step == max(figures, key=lambda step: (figures[step], step))
    assert result.validation.accuracy == figures[result.best_step]
    assert result.validation.examples == 21
    (test,) = [line for line in lines if line.get("split") == "test"]
    assert test["step"] == result.best_step
    assert (test["accuracy"], test["loss"]) == (result.test.accuracy, result.test.loss)
    assert set(test) >= {"step", "split", "loss", "accuracy", "top5"}
    assert result.step == 6
    assert result.curves == folder / "curves.png" and result.curves.exists()
    assert json.loads((folder / "config.json").read_text())["data"]["num_classes"] == 7
    # Again: nothing is trained, the same result, and no line twice.
    batches = spy_on_batches(monkeypatch)
    again = run(folder)
    assert spy == ["val", "test"] and batches == {16}  # as in training
    assert metric_lines(folder) == lines
    assert (again.best_step, again.test.loss) == (result.best_step, result.test.loss)


def test_epochs_of_their_own_and_the_best_is_chosen_on_validation(tmp_path, monkeypatch):
    """Epochs of 2 steps: evaluated every 3, saved every 2, and both at the end, as is a line. The
    middle evaluation is made the best one: its parameters are what is tested."""
    accuracies, states = iter([0.1, 0.9, 0.5]), []

    def forge(evaluate, params, split):
        result = evaluate()
        states.append((len(split), np.asarray(params["head"]["linear"]["kernel"])))
        accuracy = next(accuracies, None) if len(split) == 21 else None
        return result if accuracy is None else dataclasses.replace(result, accuracy=accuracy)

    around_evaluations(monkeypatch, forge)
    settings = {"train__batch": 32, "train__steps": 15, "train__log_every": 4}
    every = {"train__eval_every": 3, "checkpoint__every": 2, "checkpoint__keep_latest": 20}
    result = run(tmp_path, **settings, **every)
    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines if "split" not in line] == [4, 8, 12, 15]
    assert [line["step"] for line in lines if line.get("split") == "val"] == [6, 12, 15]
    steps = checkpoint.Checkpoints(tmp_path / "checkpoints", read_only=True).steps()
    assert steps == [4, 6, 8, 12, 15]
    assert result.best_step == 12
    assert [size for size, _ in states] == [21, 21, 21, 21, 23]
    np.testing.assert_array_equal(states[-1][1], states[1][1])
    assert not np.array_equal(states[-1][1], states[2][1])


def test_a_run_ends_when_patience_does(tmp_path, monkeypatch, capsys):
    """Judged by macro F1, of which an equal one is no better; again, it trains no further. A
    request to stop is heard at the very end too, and says the step."""
    correct, stops = iter([5, 9, 8, 9, 9, 9]), iter([signal.SIGTERM])

    def forge(evaluate, params, split):
        if len(split) == 23 and (signum := next(stops, None)):
            os.kill(os.getpid(), signum)
        result = evaluate()
        right = next(correct) if len(split) == 21 else 3
        confusion = np.zeros((7, 7), int)
        confusion[0, 0], confusion[1, 0] = right, 21 - right
        return dataclasses.replace(result, confusion_KK=confusion)

    around_evaluations(monkeypatch, forge)
    config = small_config(train__steps=40, train__patience=2, train__select_on="macro_f1")
    with pytest.raises(KeyboardInterrupt, match="SIGTERM after step 16"):
        train.train(config, tmp_path, dataset=small_dataset())
    said = "ended after step 16: none of the last 2 evaluations was better than that of step 8"
    assert said in capsys.readouterr().err
    (tmp_path / "environment.json").write_text("{}")  # as of another machine
    result = train.train(config, tmp_path, dataset=small_dataset())
    assert (tmp_path / "environment.json").read_text() == "{}"
    assert (result.step, result.best_step) == (16, 16)
    assert said in capsys.readouterr().err
    assert max(line["step"] for line in metric_lines(tmp_path)) == 16


def test_selecting_on_the_test_split_is_said(tmp_path, capsys, spy):
    config = small_config(train__select_on="test", train__steps=0, data__val_fraction=0.0)
    train.train(config, tmp_path, dataset=small_dataset((70, 0, 23), val_fraction=0.0))
    assert spy == ["test", "test"]
    assert "TEST split" in capsys.readouterr().err


def test_the_last_checkpoint_may_be_taken(tmp_path, monkeypatch, spy):
    """However bad it is; and without validation images the test images are read once."""
    config = small_config(train__select_on="last", data__val_fraction=0.0)
    result = train.train(
        config, tmp_path / "all", dataset=small_dataset((70, 0, 23), val_fraction=0.0)
    )
    assert (result.best_step, result.validation, spy) == (6, None, ["test"])
    worse = iter(range(21, 0, -1))

    def forge(evaluate, params, split):
        right, confusion = next(worse), np.zeros((7, 7), int)
        confusion[0, 0], confusion[1, 0] = right, 21 - right
        return dataclasses.replace(evaluate(), confusion_KK=confusion)

    around_evaluations(monkeypatch, forge)
    result = run(tmp_path / "val", train__select_on="last")
    assert result.best_step == 6 and spy == ["test", "val", "val", "val", "test"]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "40 steps of 16 images (10 epochs), 4 of them warm-up; recipe strong\n"),
        ({"optim__warmup_epochs": 0.0}, "(10 epochs), no warm-up"),
        (
            {"optim__warmup_epochs": 20.0},
            "all of them warm-up: the learning rate ends at 50.00% of optim.learning_rate "
            "(optim.warmup_epochs=20)",
        ),
    ],
)
def test_the_opening_says_data_network_length_and_folder(own, said):
    config = small_config(train__steps=0, train__epochs=10.0, **own)
    run = train.prepare(config, dataset=small_dataset())
    opening = train.run._opening(run, 0, Path("runs/x"))
    assert said in opening
    heads = ["data", "network", "length", "folder"]
    assert [line.split()[0] for line in opening.splitlines()] == heads
    assert "{" not in opening and "mesh" not in opening and "from scratch\n" in opening
    assert "from step 3\n" in train.run._opening(run, 3, Path("runs/x"))
    # Of a run that goes on with another batch, and of a network that its variant does not name.
    moved = train.run._opening(run.shifted(20), 3, Path("runs/x"))
    assert "20 steps of 16 images (10 epochs)" in moved
    sibling = run.config.copy_and_resolve_references().unlock()
    sibling.model.family, sibling.model.variant = "mobilenet_v2", "1.0"
    opening = train.run._opening(dataclasses.replace(run, config=sibling), 0, Path("runs/x"))
    assert "network  mobilenet_v2 1.0, " in opening
    tiny = train.prepare(config_lib.get_config("c2a2:digits,tiny"), dataset=small_dataset())
    opening = train.run._opening(tiny, 0, Path("runs/x"))
    assert "smoke run: its accuracy means nothing\n" in opening


def test_time_is_told_within_the_first_steps(tmp_path, capsys, monkeypatch):
    """Once, with what is cheaper where the run is long; and how long compiling took."""
    monkeypatch.setattr(loop, "_cheaper", lambda run: ["a tent"])
    for longest, cheaper in ((1800.0, []), (-1.0, ["cheaper: a tent"])):
        monkeypatch.setattr(loop, "_LONG", longest)
        config = small_config(train__steps=8)
        train.train(config, tmp_path / str(longest), dataset=small_dataset())
        told = capsys.readouterr().err.splitlines()
        assert sum(line.startswith("compiled in ") for line in told) == 1
        (about,) = (line for line in told if line.startswith("about "))
        assert re.fullmatch(r"about 0:00:\d\d for the 4 steps to go, with their evaluations", about)
        assert [line for line in told if line.startswith("cheaper")] == cheaper


def test_what_is_cheaper_has_its_factor():
    settings = "c2a2:cifar10", "data.image_size=128", "mesh.data=1"
    resolved = config_lib.resolve(config_lib.get_config(*settings), small_dataset().info)
    whole = types.SimpleNamespace(config=resolved, model=train.build_model(resolved))
    whole.total_steps, whole.steps_per_epoch = 1000, 10
    smaller, recipe = loop._cheaper(whole)
    assert re.fullmatch(r"--config.data.image_size=64,64 \(3\.\d times fewer FLOPs\)", smaller)
    assert "the recipe fast" in recipe and "(8.3 times fewer epochs)" in recipe
    whole.total_steps = 120
    resolved = resolved.copy_and_resolve_references().unlock()
    resolved.init["from"] = "zoo:c2a2-cifar10"  # whose size it is
    whole.config = resolved
    assert loop._cheaper(whole) == []


def test_images_per_second_are_of_completed_steps(tmp_path, monkeypatch):
    """No line of a short run, each step logged, is faster than the steps were."""
    plain = step_lib.jit_step

    class Slow:
        def __init__(self, *arguments, **options):
            self.jitted = plain(*arguments, **options)

        def lower(self, *arguments):
            compiled = self.jitted.lower(*arguments).compile()

            def take(state, batch):
                done = jax.block_until_ready(compiled(state, batch))
                time.sleep(0.1)
                return done

            return types.SimpleNamespace(compile=lambda: take)

    monkeypatch.setattr(step_lib, "jit_step", Slow)
    monkeypatch.setattr(loop.memory, "check_step", lambda *_: None)
    run(tmp_path, train__steps=8, train__log_every=1)
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    rates = [line["images_per_second"] for line in lines if "split" not in line]
    most = small_config().train.batch / 0.1
    assert len(rates) == 8 and max(rates) <= 1.05 * most
    assert min(rates[1:]) > 0.3 * most


def test_no_steps_leave_the_fresh_network(tmp_path, spy, monkeypatch):
    """Again in the same folder, by another name of it."""
    result = run(tmp_path, train__steps=0)
    assert (result.step, result.best_step, result.test.examples) == (0, 0, 23)
    assert spy == ["val", "val", "test"]
    assert checkpoint.load_tree(tmp_path)[0] == 0
    lines, names = metric_lines(tmp_path), sorted(os.listdir(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert run(f"~/{tmp_path.name}", train__steps=0).workdir == tmp_path
    assert (metric_lines(tmp_path), sorted(os.listdir())) == (lines, names)


@pytest.mark.parametrize(
    ("sizes", "settings", "words"),
    [
        ((70, 21, 23), {"data__val_fraction": 0.0}, ["data.val_fraction=0", "select_on"]),
        ((70, 21, 23), {"data__val_fraction": 0.2}, ["val_fraction=0.2, but the", "has 0.1"]),
        (
            (70, 21, 23),
            {"data__fraction": 0.2},
            ["data.fraction=0.2, but the data set", "has 1.0"],
        ),
        (
            (70, 21, 23),
            {"data__channels": 3},
            ["data.channels=3, but the data set", "has 1"],
        ),
        ((70, 0, 23), {}, ["select_on='val'", "no validation images"]),
        ((70, 21, 0), {}, ["no test images"]),
        ((0, 0, 23), {}, ["no training images"]),
        ((70, 21, 23), {"train__steps": 0, "train__epochs": 0.1}, ["epochs=0.1", "one step"]),
        ((70, 21, 23), {"train__accumulate": 3}, ["train.batch=16", "train.accumulate=3"]),
        ((70, 21, 23), {"mesh__group": 3}, ["8 groups", "3 devices", "[1, 2, 4, 8]"]),
        ((70, 21, 23), {"train__loggers": ("tensorbord",)}, ["train.loggers", "'tensorboard'"]),
        (
            (70, 21, 23),
            {"augment__random_resized_crop": (0.08, 1.0), "augment__crop_padding": 2},
            ["random_resized_crop replaces", "crop_padding is 2: set it to 0"],
        ),
        ((70, 21, 23), {"augment__crop_padding": 13}, ["crop_padding is 13", "are 8×8"]),
        ((70, 21, 23), {"data__fit": "stretch"}, ["data.fit=stretch, but the data", "has crop"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, sizes, settings, words):
    with pytest.raises(ValueError) as caught:
        run(tmp_path / "run", dataset=small_dataset(sizes), **settings)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_validation_part_that_cannot_be_trained_on_is_told():
    own = dataclasses.replace(small_dataset(), val_fraction=0.0)
    settings = {"train__select_on": "last", "data__val_fraction": 0.0}
    config = small_config(**settings, recipe="strong")
    with pytest.warns(UserWarning, match="has a validation part, which is not trained"):
        train.prepare(config, dataset=own)


def test_steps_that_are_not_finite_are_left_out_until_they_are_too_many(tmp_path, monkeypatch):
    """Parameters of NaN in two steps, and in three of the second epoch: the first is kept."""
    make = step_lib.make_train_step

    def faulty(*args):
        pure = make(*args)

        def train_step(state, batch):
            hit = jnp.isin(state["step"] + 1, jnp.array([2, 3, 6, 7, 8]))
            params = jax.tree.map(lambda x: jnp.where(hit, jnp.nan, x), state["params"])
            new, values = pure(state | {"params": params}, batch)
            keep = functools.partial(jnp.where, hit)
            return new | {"params": jax.tree.map(keep, state["params"], new["params"])}, values

        return train_step

    monkeypatch.setattr(step_lib, "make_train_step", faulty)
    with pytest.raises(signals.Diverged) as caught:
        run(tmp_path, train__steps=12, train__bad_steps_limit=3)
    said = str(caught.value)
    assert "not finite for 3 steps in a row, up to step 8" in said
    assert "none of them was applied, and step 4 is kept" in said
    assert checkpoint.load_tree(tmp_path)[0] == 4
    lines = [line for line in metric_lines(tmp_path) if "split" not in line]
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2, 2, 2, 3, 4]
    assert [line["loss"] is None for line in lines] == [n in (2, 3, 6, 7) for n in range(1, 8)]


def test_a_workdir_in_use_or_unwritable_is_refused_and_free_again_afterwards(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"cannot write to the work folder .* choose another"):
        run(tmp_path / "file" / "run")
    with pytest.raises(ValueError, match="gs://bucket/run is a URL"):
        run("gs://bucket/run")
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another run is using the work folder.*--workdir"):
            run(tmp_path, train__steps=1)
        assert not (tmp_path / "checkpoints").exists()
    run(tmp_path, train__steps=0)


def test_the_other_layout_of_random_bits_elsewhere_changes_no_number(tmp_path, whole):
    with jax.threefry_partitionable(False):
        run(tmp_path, train__steps=1)
    assert losses(tmp_path)[1] == losses(whole.folder)[1]


def test_processes_of_other_code_or_settings_differ(tmp_path, monkeypatch):
    told = [workdir_lib.programs()]
    with jax.enable_x64(True):
        told.append(workdir_lib.programs())
    (tmp_path / "step.py").write_text("scale = 3\n")
    monkeypatch.setattr(workdir_lib, "__file__", str(tmp_path / "train/workdir.py"))
    told.append(workdir_lib.programs())
    changed = [set(text.splitlines()) ^ set(told[0].splitlines()) for text in told[1:]]
    assert changed[0] == {"jax_enable_x64=False", "jax_enable_x64=True"}
    assert {line.partition("=")[0] for line in changed[1]} == {"hsvit_jax"}


def test_a_program_that_embeds_python_has_no_command(monkeypatch):
    """As R and Julia do."""
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setattr(sys, "orig_argv", [])
    assert workdir_lib.environment()["command"] == ""


def test_nfs_may_show_process_0s_mark_late(tmp_path, monkeypatch):
    """It is not there, then replaced while it is read, then an earlier run's, then this one's."""
    found = [FileNotFoundError(), OSError(errno.ESTALE, "Stale file handle"), "an old one", "new"]

    def read_text(path, encoding):
        if isinstance(answer := found.pop(0), OSError):
            raise answer
        return answer

    monkeypatch.setattr(coordination, "count", lambda: 2)
    monkeypatch.setattr(coordination, "is_lead", lambda: False)
    monkeypatch.setattr(coordination, "from_lead", lambda text: "new")
    monkeypatch.setattr(Path, "read_text", read_text)
    workdir_lib.check_shared(tmp_path)
    assert not found


# --- Requests to stop ----------------------------------------------------------------------------


def interrupted(workdir, patched, signum):
    """The step at which a run is stopped by a signal that `patched` sends."""
    with pytest.MonkeyPatch.context() as patch:
        patched(patch, lambda: os.kill(os.getpid(), signum))
        with pytest.raises(signals.Interrupted) as caught:
            run(workdir)
    assert caught.value.exit_code == (130 if signum == signal.SIGINT else 42)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    saved = checkpoint.Checkpoints(workdir / "checkpoints", read_only=True)
    assert saved.steps()[-1] == caught.value.step
    assert not [line for line in metric_lines(workdir) if line.get("split") == "test"]
    return caught.value.step


def before_the_first_step(patch, stop):
    init = loop.Loop.__init__
    patch.setattr(loop.Loop, "__init__", lambda *args: (init(*args), stop())[0])


def during_the_evaluation(number):
    """The `number`-th of a command, counted from 1."""

    def patched(patch, stop):
        count = itertools.count(1)

        def signalled(evaluate, params, split):
            if next(count) == number:
                stop()
            return evaluate()

        around_evaluations(patch, signalled)

    return patched


def test_a_run_that_is_stopped_again_and_again_leaves_the_same_metrics(tmp_path, whole):
    """While the step is prepared, and in each evaluation. The one at an epoch's end is finished
    first: its figure is in the checkpoint. Those at the very end are given up, and done by the next
    command."""
    stops = [
        (before_the_first_step, signal.SIGINT, 0),
        (during_the_evaluation(1), signal.SIGTERM, 4),
        (during_the_evaluation(1), signal.SIGHUP, 6),
        (during_the_evaluation(2), signal.SIGTERM, 6),  # of the best checkpoint, on the test split
    ]
    for patched, signum, step in stops:
        assert interrupted(tmp_path, patched, signum) == step
    again, folder, result = run(tmp_path), whole.folder, whole.result
    assert metric_lines(tmp_path) == metric_lines(folder)
    assert (again.best_step, again.test.loss) == (result.best_step, result.test.loss)
    steps = [
        checkpoint.Checkpoints(f / "checkpoints", read_only=True).best_step()
        for f in (tmp_path, folder)
    ]
    assert steps == [result.best_step] * 2


def test_a_slow_load_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    """Its first line at once, others every ten seconds; nothing where all is in the cache."""
    monkeypatch.setenv("HSVIT_DATA_DIR", str(tmp_path / "data"))
    folder = class_folders(tmp_path / "set", ("cat", "dog"), 96)  # three times 64 images
    config = config_lib.get_config(f"c2a2:folder={folder}")
    clock = iter((0.0, 9.0, 10.0, 10.0))
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(clock))
        train.load_data(config)
    assert capsys.readouterr().err.splitlines() == [
        "decoding images: 64 of 192",
        "decoding images: 192 of 192",
    ]
    train.load_data(config)
    train.load_data(
        config_lib.override(config, ["data.dir=" + str(tmp_path / "other")]), verbose=False
    )
    assert not capsys.readouterr().err
