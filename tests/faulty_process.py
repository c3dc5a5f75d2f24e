"""The command line with a twist: `python tests/faulty_process.py TWIST PROCESS STEP [flags]`.

term, int, kill, raise, hang: when process PROCESS looks at step STEP it is sent that signal, raises
what nobody expects, or sleeps. stream: made-up images that are read one by one, each reading noted
in $READS-<process>. none: as it is.
"""

import os
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
    signum = {"term": signal.SIGTERM, "int": signal.SIGINT, "kill": signal.SIGKILL}[kind]
    os.kill(os.getpid(), signum)


def fail_at(kind: str, process: int, step: int) -> None:
    """Arranges for the fault."""
    import jax

    from hsvit_jax import loop

    settle = loop.Loop._settle

    def faulty(self: loop.Loop) -> None:
        if self.pending[0][0] == step and jax.process_index() == process:
            fault(kind)
        settle(self)

    loop.Loop._settle = faulty


def stream() -> None:
    """Replaces the data, and notes which training images are read."""
    import jax
    from small_runs import small_dataset

    from hsvit_jax import train

    dataset = small_dataset(streamed=True)
    read = dataset.train.reader.read

    def noted(index: int):
        with open(f"{os.environ['READS']}-{jax.process_index()}", "a") as file:
            file.write(f"{index}\n")
        return read(index)

    dataset.train.reader.read = noted
    train.load_data = lambda *_, **__: dataset


if __name__ == "__main__":
    twist, process, step, *words = sys.argv[1:]
    if twist == "stream":
        stream()
    elif twist != "none":
        fail_at(twist, int(process), int(step))
    sys.exit(main.main([sys.argv[0], *words]))
