"""local.sh, with a stand-in for Python: places, exit codes and signals of several processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.launch_programs import LAUNCH, PATIENCE, program, run, words_of
from support.processes import ROOT, environment, run_main

# Stands in for Python: says what it was given, then does as $DO tells process number i.
STAND_IN = """
i=${@: -1}; i=${i##*,}
echo $$ > "$OUT/pid.$i"
printf '%s\\n' "$@" > "$OUT/words.$i"
echo "$NPROC $JAX_PLATFORMS ${JAX_NUM_CPU_DEVICES:-none}" > "$OUT/env.$i"
echo "$CUDA_VISIBLE_DEVICES" > "$OUT/gpus.$i"
echo "said by $i"; echo "warned by $i" >&2
trap 'echo TERM >> "$OUT/signals.$i"; touch "$OUT/saved"' TERM
trap 'echo INT >> "$OUT/signals.$i"; exit 130' INT
touch "$OUT/ready.$i"
read -ra todo <<< "$DO"
case ${todo[i]} in
  hang) while :; do sleep 0.05; done ;;
  train) until [[ -e $OUT/saved ]]; do sleep 0.05; done; exit 42 ;;
  go:*) until [[ -e $OUT/go ]]; do sleep 0.05; done ;;
  after:*) while [[ ! -e $OUT/pid.0 ]] || kill -0 "$(< "$OUT/pid.0")"; do sleep 0.05; done ;;
esac 2> "$OUT/noise"
exit "${todo[i]##*:}"
"""


@pytest.fixture
def local(tmp_path):
    """The environment for local.sh, with the stand-in for Python; ends what a failed test left."""
    python = program(tmp_path / "bin", "python", STAND_IN)
    out = tmp_path / "out"
    out.mkdir()
    yield {"PYTHON": str(python), "OUT": str(out), "JAX_PLATFORMS": "cpu", "DO": "0 0"}, out
    for i in range(2):
        if (out / f"pid.{i}").exists() and is_running(out, i):
            os.kill(int((out / f"pid.{i}").read_text()), signal.SIGKILL)


def wait_until(condition: Callable[[], object]) -> None:
    """Fails when the condition does not come true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


#: Becomes the program named. What runs in a shell's background, as tests may, is deaf to SIGINT,
#: and so would be all that it starts.
_HEARS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def start(env: dict, *flags: str) -> subprocess.Popen:
    """local.sh in a session of its own, as a terminal would have it; returns once both are up."""
    out = Path(env["OUT"])
    command = [sys.executable, "-c", _HEARS, LAUNCH / "local.sh", "-n", "2", "--", "--config=x"]
    process = subprocess.Popen(
        [*command, *flags],
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: all((out / f"ready.{i}").exists() for i in range(2)))
    return process


def finish(process: subprocess.Popen) -> int:
    """Its exit code, however badly it behaves."""
    try:
        return process.wait(PATIENCE)
    finally:
        process.kill()


def signals_of(out: Path) -> list[str]:
    """What each process was sent."""
    files = [out / f"signals.{i}" for i in range(2)]
    return [path.read_text().strip().replace("\n", " ") if path.exists() else "" for path in files]


def is_running(out: Path, process: int) -> bool:
    """Whether a stand-in still runs; a zombie does not."""
    pid = (out / f"pid.{process}").read_text().strip()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_local_gives_every_process_its_place_and_all_flags(local):
    env, out = local
    flags = ["--config=configs/c2a2.py:digits,tiny", "--workdir=a folder", "it's", "$HOME", ""]
    done = run([LAUNCH / "local.sh", "-n", "2", "--devices", "3", "--", *flags], env=env)
    assert done.returncode == 0, done.stderr
    given = [(out / f"words.{i}").read_text().split("\n")[:-1] for i in range(2)]
    assert [words[:2] for words in given] == [["-m", "hsvit_jax.main"]] * 2
    assert [words[2:-1] for words in given] == [flags] * 2
    port = given[0][-1].partition(",")[0]
    assert port.startswith("--distributed=127.0.0.1:")
    assert [words[-1] for words in given] == [f"{port},2,0", f"{port},2,1"]
    assert [words_of(out / f"env.{i}")[0].split()[1:] for i in range(2)] == [["cpu", "3"]] * 2
    assert sorted(done.stdout.splitlines()) == ["[0] said by 0", "[1] said by 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] warned by 0", "[1] warned by 1"]


