"""The launchers' files: what can be checked of them without a cluster.

Manifests are checked against the fields and values that their documentation gives; the commands in
them, and the notebook, run.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sysconfig
import venv

import pytest
import yaml
from support.launch_programs import CODES, LAUNCH, program, run, words_of

from hsvit_jax import cli
from hsvit_jax.commands import COMMANDS

# --- all files ---


def test_scripts_are_sound():
    for path in [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]:
        text = path.read_text()
        assert run(["bash", "-n", path]).returncode == 0
        assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
        code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        assert not [line for line in code if re.search(r"(?<!\")\$[@*](?!\")", line)], "unquoted $@"
        assert not [line for line in code if "`" in line or "eval " in line]
        assert path.suffix != ".sh" or os.access(path, os.X_OK)


def test_no_file_names_a_place_of_its_own():
    places = r"/(?:home|work|tmp|Users)/|pypi\.|pythonhosted|ghp_|AIza"
    assert not [path for path in LAUNCH.iterdir() if re.search(places, path.read_text())]


def test_readme_tells_every_code_and_file():
    text = (LAUNCH / "README.md").read_text()
    told = {int(code) for code in re.findall(r"^\|[^|]*\|[^|]*\| (\d+) \|", text, re.MULTILINE)}
    assert set(CODES) <= told
    assert all(path.name in text for path in LAUNCH.iterdir() if path.name != "README.md")
    named = set(re.findall(r"(?<![\w/])launch/([\w.]+\w)", text))
    assert named and all((LAUNCH / name).exists() for name in named)


# --- gke_jobset.yaml ---


@pytest.fixture(scope="module")
def jobset() -> dict:
    """The JobSet's spec."""
    document = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    return document["spec"]


def test_jobset_has_the_fields_of_its_schema(jobset):
    assert set(jobset) == {"network", "failurePolicy", "replicatedJobs"}
    assert jobset["failurePolicy"]["maxRestarts"] > 0
    for rule in jobset["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        known = {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns"}
        assert set(rule) <= known and set(rule["onJobFailureReasons"]) == {"PodFailurePolicy"}
    (workers,) = jobset["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    pod = job["template"]["spec"]
    assert (job["backoffLimit"], pod["terminationGracePeriodSeconds"]) == (0, 180)
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy is allowed with no other
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "hsvit_jax.main"]
    assert "google.com/tpu" in container["resources"]["limits"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        assert (rule["action"], codes["operator"]) == ("FailJob", "In")
        assert codes["containerName"] == container["name"]
        assert codes["values"] == sorted(set(codes["values"]) - {0})


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
def test_jobset_restarts_what_another_start_helps(jobset, code, action):
    assert fate(jobset, code) == action


# --- serve_ray.yaml ---


def test_ray_job_has_the_fields_of_its_schema():
    """KubeRay's v1 API; each part has a worker that has room for no other."""
    text = (LAUNCH / "serve_ray.yaml").read_text()
    job, service = yaml.safe_load_all(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, counts = job["spec"], {"replicas", "minReplicas", "maxReplicas"}
    known = {"submissionMode", "entrypoint", "backoffLimit", "shutdownAfterJobFinishes"}
    assert set(spec) == {*known, "rayClusterSpec"} and spec["submissionMode"] == "HTTPMode"
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(head) | {"groupName", *counts} == set(workers)
    assert set(head) == {"rayStartParams", "template"}
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    program, command, *words = spec["entrypoint"].split()
    given = dict(word.split("=", 1) for word in words if word.startswith("--"))
    assert program == "hsvit" and set(given) <= {
        f"--{name}" for name in cli.make_flags(COMMANDS[command].flags)
    }
    assert {workers[key] for key in counts} == {int(given["--parts"])}
    assert workers["rayStartParams"]["num-cpus"] == given["--part_cpus"]
    labels = head["template"]["metadata"]["labels"]
    (container,) = head["template"]["spec"]["containers"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert [port["port"] for port in service["spec"]["ports"]] == [int(given["--port"])]
    assert "ports" not in container  # else KubeRay's head service lacks the dashboard's port


# --- sky.yaml ---


@pytest.fixture(scope="module")
def sky() -> dict:
    """The SkyPilot task."""
    return yaml.safe_load((LAUNCH / "sky.yaml").read_text())


def test_sky_has_the_fields_of_its_schema(sky):
    known = {"name", "workdir", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}
    assert set(sky) == known
    recovery = {"recover_on_exit_codes": [42, 75]}
    assert {"use_spot": True, "job_recovery": recovery}.items() <= sky["resources"].items()
    (mount,) = sky["file_mounts"].values()
    assert mount == {"source": "${HSVIT_BUCKET}", "mode": "MOUNT_CACHED"}
    assert sky["envs"]["HSVIT_BUCKET"] is None  # must be given
    for part in ("setup", "run"):
        assert run(["bash", "-n", "-c", sky[part]]).returncode == 0


@pytest.mark.parametrize(
    ("nodes", "place"), [("1", "off"), ("3", "10.0.0.1:8476,3,2")], ids=["one", "several"]
)
def test_sky_gives_every_node_its_place(sky, tmp_path, nodes, place):
    program(tmp_path / ".venv" / "bin", "python", 'printf "%s\\n" "$@" > given')
    env = {
        **{key: value or "" for key, value in sky["envs"].items()},
        "HSVIT_FLAGS": "--config=c4a8:cifar100 --config.seed=1",
        "SKYPILOT_NUM_NODES": nodes,
        "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
    }
    done = run(["bash", "-c", sky["run"]], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = f"-m hsvit_jax.main --distributed={place} --workdir=/runs/c4a8-cifar100"
    given += " --config=c4a8:cifar100 --config.seed=1"
    assert words_of(tmp_path / "given") == given.split()


# --- colab.ipynb ---


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
    assert f"installing {tmp_path}/checkout\n" in done.stdout and "\nread as " in done.stdout
    assert (folder / "runs/colab/curves.png").exists()
    assert (folder / "views/digit-votes.png").exists()
