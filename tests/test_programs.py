"""Programs that are kept from one start to the next, and when they may not be used."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from hsvit_jax import host, programs, train
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.halves import Halves

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = itertools.count()
CONFIG = {"optim": {"learning_rate": 0.1}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept, as after starting the command line; JAX's own cache is empty."""
    made = tmp_path / "programs"
    monkeypatch.setenv("HSVIT_PROGRAMS_DIR", str(made))
    monkeypatch.setattr(host, "STARTED", float("inf"))  # whoever edits a file meanwhile
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    compilation_cache.reset_cache()
    yield made
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def a_mesh(group=1, data=1):
    return mesh_lib.make(group, data, groups=4, devices=jax.devices()[: group * data])


def kept(*facts, config=CONFIG, mesh=None):
    return programs.of_run(config, mesh or a_mesh(), *facts)


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def never():
    raise AssertionError("this program was there")


def test_a_program_is_found_again(folder):
    x = jnp.arange(5.0)
    first = kept().get("double", (x,), lambda: compiled(lambda x: {"twice": 2 * x}, x))
    again = kept().get("double", (x,), never)
    for program in (first, again):
        np.testing.assert_array_equal(program(x)["twice"], 2 * np.arange(5.0))


def test_halves_are_found_again_and_still_give_their_state_away(folder):
    halves = Halves(
        jax.jit(lambda state, x: {"grads": x * state["w"]}),
        jax.jit(
            lambda state, found: (
                {"w": state["w"] - found["grads"]},
                {"sum": found["grads"].sum()},
            ),
            donate_argnums=(0,),
        ),
    )
    x = jnp.arange(3.0)

    def state():
        return {"w": jnp.full(3, 2.0)}

    kept().get("step", (state(), x), lambda: halves.lower(state(), x).compile())
    again = kept().get("step", (state(), x), never)
    assert isinstance(again, Halves)
    given = state()
    new, metrics = again(given, x)
    np.testing.assert_array_equal(new["w"], [2, 0, -2])
    assert metrics["sum"] == 6
    assert given["w"].is_deleted()


def test_spread_over_devices(folder):
    mesh = mesh_lib.make(2, 2, groups=4, devices=jax.devices()[4:])
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.arange(8.0).reshape(4, 2), rows)
    here = kept(mesh=mesh)
    here.get("sum", (x,), lambda: compiled(lambda x: x.sum(0), x))
    again = here.get("sum", (x,), never)
    np.testing.assert_array_equal(again(x), [12, 16])
    assert again(x).sharding.device_set == set(jax.devices()[4:])


def _made_anew(keeper, arguments, name="it"):
    """Whether a program had to be compiled: one that JAX's cache cannot have."""
    made = []

    def fresh():
        made.append(next(NUMBERS))
        return compiled(lambda *x: (x, jnp.full(2, made[0])), *arguments)

    program = keeper.get(name, arguments, fresh)
    assert len(program(*arguments)) == 2
    return bool(made)


def test_what_a_program_is_made_of(folder, monkeypatch):
    x = jnp.zeros(2)
    assert _made_anew(kept(), (x,))
    assert not _made_anew(kept(), (x,))
    for other in (
        jnp.zeros(3),
        jnp.zeros(2, jnp.int32),
        jnp.zeros((2, 1)),
        jax.device_put(x, jax.devices()[0]),
    ):
        assert _made_anew(kept(), (other,))
        assert not _made_anew(kept(), (other,))
    assert _made_anew(kept(), ([x],))
    assert _made_anew(kept(), (x,), "another")
    assert _made_anew(kept(7), (x,))
    assert _made_anew(kept(config={"optim": {"learning_rate": 0.2}}), (x,))
    assert _made_anew(kept(mesh=a_mesh(2, 1)), (x,))
    pair = a_mesh(1, 2)
    for spec in (PartitionSpec("data"), PartitionSpec()):
        placed = jax.device_put(x, NamedSharding(pair, spec))
        assert _made_anew(kept(mesh=pair), (placed,))
        assert not _made_anew(kept(mesh=pair), (placed,))
    with jax.default_matmul_precision("bfloat16"):
        assert _made_anew(kept(), (x,))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")
        assert _made_anew(kept(), (x,))
    with monkeypatch.context() as patch:
        patch.setattr(programs, "version", lambda name: "0")
        assert _made_anew(kept(), (x,))
    with monkeypatch.context() as patch:
        patch.setattr(host, "processor", lambda: "another")
        assert _made_anew(kept(), (x,))
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_sources", lambda: "edited")
        assert _made_anew(kept(), (x,))
    assert not _made_anew(kept(), (x,))


def test_the_sources_are_all_of_the_package(folder, monkeypatch, tmp_path):
    package = tmp_path / "package"
    (package / "models").mkdir(parents=True)
    (package / "programs.py").write_text("a = 1")
    (package / "models" / "a.py").write_text("b = 1")
    monkeypatch.setattr(programs, "__file__", str(package / "programs.py"))
    seen = {programs._sources()}
    (package / "models" / "a.py").write_text("b = 2")
    seen.add(programs._sources())
    (package / "models" / "a.py").rename(package / "models" / "c.py")
    seen.add(programs._sources())
    assert len(seen) == 3 and None not in seen