@pytest.mark.parametrize(
    ("chosen", "shares"),
    [({}, ["0,1", "2,3"]), ({"CUDA_VISIBLE_DEVICES": "5,MIG-a,-1,3"}, ["5", "MIG-a"])],
)
def test_local_shares_the_gpus(local, tmp_path, chosen, shares):
    """All four, or those that are chosen."""
    env, out = local
    program(tmp_path / "bin", "nvidia-smi", "for i in 0 1 2 3; do echo GPU $i; done")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**env, **chosen, "JAX_PLATFORMS": "", "PATH": path}
    done = run([LAUNCH / "local.sh", "-n", "2", "--config=x"], env=env)
    assert done.returncode == 0, done.stderr
    assert [words_of(out / f"gpus.{i}") for i in range(2)] == [[share] for share in shares]


@pytest.mark.parametrize(
    ("todo", "code"), [("0 3", 3), ("42 42 42", 42), ("75 after:1", 75), ("42 after:134", 42)]
)
def test_local_returns_the_first_code_that_is_not_0(local, todo, code):
    env, _ = local
    count = len(todo.split())
    done = run([LAUNCH / "local.sh", "-n", count, "--config=x"], env={**env, "DO": todo})
    assert done.returncode == code, done.stderr
    assert f"ended with code {code}" in done.stderr


@pytest.mark.parametrize(("todo", "code"), [("go:137 go:1", 1), ("go:75 go:134", 75)])
def test_local_returns_the_code_that_says_most_of_those_at_one_moment(local, todo, code):
    env, out = local
    process = start({**env, "DO": todo})
    process.send_signal(signal.SIGSTOP)
    (out / "go").touch()
    wait_until(lambda: not any(is_running(out, i) for i in range(2)))
    process.send_signal(signal.SIGCONT)
    assert finish(process) == code


def test_local_ends_the_others_when_one_fails(local):
    env, out = local
    process = start({**env, "DO": "hang go:1", "HSVIT_GRACE": "1"})
    (out / "go").touch()
    assert finish(process) == 1
    assert signals_of(out) == ["", ""]  # SIGTERM would be swallowed
    assert not is_running(out, 0)


@pytest.mark.parametrize(
    ("todo", "code", "word"),
    [
        ("go:0 137", 0, "--recoverable"),
        ("hang 137", 137, "--recoverable=0"),
        ("137 hang", 137, "--recoverable"),
    ],
)
def test_local_leaves_the_survivors_of_a_recoverable_run_alone(local, todo, code, word):
    """Only a process that was killed can be spared, and process 0 cannot."""
    env, out = local
    env = {**env, "DO": todo, "HSVIT_GRACE": "1"}
    process = start(env, word)
    if code == 0:
        wait_until(lambda: not is_running(out, 1))
        time.sleep(2)  # twice the grace
        assert is_running(out, 0)
        (out / "go").touch()
    assert finish(process) == code


def test_local_passes_sigterm_to_one_and_waits_for_all(local):
    env, out = local
    process = start({**env, "DO": "train train"})
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 42
    assert signals_of(out) == ["TERM", ""]


def test_local_passes_ctrl_c_to_all_and_only_once(local):
    env, out = local
    process = start({**env, "DO": "hang hang"})
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert finish(process) == 130
    assert signals_of(out) == ["INT", "INT"]


def test_local_ends_at_once_on_a_second_sigterm(local):
    env, out = local
    process = start({**env, "DO": "hang hang"})
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: signals_of(out)[0])
    process.send_signal(signal.SIGHUP)  # a closing terminal sends two: one request
    time.sleep(2)
    assert all(is_running(out, i) for i in range(2))
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 143
    wait_until(lambda: not any(is_running(out, i) for i in range(2)))


@pytest.mark.slow
def test_a_trained_network_in_two_processes(tmp_path):
    """Evaluation and prediction on four devices of two processes: the bits of one process
    where the groups are added in their order, printed once."""
    folder, picture = tmp_path / "run", tmp_path / "one.png"
    settings = ("--config=c2a2:digits,tiny", "--config.train.steps=3", "--config.mesh.data=1")
    assert run_main(*settings, f"--workdir={folder}", cwd=ROOT).returncode == 0
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(picture)
    mesh = [f"--config.mesh.{x}" for x in ("group=4", "data=1", "aggregate=ordered")]
    network = [f"--checkpoint={folder}", *mesh]
    for words in (["--mode=eval", *network], ["--mode=predict", *network, str(picture)]):
        one = run_main(*words, cwd=ROOT, JAX_NUM_CPU_DEVICES="4", NPROC="8")
        two = run(
            [LAUNCH / "local.sh", "-n", "2", "--devices", "2", "--", *words],
            env=environment(PYTHON=sys.executable),
        )
        assert (one.returncode, two.returncode) == (0, 0), two.stderr
        # What Gloo says of its connections goes to standard error.
        assert two.stdout.splitlines() == [f"[0] {line}" for line in one.stdout.splitlines()]
