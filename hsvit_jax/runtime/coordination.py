"""Coordination of a job's processes: agreement, barriers, stopping, and ending with one message.

It goes through jax's coordination service, a key-value store in process 0, and never through the
devices: so it also works before the first compilation and beside a step that hangs. With one
process no function here waits for anything. jax has no public name for that store; this module is
the only one that imports it from `jax._src`.
"""

import collections
import contextlib
import hashlib
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import jax
from jax._src import distributed

from hsvit_jax.runtime import signals, watchdog

T = TypeVar("T")

#: Seconds of silence after which another process is given up. TCP tries again after 51 s at most
#: where a connection was cut for 25 s.
SILENCE = 60
# TCP's options, in seconds; its own limit, which may count from an earlier cut on, is off.
_PATIENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 99, "TCP_USER_TIMEOUT": 0}
#: Steps between the request to stop and the stop: more than any process can be ahead of another.
LEAD = 8
_EVERY = 4  # steps between two polls of the store
_PAUSE = 1.5  # seconds between two polls for the end of another process
_LONGEST = 6 * 3600  # seconds: one process may have to decode what others have cached
# Exit codes that all processes come to → seconds to wait for process 0, which closes its loggers.
_TOGETHER = {0: 120.0, 3: 60.0, 42: 60.0}
_STALL = "a stall"  # why a process ends whose watchdog fired
_PRINTED_MS = 5_000  # how long others wait for process 0 to print the same message
_numbers = itertools.count()
_barriers: collections.Counter[str] = collections.Counter()
_survivors: list[int] | None = None  # the processes that are left, once some are lost
_peers: set[int] = set()  # the ports at which the job's processes listen for each other's sums


def _client() -> Any:
    """The key-value store; None with one process."""
    return distributed.global_state.client


def index() -> int:
    """Returns this process's number."""
    return distributed.global_state.process_id


def count() -> int:
    """Returns the number of processes; jax's own function would start the devices."""
    return distributed.global_state.num_processes


def is_lead() -> bool:
    """Whether this is process 0, which writes the files and prints for all."""
    return index() == 0


def agree(what: Callable[[], T]) -> T:
    """Calls `what` on every process; a ValueError on any of them is raised on all.

    A barrier: the processes call this in the same order and wait for each other.

    Args:
      what: called once on each process.

    Returns:
      this process's result.

    Raises:
      ValueError: the message of the first process that failed, with its number unless all failed
        equally.
    """
    client = _client()
    if client is None:
        return what()
    result = error = None
    try:
        result = what()
    except ValueError as raised:
        error = raised
    complaints = _gather("" if error is None else str(error) or type(error).__name__)
    for number, complaint in enumerate(complaints):
        if complaint:
            alike = len(set(complaints)) == 1
            raise ValueError(complaint if alike else f"process {number}: {complaint}") from error
    return result


def check_same(what: str, text: str) -> None:
    """Raises ValueError on every process unless all of them give the same text."""
    texts = _gather(text)
    for number, other in enumerate(texts):
        if other != texts[0]:
            pairs = itertools.zip_longest(other.splitlines(), texts[0].splitlines(), fillvalue="")
            here, there = next((a.strip()[:60], b.strip()[:60]) for a, b in pairs if a != b)
            raise ValueError(
                f"process {number} has another {what} than process 0 ({here!r}, not {there!r}): "
                "start all processes with the same command, code and data"
            )


def check_count(recoverable: bool = False) -> None:
    """Raises ValueError unless process 0 knows of as many processes and of the same --recoverable.

    To be called first: with other numbers, processes would wait for each other for ever.
    """
    told = f"{count()} processes, {'' if recoverable else 'not '}recoverable"
    if is_lead():
        _client().key_value_set("hsvit/count", told)
    elif (other := _get("hsvit/count", _LONGEST)) != told:
        raise ValueError(
            f"process {index()} was started as one of {told}; process 0 as one of {other}: give "
            "all the same n in --distributed=host:port,n,i, and --recoverable to all or none"
        )


def from_lead(text: str) -> str:
    """Broadcasts process 0's text to every process."""
    return _gather(text)[0]


