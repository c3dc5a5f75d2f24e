"""Callbacks that act, and frozen parts that train later: the same bits after any interruption."""

import signal

import jax
import numpy as np
import pytest
from support import small_runs
from support.small_runs import DATASET, PLAIN

from hsvit_jax import checkpoint, train
from hsvit_jax.runtime import signals

#: Two steps an epoch at one rate.
STEADY = {**PLAIN, "optim__cosine_per": "never", "optim__warmup_epochs": 0.0}
FIT = {"dataset": DATASET, "verbose": False}


class Interrupt(train.Callback):
    def __init__(self, at=0):
        self.at = at

    def on_step(self, step, figures):
        if step == self.at:
            signal.raise_signal(signal.SIGTERM)


class Act(Interrupt):
    """Halves the rate after step 1, stops after the evaluation of step 4, and adds to the log."""

    def on_step(self, step, figures):
        if step == 1:
            self.scale_rate(0.5)
        super().on_step(step, figures)
        return {"twice": 2 * figures["loss"]}

    def on_evaluation(self, step, split, result):
        if step == 4 and split == "val":
            self.stop()
        return {"seen": result.examples}


def test_callbacks_halve_the_rate_stop_and_log(tmp_path):
    config = small_runs.small_config(**{**STEADY, "train__steps": 8})
    done = train.train(config, tmp_path / "whole", callbacks=[Act()], **FIT)
    assert done.step == 4
    lines = small_runs.metric_lines(tmp_path / "whole")
    steps = [line for line in lines if "split" not in line]
    rates = [line["learning_rate"] / config.optim.learning_rate for line in steps]
    np.testing.assert_allclose(rates, [1, 1, 0.5, 0.5], rtol=1e-6)
    assert all(line["twice"] == pytest.approx(2 * line["loss"], rel=1e-5) for line in steps)
    assert {line["seen"] for line in lines if "split" in line} == {21, 23}
    for at in (1, 3):  # between what is asked for and the end of the epoch, and after it
        folder = tmp_path / f"stopped{at}"
        with pytest.raises(signals.Interrupted):
            train.train(config, folder, callbacks=[Act(at)], **FIT)
        assert train.train(config, folder, callbacks=[Act()], **FIT).step == 4
        assert small_runs.digest(folder) == small_runs.digest(tmp_path / "whole")
    assert train.train(config, tmp_path / "whole", **FIT).step == 4  # the run has ended


def counts(state):
    """The numbers of updates that the optimizer has counted."""
    leaves = jax.tree_util.tree_flatten_with_path(state["opt"])[0]
    return {int(leaf) for path, leaf in leaves if jax.tree_util.keystr(path).endswith("count']")}


def test_frozen_parts_train_after_their_epochs(stored_weights, tmp_path):
    """Until then the run is that of frozen parts, to the bit; its moments start anew."""
    start = {"init__from": str(stored_weights), "init__freeze": "trunk"}
    start |= {"train__ema_decay": 0.9, "optim__name": "adamw", "checkpoint__keep_latest": 9}
    frozen = small_runs.small_config(**{**STEADY, **start})
    train.train(frozen, tmp_path / "frozen", **FIT)
    config = small_runs.small_config(
        **{**STEADY, **start, "train__steps": 6, "init__unfreeze_after": 1}
    )
    train.train(config, tmp_path / "whole", **FIT)
    before = checkpoint.load_tree(tmp_path / "whole", 2)[1]
    alone, after = (checkpoint.load_tree(tmp_path / name)[1] for name in ("frozen", "whole"))
    for kind in ("params", "stats"):
        jax.tree.map(np.testing.assert_array_equal, before[kind], alone[kind])
        moved = jax.tree.map(lambda a, b: np.any(a != b), before[kind], after[kind])
        assert all(jax.tree.leaves(moved["trunk"])), kind
        assert set(after["ema"][kind]) == set(after[kind])
    assert (counts(before), counts(after)) == ({2}, {4, 6})
    for at in (2, 3):  # at the change, and after it
        folder = tmp_path / f"stopped{at}"
        with pytest.raises(signals.Interrupted):
            train.train(config, folder, callbacks=[Interrupt(at)], **FIT)
        train.train(config, folder, **FIT)
        assert small_runs.digest(folder) == small_runs.digest(tmp_path / "whole")
