"""The launchers' scripts, with stand-ins for Python, srun, scontrol, gcloud and xpk."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.launch_programs import CODES, LAUNCH, PATIENCE, program, run, words_of
from support.processes import ROOT, environment, run_main

# --- local.sh ---

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
    places = [re.fullmatch(r"--distributed=(127\.0\.0\.1:\d+),2,(\d)", w[-1]) for w in given]
    assert places[0][1] == places[1][1]
    assert [place[2] for place in places] == ["0", "1"]
    assert sorted(done.stdout.splitlines()) == ["[0] said by 0", "[1] said by 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] warned by 0", "[1] warned by 1"]


@pytest.mark.parametrize(
    ("words", "nproc", "devices"),
    [
        (["--devices", "4"], 8, "4"),
        (["--cpu"], 2, "none"),
        (["-n", "2", "--port", "5000"], 2, "none"),
    ],
)
def test_local_makes_the_cpu_back_end_fit(local, words, nproc, devices):
    env, out = local
    bare = {key: value for key, value in os.environ.items() if key != "NPROC"}
    command = ["env", "-i", *(f"{k}={v}" for k, v in {**bare, **env}.items()), LAUNCH / "local.sh"]
    done = run([*command, *words, "--config=x"])
    assert done.returncode == 0, done.stderr
    assert [words_of(out / f"env.{i}") for i in range(2)] == [[f"{nproc} cpu {devices}"]] * 2
    if "--port" in words:
        assert words_of(out / "words.1")[-1] == "--distributed=127.0.0.1:5000,2,1"


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
    ("todo", "code"),
    [("0 3", 3), ("42 42 42", 42), ("2 2", 2), ("75 after:1", 75), ("42 after:134", 42)],
)
def test_local_returns_the_first_code_that_is_not_0(local, todo, code):
    env, _ = local
    count = len(todo.split())
    done = run([LAUNCH / "local.sh", "-n", count, "--config=x"], env={**env, "DO": todo})
    assert done.returncode == code, done.stderr
    assert f"ended with code {code}" in done.stderr


@pytest.mark.parametrize(
    ("todo", "code"), [("go:137 go:1", 1), ("go:42 go:1", 1), ("go:75 go:134", 75)]
)
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
        ("go:0 137", 0, "-recoverable=True"),
        ("hang 137", 137, "--recoverable=0"),
        ("137 hang", 137, "--recoverable"),
        ("hang 1", 1, "--recoverable"),
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no flags"),
        (["-n", "0", "x"], "'0'"),
        (["--devices"], "--devices needs a value"),
        (["--config=x", "--distributed=off"], "leave --distributed out"),
        (["--help"], "see above"),
        (["HSVIT_GRACE=1m", "--config=x"], "whole seconds, got '1m'"),
    ],
)
def test_local_refuses_what_it_cannot_do(local, words, told):
    env, out = local
    settings = dict(word.split("=") for word in words if word.startswith("HSVIT_"))
    words = [word for word in words if not word.startswith("HSVIT_")]
    done = run([LAUNCH / "local.sh", *words], env=env | settings)
    assert done.returncode == 2
    assert told in done.stderr
    assert "launch/local.sh [-n N]" in done.stderr
    assert not list(out.iterdir())


# --- slurm.sbatch ---


def sbatch(
    tmp_path: Path, code: int, *more: str, **env: str
) -> tuple[subprocess.CompletedProcess, list, str]:
    """slurm.sbatch under an srun that ends with `code`: (done, srun's words, scontrol's)."""
    programs = tmp_path / "bin"
    program(programs, "srun", f'printf "%s\\n" "$@" > "$OUT/srun"; exit {code}')
    program(programs, "scontrol", 'echo "$*" >> "$OUT/scontrol"; exit "${SCONTROL:-0}"')
    program(tmp_path / ".venv" / "bin", "python", "exit 99")
    done = run(
        ["bash", LAUNCH / "slurm.sbatch", *more, "--config=configs/c4a8.py", "--workdir=a b"],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "OUT": str(tmp_path),
            "SLURM_JOB_ID": "321",
            "SLURM_CPUS_PER_TASK": "8",
            **env,
        },
        cwd=tmp_path,
    )
    asked = tmp_path / "scontrol"
    return done, words_of(tmp_path / "srun"), asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize("code", [*CODES, 137, 143])
def test_slurm_requeues_what_another_start_helps(tmp_path, code):
    done, words, asked = sbatch(tmp_path, code)
    assert asked == ("requeue 321\n" if code in (42, 75) else "")
    assert done.returncode == (0 if code in (42, 75) else code)
    command = ".venv/bin/python -m hsvit_jax.main --config=configs/c4a8.py"
    assert words[-5:] == [*command.split(), "--workdir=a b"]
    assert "--cpus-per-task=8" in words


@pytest.mark.parametrize(
    ("flags", "wait"),
    [([], 60), (["--recoverable"], 0), (["-recoverable=true", "--norecoverable"], 60)],
)
def test_slurm_lets_survivors_go_on(tmp_path, flags, wait):
    assert f"--wait={wait}" in sbatch(tmp_path, 0, *flags)[1]


@pytest.mark.parametrize(
    ("code", "env", "ended", "requeued", "said"),
    [
        (75, {"SLURM_RESTART_COUNT": "20"}, 75, False, "giving up"),
        (42, {"SLURM_RESTART_COUNT": "20"}, 0, True, ""),
        (42, {"SCONTROL": "1"}, 42, True, "scontrol requeue failed"),
    ],
)
def test_slurm_gives_up(tmp_path, code, env, ended, requeued, said):
    """A stalled run is not restarted for ever, a preempted one is, where that is allowed."""
    done, _, asked = sbatch(tmp_path, code, **env)
    assert (done.returncode, asked) == (ended, "requeue 321\n" * requeued)
    assert said in done.stderr


def test_slurm_asks_for_what_saving_needs():
    text = (LAUNCH / "slurm.sbatch").read_text()
    options, _, _ = text.partition("\nset -euo")  # sbatch reads no further than a command
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", options, re.MULTILINE))
    # To the steps: with B: it would go to the shell only.
    assert {"requeue": "", "signal": "TERM@180", "open-mode": "append"}.items() <= asked.items()
    # jax gives every task the one GPU with the task's local number
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def test_slurm_refuses_to_start_without_flags_or_environment(tmp_path):
    done = run(["bash", LAUNCH / "slurm.sbatch"], cwd=tmp_path)
    assert (done.returncode, "usage:" in done.stderr) == (2, True)
    done = run(["bash", LAUNCH / "slurm.sbatch", "--config=x"], cwd=tmp_path)
    assert (done.returncode, "HSVIT_VENV" in done.stderr) == (2, True)


# --- tpu_vm.sh, xpk.sh ---


@pytest.fixture
def tpu(tmp_path):
    """gcloud stands for two workers: it runs the command in a home folder here."""
    home = tmp_path / "home"
    home.mkdir()
    program(
        tmp_path / "bin",
        "gcloud",
        'printf "%s\\n" "$@" > "$OUT/gcloud"\n'
        "for word; do case $word in --command=*) command=${word#--command=} ;; esac; done\n"
        'cd "$OUT/home" && bash -c "$command"',
    )
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
        "TPU_NAME": "my-tpu",
        "ZONE": "zone-1",
    }
    return env, home


def test_tpu_vm_runs_the_same_command_on_every_worker(tpu, tmp_path):
    env, home = tpu
    program(home / "hsvit_jax" / ".venv" / "bin", "python", 'printf "%s\\n" "$$" "$@" > given')
    flags = ["--config=configs/c4a8.py:cifar100", "--workdir=a b", "it's $HOME"]
    done = run([LAUNCH / "tpu_vm.sh", "run", *flags], env={**env, "PROJECT": "p"})
    assert done.returncode == 0, done.stderr
    asked = words_of(tmp_path / "gcloud")
    assert asked[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
    assert {"--zone=zone-1", "--project=p", "--worker=all"} <= set(asked)
    pid, *given = words_of(home / "hsvit_jax" / "given")
    assert given == ["-m", "hsvit_jax.main", *flags]
    assert words_of(home / "hsvit_jax" / "run.pid") == [pid]


def test_tpu_vm_stops_through_one_worker(tpu, tmp_path):
    env, home = tpu
    (home / "hsvit_jax").mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, other = subprocess.Popen([*sleep, "hsvit_jax.main"]), subprocess.Popen(sleep)
    try:
        for sleeper, code in ((ours, 0), (other, 1)):  # the number may be another's by now
            (home / "hsvit_jax" / "run.pid").write_text(f"{sleeper.pid}\n")
            assert run([LAUNCH / "tpu_vm.sh", "stop"], env=env).returncode == code
        assert ours.wait(PATIENCE) == -signal.SIGTERM and other.poll() is None
    finally:
        for sleeper in (ours, other):
            sleeper.kill()
            sleeper.wait(PATIENCE)
    assert "--worker=0" in words_of(tmp_path / "gcloud")


def test_tpu_vm_installs_a_commit(tpu, tmp_path):
    env, home = tpu
    source = tmp_path / "a source"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", source]
    source.mkdir()
    run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    run([*git, "commit", "--quiet", "--allow-empty", "--message=one"], check=True)
    run([*git, "tag", "v1"], check=True)
    run([*git, "commit", "--quiet", "--allow-empty", "--message=two"], check=True)
    python = program(
        tmp_path / "other python",
        "python",
        f'if [[ $1 == -c ]]; then exec {shlex.quote(sys.executable)} "$@"; fi\n'
        'mkdir -p .venv/bin; cp "$OUT/pip" .venv/bin/pip',
    )
    program(tmp_path, "pip", 'printf "%s\\n" "$@" > installed')
    given = {**env, "HSVIT_REPO": str(source), "HSVIT_PYTHON": str(python)}
    for reference, message in (("v1", "one"), ("", "two")):
        done = run([LAUNCH / "tpu_vm.sh", "install"], env={**given, "HSVIT_REF": reference})
        assert done.returncode == 0, done.stderr
        head = run(["git", "-C", home / "hsvit_jax", "log", "-1", "--format=%s"])
        assert head.stdout.strip() == message
        assert words_of(home / "hsvit_jax" / "installed")[-2:] == ["--editable", ".[tpu]"]
    program(tmp_path / "other python", "python", "exit 1")  # as the check of the version ends
    assert run([LAUNCH / "tpu_vm.sh", "install"], env=given).returncode == 1


def test_tpu_vm_names_what_is_missing(tpu):
    env, _ = tpu
    for words, without, told in (
        (["run", "x"], "TPU_NAME", "set TPU_NAME"),
        (["run", "x"], "ZONE", "set ZONE"),
        (["install"], "HSVIT_REPO", "set HSVIT_REPO"),
        (["run"], "", "needs the flags"),
        (["walk"], "", "'walk'"),
    ):
        done = run([LAUNCH / "tpu_vm.sh", *words], env={**env, without or "UNUSED": ""})
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr


def test_xpk_creates_a_workload(tmp_path):
    program(tmp_path / "bin", "xpk", 'printf "%s\\n" "$@" > "$OUT/xpk"')
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
        "HSVIT_CLUSTER": "c",
        "HSVIT_TPU_TYPE": "v5litepod-16",
        "HSVIT_IMAGE": "registry/hsvit:1",
    }
    done = run([LAUNCH / "xpk.sh", "my-run", "--config=a b", "it's"], env=env)
    assert done.returncode == 0, done.stderr
    words = words_of(tmp_path / "xpk")
    assert words[:2] == ["workload", "create"]
    flags = dict(word[2:].split("=", 1) for word in words[2:])
    assert shlex.split(flags.pop("command")) == [
        *("python", "-m", "hsvit_jax.main", "--config=a b", "it's")
    ]
    expected = {"workload": "my-run", "cluster": "c", "tpu-type": "v5litepod-16"}
    expected |= {"docker-image": "registry/hsvit:1", "restart-on-exit-codes": "75"}
    expected |= {"num-slices": "1", "max-restarts": "20", "termination-grace-period-seconds": "180"}
    assert flags == expected
    assert run([LAUNCH / "xpk.sh", "my-run"], env=env).returncode == 2
    done = run([LAUNCH / "xpk.sh", "my-run", "x"], env={**env, "HSVIT_CLUSTER": ""})
    assert (done.returncode, "set HSVIT_CLUSTER" in done.stderr) == (2, True)


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
