"""The command line as a process: its standard streams, its signals, and what it refuses."""

import json
import os
import subprocess
import sys
import time

import pytest
from support.processes import COMMAND, ROOT, environment

from hsvit_jax import checkpoint

TINY = (
    *("--config=c2a2:digits,tiny", "--config.model.depth=1", "--config.mesh.data=1"),
    "--config.train.log_every=1",
)

#: Makes the terminal on standard input the one whose closing is told by SIGHUP.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'hsvit_jax.main', *sys.argv[1:]])"
)


def start(*words, shell="", path="", **more):
    """A process of the command line; `shell`: redirections; `path`: looked into for modules."""
    places = os.pathsep.join(filter(None, (str(path), str(ROOT))))
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", *COMMAND, *words],
        env=environment(PYTHONPATH=places, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_closed_standard_output_is_refused():
    code, _, err = start("--help", shell=">&-")
    assert (code, err) == (1, "standard output is closed: send it to a file or to /dev/null\n")


def test_a_closed_standard_error_takes_no_file(tmp_path):
    """The lines for it are lost, and go to none of the files that are opened in its place."""
    code, out, err = start("predict", "x", f"{tmp_path}/none.png", shell="0<&- 2>&-")
    assert (code, out, err) == (1, "", "")


def test_a_full_disk_under_standard_output_is_one_line():
    code, _, err = start("--help", shell=">/dev/full")
    assert (code, err) == (1, "No space left on device: writing\n")


def test_a_name_too_long_is_one_line():
    code, _, err = start("curves", "z" * 300)
    told = ("File name too long: zzz", "z" * 300)  # from Python 3.14 on it is no such folder
    assert code == 1 and err.startswith(told) and err.count("\n") == 1


def test_a_name_that_the_output_cannot_encode(tmp_path):
    file = tmp_path / "zebrä.py"
    file.write_text("raise RuntimeError('ü')\n", encoding="utf-8")
    code, _, err = start("--config", str(file), PYTHONIOENCODING="ascii")
    assert code == 2 and r"zebr\xe4.py failed in line 1: RuntimeError: \xfc" in err
    words = ("--help", "--config=c2a2", f"--config.init.from={file}")
    code, out, _ = start(*words, PYTHONIOENCODING="ascii")
    assert code == 0 and rf"init.from={tmp_path}/zebr\xe4.py" in out


@pytest.mark.parametrize("module", ["absl", "jax"])
def test_ctrl_c_during_the_imports(tmp_path, module):
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    code, out, err = start(*TINY, path=tmp_path)
    assert (code, out, err) == (130, "", "stopped by Ctrl-C; there was nothing to save\n")


def test_sigterm_to_the_first_process_of_a_container():
    """For which the kernel would drop it, where the program has no handler yet."""
    code = "import os; from hsvit_jax.runtime import signals; number = os.getpid()\n"
    code += "os.getpid = lambda: 1; signals.prepare_process(); os.kill(number, 15)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM\n")


@pytest.mark.slow
def test_a_terminal_that_closes_leaves_a_checkpoint(tmp_path):
    """SIGHUP saves as SIGTERM does, though nothing can be printed any more."""
    ours, theirs = os.openpty()
    words = (*TINY, "--config.train.steps=100000", f"--workdir={tmp_path}/run")
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *words],
        env=environment(),
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 200
    while b"loss" not in shown and time.monotonic() < deadline:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(100) == 42, shown
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert checkpoint.load_tree(tmp_path / "run", "latest")[0] == json.loads(rows[-1])["step"]


def test_a_limit_of_addresses_below_what_libraries_map_is_told_at_once():
    """They abort (134, 139) or, as OpenBLAS does, send the signal of Ctrl-C (130)."""
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "sh", *COMMAND, "eval", "run"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "(ulimit -v) is 976 MiB, and jax maps 2,304 and more" in done.stderr
