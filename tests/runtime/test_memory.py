"""What needs more memory than there is ends in one line, before data is read or a run is begun."""

import importlib
import math
import resource
from types import SimpleNamespace

import pytest
from support.small_runs import small_config, small_dataset

from hsvit_jax import main, train
from hsvit_jax.models import costs
from hsvit_jax.runtime import memory


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.embed_dim=65536",), "training c2a2 with its 137,448,722,546 parameters needs"),
        (("data.image_size=8192", "train.batch=64"), "step of 64 images of 8192×8192 pixels needs"),
        (("data.image_size=2048", "train.batch=1048576"), "step of 1048576 images of 2048×2048"),
    ],
)
def test_absurd_sizes_end_at_once(settings, message, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 64.0 * 2**30)
    prepare = importlib.import_module("hsvit_jax.train.prepare")
    monkeypatch.setattr(prepare, "load_data", lambda *_, **__: pytest.fail("data was read"))
    words = [f"--config.{setting}" for setting in settings]
    folder = tmp_path / "run"
    assert main.main(["main", "--config=c2a2:digits,tiny", *words, f"--workdir={folder}"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and not folder.exists()
    assert message in err and "and there are 64: " in err


def test_the_estimate_is_below_what_the_compiled_step_needs():
    config = train.prepare(small_config(), dataset=small_dataset()).config
    model = train.build_model(config)
    estimate = memory._saved_bytes(config, model) / memory._MARGIN
    assert 0.05 < estimate / costs.training_bytes(model, config.train.batch) < 1


def test_a_compiled_step_is_held_against_its_device(monkeypatch):
    config = train.prepare(small_config(), dataset=small_dataset()).config
    sizes = {"argument": 3, "output": 2, "temp": 5, "alias": 2}
    told = SimpleNamespace(**{f"{k}_size_in_bytes": v * 2**30 for k, v in sizes.items()})
    program = SimpleNamespace(memory_analysis=lambda: told)
    monkeypatch.setattr(memory, "available", lambda: 16.0 * 2**30)
    memory.check_step(program, config, 2)  # devices, which share their host
    monkeypatch.setattr(memory, "available", lambda: 15.9 * 2**30)
    with pytest.raises(ValueError, match=r"16 images of 8×8 pixels needs .* 16 GiB .* are 15.9: "):
        memory.check_step(program, config, 2)
    memory.check_step(program, config, 1)  # of more that do nothing
    memory.check_step(SimpleNamespace(memory_analysis=lambda: None), config, 2)


def test_a_host_s_memory_is_the_kernel_s_account(monkeypatch, tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:  2048 kB\nMemFree: 9 kB\nSwapTotal:   1024 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", told)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "none")
    assert memory.available() == 3 * 2**20
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    assert memory.available() == math.inf
    limits = {resource.RLIMIT_AS: (2**29, 2**30)}
    monkeypatch.setattr(memory.resource, "getrlimit", limits.__getitem__)
    assert memory.available() == 2**29


@pytest.mark.parametrize(
    ("groups", "limits", "found"),
    [
        ("0::/\n", {"memory.max": 7 * 2**30}, 7),  # v2, in a container
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": 5 * 2**30, "a/b/memory.max": "max"}, 5),
        ("0::/a\n", {"a/memory.max": 90 * 2**30}, 64),  # more than the host has
        ("0::/\n", {}, 64),
        ("3:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": 4 * 2**30}, 4),  # v1
        ("3:memory:/docker/1f\n", {"memory/memory.limit_in_bytes": 6 * 2**30}, 6),
        ("3:cpuset:/a\n", {"memory.max": 2**30, "memory/a/memory.limit_in_bytes": 2**30}, 64),
    ],
)
def test_the_limit_of_a_container_is_its_memory(monkeypatch, tmp_path, groups, limits, found):
    (tmp_path / "own").write_text(groups)
    (tmp_path / "meminfo").write_text("MemTotal:  67108864 kB\nSwapTotal:   0 kB\n")
    for name, limit in limits.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    names = {"_MEMINFO": "meminfo", "_OWN_GROUPS": "own", "_GROUPS": "fs"}
    for name, file in names.items():
        monkeypatch.setattr(memory, name, tmp_path / file)
    assert memory.available() == found * 2**30
