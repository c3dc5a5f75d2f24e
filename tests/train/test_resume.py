"""A run that is cut short and started again is the run that was not, bit for bit.

In one process; real ones, and kill -9, in faults/test_runs.py.
"""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
from support.small_runs import digest, losses, metric_lines, small_config, small_dataset

from hsvit_jax import checkpoint, train
from hsvit_jax.runtime import signals
from hsvit_jax.train import loop, metrics, resume
from hsvit_jax.train import step as step_lib


def run(workdir, dataset=None, **settings):
    """A quiet run."""
    config = small_config(**settings)
    return train.train(config, workdir, dataset=dataset or small_dataset(), verbose=False)


def interrupt_after(workdir, step, **settings):
    """Runs until SIGTERM comes during a step."""
    write = metrics.MetricLog.write

    def signalled(self, number, values):
        write(self, number, values)
        if number == step and "split" not in values:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "in_flight", 0)  # each step is logged as soon as it is taken
        patch.setattr(metrics.MetricLog, "write", signalled)
        with pytest.raises(signals.Interrupted) as caught:
            run(workdir, **settings)
    assert caught.value.step == step


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The folder of such a run that SIGTERM stopped after the second step."""
    folder = tmp_path_factory.mktemp("cut")
    interrupt_after(folder, 2)
    return folder


def test_the_best_without_some_groups_is_evaluated_without_them(tmp_path):
    prepared = train.prepare(small_config(), dataset=small_dataset())
    state = step_lib.first_state(prepared)
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        for step, metric, lost in ((0, 0.5, []), (1, 0.9, [2, 3])):
            meta, plain = prepared.meta | {"lost_groups": lost}, step_lib.to_plain(state)
            checkpoints.save(step, plain | {"step": np.int32(step)}, meta, metric=metric)
            last = state | {"step": np.int32(7)}
            number, _, without = resume.best(prepared, checkpoints, last)
            assert (number, without) == (step, lost)
    with checkpoint.Checkpoints(tmp_path / "unmeasured") as checkpoints:
        checkpoints.save(7, plain | {"step": np.int32(7)}, meta)
        assert resume.best(prepared, checkpoints, last)[2] == [2, 3]


@pytest.mark.parametrize("shape", [pytest.param((1, 8), marks=pytest.mark.slow), (2, 2)])
def test_a_run_goes_on_on_other_devices(tmp_path, whole, cut, shape):
    """From one device to four, or eight: the same losses."""
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    run(tmp_path, mesh__group=shape[0], mesh__data=shape[1])
    expected, moved = losses(whole.folder), losses(tmp_path)
    assert list(moved) == list(range(1, 7))
    np.testing.assert_allclose(list(moved.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.parametrize("step", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_every_place_in_an_epoch_resumes_to_the_same_bits(tmp_path, whole, cut, step):
    """In the middle, at the end, and just after it; epochs of 4 steps."""
    if step == 2:
        shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    else:
        interrupt_after(tmp_path, step)
    run(tmp_path)
    assert metric_lines(tmp_path) == metric_lines(whole.folder)
    assert digest(tmp_path) == digest(whole.folder)


@pytest.mark.slow
def test_mixed_images_resume_to_the_same_bits(tmp_path):
    mixed = {"augment__mixup": 0.8, "augment__cutmix": 1.0}
    run(tmp_path / "whole", **mixed)
    interrupt_after(tmp_path / "cut", 2, **mixed)
    run(tmp_path / "cut", **mixed)
    assert metric_lines(tmp_path / "cut") == metric_lines(tmp_path / "whole")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


@pytest.mark.parametrize(("stopped", "best"), [(2, 2), (5, 4)])
def test_an_end_at_a_step_that_was_not_evaluated_is_said(tmp_path, cut, capsys, stopped, best):
    """Where a step before it was, and is the result; epochs of 4 steps."""
    if stopped == 2:
        shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    else:
        interrupt_after(tmp_path, stopped)
    config, before = small_config(train__steps=1), (tmp_path / "config.json").read_text()
    assert train.train(config, tmp_path, dataset=small_dataset()).best_step == best
    said = f"step {stopped} was saved without an evaluation, and the run ends at step 1: "
    errors = capsys.readouterr().err
    assert (said in errors) == (best != stopped)
    assert f"the run is at step {stopped} already, beyond the requested 1: nothing" in errors
    assert (tmp_path / "config.json").read_text() == before


def test_a_changed_learning_rate_is_allowed_and_told(tmp_path, whole, capsys):
    """Of a run that goes on; one that has ended would be taken for a run with it."""
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(
        ValueError,
        match=r"has ended with other .*: optim\.learning_rate: .*from=.* --workdir=ANOTHER",
    ):
        train.train(small_config(optim__learning_rate=0.5), tmp_path, dataset=small_dataset())
    with pytest.raises(ValueError, match=r"has ended with other .*: optim\.warmup_epochs: "):
        train.train(small_config(optim__warmup_epochs=1.0), tmp_path, dataset=small_dataset())
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["learning_rate"] == 0.001
    # The recipe `small` has evaluations by the length, which may be shortened.
    config = small_config(train__steps=5, train__eval_every=2, checkpoint__every=2)
    assert train.train(config, tmp_path, dataset=small_dataset()).step == 6
    config = small_config(optim__learning_rate=0.5, train__steps=7)
    assert train.train(config, tmp_path, dataset=small_dataset()).step == 7
    said = capsys.readouterr().out
    assert "resuming with changed settings" in said
    assert "optim.learning_rate" in said and "0.001" in said and "0.5" in said


LONG = {"train__epochs": 4.0, "train__steps": 0, "optim__warmup_epochs": 0.0}


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """The folder of a run of 16 steps, four epochs of 70 images by 16, that stopped after 8."""
    folder = tmp_path_factory.mktemp("halved")
    interrupt_after(folder, 8, **LONG)
    return folder


def steps_of(folder):
    """The lines of the training steps in a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "split" not in line]


