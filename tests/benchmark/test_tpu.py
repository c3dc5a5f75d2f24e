"""Steps compiled for TPUs by libtpu, on a machine that has none."""

import json

import pytest

from hsvit_jax import config as config_lib
from hsvit_jax import main
from hsvit_jax.benchmark import tpu
from hsvit_jax.models import FAMILIES
from hsvit_jax.planner import hlo

MODULE = """HloModule step, is_scheduled=true

body {
  %x = f32[8]{0:T(128)} add(%a, %a), backend_config={"estimated_cycles":"10"}
}

condition {
  ROOT %less = pred[]{:T(128)} compare(%a, %b), backend_config={"estimated_cycles":"1"}
}

limit {
  %n = s32[]{:T(128)} constant(7), metadata={op_name="while"}
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %below = pred[]{:T(128)} compare(%i, %n), direction=LT
}

ENTRY main {
  %l = f32[8]{0:T(128)} while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %m = f32[8]{0:T(128)} while(%l), condition=%condition, body=%body
  %n = f32[8]{0:T(128)} while(%a), condition=%limit, body=%body
  ROOT %y = (f32[8]{0:T(128)}, f32[2,8]{1,0:T(2,128)S(1)}) fusion(%m), calls=%f, backend_config={"estimated_cycles":"100"}
}
"""  # noqa: E501


def test_estimated_cycles_count_a_loop_as_often_as_it_turns():
    assert hlo.cycles(MODULE) == 5 * (10 + 1) + (10 + 1) + 7 * 10 + 100


def test_a_topology_that_cannot_be_compiled_for_is_refused():
    with pytest.raises(ValueError, match=r"cannot compile for 'v5x': .*hsvit_jax\[tpu\]"):
        tpu.devices("v5x")


def test_only_one_program_is_compiled_for_a_topology(capsys):
    words = ["--config=configs/c2a2.py:digits", "--topology=v5e:2x2"]
    assert main.main(["hsvit", "benchmark", *words, "--work=eval"]) == 1
    assert "choose train or infer" in capsys.readouterr().err


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
def test_a_tpu_adds_the_cls_tokens_of_all_groups_in_one_all_reduce(capsys, topology):
    words = ["--config=configs/c2a2.py:digits,tiny", "--batch=32", f"--topology={topology}"]
    words += ["--config.mesh.group=4", "--config.mesh.data=1"]
    assert main.main(["hsvit", "benchmark", *words, "--work=infer"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["mesh"] == {"data": 1, "group": 4}
    assert record["transfers"] == {"group all-reduce": 32 * 16 * 4}


@pytest.mark.tpu
def test_a_training_step_compiles_for_a_tpu(capsys):
    words = ["--config=configs/c2a2.py:digits,tiny", "--batch=32", "--topology=v5e:2x2"]
    words += ["--config.mesh.group=2", "--config.mesh.data=2"]
    assert main.main(["hsvit", "benchmark", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["mesh"] == {"data": 2, "group": 2}
    # The batch of a device has its tokens' gradients and CLS tokens summed over `group`.
    assert record["transfers"].keys() >= {"data all-reduce", "group all-reduce"}
    assert record["estimated_cycles"] > 0 and 0 < record["temp_bytes"] < 2**30


@pytest.mark.tpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_on_tpus(family):
    name = "c2a2" if family == "hsvit" else family
    config = config_lib.get_config(f"{name}:cifar10,tiny", "train.batch=32", "mesh.data=4")
    record = tpu.measure(config, "train", "v5e:2x2", augmented=False)
    assert record["estimated_cycles"] > 0
    assert record["transfers"].keys() == {"data all-reduce"}


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("settings", "transfers"),
    [
        ("model.towers=4", {"group all-reduce": 32 * 16 * 4}),
        ("model.towers=4 model.tiles=2,2", {"group all-reduce": 32 * 16 * 4}),
        ("mesh.aggregate=ordered", {"group all-gather": 4 * 32 * 16 * 4}),
        ("model.trunk=sharded", {"group all-reduce": 32 * 16 * 4, "group all-gather": ...}),
    ],
)
def test_what_a_spread_evaluation_sends_between_tpus(settings, transfers):
    words = (*settings.split(), "train.batch=32", "mesh.group=4", "mesh.data=1")
    config = config_lib.get_config("c2a2:digits,tiny", *words)
    found = tpu.measure(config, "infer", "v5e:2x2")["transfers"]
    assert found.keys() == transfers.keys()
    assert all(size in (found[kind], ...) for kind, size in transfers.items())