def _gather(text: str) -> list[str]:
    """Every process's text, by its index."""
    client, everyone = _client(), range(count())
    if client is None:
        return [text]
    place = f"hsvit/{next(_numbers)}"
    client.key_value_set(f"{place}/{index()}", text or " ")  # an empty value counts as none
    if jax.config.jax_enable_recoverability:  # a barrier would wait for a lost process too
        lost = sorted({*everyone} - {*client.get_live_nodes([*everyone])})
        if lost:
            numbers = ", ".join(map(str, lost))
            raise ValueError(f"process {numbers} was lost before the first step: start all again")
    values = [_get(f"{place}/{i}", _LONGEST) for i in everyone]
    return ["" if value == " " else value for value in values]


def _get(key: str, seconds: float) -> str:
    """Waits for a value of the store a second at a time: between them Python handles signals."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _client().blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if time.monotonic() > deadline or "DEADLINE_EXCEEDED" not in str(error):
                raise


class StopTogether(signals.StopRequests):
    """Stops all processes at the same call of `due` once any of them was asked to stop.

    The first to be asked writes into the store at which call all will stop: far enough ahead that
    no process is past it, and a call at which every process polls the store.
    """

    def __init__(self, on_request: Callable[[], object] = lambda: None) -> None:
        super().__init__(on_request)
        self._calls, self._asked = 0, False
        self._place = f"hsvit/{next(_numbers)}/stop"  # of this run, not of the next in the process

    def due(self) -> int | None:
        """The signal to stop for, once all processes have reached the same call.

        Every process must call this equally often, and none may be `LEAD` calls ahead of another.
        """
        client = _client()
        if client is None:
            return super().due()
        self._calls += 1
        if self.signum is not None and not self._asked:
            self._asked = True
            at = -(-(self._calls + LEAD) // _EVERY) * _EVERY
            # An error: another process was asked too, and came first.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.key_value_set(self._place, f"{self.signum} {at}")
        if self._calls % _EVERY:
            return None
        try:
            signum, at = map(int, client.key_value_try_get(self._place).split())
        except jax.errors.JaxRuntimeError:  # no process was asked
            return None
        return signum if self._calls >= at else None


def print_once(text: str) -> None:
    """Prints a message on stderr once for the job.

    Process 0 prints it; another process only where process 0 has not done so within 5 s.
    """
    client = _client()
    if client is not None:
        first = text.partition("\n")[0]  # the rest may be a command line, each its own
        key = "hsvit/said/" + hashlib.sha256(first.encode()).hexdigest()
        if is_lead():
            client.key_value_set(key, "1", allow_overwrite=True)
        else:
            try:
                client.blocking_key_value_get(key, _PRINTED_MS)
                return
            except jax.errors.JaxRuntimeError:
                own = f"process {index()}"
                text = text if text.startswith(own) else f"{own}: {text}"
    print(text, file=sys.stderr, flush=True)


def leave(code: int, alone: bool = False) -> int:
    """Ends this process with `code`, without a long wait for processes that do not get here.

    With one process the code is returned instead.

    Args:
      alone: the others do not come to this end by themselves, whatever the code.
    """
    client = _client()
    if client is None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by Python's way out, where jax aborts a process whose work is done if another was lost.
    if (alone or not _part("leave", _TOGETHER.get(code, 5.0))) and code:
        _pull_down(code, f"exit code {code}")
    os._exit(code)


def _part(what: str, seconds: float) -> bool:
    """Calls `barrier`; process 0 then waits a little, because the store ends with it."""
    complete = barrier(what, seconds)
    if is_lead():
        time.sleep(0.5)
    return complete


def go_on_with(processes: set[int]) -> None:
    """Restricts barriers to these processes, the survivors of a loss."""
    global _survivors
    _survivors = sorted(processes)


def listening() -> set[int]:
    """The TCP ports at which this process listens."""
    ports, asked = set(), (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    _on_sockets(lambda one: one.getsockopt(*asked) and ports.add(one.getsockname()[1]))
    return ports


def meet(ports: set[int]) -> None:
    """Tells every process at which ports the others listen; `ports` are this one's."""
    for text in _gather(" ".join(map(str, ports))):
        _peers.update(map(int, text.split()))


