"""Signals and standard streams of a process: requests to stop, Ctrl-C, closed terminals.

It imports nothing heavy, so that `prepare_process` can be a program's first call.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

#: How Ctrl-C ends a program that has nothing to keep.
NOTHING_SAVED = "stopped by Ctrl-C; there was nothing to save"

# Seconds in which signals are one request: a closing terminal sends SIGHUP twice (kernel, shell),
# systemd may send SIGHUP right after SIGTERM, and `timeout` signals a process and then its group.
_ONE_REQUEST = 0.5
_NOTICE = b"\nstopping as soon as the state is saved; a second signal stops at once, unsaved\n"


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop and has saved its state; of step 0 where it has none to save."""

    def __init__(self, signum: int, step: int) -> None:
        when = f" after step {step}" if step else ""
        super().__init__(f"stopped by {signal.Signals(signum).name}{when}")
        self.signum, self.step = signum, step

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 42 for SIGTERM and SIGHUP: schedulers requeue on 42."""
        return 130 if self.signum == signal.SIGINT else 42


class Diverged(Exception):
    """Loss or gradient was not finite several steps in a row; none of those steps was applied."""


class StopRequests:
    """Context in which SIGTERM, SIGHUP and Ctrl-C set `signum` instead of ending the process.

    SIGHUP stays ignored where it is, as under nohup. A second signal, half a second later or more,
    ends the process at once, but in a notebook and at Python's prompt it is a KeyboardInterrupt,
    and nothing ends the session with all its variables. A thread reads the signals, since Python's
    handlers wait for a main thread that may hang.

    Args:
      on_request: called in that thread at the first signal.
      notice: written to standard error then.
    """

    def __init__(
        self, on_request: Callable[[], object] = lambda: None, notice: bytes = _NOTICE
    ) -> None:
        self.signum: int | None = None
        self._on_request, self._notice = on_request, notice
        self._previous: dict[int, object] = {}
        prompt = hasattr(sys, "ps1") or sys.flags.interactive  # IPython's too
        self._in_session = "ipykernel" in sys.modules or prompt

    def due(self) -> int | None:
        """The signal to stop for, if there is one; to be called between two steps."""
        return self.signum

    def check(self, step: int) -> None:
        """Raises Interrupted, after `step`, if there is a signal to stop for."""
        if (signum := self.due()) is not None:
            raise Interrupted(signum, step)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and self._in_session:
            raise KeyboardInterrupt
        self.signum = self.signum or signum

    def _listen(self, pipe: int) -> None:
        # In a thread: nobody may be reading standard error, and the next signal must be heard.
        notice = threading.Thread(target=_write, args=[self._notice], daemon=True)
        while byte := os.read(pipe, 1):
            if byte[0] not in self._previous:
                continue
            if notice.ident is None:
                if not self._in_session:
                    self.signum = byte[0]  # the main thread may be late
                    self._on_request()
                notice.start()
                first = time.monotonic()
            elif not self._in_session and time.monotonic() - first > _ONE_REQUEST:
                os._exit(128 + byte[0])
        os.close(pipe)
        if notice.ident is not None:
            notice.join(1)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # a notebook's worker: signals stay as they are
        pipe, self._written = os.pipe()
        os.set_blocking(self._written, False)  # as `set_wakeup_fd` asks
        self._previous = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        }
        self._previous_fd = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=[pipe], daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for signum, handler in self._previous.items():
            # None: the handler before was not installed by Python, which cannot put it back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._written)
        self._thread.join(5)


def prepare_process() -> None:
    """Sets up streams and Ctrl-C of a program: to be called before anything heavy is imported.

    Ctrl-C ends the process with a line and code 130 until `raise_on_ctrl_c`: an exception in the
    middle of an import is no end. So does SIGTERM, with 143, to the first process of a container,
    which has no default for it. A closed standard input or error becomes the null device, as the
    next file to be opened would take its place; a closed standard output ends the process with a
    line and code 1. What a stream cannot encode is written with escapes.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, _leave)
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.stdout is None:
        _write(b"standard output is closed: send it to a file or to /dev/null\n")
        os._exit(1)
    for number in (0, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)


def divert_output() -> None:
    """Sends what libraries print past Python, as Gloo does, to standard error.

    Standard output is for results. In a notebook it is no descriptor of this process, and stays.
    """
    if isinstance(getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Output):
        sys.stdout.flush()
        sys.stdout = _stream(os.dup(1), sys.stdout)
        os.dup2(2, 1)


def raise_on_ctrl_c() -> None:
    """Makes Ctrl-C a KeyboardInterrupt again, now that everything is imported."""
    if signal.getsignal(signal.SIGINT) == _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def nothing_to_save() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise Interrupted: schedulers start the program again."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum, 0)

    here = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    ours = [s for s, handler in before.items() if handler in (signal.SIG_DFL, _leave)]
    for signum in ours if here else ():
        signal.signal(signum, leave)
    try:
        yield
    finally:
        for signum in ours if here else ():
            signal.signal(signum, before[signum])


def _leave(signum: int, frame: FrameType | None) -> None:
    _write(f"{NOTHING_SAVED if signum == signal.SIGINT else 'stopped by SIGTERM'}\n".encode())
    os._exit(128 + signum)


def _write(text: bytes) -> None:
    """Writes to standard error, past the buffer that the main thread may hold."""
    try:
        os.write(2, text)
    except OSError:  # closed, or its terminal is
        return


class _Output(io.FileIO):
    """A standard stream that outlives its terminal; standard error fails for nothing at all."""

    def write(self, data: Any) -> int:
        """Writes, or drops what no terminal can show any more."""
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() != 2 and error.errno != errno.EIO:
                raise
            return len(data)


def _stream(number: int, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Replaces Python's stream, which is None if its descriptor was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "w", closefd=False)),
        before.encoding if before else "utf-8",
        "backslashreplace",
        line_buffering=number == 2 or before.line_buffering,
        write_through=before is not None and before.write_through,
    )
