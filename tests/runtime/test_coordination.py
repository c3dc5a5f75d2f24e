"""What processes do together, with threads for processes and a dictionary for jax's store."""

import socket
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from hsvit_jax.runtime import coordination


class Store:
    """The part of jax's coordination client that is used."""

    def __init__(self, count):
        self.values, self.lock, self.barriers = {}, threading.Condition(), {}
        self.count = count

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.lock.notify_all()

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        with self.lock:
            if not self.lock.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def wait_at_barrier(self, key, milliseconds, processes=None):
        with self.lock:
            barrier = self.barriers.setdefault(key, threading.Barrier(self.count))
        try:
            barrier.wait(milliseconds / 1000)
        except threading.BrokenBarrierError:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED") from None


@pytest.fixture
def processes(monkeypatch):
    """Runs functions side by side, each as a process of its own: [its result or its error]."""

    def run(*bodies):
        state = threading.local()
        store = Store(len(bodies))
        monkeypatch.setattr(coordination, "distributed", types.SimpleNamespace(global_state=state))

        class Numbers:
            """A process counts its own gatherings."""

            def __next__(self):
                state.gathered += 1
                return state.gathered

        monkeypatch.setattr(coordination, "_numbers", Numbers())

        def process(index):
            state.client, state.process_id, state.num_processes = store, index, len(bodies)
            state.gathered = 0  # the thread may have been another process
            try:
                return bodies[index]()
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(process, range(len(bodies))))

    return run


def raises(message):
    def body():
        raise ValueError(message)

    return body


def test_a_mistake_of_one_is_everybodys_and_one_of_all_names_nobody(processes):
    def agreed(*bodies):
        return processes(*(lambda body=body: coordination.agree(body) for body in bodies))

    assert agreed(*(lambda i=i: i for i in range(3))) == [0, 1, 2]
    for bodies, told in (
        ((lambda: 1, raises("disk"), int), "process 1: disk"),
        ((raises("batch"), raises("batch")), "batch"),
    ):
        got = agreed(*bodies)
        assert {type(error) for error in got} == {ValueError}
        assert {str(error) for error in got} == {told}


def test_different_processes_are_refused(processes):
    texts = ("{\n  seed: 1,\n}", "{\n  seed: 1,\n}", "{\n  seed: 2,\n}")
    got = processes(*(lambda t=t: coordination.check_same("configuration", t) for t in texts))
    assert {type(error) for error in got} == {ValueError}
    told = "process 2 has another configuration than process 0 ('seed: 2,', not 'seed: 1,')"
    assert told in str(got[0])
    assert processes(*(lambda: coordination.check_same("a", "b") for _ in range(2))) == [None, None]
    assert processes(*(lambda t=t: coordination.from_lead(t) for t in texts)) == [texts[0]] * 3


def test_another_number_of_processes_is_refused(processes, monkeypatch):
    same, other = (lambda r=r: coordination.check_count(r) for r in (False, True))
    assert processes(same, same) == [None, None]
    done, error = processes(same, other)
    assert done is None and "--recoverable to all or none" in str(error)
    monkeypatch.setattr(coordination, "count", lambda: 2 + coordination.index())
    done, error = processes(same, same)
    told = "process 1 was started as one of 3 processes, not recoverable; process 0 as one of 2"
    assert done is None and told in str(error)


def test_a_run_that_follows_one_that_was_stopped_goes_on(processes):
    """In a notebook the process stays, and jax's store with it."""

    def body():
        stopped, dues = coordination.StopTogether(), range(20)
        stopped.signum = 2
        assert 2 in [stopped.due() for _ in dues]
        after = coordination.StopTogether()
        return {after.due() for _ in dues}

    assert processes(body, body) == [{None}, {None}]


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("lag", [0, 1, coordination.LEAD - 2])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 9])
def test_all_stop_at_the_same_call(processes, asked, lag, at):
    """Process 1 is `lag` calls behind the others; who is asked at its own call `at`, asks."""
    ahead = [threading.Event() for _ in range(200)]

    def process(index):
        def body():
            stop = coordination.StopTogether()
            for call in range(1, 150):
                if index == 1:
                    assert ahead[call + lag].wait(60)  # process 0 is past that call
                elif call > lag + 1:
                    assert behind[call - lag - 1].wait(60)  # and no further
                if call == at and index in asked:
                    stop.signum = 2 + index
                due = stop.due()
                if index == 0:
                    ahead[call].set()
                if index == 1:
                    behind[call].set()
                if due is not None:
                    for event in ahead + behind:
                        event.set()
                    return call, due
            return None

        return body

    behind = [threading.Event() for _ in range(200)]
    got = processes(*(process(i) for i in range(3)))
    assert len(set(got)) == 1, got
    call, signum = got[0]
    assert at <= call <= at + 2 * coordination.LEAD + 4
    assert signum - 2 in asked


