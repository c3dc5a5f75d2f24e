"""The watchdog: fires when nothing moves, and only then."""

import threading
import time

import pytest

from hsvit_jax.runtime import watchdog


@pytest.fixture
def ended(monkeypatch):
    """Instead of ending the process: the exit code, once there is one."""
    done = threading.Event()
    done.codes = []

    def end(code):
        done.codes.append(code)
        done.set()

    monkeypatch.setattr(watchdog.os, "_exit", end)
    return done


def test_a_stall_is_told_with_stacks(ended, capfd):
    with watchdog.Watchdog(0.2, lambda: print("others told")) as dog:
        dog.heartbeat("step 7")
        assert ended.wait(60)
    said = capfd.readouterr()
    assert ended.codes == [75]
    assert "nothing has moved for 0 s, the last was step 7" in said.err
    assert "test_a_stall_is_told_with_stacks" in said.err  # this thread's stack
    assert said.out == "others told\n"


def test_slow_work_is_given_time(ended, monkeypatch):
    """The clock is wound by hand: the start and what is called slow have half an hour more."""
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = watchdog.Watchdog(10.0)
    assert dog.overdue() is None
    for what, slow, limit in (("the start", True, 1810.0), ("a", False, 10), ("b", True, 1810)):
        dog.heartbeat(what, slow=slow)
        now[0] += limit
        assert dog.overdue() is None
        now[0] += 0.5
        assert dog.overdue() == limit


def test_zero_is_never_until_the_run_is_asked_to_stop(ended, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = watchdog.Watchdog(0.0)
    now[0] = 1e9
    assert dog.overdue() is None
    dog.hurry()
    dog.heartbeat("the first batch", slow=True)
    now[0] += watchdog.GRACE
    assert dog.overdue() is None
    now[0] += 0.5
    assert dog.overdue() == watchdog.GRACE


def test_a_process_that_was_stopped_has_not_stalled(ended, monkeypatch):
    """Ctrl-Z for an hour, while the watchdog waits for its next look."""
    clock, stopped = time.monotonic, [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + stopped[0])
    with watchdog.Watchdog(60.0) as dog:
        dog.heartbeat("step 7")
        time.sleep(0.3)
        stopped[0] = 3600.0
        assert not ended.wait(1.5)
        assert dog.overdue() is None
