"""One place for strictness: eight fake devices, no silent rank promotion, warnings are errors."""

import contextlib
import gc
import os
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

from hsvit_jax.runtime import compile_cache

# Both must be in the environment before jax is imported. With several CPU devices per process the
# collectives wait for each other in one thread pool, whose size is NPROC: too small, and they hang.
os.environ["NPROC"] = "32"
# Nearly all of the tests' time is compilation, and most of that making machine code, which changes
# neither the program that XLA makes (what tests read) nor its results beyond rounding. A longer
# suite may ask for the level of a real run, 2.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    f" --xla_backend_optimization_level={os.environ.get('TEST_OPTIMISATION', '0')}"
    # A program's parts are compiled one after the other: the tests use every core as it is.
    " --xla_cpu_parallel_codegen_split_count=1"
    # The quicker of two generators of code, which jax 0.11 has not. Where bits count, see
    # `bits_of_a_run`.
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10.")
)
os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_PLATFORM", "cpu")
# What several tests need, or the processes that they start, is compiled once, and kept for the next
# run of the tests. Small programs compile as fast as they are written.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    KEPT = compile_cache.default_folder().with_name(
        f"tests-{version('jaxlib')}-{compile_cache.processor()}"
    )
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compile_cache.trusted_folder(KEPT)
    with contextlib.suppress(FileNotFoundError):  # another worker is as quick
        for program in KEPT.iterdir():  # a week is kept, or the folder would only grow
            if time.time() - program.stat().st_mtime > 7 * 86_400:
                program.unlink()

import jax
import pytest

# Tracing makes many objects, few of them garbage, beside the many that are kept: looking through
# them all as often as Python does takes a fifteenth of the tests' time.
gc.set_threshold(200_000, 50, 1000)

# What the shell made these tests ignore, by nohup or &, the processes that they start would too.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # tests import the configs as files, the package as installed
    sys.path.insert(0, str(ROOT))


@pytest.fixture(autouse=True)
def strict_jax():
    """Rank promotion raises, so a forgotten axis cannot pass by broadcasting."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def bits_of_a_run(monkeypatch):
    """The trainer's programs as `mesh.compiler_options` has them, whatever quickens other tests."""
    named = "--xla_cpu_use_fusion_emitters=false"
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(named, ""))


@pytest.fixture(scope="session")
def stored_weights(tmp_path_factory) -> Path:
    """A run's folder with a checkpoint of `small_runs.made_up_values`, to start from."""
    from support import small_runs

    from hsvit_jax import checkpoint, train

    folder = tmp_path_factory.mktemp("stored")
    run = train.prepare(small_runs.small_config(), dataset=small_runs.small_dataset())
    params, stats = small_runs.made_up_values(run.model)
    with checkpoint.Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params, "stats": stats}, run.meta, metric=0.5, wait=True)
    return folder


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of committed golden vectors."""
    return ROOT / "tests" / "golden"
