"""Runs and files that commit 8ee9dae wrote are read, answer as they did, and go on."""

import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from support import small_runs

import hsvit_jax
from hsvit_jax import train

GOLDEN = Path(__file__).parents[1] / "golden" / "house"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of the runs, and the logits that their networks had."""
    folder = tmp_path_factory.mktemp("older")
    with zipfile.ZipFile(GOLDEN / "runs.zip") as archive:
        archive.extractall(folder)
    with np.load(GOLDEN / "logits.npz") as arrays:
        return folder, dict(arrays)


@pytest.mark.filterwarnings("ignore:step 1 was saved after")
@pytest.mark.parametrize(
    "name", ["plain", "averaged", "towers", "lost-groups", "backbone", "exported"]
)
def test_networks_answer_as_they_did(written, name):
    folder, arrays = written
    path = folder / (f"{name}.safetensors" if name == "exported" else name)
    network = hsvit_jax.load(path, devices=jax.devices()[:1])
    images = arrays["pictures" if network.channels == 3 else "rows"]
    expected = arrays[name]
    np.testing.assert_allclose(
        network.logits(images), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


def test_a_run_goes_on(written, tmp_path):
    shutil.copytree(written[0] / "plain", tmp_path / "plain")
    config = small_runs.small_config(train__steps=4)
    dataset = small_runs.small_dataset()
    done = train.train(config, tmp_path / "plain", dataset=dataset, verbose=False)
    assert done.step == 4