@pytest.mark.parametrize(("batch", "each"), [(7, 10), (24, 2), (64, 1)])
def test_another_batch_goes_on_after_the_same_images(tmp_path, halved, capsys, batch, each):
    """Two of four epochs, at the rate of the half-way; `each` steps are an epoch now."""
    shutil.copytree(halved, tmp_path, dirs_exist_ok=True)
    config = small_config(train__batch=batch, **LONG)
    done = train.train(config, tmp_path, dataset=small_dataset(), verbose=True)
    lines = steps_of(tmp_path)
    assert done.step == 8 + 2 * each == lines[-1]["step"]
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4 + [2] * each + [3] * each
    rates = [line["learning_rate"] for line in lines[7:]]
    assert rates[1] == pytest.approx(0.5e-3, rel=0.02)  # half of a cosine's way
    assert rates == sorted(rates, reverse=True)
    said = capsys.readouterr().out
    assert f"after 8 of 16 steps of 16 images, 2 epochs, the run resumes with {2 * each}" in said
    assert "the learning rate" not in said
    # As a run that has ended, with the same command again; with another length it goes on.
    assert train.train(config, tmp_path, dataset=small_dataset(), verbose=False).step == done.step
    longer = small_config(**{**LONG, "train__epochs": 5.0})
    assert train.train(longer, tmp_path, dataset=small_dataset()).step == done.step + 4
    assert "the learning rate was" in capsys.readouterr().out


def test_another_batch_in_the_middle_of_an_epoch_ends_it(tmp_path):
    """After 6 of 16 steps, 32 of 70 images of the second epoch."""
    interrupt_after(tmp_path, 6, **LONG)
    config = small_config(train__batch=24, **LONG)
    assert train.train(config, tmp_path, dataset=small_dataset(), verbose=False).step == 6 + 1 + 4
    assert [line["epoch"] for line in steps_of(tmp_path)] == [0] * 4 + [1] * 3 + [2] * 2 + [3] * 2


def test_a_key_that_is_newer_than_a_run_changes_nothing(tmp_path):
    prepared = train.prepare(small_config(), dataset=small_dataset())
    meta = json.loads(json.dumps(prepared.meta))
    del meta["config"]["data"]["repeats"], meta["config"]["optim"]["layer_decay"]
    plain = step_lib.to_plain(step_lib.first_state(prepared))
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, plain, meta, wait=True)
        assert resume.latest(prepared, checkpoints, verbose=False, as_begun=True)[1]["step"] == 0


def test_another_augmentation_of_evaluations_is_refused():
    saved = small_config().to_dict()
    wanted = {**saved, "eval": {**saved["eval"], "tta": "flip"}}
    with pytest.raises(
        ValueError, match=r"eval\.tta='none', now it is 'flip': the best checkpoint"
    ):
        resume._refuse_other_state(saved, wanted)


NAMES = small_dataset().info.class_names


def renamed(names):
    """The data set under other class names."""
    dataset = small_dataset()
    return dataclasses.replace(
        dataset, info=dataclasses.replace(dataset.info, class_names=tuple(names))
    )


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (
            None,
            {"model__embed_dim": 4},
            ["model.embed_dim: checkpoint 8, config 4; params.", "×", "more"],
        ),
        (None, {"model__heads": 4}, ["model.heads: checkpoint 2, config 4"]),
        (None, {"optim__name": "muon"}, ["optim.name='adamw', now it is 'muon'"]),
        (None, {"train__ema_decay": 0.0}, ["train.ema_decay=0.9", "now it is 0.0"]),
        (None, {"data__mean": (0.5,)}, ["data.mean=(0.3,), now it is (0.5,): the network"]),
        (renamed([*NAMES[:-1], "a stranger"]), {}, ["class_names", "row 6", "a stranger"]),
        (renamed(NAMES[::-1]), {}, ["class_names", "another order"]),
        (small_dataset(seed=4), {}, ["fingerprint", "rows-3", "rows-4"]),
    ],
)
def test_another_network_optimizer_or_data_are_refused(whole, dataset, settings, words):
    before, lines = digest(whole.folder), metric_lines(whole.folder)
    written = (whole.folder / "config.json").read_text()
    with pytest.raises(ValueError) as caught:
        run(whole.folder, dataset, train__steps=9, **settings)
    for word in [*words, "--workdir"]:
        assert word in str(caught.value)
    assert (digest(whole.folder), metric_lines(whole.folder)) == (before, lines)
    assert (whole.folder / "config.json").read_text() == written
