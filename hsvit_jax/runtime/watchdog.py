"""Watchdog: ends a process that is alive but makes no progress."""

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

#: Exit code of a stalled process; a scheduler may start the run again.
EXIT_CODE = 75

#: Seconds without progress that a run is granted once it was asked to stop; schedulers kill at 180.
GRACE = 150.0

# Seconds for the stacks and `before_exit`; nobody may be reading standard error.
_LAST_WORDS = 30.0

# Seconds more for work that may compile, which takes long without a heartbeat.
_SLOW = 1800.0


def dump_stacks() -> None:
    """Prints the stacks of all threads on stderr."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()


class Watchdog:
    """Context in which the process ends with code 75 when no `heartbeat` comes for too long.

    Before that the stacks of all threads go to stderr.

    Args:
      timeout: seconds without a heartbeat; 0 for never.
      before_exit: called last, to let other processes that are stuck get there too.
    """

    def __init__(self, timeout: float, before_exit: Callable[[], object] = lambda: None) -> None:
        self._timeout, self._before_exit = timeout or math.inf, before_exit
        self._last, self._extra, self._what = time.monotonic(), 0.0, "the start"
        self._hurried = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def heartbeat(self, what: str, *, slow: bool = False) -> None:
        """Notes progress.

        Args:
          what: the work done, named in the message if it remains the last.
          slow: the next work may compile; it has half an hour more.
        """
        self._extra = _SLOW if slow else 0.0
        self._last, self._what = time.monotonic(), what

    def hurry(self) -> None:
        """Limits every wait to `GRACE` seconds from here on, compiling and saving included."""
        self._timeout, self._hurried = min(self._timeout, GRACE), True
        self._last = time.monotonic()

    def overdue(self) -> float | None:
        """The limit in seconds, if more have passed since the last heartbeat; else None."""
        limit = self._timeout + (0.0 if self._hurried else self._extra)
        return limit if time.monotonic() - self._last > limit else None

    def _watch(self) -> None:
        while (limit := self.overdue()) is None:
            pause, before = min(1.0, self._timeout / 4), time.monotonic()
            if self._ended.wait(pause):
                return
            # A process that was stopped (Ctrl-Z, a suspended job) could not move in that time.
            self._last += time.monotonic() - before - pause
        last = threading.Timer(_LAST_WORDS, os._exit, [EXIT_CODE])
        last.daemon = True
        last.start()
        print(
            f"\nnothing has moved for {limit:.0f} s, the last was {self._what}; the stacks of all "
            f"threads follow, then exit code {EXIT_CODE}",
            file=sys.stderr,
            flush=True,
        )
        dump_stacks()
        self._before_exit()
        os._exit(EXIT_CODE)

    def __enter__(self) -> Self:
        self.heartbeat("the start", slow=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