def test_not_of_sources_that_changed_since_the_start(folder, monkeypatch):
    x = jnp.zeros(2)
    monkeypatch.setattr(host, "STARTED", 0.0)
    assert kept() is programs.NONE
    monkeypatch.setattr(host, "STARTED", float("inf"))
    here = kept()
    monkeypatch.setattr(host, "STARTED", 0.0)  # edited while it was compiled
    assert _made_anew(here, (x,))
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-9],
        lambda data: b"",
        lambda data: data[:500] + b"\0" + data[501:],
        lambda data: programs.hashlib.sha256(b"no").digest() + b"no",
    ],
    ids=["cut", "empty", "one byte", "not a program"],
)
def test_a_damaged_file_is_made_anew(folder, harm):
    x = jnp.zeros(2)
    assert _made_anew(kept(), (x,))
    (file,) = folder.iterdir()
    file.write_bytes(harm(file.read_bytes()))
    assert _made_anew(kept(), (x,))
    assert not _made_anew(kept(), (x,))


def test_only_in_a_folder_of_this_user(folder, monkeypatch, tmp_path):
    folder.mkdir(mode=0o700)
    assert kept().folder == folder
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert kept() is programs.NONE
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        assert kept() is programs.NONE
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert kept() is programs.NONE
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.delenv("HSVIT_PROGRAMS_DIR")
    assert kept() is programs.NONE
    assert _made_anew(programs.NONE, (jnp.zeros(2),))
    assert _made_anew(programs.NONE, (jnp.zeros(2),))


def test_a_program_of_jaxs_cache_works_and_is_not_kept(folder):
    """What XLA for CPU gives back of such a program has no code in it."""
    x = jnp.zeros(3)

    def fresh():
        return compiled(lambda x: jnp.sin(x) @ jnp.cos(jnp.arange(9.0).reshape(3, 3)), x)

    fresh()
    np.testing.assert_array_equal(kept().get("it", (x,), fresh)(x), [0, 0, 0])
    assert not list(folder.iterdir())


def test_a_program_that_cannot_be_kept_works(folder):
    def shout(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    x = jnp.zeros(2)
    for _ in range(2):
        program = kept().get("shout", (x,), lambda: compiled(shout, x))
        np.testing.assert_array_equal(program(x), [1, 1])


def test_what_was_not_used_for_longest_goes(folder, monkeypatch):
    arguments = [(jnp.zeros(n),) for n in (1, 2, 3, 4)]
    for age, one in enumerate(arguments[:3]):
        assert _made_anew(kept(), one)
        newest = max(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        os.utime(newest, (age, age))
    size = max(file.stat().st_size for file in folder.iterdir())
    assert not _made_anew(kept(), arguments[0])  # used: no longer the oldest
    monkeypatch.setattr(programs, "_LIMIT", 3 * size + size // 2)
    assert _made_anew(kept(), arguments[3])
    assert len(list(folder.iterdir())) == 3
    assert [_made_anew(kept(), one) for one in (arguments[0], arguments[2])] == [False, False]
    assert _made_anew(kept(), arguments[1])


def test_a_run_with_kept_programs_is_the_same_run(folder, tmp_path, monkeypatch):
    def run(name):
        spread = {"mesh__group": 2, "mesh__data": 2, "train__ema_decay": 0.9}
        config = small_runs.small_config(train__steps=4, **spread)
        data = small_runs.small_dataset(streamed=True)
        train.train(config, tmp_path / name, dataset=data, verbose=False)
        return small_runs.metric_lines(tmp_path / name), small_runs.digest(tmp_path / name)

    first = run("first")
    assert len(list(folder.iterdir())) == 2  # the fresh state, the step
    monkeypatch.setattr(programs, "_write", never)
    assert run("again") == first


def test_the_command_line_keeps_its_programs(tmp_path):
    """The second start finds what the first compiled: nothing of a step is traced or compiled."""
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path), JAX_LOG_COMPILES="1")
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment.pop("HSVIT_PROGRAMS_DIR", None)
    environment["XLA_FLAGS"] = conftest.QUICK_FLAGS
    words = ["--config=configs/c2a2.py:digits,tiny", "--config.train.epochs=0"]
    words += ["--config.train.steps=2", "--config.train.batch=8"]
    lines = []
    for name in ("first", "again"):
        command = [sys.executable, "-m", "hsvit_jax.main", *words, f"--workdir={tmp_path / name}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        for half in ("resident", "second_half"):
            assert (f"Finished tracing {half} " in done.stderr) == (name == "first"), done.stderr
        lines.append(small_runs.metric_lines(tmp_path / name))
    assert lines[0] == lines[1]
    (kept,) = (tmp_path / "hsvit_jax").glob("xla-*/programs")
    assert kept.stat().st_mode & 0o777 == 0o700
