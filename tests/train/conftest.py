"""A run that nothing stops, which several files compare others with."""

from types import SimpleNamespace

import pytest
from support.small_runs import DATASET, PLAIN, small_config, small_dataset

from hsvit_jax import train


class Recorder(train.Callback):
    """Notes what it is told."""

    def __init__(self):
        self.called = []

    def on_step(self, step, figures):
        self.called.append((step, sorted(figures)))

    def on_evaluation(self, step, split, result):
        self.called.append((step, split))

    def on_end(self, result):
        self.called.append(result)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run of 6 steps, an epoch and a half: its folder, result and what a callback was told."""
    folder, recorder = tmp_path_factory.mktemp("whole"), Recorder()
    options = {"dataset": small_dataset(), "callbacks": [recorder], "verbose": False}
    result = train.train(small_config(), folder, **options)
    return SimpleNamespace(folder=folder, result=result, told=recorder.called)


@pytest.fixture(scope="session")
def frozen(stored_weights, tmp_path_factory):
    """The folder of a run of two steps from stored weights, its trunk frozen."""
    folder = tmp_path_factory.mktemp("frozen")
    config = small_config(**PLAIN, init__from=str(stored_weights), init__freeze="trunk")
    train.train(config, folder, dataset=DATASET, verbose=False)
    return folder