def test_nobody_stops_unasked(processes):
    def body():
        stop = coordination.StopTogether()
        return [stop.due() for _ in range(30)]

    assert processes(body, body) == [[None] * 30] * 2


def test_a_saved_run_ends_together(processes, monkeypatch):
    """Process 0, which closes its loggers, is waited for where it is known to come."""
    waits = {}
    for code in (0, 1, 42):
        monkeypatch.setattr(coordination, "barrier", lambda _, s, c=code: waits.setdefault(c, s))
        monkeypatch.setattr(coordination.os, "_exit", lambda code: None)
        processes(lambda code=code: coordination.leave(code))
    assert waits[1] == 5 and waits[0] >= waits[42] >= 40  # two loggers, 20 s each
    monkeypatch.setattr(coordination, "barrier", lambda *_: False)
    monkeypatch.setattr(coordination, "_pull_down", pytest.fail)  # the work is done all the same
    processes(lambda: coordination.leave(0))
    monkeypatch.setattr(coordination, "_pull_down", lambda *_: None)
    monkeypatch.setattr(coordination, "barrier", None)  # where it does not come, nobody waits
    monkeypatch.setattr(coordination, "_PAUSE", 0)
    processes(lambda: coordination.leave(42, alone=True))


def test_one_voice(processes, capfd, monkeypatch):
    """Process 1 keeps silent where process 0 speaks, though the second lines differ."""

    def body(index):
        return lambda: coordination.print_once(f"stopped\n as process {index}")

    processes(body(0), body(1))
    assert capfd.readouterr().err == "stopped\n as process 0\n"
    monkeypatch.setattr(coordination, "_PRINTED_MS", 10)
    processes(lambda: coordination.print_once("mine"), lambda: coordination.print_once("my own"))
    assert sorted(capfd.readouterr().err.splitlines()) == ["mine", "process 1: my own"]


@pytest.fixture
def connections():
    """The two ends of a connection, and the port at which one of them listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one, server.accept()[0] as other:
            one.settimeout(5)
            yield one, other, port


def test_connections_of_collectives_are_dropped_and_no_others(monkeypatch, connections):
    one, other, port = connections
    assert port in coordination.listening()
    monkeypatch.setattr(coordination, "_peers", {port - 1})
    coordination.drop_peers()
    other.sendall(b"sum")
    assert one.recv(9) == b"sum"
    monkeypatch.setattr(coordination, "_peers", {port})
    coordination.drop_peers()
    assert one.recv(9) == b""
    socket.create_connection(("127.0.0.1", port)).close()  # survivors find each other anew


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
def test_connections_may_be_cut_for_a_while(monkeypatch, connections):
    connections[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)  # as gRPC's
    monkeypatch.setattr(coordination, "_peers", {connections[2]})
    state = types.SimpleNamespace(coordinator_address="host:1")
    monkeypatch.setattr(coordination, "distributed", types.SimpleNamespace(global_state=state))
    coordination._on_sockets(coordination._be_patient)
    for end in connections[:2]:
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert coordination.SILENCE > 2 * 25
    connections[1].sendall(b"sum")
    assert connections[0].recv(9) == b"sum"
    monkeypatch.setattr(coordination, "SILENCE", 0)
    time.sleep(0.1)
    coordination._on_sockets(coordination._be_patient)
    assert connections[0].recv(9) == b""
