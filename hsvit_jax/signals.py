"""Stopping a run from outside: the first signal asks, the second ends it at once."""

import os
import signal
from types import FrameType
from typing import Self

_NOTICE = b"\nstopping as soon as the state is saved; a second signal stops at once, unsaved\n"


class Interrupted(Exception):
    """A run that was asked to stop and has saved its state."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step = signum, step

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 42 for SIGTERM: schedulers requeue on 42."""
        return 130 if self.signum == signal.SIGINT else 42


class StopRequests:
    """Within this context SIGTERM and Ctrl-C set `signum` instead of ending the process."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, object] = {}

    def due(self) -> int | None:
        """The signal to stop for now, if there is one; to be asked between two steps."""
        return self.signum

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        os.write(2, _NOTICE)  # print may not be entered anew from a signal handler

    def __enter__(self) -> Self:
        try:
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._ask)
        except ValueError:  # not the main thread (a notebook's worker): signals stay as they are
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            # None: the handler before was not installed by Python, which cannot put it back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
