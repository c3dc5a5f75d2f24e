"""The launchers' files: what can be checked of them without a cluster.

Scripts are checked by ShellCheck and run dry, with stand-ins for srun, gcloud and xpk. Manifests
are checked against the codes and flags of the program; the notebook runs.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from support.launch_programs import CODES, LAUNCH, program, run, words_of

from hsvit_jax import cli
from hsvit_jax.commands import COMMANDS

FLAGS = ["--config=configs/c4a8.py:cifar100", "--workdir=a b", "it's $HOME"]
#: What every launcher makes of them, in the end.
PROGRAM = ["-m", "hsvit_jax.main", *FLAGS]


@pytest.mark.parametrize("name", ["local.sh", "slurm.sbatch", "tpu_vm.sh", "xpk.sh"])
def test_scripts_are_sound(name):
    path = LAUNCH / name
    assert "\nset -euo pipefail\n" in path.read_text()
    assert path.suffix != ".sh" or os.access(path, os.X_OK)
    done = run([Path(sys.executable).with_name("shellcheck"), "--severity=warning", path])
    assert done.returncode == 0, done.stdout


def test_readme_tells_every_code_and_file():
    text = (LAUNCH / "README.md").read_text()
    told = {int(code) for code in re.findall(r"^\|[^|]*\|[^|]*\| (\d+) \|", text, re.MULTILINE)}
    assert set(CODES) <= told
    assert all(path.name in text for path in LAUNCH.iterdir() if path.name != "README.md")
    named = set(re.findall(r"(?<![\w/])launch/([\w.]+\w)", text))
    assert named and all((LAUNCH / name).exists() for name in named)


@pytest.fixture
def dry(tmp_path):
    """Runs a launcher where a stand-in program writes its arguments to a file: (done, words)."""

    def go(words, stand_in, then="", **env):
        program(tmp_path / "bin", stand_in, f'printf "%s\\n" "$@" > "$OUT/given"; {then}')
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = run(words, env={"PATH": path, "OUT": str(tmp_path), **env}, cwd=tmp_path)
        given = tmp_path / "given"
        return done, words_of(given) if given.exists() else []

    return go


@pytest.mark.parametrize("code", [*CODES, 137, 143])
def test_slurm_requeues_what_another_start_helps(dry, tmp_path, code):
    program(tmp_path / "bin", "scontrol", 'echo "$*" >> "$OUT/scontrol"')
    program(tmp_path / ".venv" / "bin", "python", "exit 99")
    job = {"SLURM_JOB_ID": "321", "SLURM_CPUS_PER_TASK": "8"}
    script = ["bash", LAUNCH / "slurm.sbatch", *FLAGS]
    done, words = dry(script, "srun", f"exit {code}", **job)
    again = code in (42, 75)
    assert (tmp_path / "scontrol").exists() == again
    assert done.returncode == (0 if again else code)
    assert words[-len(PROGRAM) :] == PROGRAM and {"--cpus-per-task=8", "--wait=60"} < {*words}
    # Survivors go on; a stalled run is not restarted for ever, a preempted one is.
    done, words = dry([*script, "--recoverable"], "srun", f"exit {code}", **job)
    assert "--wait=0" in words
    done, _ = dry(script, "srun", f"exit {code}", **job, SLURM_RESTART_COUNT="20")
    assert done.returncode == (0 if code == 42 else code)


def test_slurm_asks_for_what_saving_needs():
    text = (LAUNCH / "slurm.sbatch").read_text()
    options, _, _ = text.partition("\nset -euo")  # sbatch reads no further than a command
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", options, re.MULTILINE))
    # To the steps: with B: it would go to the shell only.
    assert {"requeue": "", "signal": "TERM@180", "open-mode": "append"}.items() <= asked.items()
    # jax gives every task the one GPU with the task's local number
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def test_tpu_vm_runs_the_same_command_on_every_worker(dry, tmp_path):
    """gcloud stands for a worker: it runs the command in a home folder here."""
    checkout = tmp_path / "home" / "hsvit_jax"
    program(checkout / ".venv" / "bin", "python", 'printf "%s\\n" "$$" "$@" > given')
    worker = "for word; do case $word in --command=*) command=${word#--command=} ;; esac; done\n"
    worker += 'cd "$OUT/home" && bash -c "$command"'
    place = {"TPU_NAME": "my-tpu", "ZONE": "zone-1", "PROJECT": "p"}
    done, asked = dry([LAUNCH / "tpu_vm.sh", "run", *FLAGS], "gcloud", worker, **place)
    assert done.returncode == 0, done.stderr
    assert asked[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
    assert {"--zone=zone-1", "--project=p", "--worker=all"} <= set(asked)
    pid, *given = words_of(checkout / "given")
    assert (given, words_of(checkout / "run.pid")) == (PROGRAM, [pid])
    done, asked = dry([LAUNCH / "tpu_vm.sh", "stop"], "gcloud", "exit 0", **place)
    assert done.returncode == 0 and "--worker=0" in asked  # through one worker: all stop together
    done, _ = dry([LAUNCH / "tpu_vm.sh", "run", "x"], "gcloud", **{**place, "ZONE": ""})
    assert (done.returncode, "set ZONE" in done.stderr) == (2, True)


def test_xpk_creates_a_workload(dry):
    place = {"HSVIT_CLUSTER": "c", "HSVIT_TPU_TYPE": "v5litepod-16", "HSVIT_IMAGE": "hsvit:1"}
    done, words = dry([LAUNCH / "xpk.sh", "my-run", *FLAGS], "xpk", **place)
    assert done.returncode == 0, done.stderr
    assert words[:2] == ["workload", "create"]
    flags = dict(word[2:].split("=", 1) for word in words[2:])
    assert shlex.split(flags.pop("command")) == ["python", *PROGRAM]
    expected = {"workload": "my-run", "cluster": "c", "tpu-type": "v5litepod-16"}
    expected |= {"docker-image": "hsvit:1", "restart-on-exit-codes": "75", "num-slices": "1"}
    expected |= {"max-restarts": "20", "termination-grace-period-seconds": "180"}
    assert flags == expected


@pytest.mark.parametrize(
    ("nodes", "place"), [("1", "off"), ("3", "10.0.0.1:8476,3,2")], ids=["one", "several"]
)
def test_sky_gives_every_node_its_place(tmp_path, nodes, place):
    sky = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    assert sky["resources"]["job_recovery"] == {"recover_on_exit_codes": [42, 75]}
    program(tmp_path / ".venv" / "bin", "python", 'printf "%s\\n" "$@" > given')
    env = {
        **{key: value or "" for key, value in sky["envs"].items()},
        "HSVIT_FLAGS": "--config=c4a8:cifar100 --config.seed=1",
        "HSVIT_BUCKET": "s3://bucket",
        "SKYPILOT_NUM_NODES": nodes,
        "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
    }
    done = run(["bash", "-c", sky["run"]], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = f"-m hsvit_jax.main --distributed={place} --workdir=s3://bucket/c4a8-cifar100"
    given += " --config=c4a8:cifar100 --config.seed=1"
    assert words_of(tmp_path / "given") == given.split()


def fate(jobset: dict, code: int) -> str:
    """What the two policies do, as Kubernetes reads them, when a container ends with `code`."""
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if code in rule["onExitCodes"]["values"]:
            reason = "PodFailurePolicy"
            message = (
                f"Container hsvit for pod default/hsvit-worker-0-1-x7 failed with exit code {code} "
                f"matching FailJob rule at index {index}"
            )
            break
    for rule in jobset["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (42, "RestartJobSetAndIgnoreMaxRestarts"),
        (75, "RestartJobSet"),
        (134, "RestartJobSet"),  # a peer was lost
        (137, "RestartJobSet"),
        (1, "FailJobSet"),
        (2, "FailJobSet"),
        (3, "FailJobSet"),
        (130, "FailJobSet"),
    ],
)
def test_jobset_restarts_what_another_start_helps(code, action):
    jobset = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())["spec"]
    assert fate(jobset, code) == action


def test_ray_job_starts_the_program_with_its_flags():
    """Each part has a worker that has room for no other."""
    job, _ = yaml.safe_load_all((LAUNCH / "serve_ray.yaml").read_text())
    program, command, *words = job["spec"]["entrypoint"].split()
    given = dict(word.split("=", 1) for word in words if word.startswith("--"))
    known = {f"--{name}" for name in cli.make_flags(COMMANDS[command].flags)}
    assert program == "hsvit" and set(given) <= known
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == int(given["--parts"])
    assert workers["rayStartParams"]["num-cpus"] == given["--part_cpus"]


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    """The notebook's cells, as nbformat 4.5 has them, without outputs."""
    notebook = json.loads((LAUNCH / "colab.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        bare = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        assert {"metadata": {}, **bare}.items() <= cell.items()
    return notebook["cells"]


def script_of(cells: list[dict]) -> str:
    """The code cells as a program: lines of the notebook itself begin with % or !."""
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = re.sub(r"(?m)^%(pip .*)$", r"""run(f'{sys.executable} -m \1')""", code)
    # Where the notebook's process holds a GPU's memory or a TPU, no other can have it.
    command = r"""run(f'JAX_PLATFORMS=cpu {Path(sys.prefix)}/bin/\1')"""
    return "import sys\n" + re.sub(r"(?m)^!JAX_PLATFORMS=cpu (.*)$", command, code)


def test_notebook_is_python_but_for_two_commands(cells):
    script = script_of(cells)
    ast.parse(script)
    assert script.count("run(f'") == 2 and cells[-1]["source"][0].startswith("Image.open(")


@pytest.mark.slow
def test_notebook_runs(cells, tmp_path):
    """All of it, beside a copy of the checkout, in an environment without the package."""
    left_out = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(LAUNCH.parent, tmp_path / "checkout", symlinks=True, ignore=left_out)
    venv.create(tmp_path / "venv", with_pip=True)
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    # What the package needs is installed already, where the tests run.
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    given = (
        "import subprocess\n\ndef run(line):\n    subprocess.run(line, shell=True, check=True)\n\n"
    )
    script = tmp_path / "notebook.py"
    script.write_text(given + script_of(cells).replace("c2a2:digits", "c2a2:digits,tiny"))
    python, folder = tmp_path / "venv/bin/python", tmp_path / "checkout/launch"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, script], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"installing {tmp_path}/checkout\n" in done.stdout and "\npredicted " in done.stdout
    assert (folder / "runs/colab/curves.png").exists()
    assert (folder / "views/digit-votes.png").exists()
