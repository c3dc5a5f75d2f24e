"""PoWER's three steps on a tiny DeiT: a network, its schedule, the same network pruned."""

import json
import shutil

import jax
import numpy as np
import pytest
from support.small_runs import made_up_values

from hsvit_jax import config as config_lib
from hsvit_jax import main, train
from hsvit_jax.studies import power_search
from hsvit_jax.train import init_from
from hsvit_jax.weights import files
from hsvit_jax.weights.stored import stored_network

SPEC, SIZE = "deit:ti,digits,tiny", "data.image_size=16,16"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network of fresh weights, in a file."""
    run = train.prepare(config_lib.get_config(SPEC, SIZE))
    params, stats = made_up_values(run.model)
    path = tmp_path_factory.mktemp("power") / "first.safetensors"
    path.write_bytes(files.pack({"params": params, "stats": stats}, {**run.meta, "step": 1}))
    return path


def test_the_tokens_are_learned_and_the_network_goes_on(trained, tmp_path, capsys):
    """At 0.1 a step, four steps of a penalty leave 10 of 16 patches, and the CLS."""
    out = tmp_path / "power.safetensors"
    shutil.copy(trained, tmp_path / "model.safetensors")
    described = {"image_mean": [0.25], "image_std": [0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    words = [f"--config={SPEC}", f"--config.init.from={tmp_path}", "--epochs=0.1", f"--out={out}"]
    words += ["--config.init.classifier=new"]
    words += ["--penalty=10", "--rate=0.1", "--config.mesh.data=1", f"--config.{SIZE}"]
    assert main.main(["hsvit", "power-search", *words]) == 0
    printed = capsys.readouterr().out
    assert main.main(["hsvit", "power-search", *words]) == 1
    assert "is there already" in capsys.readouterr().err
    stored = stored_network(out)
    assert (stored.step, stored.config.model.retained) == (4, (11, 11))
    assert "--config.model.retained=11,11" in printed
    assert "--config.init.classifier=keep" in printed and "classifier=new" not in printed
    before = stored_network(trained)
    assert any(
        map(np.any, jax.tree.leaves(jax.tree.map(np.subtract, stored.params, before.params)))
    )
    third = config_lib.get_config(SPEC, SIZE, f"init.from={out}", "model.retained=11,11")
    run = train.prepare(third)
    assert (run.config.data.mean, run.config.data.std) == ((0.25,), (0.5,))
    assert init_from.load(run.config, run.model).notes[0].startswith("32 of 32 tensors")


def test_what_cannot_be_searched(trained):
    for spec, message in (
        ("deit:ti-power,digits,tiny", r"ti-power \(deit\)"),
        ("hvt:digits,tiny", "deit:ti"),
        (SPEC, "--config.init.from=RUN"),
        (f"{SPEC} train.epochs=0", "--epochs"),
    ):
        with pytest.raises(ValueError, match=message):
            power_search.search(config_lib.get_config(*spec.split()), 1e-4, 1e-2)
