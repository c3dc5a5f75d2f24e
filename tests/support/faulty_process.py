"""The command line with a twist: `python faulty_process.py TWIST PROCESS STEP [flags]`.

term, int, kill, raise, hang: when process PROCESS looks at step STEP it is sent that signal, raises
what nobody expects, or sleeps. full: no file can grow from then on, as on a full disk. clock: it is
set back by 400 days. kill_saving, hang_saving: while the checkpoint of STEP is written.
kill_testing: before the test split is evaluated. kill_loading, term_loading: before the data are
loaded. late: PROCESS starts its first step STEP seconds after it was compiled. stream: made-up
images that are read one by one, each reading noted in $READS-<process>. none: as it is.
"""

import dataclasses
import os
import resource
import signal
import sys
import time

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


def fail_at(kind: str, process: int, step: int) -> None:
    """Arranges for the fault."""
    import jax

    from hsvit_jax.train import loop

    settle = loop.Loop.process_oldest_step

    def faulty(self: loop.Loop) -> None:
        if self.pending[0][0] == step and jax.process_index() == process:
            fault(kind)
        settle(self)

    loop.Loop.process_oldest_step = faulty


def fail_saving(kind: str, process: int, step: int) -> None:
    """Arranges for the fault while the checkpoint of a step is written."""
    import jax
    from orbax.checkpoint import JsonCheckpointHandler

    save = JsonCheckpointHandler._save_fn

    async def faulty(self: JsonCheckpointHandler, item: dict, directory: object) -> None:
        if item["content"]["step"] == step and jax.process_index() == process:
            fault(kind)
        await save(self, item, directory)

    JsonCheckpointHandler._save_fn = faulty


def fail_testing(kind: str, process: int) -> None:
    """Arranges for the fault before the evaluation on the test split."""
    import jax

    from hsvit_jax.train import loop

    evaluate = loop.Loop.evaluate

    def faulty(self: loop.Loop, state: dict, split: str, *more: object) -> object:
        if split == "test" and jax.process_index() == process:
            fault(kind)
        return evaluate(self, state, split, *more)

    loop.Loop.evaluate = faulty


def fail_loading(kind: str, process: int) -> None:
    """Arranges for the fault before the data are loaded."""
    import jax

    from hsvit_jax.train import run

    load = run.load_data

    def faulty(*given: object, **settings: object) -> object:
        if jax.process_index() == process:
            fault(kind)
        return load(*given, **settings)

    run.load_data = faulty


def late(process: int, seconds: int) -> None:
    """The first step of a process waits."""
    import jax

    from hsvit_jax.train import loop

    compiled = loop.Loop.compile

    def faulty(self: loop.Loop, *args: object, **settings: object) -> object:
        if jax.process_index() == process:
            time.sleep(seconds)
        return compiled(self, *args, **settings)

    loop.Loop.compile = faulty


def stream() -> None:
    """Replaces the data, and notes which training images are read."""
    import jax
    from small_runs import small_dataset

    from hsvit_jax.train import run

    dataset = small_dataset(streamed=True)
    read = dataset.train.read

    def noted(index: int):
        with open(f"{os.environ['READS']}-{jax.process_index()}", "a") as file:
            file.write(f"{index}\n")
        return read(index)

    train = dataclasses.replace(dataset.train, read=noted)
    dataset = dataclasses.replace(dataset, train=train)
    run.load_data = lambda *_, **__: dataset


if __name__ == "__main__":
    twist, process, step, *words = sys.argv[1:]
    if twist == "stream":
        stream()
    elif twist == "late":
        late(int(process), int(step))
    elif twist.endswith("_saving"):
        fail_saving(twist.removesuffix("_saving"), int(process), int(step))
    elif twist.endswith("_testing"):
        fail_testing(twist.removesuffix("_testing"), int(process))
    elif twist.endswith("_loading"):
        fail_loading(twist.removesuffix("_loading"), int(process))
    elif twist != "none":
        fail_at(twist, int(process), int(step))
    sys.exit(main.main([sys.argv[0], *words]))
