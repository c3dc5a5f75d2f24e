"""Checkpoints: nothing is lost, nothing damaged is believed, any sharding reads any other."""

import contextlib
import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.processes import free_port, script

from hsvit_jax.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    brief,
    checksum,
    load_tree,
    manager,
)

META = {"config": {"depth": 2, "lr": 1e-3}, "classes": ["cat", "dog"]}


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (devices,), ("group",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def make_state(seed: int, devices: int = 8) -> dict:
    """Sharded and replicated leaves of every kind a training state has."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(devices)

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "params": {
            "groups": {0: {"kernel": put(rng.normal(size=(8, 3, 5)).astype("f4"), "group")}},
            "head": put(rng.normal(size=(5, 7)).astype(jnp.bfloat16)),
        },
        "stats": {},
        "opt": {"mu": put(rng.normal(size=(11,)).astype("f4")), "count": put(np.int32(seed))},
        "mask": put(rng.integers(0, 2, size=16).astype(bool), "group"),
        "key": put(np.asarray(jax.random.key_data(jax.random.key(seed)))),
        "bytes": put(rng.integers(0, 256, size=(8, 3), dtype=np.uint8), "group"),
    }


def template_of(state: dict) -> dict:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def same(one: dict, other: dict) -> bool:
    """Equal structure, dtypes, shapes and bits."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == b.tobytes()
        for a, b in ((a, np.asarray(b)) for a, b in pairs)
    )


def save_steps(directory: Path, *steps: int, **options) -> dict[int, dict]:
    states = {step: make_state(step) for step in steps}
    with Checkpoints(directory, **options) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, META | {"at": step})
    return states


def damage_warning(step: int):
    return pytest.warns(CheckpointWarning, match=rf"step {step} .*damaged, passed over")


# --- there and back -------------------------------------------------------------------------


def test_any_sharding_reads_any_other(tmp_path):
    templates = [template_of(make_state(0, devices)) for devices in (1, 2, 8)]
    for saved_on in (1, 2, 8):
        state = make_state(3, saved_on)
        with Checkpoints(tmp_path / str(saved_on)) as checkpoints:
            checkpoints.save(3, state, META, metric=0.5)
            for template in templates:
                step, restored, meta = checkpoints.restore(template)
                assert step == 3 and meta == META and same(state, restored)
                pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True)
                assert all(leaf.sharding == wanted.sharding for leaf, wanted in pairs)


