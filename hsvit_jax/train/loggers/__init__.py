"""Where a run's figures are shown, by `train.loggers`: each logger in a thread of its own.

A logger that is slow, dead or full costs its figures, never the run: nothing waits for it.
"""

import importlib
import importlib.util
import queue
import threading
from collections.abc import Collection
from typing import Any

_MOST_WAITING = 10_000  # lines of a logger
_PATIENCE = 60.0  # seconds in which it takes the last ones: MLflow makes its database first

#: Name → (module here, its class, the library that it needs).
_KNOWN = {
    "tensorboard": ("tensorboard", "TensorBoard", "tensorboardX"),
    "wandb": ("services", "WeightsAndBiases", "wandb"),
    "mlflow": ("services", "MLflow", "mlflow"),
}


def check(names: Collection[str]) -> None:
    """Raises ValueError for a logger named twice, or whose library is not installed."""
    if len({*names}) < len(names):
        raise ValueError(f"train.loggers={','.join(names)} names one twice: leave it out")
    for name in names:
        if importlib.util.find_spec(_KNOWN[name][2]) is None:
            raise ValueError(f"train.loggers={name} needs {name}: pip install 'hsvit_jax[{name}]'")


class Background(threading.Thread):
    """A thread that makes a logger and calls its `log(step, scalars)`, then its `close()`.

    Args:
        arguments: of the logger's class: the work folder, the step after which the run goes on,
            whether another training of the folder begins, and the configuration as a dict.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        super().__init__(name=name, daemon=True)
        self._arguments, self._error = arguments, None
        self._lines: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MOST_WAITING)
        self.start()

    def put(self, line: tuple[int, dict[str, float]] | None) -> None:
        """Queues a step's figures, or None for the end.

        Raises:
            Exception: the logger's, where it has failed; TimeoutError where too many lines wait.
        """
        if self._error is not None:
            raise self._error
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            raise TimeoutError("it is too slow") from None

    def close(self) -> None:
        """Waits `_PATIENCE` for what is queued; raises as `put` does."""
        self.put(None)
        self.join(_PATIENCE)
        if self.is_alive() or self._error is not None:
            raise self._error or TimeoutError("it is too slow")

    def run(self) -> None:
        """Shows figures until the end is queued, or the logger fails."""
        try:
            module, kind, _ = _KNOWN[self.name]
            module = importlib.import_module(f"hsvit_jax.train.loggers.{module}")
            logger = getattr(module, kind)(*self._arguments)
            while (line := self._lines.get()) is not None:
                logger.log(*line)
            logger.close()
        except Exception as error:  # a library's own, of any kind
            self._error = error
