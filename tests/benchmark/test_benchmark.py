"""The benchmark's JSON, its arithmetic and its mistakes. No test looks at a clock."""

import importlib.metadata
import json
import platform
import shlex
import statistics
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.processes import ROOT

from hsvit_jax import config as configs
from hsvit_jax import data, main, train
from hsvit_jax.benchmark import jobs, machine, versus
from hsvit_jax.benchmark import measure as benchmark
from hsvit_jax.models import costs
from hsvit_jax.train import evaluate

SMALL = {
    "variant": "c2a2",
    "conv_channels": (4, 8),
    "conv_kernels": (3, 3),
    "pool_strides": (2, 1),
    "groups": 2,
    "depth": 1,
    "embed_dim": 16,
    "heads": 2,
    "dropout": 0.2,
}
CONFIG_FILE = f"{ROOT / 'configs' / 'c2a2.py'}:digits"


def small(batch=16, argument="digits", **model):
    config = configs.base(argument, {**SMALL, **model})
    config.train.batch = batch
    config.data.image_size = (16, 16)
    return config


@pytest.fixture(autouse=True, scope="module")
def small_peak():
    """A product and a convolution that take no time; the arithmetic is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine._PEAK_SIZES, "cpu", (64, 1))
        yield


@pytest.fixture(scope="module")
def records():
    """One measurement of every kind of work; training on a mesh of 2×2, the rest on one device."""
    out = {}
    for work in jobs.JOBS:
        config, devices = small(), jax.devices()[:1]
        if work == "train":
            config.mesh.group, config.mesh.data, devices = 2, 2, None
        out[work] = benchmark.measure(config, work, steps=3, warmup=1, devices=devices)
    return out


@pytest.mark.parametrize("work", jobs.JOBS)
def test_record_holds_what_the_docs_promise(records, work):
    record = records[work]
    assert json.loads(json.dumps(record)) == record
    expected = {"work": work, "batch": 16, "steps": 3, "dtype": "float32", "data": "random"}
    expected |= {"image_size": [16, 16], "images_per_step": 128 if work == "eval" else 16}
    expected |= {"mesh": dict.fromkeys(("data", "group"), 2 if work == "train" else 1)}
    expected |= {"device_peak_memory_bytes": None, "devices": ["cpu"] * 8}
    versions = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib")}
    expected |= {"versions": versions | {"python": platform.python_version()}}
    assert expected.items() <= record.items()
    spread = record["images_per_second_spread"]
    ordered = [spread["min"], spread["quartile1"], record["images_per_second"]]
    ordered += [spread["quartile3"], spread["max"]]
    assert ordered == sorted(ordered) and ordered[0] > 0
    assert record["compile_seconds"] >= 0 and record["peak_memory_bytes"] > 2**20
    program = record["program"]
    assert program is None if work == "eval" else min(program["flops"], program["temp_bytes"]) > 0
    if work == "input":
        assert record["flops_per_image"] is record["share_of_peak"] is record["peak"] is None
        return
    done = record["images_per_second"] * record["flops_per_image"]
    assert record["flops_per_second"] == pytest.approx(done)
    assert record["share_of_peak"] == pytest.approx(done / record["peak"]["flops_per_second"])
    assert ("backward" in record["flops_counted_on"]) == (work == "train")


def test_inference_is_timed_as_the_configuration_has_it(monkeypatch):
    config = small()
    config.mesh.update(group=2, data=1, aggregate="ordered")
    config.eval.batch = 7
    run = jobs.prepare(config, False, jax.devices()[:2])
    text = jobs.infer_job(run, True).compiled.as_text()
    assert "all-gather" in text and "all-reduce" not in text
    given = []
    loss = SimpleNamespace(loss=0.0)
    monkeypatch.setattr(
        evaluate,
        "make_evaluator",
        lambda *a: given.append(a) or (lambda *b: given.append(b) or loss),
    )
    jobs.eval_job(run, True).take()
    assert (given[0][-1], given[1][-1]) == ("ordered", 7)


def test_a_record_is_of_the_steps_and_of_every_view(monkeypatch):
    order = []
    monkeypatch.setattr(machine, "device_memory", lambda _: order.append("memory"))
    peak = {"flops_per_second": 1.0}
    monkeypatch.setattr(machine, "measure_peak", lambda _: order.append("peak") or peak)
    monkeypatch.setattr(costs, "computed_flops", lambda _: 5.0)
    monkeypatch.setitem(jobs.JOBS, "infer", lambda *_: jobs.Job(lambda: None, 16))
    config = small(argument="fashion_mnist,fast")
    record = benchmark.measure(config, "infer", steps=1, warmup=1, devices=jax.devices()[:1])
    assert order == ["memory", "peak"]  # whose arrays the accelerator's figure would hold else
    assert config.eval.tta == "flip" and record["flops_per_image"] == 2 * 5.0
    assert "2 views" in record["flops_counted_on"]


def test_real_data_without_augmentation_and_a_trace(records, tmp_path, monkeypatch):
    record = benchmark.measure(
        small(),
        "input",
        steps=1,
        warmup=1,
        augmented=False,
        real_data=True,
        trace=str(tmp_path),
        devices=jax.devices()[:1],
    )
    assert record["data"] == "digits"
    assert not record["augmented"] and records["input"]["augmented"]
    assert record["program"]["flops"] < records["input"]["program"]["flops"]
    (trace,) = tmp_path.rglob("*.xplane.pb")
    monkeypatch.setattr(jobs, "prepare", pytest.fail)
    with pytest.raises(ValueError, match="cannot be made a folder"):  # before the work
        benchmark.measure(small(), "input", trace=str(trace / "x"))


def zeros(run):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), run.state_shape)


# --- Mistakes ------------------------------------------------------------------------------------


def test_data_that_do_not_fit_in_memory_are_refused(monkeypatch):
    streamed = data.Split(np.arange(64, dtype=np.int32) % 10, None, None)
    dataset = data.Dataset(
        data.describe("digits").with_shape((16, 16), 1), streamed, streamed, streamed, "x"
    )
    monkeypatch.setattr(train, "load_data", lambda config, **_: dataset)
    with pytest.raises(ValueError, match="remove --data"):
        benchmark.measure(small(), "train", real_data=True, devices=jax.devices()[:1])


def test_command_line_hands_over_its_flags(capsys, monkeypatch):
    def measure(config, work, **settings):
        return {"work": work, "batch": config.train.batch, "depth": config.model.depth, **settings}

    monkeypatch.setattr(benchmark, "measure", measure)
    words = [f"--config={CONFIG_FILE}", "--config.model.depth=5", "--batch=48", "--work=input"]
    words += ["--steps=7", "--warmup=3", "--no_augment", "--data", "--trace=somewhere"]
    assert main.main(["hsvit", "benchmark", *words]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    given = {"work": "input", "batch": 48, "depth": 5, "steps": 7, "warmup": 3}
    more = {"augmented": False, "real_data": True, "trace": "somewhere"}
    assert json.loads(line) == {"config": CONFIG_FILE, **given, **more}


# --- Against another program ---------------------------------------------------------------------


def script(tmp_path, name, *rates, **fields):
    """A program that prints the next of `rates` each time, and logs its turn."""
    path = tmp_path / f"{name}.py"
    path.write_text(
        f"import json, pathlib\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"turns = log.read_text() if log.exists() else ''\n"
        f"log.write_text(turns + {name!r})\n"
        f"print('starting')\n"
        f"rate = {rates!r}[turns.count({name!r})]\n"
        f"print(json.dumps(dict(images_per_second=rate, **{fields!r})))\n"
        f"print('done')\n"
    )
    return [sys.executable, str(path)]


def test_compare_alternates_and_takes_the_median_of_pairwise_ratios(tmp_path):
    ours = script(tmp_path, "A", 10, 30, 20)
    theirs = script(tmp_path, "B", 2, 10, 40, 1, peak_memory_bytes=200)
    record = versus.compare(ours, shlex.join(theirs), 3)
    assert (tmp_path / "log").read_text() == "ABABAB"
    assert record["ratios"] == [5.0, 3.0, 0.5]
    assert record["ratio"] == 3.0  # not 20/10, the ratio of the medians
    assert record["ratio_spread"] == {"min": 0.5, "quartile1": 1.75, "quartile3": 4.0, "max": 5.0}
    assert record["ours"]["images_per_second"] == statistics.median(record["ours"]["runs"]) == 20
    assert record["theirs"]["images_per_second"] == 10
    assert record["theirs"]["runs"] == [2, 10, 40]
    memory = record["ours"]["peak_memory_bytes"]
    assert memory > 2**20 and record["memory_ratio"] == memory / 200  # B states its own
    unknown = script(tmp_path, "C", 1, peak_memory_bytes=None)
    assert versus.compare(unknown, shlex.join(theirs), 1)["ours"]["peak_memory_bytes"] > 2**20


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo first >&2; echo the end >&2; exit 3", r"failed with code 3.*\n.*first\nthe end"),
        *((f"echo '{{\"images_per_second\": {x}}}'", "JSON line") for x in (0, "NaN", "true")),
    ],
)
def test_compare_tells_how_the_other_command_failed(tmp_path, command, said):
    with pytest.raises(ValueError, match=said):
        versus.compare(script(tmp_path, "A", 1.0), command, 1)


def test_vs_runs_our_own_command_line_in_a_process(capfd):
    theirs = "echo '{\"images_per_second\": 1}'"
    ours = [f"--config={CONFIG_FILE}", "--work=input", "--no_augment", "--batch=16", "--steps=1"]
    assert main.main(["hsvit", "benchmark", *ours, "--rounds=1", f"--vs={theirs}"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["vs"] == theirs and record["rounds"] == 1
    last = record["ours"]["last"]
    assert (last["work"], last["batch"], last["mesh"]) == ("input", 16, {"data": 8, "group": 1})
    assert record["ratio"] == last["images_per_second"]