def test_load_tree_needs_no_template(tmp_path):
    states = save_steps(tmp_path / "checkpoints", 1, 2)
    for path in (tmp_path, tmp_path / "checkpoints"):
        step, tree, meta = load_tree(path, "best")  # without any metric, the latest
        assert step == 2 and meta == META | {"at": 2}
        assert same(states[2], tree)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))
    assert same(states[1], load_tree(tmp_path, 1)[1])
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_tree(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_tree(tmp_path / "empty")
    assert os.listdir(tmp_path / "empty") == []


def test_numpy_64_bit_and_empty_leaves(tmp_path):
    state = {
        "wide": np.array([2**63 - 1, -1], np.int64),
        "double": np.float64(np.pi),
        "none": np.zeros((0, 3), np.float32),
        "nothing": jnp.zeros((0, 2)),
        "weights": np.array([1.0, np.nan, -0.0], np.float32),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
        state["weights"][:] = 7  # must not reach a save under way
        step, restored, _ = checkpoints.restore({k: np.asarray(v) for k, v in state.items()})
    state["weights"] = np.array([1.0, np.nan, -0.0], np.float32)
    assert step == 0 and same(jax.tree.map(np.asarray, state), restored)
    assert same(jax.tree.map(np.asarray, state), load_tree(tmp_path)[1])


def test_donating_a_state_while_it_is_written(tmp_path):
    """The next train step reuses the buffers; what is written must be the old contents."""
    step_fn = jax.jit(lambda s: jax.tree.map(lambda x: x * 2 + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path, keep_latest=4) as checkpoints:
        state, kept = {"w": jnp.arange(400_000.0), "b": jnp.ones((300, 7))}, {}
        for step in range(4):
            kept[step] = jax.tree.map(np.array, state)
            checkpoints.save(step, state, {})
            for _ in range(3):
                state = step_fn(state)
        for step, wanted in kept.items():
            assert same(wanted, checkpoints.restore(wanted, step)[1])


def test_no_checkpoint_at_all(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(template_of(make_state(0))) is None
        assert checkpoints.meta() is None and checkpoints.best_step() is None
        assert checkpoints.steps() == []
        with pytest.raises(CheckpointError, match="no step 4 in"):
            checkpoints.restore(template_of(make_state(0)), 4)


# --- what is kept ---------------------------------------------------------------------------


def test_latest_and_best_are_both_kept_and_nan_is_never_best(tmp_path):
    state = make_state(0)
    with Checkpoints(tmp_path, keep_latest=2, keep_best=1) as checkpoints:
        for step, metric in enumerate([0.1, 0.9, 0.5, 0.2, float("nan"), 0.3]):
            checkpoints.save(step, state, {"at": step}, metric=metric)
            assert checkpoints.best_step() == (0 if step == 0 else 1)
        assert checkpoints.steps() == [1, 4, 5]
        assert checkpoints.meta("best") == {"at": 1}
    with Checkpoints(tmp_path, keep_latest=1, keep_best=1) as checkpoints:  # a new process
        for step, metric in ((6, None), (7, float("inf")), (8, -0.5)):
            checkpoints.save(step, state, {"at": step}, metric=metric)
        assert checkpoints.steps() == [1, 8]
        assert checkpoints.restore(template_of(state), "best")[0] == 1
        checkpoints.save(9, state, {}, metric=0.9)
        assert checkpoints.best_step() == 9  # the later of equals
        assert checkpoints.steps() == [9]


def test_saving_the_same_step_again(tmp_path):
    states = save_steps(tmp_path, 1, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, states[2], META)  # same bits: nothing to do
        with pytest.raises(CheckpointError, match="already holds another state"):
            checkpoints.save(2, make_state(5), META)
        with pytest.raises(CheckpointError, match="already holds step 2; resume from it"):
            checkpoints.save(0, make_state(5), META)
        assert checkpoints.steps() == [1, 2]
    assert same(states[2], load_tree(tmp_path)[1])


# --- mistakes -------------------------------------------------------------------------------


def test_a_template_that_does_not_fit_lists_every_difference(tmp_path):
    states = save_steps(tmp_path, 1, 2)
    template = template_of(states[2])
    template["params"]["head"] = jax.ShapeDtypeStruct((5, 10), jnp.bfloat16)
    template["opt"]["mu"] = jax.ShapeDtypeStruct((11,), jnp.bfloat16)
    template["ema"] = template.pop("key")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError) as caught:
        checkpoints.restore(template)
    lines = str(caught.value).partition("directory: ")[2].split("; ")
    assert lines == [
        "missing: ema uint32[2]",
        "extra: key uint32[2]",
        "different: opt.mu checkpoint float32[11], wanted bfloat16[11]",
        "different: params.head checkpoint bfloat16[5, 7], wanted bfloat16[5, 10]",
    ]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_states_that_could_not_be_read_back(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for leaf, message in ((jax.random.key(0), "key_data"), (np.array(["x"]), "one of bool")):
            with pytest.raises(ValueError, match=message):
                checkpoints.save(1, {"a": leaf}, {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(1, make_state(0), {"path": tmp_path})
    assert os.listdir(tmp_path) == []


def test_read_only_changes_nothing(tmp_path):
    states = save_steps(tmp_path, 1, 2)
    (tmp_path / "3").mkdir()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        with pytest.raises(CheckpointError, match="opened read-only; step 4 not saved"):
            checkpoints.save(4, states[2], {})
        with damage_warning(3):
            assert checkpoints.restore(template_of(states[2]))[0] == 2
    Checkpoints(tmp_path / "absent", read_only=True).close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]


def test_a_directory_that_cannot_be_written_fails_at_once(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for name in ("file", "file/below"):
        with pytest.raises(CheckpointError, match=f"cannot write to the work folder .*{name}: "):
            Checkpoints(tmp_path / name)
    for name in ("a[b]c", "a\\b", "a\udcffb"):
        with pytest.raises(CheckpointError, match=r"Orbax takes brackets .* another folder"):
            Checkpoints(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


# --- checksums ------------------------------------------------------------------------------


def flipped(content: bytes, bit: int) -> bytes:
    broken = bytearray(content)
    broken[bit // 8] ^= 1 << bit % 8
    return bytes(broken)


def test_every_single_bit_shows_in_a_checksum():
    rng = np.random.default_rng(0)
    for dtype in ("bool", "uint8", "int16", "bfloat16", "float32", "uint32", "float64"):
        array = rng.integers(0, 2, size=(3, 5)).astype(jnp.dtype(dtype))
        raw = array.tobytes()
        bits = range(0, 8 * len(raw), 8 if dtype == "bool" else 1)
        others = [np.frombuffer(flipped(raw, bit), array.dtype).reshape(3, 5) for bit in bits]
        assert len(set(checksum.of([array, *others]))) == 1 + len(bits)
    array = np.arange(1, 30, dtype=np.float32)
    swapped, negated = array.copy(), array.copy()
    swapped[[3, 17]] = swapped[[17, 3]]
    negated[[3, 17]] *= -1
    assert len(set(checksum.of([array, swapped, negated, -array]))) == 4


def test_checksums_are_the_same_on_hosts_and_on_every_mesh():
    states = [make_state(7, devices) for devices in (1, 2, 8)]
    sums = [checksum.of(jax.tree.leaves(state)) for state in states]
    sums.append(checksum.of([np.asarray(leaf) for leaf in jax.tree.leaves(states[0])]))
    assert sums[0] == sums[1] == sums[2] == sums[3]
    assert len(set(sums[0])) == len(sums[0])
    with jax.enable_x64(True):
        wide = [np.array([1.5, -np.pi]), np.array([[2**62], [-3]], np.int64)]
        assert checksum.of([jnp.asarray(array) for array in wide]) == checksum.of(wide)


# --- damage ---------------------------------------------------------------------------------


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_damaged_file_is_found_or_harmless(tmp_path):
    """Files of the newest step gone, cut off or with a bit flipped: no wrong tree comes back.

    Some files are not needed (superseded nodes, commit marks); the tree is right or older.
    """
    states, rng = save_steps(tmp_path, 1, 2), np.random.default_rng(0)
    kinds = ("deleted", "cut", "empty", "garbage", "bit")
    needed, harmless = {kind: [] for kind in kinds}, 0
    for path in files_of(tmp_path / "2"):
        content = path.read_bytes()
        cases = [("cut", content[: len(content) // 2]), ("empty", b""), ("garbage", b"\xff\x00{")]
        bits = rng.integers(8 * len(content), size=4) if content else ()
        cases += [("bit", flipped(content, int(bit))) for bit in bits]
        for kind, damaged in [("deleted", None), *cases]:
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step, tree, _ = load_tree(tmp_path)
            assert same(states[step], tree), (path, kind)
            warned = any(f"step 2 in {tmp_path} is damaged" in str(w.message) for w in caught)
            assert warned == (step == 1)
            if warned:
                needed[kind].append(path.relative_to(tmp_path / "2").as_posix())
            harmless += not warned
            path.write_bytes(content)
    assert len(needed["bit"]) > 15 and harmless
    for names in needed.values():
        assert {"meta/metadata", "state/manifest.ocdbt"} <= set(names)
        assert any("/d/" in name for name in names)


def test_a_chunk_larger_than_its_array_is_not_unpacked(tmp_path):
    """It could be all the memory there is, in a few compressed bytes."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3, np.float32)}, {})
    base = {"driver": "file", "path": f"{tmp_path}/1/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    layout = json.loads(store.read("w/.zarray").result().value)
    store["w/.zarray"] = json.dumps(layout | {"chunks": [1 << 20], "compressor": None})
    store["w/0"] = np.ones(1 << 20, np.float32).tobytes()
    with damage_warning(1), pytest.raises(CheckpointError, match="w has another shape than its"):
        load_tree(tmp_path)


def test_a_flipped_weight_is_named_and_the_step_before_is_used(tmp_path):
    """The flip lies in array bytes, which Orbax itself would hand on without a word."""
    states = {step: {"w": jnp.arange(4096.0) + step} for step in (1, 2)}
    with Checkpoints(tmp_path) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {})
        checkpoints.wait()
        path = max(files_of(tmp_path / "2"), key=lambda p: p.stat().st_size)
        path.write_bytes(flipped(path.read_bytes(), 4 * path.stat().st_size))
        reads = (lambda: load_tree(tmp_path), lambda: checkpoints.restore(states[1]))
        for read, left in zip(reads, (["1", "2"], ["1", "2.damaged"]), strict=True):
            with damage_warning(2) as caught:
                step, tree, _ = read()
            assert step == 1 and same(states[1], tree)
            assert "the data of w do not agree with its checksum" in str(caught[0].message)
            assert sorted(os.listdir(tmp_path)) == left


def test_a_damaged_step_makes_room_and_is_kept_aside(tmp_path):
    states = save_steps(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "2" / "state")
    (tmp_path / "3").mkdir()
    with Checkpoints(tmp_path, keep_latest=2) as checkpoints:
        with damage_warning(3), damage_warning(2):
            assert checkpoints.restore(template_of(states[1]))[0] == 1
        checkpoints.save(2, states[2], META)
        checkpoints.save(3, states[1], META)
        assert checkpoints.steps() == [2, 3]
    assert sorted(os.listdir(tmp_path)) == ["2", "2.damaged", "3", "3.damaged"]
    assert os.listdir(tmp_path / "2.damaged")
    assert same(states[2], load_tree(tmp_path, 2)[1])


def test_damaged_steps_take_no_place_among_the_latest(tmp_path):
    states = save_steps(tmp_path, 1, 2)
    (tmp_path / "2" / "meta" / "metadata").write_text("{")
    with Checkpoints(tmp_path, keep_latest=2) as checkpoints:
        assert checkpoints.steps() == [1]
        checkpoints.save(4, states[2], META)
        assert checkpoints.steps() == [1, 4]
        with pytest.raises(CheckpointError, match="no step 3 in"):
            checkpoints.meta(3)
        with damage_warning(2), pytest.raises(CheckpointError, match=r"step 2: .*metadata"):
            checkpoints.restore(template_of(states[2]), 2)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "4"]


def test_a_damaged_best_falls_back_to_the_next_best(tmp_path):
    state = make_state(0)
    with Checkpoints(tmp_path, keep_latest=1, keep_best=3) as checkpoints:
        for step, metric in enumerate([0.5, 0.9, 0.7, None]):
            checkpoints.save(step, state, {}, metric=metric)
    shutil.rmtree(tmp_path / "1" / "state" / "d")
    with damage_warning(1):
        assert load_tree(tmp_path, "best")[0] == 2


def test_a_reader_of_a_run_that_saves_meanwhile_looks_anew(tmp_path, monkeypatch):
    """Steps that the run removes are not damaged, and the best is the best of those that are."""
    options = {"keep_latest": 1, "keep_best": 1}
    save_steps(tmp_path, 1, 2, **options)
    states = []

    def read(*words, read=manager.arrays.read):
        if not states:
            states.append(save_steps(tmp_path, 3, 4, **options))
        return read(*words)

    monkeypatch.setattr(manager.arrays, "read", read)
    assert load_tree(tmp_path)[0] == 4
    assert os.listdir(tmp_path) == ["4"]


def test_only_damaged_steps_is_an_error_each_time(tmp_path):
    """Moving them aside would let the next run start from nothing without a word."""
    states = save_steps(tmp_path, 1, 2)
    for step in states:
        shutil.rmtree(tmp_path / str(step) / "state")
    for _ in range(2):
        with Checkpoints(tmp_path) as checkpoints:
            with damage_warning(2), damage_warning(1), pytest.raises(CheckpointError) as caught:
                checkpoints.restore(template_of(states[1]))
            assert "no good checkpoint" in str(caught.value)
            assert "step 1" in str(caught.value) and "step 2" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_strangers_in_the_directory_are_left_alone(tmp_path):
    states = save_steps(tmp_path, 1)
    strangers = ["07", "1.5", "notes", "5", "-3"]
    for name in strangers[:3]:
        (tmp_path / name).mkdir()
    for name in strangers[3:]:
        (tmp_path / name).write_text("a file")
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    shutil.copytree(tmp_path / "1", tmp_path / "8")  # a record of another number
    with Checkpoints(tmp_path) as checkpoints:
        with damage_warning(8):
            step, tree, _ = checkpoints.restore(template_of(states[1]))
        assert step == 1 and same(states[1], tree)
        checkpoints.save(9, states[1], {})
        assert checkpoints.steps() == [1, 9]
    assert {*strangers, "1", "8.damaged", "9"} == set(os.listdir(tmp_path))


def test_a_newer_format_is_neither_read_nor_moved(tmp_path, monkeypatch):
    monkeypatch.setattr("hsvit_jax.checkpoint.record.FORMAT", 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(0), {}, wait=True)
        monkeypatch.setattr("hsvit_jax.checkpoint.record.FORMAT", 1)
        with pytest.raises(CheckpointError, match="format 2, this version reads format 1"):
            checkpoints.restore(make_state(0))
    assert os.listdir(tmp_path) == ["1"]


# --- processes that die, disks that fill ----------------------------------------------------


def test_kill_during_an_async_save(tmp_path):
    """The second save is held up before its last file, then the process is killed with -9."""
    code = """
        import os, signal, sys, threading
        import jax.numpy as jnp
        from hsvit_jax.checkpoint import Checkpoints
        from orbax.checkpoint import JsonCheckpointHandler
        checkpoints = Checkpoints(sys.argv[1])
        checkpoints.save(1, {"w": jnp.arange(1000.0)}, {}, wait=True)
        reached = threading.Event()
        async def hang(self, item, directory):
            reached.set()
            threading.Event().wait()
        JsonCheckpointHandler._save_fn = hang
        checkpoints.save(2, {"w": jnp.arange(1000.0) + 2}, {})
        reached.wait(30)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with script(code, tmp_path) as process:
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGKILL, errors
    assert sorted(os.listdir(tmp_path)) == ["1", "2.orbax-checkpoint-tmp"]
    with Checkpoints(tmp_path) as checkpoints:
        step, tree, _ = checkpoints.restore({"w": jnp.zeros(1000)})
        assert step == 1 and same({"w": np.arange(1000, dtype=np.float32)}, tree)
        checkpoints.save(2, {"w": tree["w"] + 2}, {}, wait=True)
        assert checkpoints.restore(tree)[0] == 2
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_full_disk_leaves_the_earlier_steps(tmp_path):
    """A file-size limit stands for the full disk; three steps, of which the third must fail.

    Many of its arrays fail at once, and neither Orbax nor asyncio says so on stderr.
    """
    code = """
        import os, resource, signal, sys
        import numpy as np
        from hsvit_jax.checkpoint import Checkpoints, CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        draw = np.random.default_rng(0).normal
        big = {f"w{index}": draw(size=20_000) for index in range(40)}
        with Checkpoints(sys.argv[1], keep_latest=2) as checkpoints:
            checkpoints.save(1, big, {})
            checkpoints.save(2, big, {}, wait=True)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            try:
                checkpoints.save(3, big, {}, wait=True)
            except CheckpointError as error:
                print(error)
            assert checkpoints.steps() == [1, 2]
            assert sorted(os.listdir(sys.argv[1])) == ["1", "2"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert checkpoints.restore(big)[0] == 2
            checkpoints.save(4, big, {}, metric=0.1)
            assert checkpoints.steps() == [2, 4]
        from absl import logging
        logging.warning("ours stays")
    """
    with script(code, tmp_path) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (line,) = errors.splitlines()  # nothing from Orbax
    assert "ours stays" in line
    assert "failed" in out or "was not saved" in out, out
    assert str(tmp_path) in out and "Earlier steps are untouched" in out
    assert load_tree(tmp_path)[0] == 4


def test_a_failed_save_is_reported_and_does_not_hide_another_error(tmp_path, monkeypatch):
    from orbax.checkpoint import JsonCheckpointHandler

    async def fail(self, item, directory):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(JsonCheckpointHandler, "_save_fn", fail)
        with pytest.raises(CheckpointError, match=r"No space left on device\. No step was saved"):
            checkpoints.save(0, make_state(0), {}, wait=True)
    assert checkpoints.steps() == []
    checkpoints.save(1, make_state(1), {}, wait=True)
    monkeypatch.setattr(JsonCheckpointHandler, "_save_fn", fail)
    checkpoints.save(2, make_state(2), {})
    with pytest.raises(CheckpointError, match=r"No space left on device\. Earlier steps are"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    with pytest.raises(KeyboardInterrupt) as caught, checkpoints:
        checkpoints.save(3, make_state(3), {})
        raise KeyboardInterrupt
    assert "No space left on device" in caught.value.__notes__[0]
    monkeypatch.undo()
    checkpoints.save(3, make_state(3), {}, wait=True)
    checkpoints.close()
    assert same(make_state(3), load_tree(tmp_path)[1])


def test_the_advice_at_the_end_of_a_library_s_message_is_kept():
    short = brief(RuntimeError("no driver\n\n  Please run: repair"))
    assert short == "RuntimeError: no driver Please run: repair"
    long = brief(ValueError(f"no chunk\n{'[spec=…] ' * 999}\nPlease run: repair"))
    assert long.startswith("ValueError: no chunk [spec") and len(long) < 1000
    assert long.endswith("Please run: repair") and " … " in long
    assert brief(OSError(28, "No space left on device", "/x")) == "No space left on device"


def test_two_processes_share_a_checkpoint_and_its_damage(tmp_path):
    """Only process 0's array data are cut off, and both must fall back to the step before; then
    process 0 reads alone, and process 1 sees no step at all. At the end process 1 cannot write, and
    says so at once."""
    code = """
        import os, resource, sys, threading, time
        import jax
        import numpy as np
        from jax._src import distributed
        rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
        from jax.experimental import multihost_utils
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        from hsvit_jax.checkpoint import CheckpointError, Checkpoints, alone, load_tree
        mesh = jax.make_mesh((4,), ("group",), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, PartitionSpec("group"))
        whole = NamedSharding(mesh, PartitionSpec())
        def state(step):
            w = np.random.default_rng(step).normal(size=(8, 500)).astype("f4")
            make = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i])
            return {"w": make(w, split), "step": make(np.int32(step), whole)}
        with Checkpoints(directory) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state(step), {"at": step}, metric=step)
            checkpoints.wait()
            if rank == 0:
                data = os.path.join(directory, "2/state/ocdbt.process_0/d")
                names = [os.path.join(data, name) for name in os.listdir(data)]
                largest = max(names, key=os.path.getsize)
                os.truncate(largest, os.path.getsize(largest) // 2)
            multihost_utils.sync_global_devices("damaged")
            step, tree, meta = checkpoints.restore(state(0))
            assert step == 1 and meta == {"at": 1}, (step, meta)
            for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(state(1))):
                for x, y in zip(a.addressable_shards, b.addressable_shards):
                    np.testing.assert_array_equal(np.asarray(x.data), np.asarray(y.data))
            checkpoints.save(2, state(2), {}, wait=True)
            assert checkpoints.steps() == [1, 2]
            if rank == 0:  # no other reads it
                with alone():
                    assert load_tree(directory)[0] == 2
            checkpoints.save(3, state(3), {}, metric=0, wait=True)
            if rank == 1:  # a file system shows it less than process 0
                checkpoints._numbered = lambda: []
                checkpoints._records = dict
            assert checkpoints.best_step() == 1
            assert checkpoints.restore(state(0), "best")[0] == 1
            assert checkpoints.restore(state(0))[0] == 3
            checkpoints.save(3, state(3), {})
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if rank else soft, hard))
            save = lambda: checkpoints.save(4, state(4), {}, wait=True)
            if rank == 0:  # it waits for the other one
                threading.Thread(target=save, daemon=True).start()
            else:
                try:
                    save()
                    raise AssertionError
                except CheckpointError as error:
                    assert "File too large" in str(error), error
            distributed.global_state.client.wait_at_barrier("told", 30_000)
            time.sleep(1 - rank)  # the barrier ends with process 0
            os._exit(0)
    """
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(script(code, rank, port, tmp_path, JAX_NUM_CPU_DEVICES="2"))
            for rank in range(2)
        ]
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert all("step 2" in text for text in errors)  # as a warning, on both
    complete = [name for name in os.listdir(tmp_path) if "tmp" not in name]
    assert sorted(complete) == ["1", "2", "2.damaged", "3"]
    restored = load_tree(tmp_path, 2)[1]["w"]
    wanted = np.random.default_rng(2).normal(size=(8, 500)).astype("f4")
    np.testing.assert_array_equal(restored, wanted)