def drop_peers() -> None:
    """Ends the connections of collectives, after one has failed here.

    Another process may wait for this one in it, and does not hear of the one that was lost.
    """
    _on_sockets(lambda one: _joins(one, _peers) and one.shutdown(socket.SHUT_RDWR))


def _be_patient(one: socket.socket) -> None:
    """Ends a connection of the job once its other end was silent for `SILENCE` seconds.

    Process 0 would end those of the store after 20 s, and nobody those of collectives.
    """
    service = int(distributed.global_state.coordinator_address.rpartition(":")[2])
    if _joins(one, {*_peers, service}):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PATIENCE.items():
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        since = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)[56:]  # its last answer
        if int.from_bytes(since, sys.byteorder) > 1000 * SILENCE:
            one.shutdown(socket.SHUT_RDWR)


def _on_sockets(act: Callable[[socket.socket], object]) -> None:
    """Calls `act` with every internet socket of this process, those of libraries included."""
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # no socket, closed meanwhile, or without another end
            one = socket.socket(fileno=int(number))
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    act(one)
            finally:
                one.detach()


def _joins(one: socket.socket, ports: set[int]) -> bool:
    """Whether an end of a connection is at one of these ports; OSError where it is none."""
    return not ports.isdisjoint((one.getsockname()[1], one.getpeername()[1]))


def barrier(what: str, seconds: float) -> bool:
    """Waits until every process has called this.

    Args:
      what: the barrier's name; all processes use it equally often.
      seconds: the longest wait.

    Returns:
      whether all processes called it in time; with one process True at once.
    """
    client = _client()
    if client is None:
        return True
    _barriers[what] += 1
    try:
        client.wait_at_barrier(f"hsvit/{what}/{_barriers[what]}", int(seconds * 1000), _survivors)
        return True
    except jax.errors.JaxRuntimeError:
        return False


def wait_for_lead(what: str, seconds: float) -> None:
    """Waits until process 0 has called this too; it waits for nobody, as one may be lost."""
    client = _client()
    if client is None:
        return
    _barriers[what] += 1
    key = f"hsvit/{what}/{_barriers[what]}"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has ended, or took too long
        if is_lead():
            client.key_value_set(key, "1")
        else:
            _get(key, seconds)


def install_excepthook() -> None:
    """Installs an excepthook: an uncaught exception in one process ends the whole job.

    Python alone would wait at exit for the other processes, which wait for this one in a collective
    that may not notice. The code is 1, and that of a stall where the devices failed: most often
    because another process was lost, and then another start helps.
    """
    sys.excepthook = _die
    threading.Thread(target=_listen, name="listener", daemon=True).start()


def _die(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(f"process {index()} of {count()}:", file=sys.stderr)
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    lost = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    code = watchdog.EXIT_CODE if lost else 1
    _pull_down(code, kind.__name__)
    os._exit(code)


def leave_stalled() -> None:
    """Waits a little for the other processes' watchdogs, and ends those that have not fired."""
    if _client() is not None and not _part("stalled", 5.0):
        _pull_down(watchdog.EXIT_CODE, _STALL)


def _pull_down(code: int, why: str) -> None:
    """Writes into the store that this process ends, for the listeners of the others."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process ended before
        _client().key_value_set("hsvit/down", f"{code} process {index()} ended with {why}")
    if is_lead():
        time.sleep(4 * _PAUSE)  # longer than `_listen` takes: the store is gone afterwards


def _listen() -> None:
    """Ends this process soon after another one has ended, unless a collective noticed first."""
    while (client := _client()) is not None:
        if sys.platform == "linux":
            _on_sockets(_be_patient)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            code, _, why = client.key_value_try_get("hsvit/down").partition(" ")
            time.sleep(2 * _PAUSE)  # a collective that notices has a traceback to show
            print(f"{why}, so this one ends too", file=sys.stderr, flush=True)
            if why.endswith(_STALL):
                watchdog.dump_stacks()
            os._exit(int(code) or 1)
        time.sleep(_PAUSE)
