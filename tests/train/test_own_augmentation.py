"""A user's own augmentation, word for word from the page on data, and crops from stored photos."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import small_runs
from support.data_files import noise

from hsvit_jax import config as config_lib
from hsvit_jax import data, main, train
from hsvit_jax.augment import transforms
from hsvit_jax.run_report import findings
from hsvit_jax.runtime import signals
from hsvit_jax.train import batches

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
OWN = re.findall(r"## How do I add my own augmentation.*?```python\n(.*?)```", PAGE, re.DOTALL)[0]


class Stop(train.Callback):
    def on_step(self, step, figures):
        if step == 1:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """The page's file; what it registers is forgotten again."""
    monkeypatch.setattr(transforms, "TRANSFORMS", dict(transforms.TRANSFORMS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_augmentation.py").write_text(OWN, "utf-8")
    return "my_augmentation.py:digits,tiny"


def test_an_own_augmentation_trains_and_resumes_but_evaluates_without_its_file(
    spec, tmp_path, capsys
):
    config = config_lib.get_config(spec, "train.steps=4", "train.loggers=")
    assert config.augment.transforms == ("darker:0.3",)
    run = train.prepare(config)
    split, ids = run.dataset.train, np.arange(64, dtype=np.int32)
    pixels, _ = batches.augmented(run.config, 0, split.gather(ids), split.labels[ids], ids)
    plain = split.gather(ids)
    brightest = pixels.reshape(64, -1).max(1) / plain.reshape(64, -1).max(1)
    assert 0.6 < brightest.min() < 0.8 < 0.9 < brightest.max() <= 1.0
    whole = train.train(config, tmp_path / "whole", verbose=False)
    with pytest.raises(signals.Interrupted) as stopped:
        train.train(config, tmp_path / "run", callbacks=[Stop()], verbose=False)
    assert 0 < stopped.value.step < whole.step
    train.train(config, tmp_path / "run", verbose=False)
    assert small_runs.digest(tmp_path / "run") == small_runs.digest(tmp_path / "whole")

    del transforms.TRANSFORMS["darker"]
    assert main.main(["hsvit", "eval", "run"]) == 0
    assert findings._augmented(run.config, split) == []
    capsys.readouterr()
    words = ["--config=c2a2:digits,tiny", "--config.augment.transforms=darker:0.3"]
    assert main.main(["hsvit", "train", *words, "--workdir=run"]) in (1, 2)
    told = capsys.readouterr().err
    assert "unknown transform 'darker'" in told and "--config=FILE.py" in told
    assert "Traceback" not in told and told.count("\n") == 1


def test_training_photos_are_stored_larger_than_their_crops(tmp_path, capsys):
    """Validation and test images have the network's size, and the memory is printed."""
    for number, image in enumerate(noise((40, 30, 40, 3))):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    words = f"c2a2:folder={tmp_path / 'photos'},tiny"
    sizes = ("data.image_size=8", "data.train_size=20,24", "train.batch=8", "train.steps=1")
    crops = ("augment.random_resized_crop=0.3,1", "augment.crop_padding=0", "train.loggers=")
    config = config_lib.get_config(words, *sizes, *crops, "model.depth=1", "mesh.data=1")
    train.train(config, tmp_path / "run")
    assert "8×8, crops of 20×24 (1 MB)" in capsys.readouterr().err
    assert (tmp_path / "run" / "batch.png").is_file()
    loaded = train.load_data(config, training=True)
    assert loaded.train.images.shape[1:] == (20, 24, 3)
    assert loaded.test.images.shape[1:] == (8, 8, 3)
    assert train.load_data(config).train.images.shape[1:] == (8, 8, 3)
    given = data.from_arrays(noise((40, 8, 8, 3)), np.arange(40) % 2, name="given")
    with pytest.raises(ValueError, match=r"data.train_size=\(20, 24\).* have \(8, 8\): remove"):
        train.prepare(config_lib.get_config("c2a2", *sizes, *crops), dataset=given)
