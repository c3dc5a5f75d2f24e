"""The command line with a twist: `python faulty_process.py TWIST PROCESS STEP [flags]`.

PROCESS is a number, or several with commas between them; $SILENCE replaces coordination.SILENCE.
term, int, kill, raise, hang: when process PROCESS looks at step STEP it is sent that signal, raises
what nobody expects, or sleeps. full: no file can grow from then on, as on a full disk. clock: it is
set back by 400 days. kill_saving, hang_saving: while the checkpoint of STEP is written, by a
process that writes a part of it. kill_giving: before it gives process 0, which writes all, its part
of the checkpoint of STEP. kill_testing: before the test split is evaluated. kill_loading,
term_loading: before the data are loaded. late: PROCESS starts its first step STEP seconds after it
was compiled. stream: made-up images that are read one by one, each reading noted in
$READS-<process>. ask: callbacks of all processes act as `asking` says. none: as it is.
"""

import dataclasses
import functools
import importlib
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from hsvit_jax import main


def fault(kind: str) -> None:
    """Brings about what `kind` says."""
    if kind == "raise":
        raise RuntimeError("the fault that was asked for")
    if kind == "hang":
        time.sleep(600)
        return
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return
    if kind == "clock":
        now = time.time
        time.time = lambda: now() - 400 * 86_400
        return
    signum = {"term": signal.SIGTERM, "int": signal.SIGINT, "kill": signal.SIGKILL}[kind]
    os.kill(os.getpid(), signum)


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Arranges for `act` to be called, with the same arguments, before a function of `owner`."""
    function = getattr(owner, name)

    def faulty(*given: object, **settings: object) -> object:
        act(*given, **settings)
        return function(*given, **settings)

    setattr(owner, name, faulty)


def preparation() -> types.ModuleType:
    """The module whose name its function has in `hsvit_jax.train`."""
    return importlib.import_module("hsvit_jax.train.prepare")


def arrange(twist: str, processes: set[int], step: int) -> None:
    """Arranges for the fault."""
    import jax
    from orbax.checkpoint import JsonCheckpointHandler

    from hsvit_jax.runtime import coordination
    from hsvit_jax.train import elastic, loop

    coordination.SILENCE = int(os.environ.get("SILENCE", coordination.SILENCE))
    kind, _, place = twist.partition("_")

    def strike(here: bool = True) -> None:
        if here and jax.process_index() in processes:
            time.sleep(step) if kind == "late" else fault(kind)

    save = JsonCheckpointHandler._save_fn

    async def faulty_save(self: JsonCheckpointHandler, item: dict, directory: object) -> None:
        strike(item["content"]["step"] == step)
        await save(self, item, directory)

    if kind == "late":
        before(loop.Loop, "compile", lambda *_: strike())
    elif place == "saving":
        JsonCheckpointHandler._save_fn = faulty_save
    elif place == "giving":
        before(
            elastic.RecoverableLoop, "save", lambda _, number, *__, **___: strike(number == step)
        )
    elif place == "testing":
        before(loop.Loop, "evaluate", lambda self, state, split, *_: strike(split == "test"))
    elif place == "loading":
        before(preparation(), "load_data", lambda *_, **__: strike())
    else:
        oldest = "process_oldest_step"
        before(loop.Loop, oldest, lambda self: strike(self.pending[0][0] == step))


def asking(step: int) -> Any:
    """A callback that halves the rate after the epoch of step 1, and stops after that of `step`."""
    from hsvit_jax import train

    class Asking(train.Callback):
        def on_step(self, number: int, figures: dict[str, float]) -> None:
            if number == 1:
                self.scale_rate(0.5)
            if number == step:
                self.stop()

    return Asking()


def stream() -> None:
    """Replaces the data, and notes which training images are read."""
    import jax
    from small_runs import small_dataset

    dataset = small_dataset(streamed=True)
    read = dataset.train.read

    def noted(index: int):
        with open(f"{os.environ['READS']}-{jax.process_index()}", "a") as file:
            file.write(f"{index}\n")
        return read(index)

    train = dataclasses.replace(dataset.train, read=noted)
    dataset = dataclasses.replace(dataset, train=train)
    preparation().load_data = lambda *_, **__: dataset


if __name__ == "__main__":
    twist, processes, step, *words = sys.argv[1:]
    if twist == "stream":
        stream()
    elif twist == "ask":
        from hsvit_jax import train

        train.train = functools.partial(train.train, callbacks=[asking(int(step))])
    elif twist != "none":
        arrange(twist, {*map(int, processes.split(","))}, int(step))
    sys.exit(main.main([sys.argv[0], *words]))
