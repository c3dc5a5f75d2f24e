"""A network from a file outside the package: README's own, word for word, and the least one."""

import json
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from support import small_runs

import hsvit_jax
from hsvit_jax import config as config_lib
from hsvit_jax import main, models, train
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.models.hsvit import Groups, HSViT
from hsvit_jax.runtime import signals

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
IDEA = re.findall(r"## Try your own idea.*?```python\n(.*?)```", README, re.DOTALL)[0]
LEAST = """
import dataclasses

import jax.numpy as jnp
from flax import nnx
import hsvit_jax
from hsvit_jax.models import Network, Sizes, layers


@dataclasses.dataclass(frozen=True)
class Config(Sizes):
    widths: tuple[int, ...] = (4,)
    scale: float = 1.0


class Mean(Network):
    def parts(self, key):
        return {"head": layers.Linear(self.config.image_channels, self.config.num_classes, key)}

    def logits(self, bound, images_BHWC, context):
        return bound["head"](images_BHWC.mean((1, 2)) * self.config.scale)


hsvit_jax.register(hsvit_jax.Family("mean", config=Config, network=Mean))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder outside the repository, with the files; what they register is forgotten again."""
    for name in ("exchange", "mean", "other"):
        monkeypatch.setitem(models.FAMILIES, name, None)
        del models.FAMILIES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_idea.py").write_text(IDEA, "utf-8")
    (tmp_path / "least.py").write_text(LEAST, "utf-8")
    return tmp_path


class Stop(train.Callback):
    def on_step(self, step, figures):
        if step == 1:
            signal.raise_signal(signal.SIGTERM)


def hsvit(*words):
    return main.main(["hsvit", *words])


def test_the_readme_s_idea_is_short():
    assert len([line for line in IDEA.splitlines() if line.strip()]) <= 25


def test_the_readme_s_idea_is_trained_resumed_and_used(folder, capsys):
    """Stopped after two steps it goes on to the same bits; no command knows it without its file."""
    spec, place = "--config=my_idea.py:digits,tiny", "--workdir=run"
    config = config_lib.get_config(spec.partition("=")[2])
    assert config.model.family == "exchange" and config.model.groups == 4
    train.train(config, folder / "whole", verbose=False)
    with pytest.raises(signals.Interrupted) as stopped:
        train.train(config, folder / "run", callbacks=[Stop()], verbose=False)
    assert 0 < stopped.value.step < 8
    assert hsvit("train", spec, place) == 0
    assert small_runs.digest(folder / "run") == small_runs.digest(folder / "whole")
    assert f"eval run {spec}" in capsys.readouterr().out
    assert hsvit("eval", spec, place) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 8
    from PIL import Image

    Image.fromarray(np.zeros((8, 8), np.uint8)).save("digit.png")
    assert hsvit("predict", spec, place, "digit.png") == 0
    assert hsvit("export", spec, place, "idea.safetensors") == 0
    assert hsvit("predict", spec, "--checkpoint=idea.safetensors", "digit.png") == 0
    models.FAMILIES.pop("exchange")
    capsys.readouterr()
    for path in ("run", "idea.safetensors"):
        assert hsvit("predict", path, "digit.png") == 1
        assert "--config=FILE.py" in capsys.readouterr().err
        with pytest.raises(ValueError, match="exchange"):
            hsvit_jax.load(path)


def test_the_readme_s_idea_runs_on_a_mesh_of_two_groups(folder):
    """Groups on two devices exchange what they do on one; nothing else takes them apart."""
    config = config_lib.get_config("my_idea.py:digits,tiny", "model.dropout=0")
    network = models.build(config.model.to_dict(), image_size=(8, 8), channels=1, num_classes=10)
    params, stats = small_runs.made_up_values(network)
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)

    def results(group):
        mesh = mesh_lib.make(group, 1, groups=network.group_axis_limit)
        run = mesh_lib.spread(network, mesh)

        def loss(params):
            logits = run(params, stats, mesh_lib.put_batch(mesh, images), train=True)[0]
            return (logits**2).sum(), logits

        placed = mesh_lib.place(mesh, params, network)
        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(placed)
        return jax.device_get((logits, grads))

    one, two = results(1), results(2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), one, two)
    alone = HSViT(network.config)
    assert np.abs(alone.apply(params, stats, images)[0] - one[0]).max() > 1e-3
    assert network.voters == 0
    mesh = mesh_lib.make(1, 1, groups=network.group_axis_limit, aggregate="ordered")
    with pytest.raises(ValueError, match="ordered"):
        mesh_lib.spread(network, mesh, "ordered")(params, stats, images)


def test_other_groups_stay_together_unless_their_network_says_otherwise():
    class Own(HSViT):
        groups_module = Groups

    network = Own(small_runs.HSVIT)
    assert (network.splits, network.group_axis_limit, network.voters) == (None, 0, 0)
    assert Own.whitens


def test_the_least_family_trains_and_has_its_keys(folder, capsys):
    """A dataclass without meanings or ranges: types follow from the defaults."""
    spec = "--config=least.py:digits,tiny"
    more = ("--config.model.widths=2,3", "--config.model.scale=0.5", "--config.train.steps=1")
    assert hsvit("train", spec, *more, "--report=false") == 0
    assert hsvit("summary", spec) == 0
    assert "head" in capsys.readouterr().out
    assert hsvit("train", spec, "--config.model.scale=much") == 2
    assert hsvit("train", "--config=least.py:digits,paper") == 2
    assert "strong" in capsys.readouterr().err


def test_a_file_registers_one_family_of_a_new_name(folder):
    Path("two.py").write_text(LEAST + LEAST.replace('"mean"', '"other"'), "utf-8")
    with pytest.raises(ValueError, match="must register one family"):
        config_lib.get_config("two.py")
    with pytest.raises(ValueError, match="another name"):
        models.register(models.FAMILIES["vit"])
