"""The decoding benchmark: its input and its record. No test looks at a clock."""

import decode_speed
import jax
import pytest
from support.data_files import class_folders

from hsvit_jax import config as config_lib
from hsvit_jax.benchmark import jobs
from hsvit_jax.data import decode


@pytest.fixture
def config(tmp_path):
    """The recipe of a frozen backbone, at 24 pixels, on twenty JPEGs of 40×30."""
    class_folders(tmp_path / "set", ("a", "b"), 10, (30, 40, 3), "jpg")
    spec = f"hsvit_backbone:resnet18,paper,folder={tmp_path / 'set'}"
    return spec, (f"data.dir={tmp_path / 'data'}", "data.image_size=24", "train.batch=8")


def test_every_image_of_every_batch_is_decoded(config, monkeypatch):
    loaded = config_lib.get_config(config[0], *config[1])
    seen = []
    read_image = decode.read_image

    def read(raw, image_size, channels, *, name, **how):
        seen.append(name)
        return read_image(raw, image_size, channels, name=name, **how)

    monkeypatch.setattr(decode, "read_image", read)
    speed = decode_speed.measure(loaded, steps=3, warmup=2)
    assert len(seen) >= 20 + 5 * 8  # once when the set is checked, then again for each batch
    assert speed["image_size"] == [24, 24] and speed["steps"] == 3
    assert speed["images_per_second"] > 0 and speed["images_per_cpu_second"] > 0


def test_speed_is_that_of_the_recipe_asked_for(config):
    """Few random images stand for a set of any number, and choose no recipe."""
    folder = config[0].partition("folder=")[2]
    wanted = config_lib.get_config(f"c2a2:folder={folder},tiny", *config[1])
    assert jobs.prepare(wanted, False, jax.devices()[:1]).config.recipe == "strong"
