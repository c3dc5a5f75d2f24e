"""The mesh: its sizes, where arrays live on it, and mistakes."""

import types

import jax
import pytest
from support.small_runs import small_config, small_dataset

from hsvit_jax import mesh as mesh_lib
from hsvit_jax import train
from hsvit_jax.train import step


def test_groups_live_on_their_own_devices():
    """Parameters, optimizer moments and the moving average: each device holds G/g groups."""
    config = small_config(mesh__group=4, mesh__data=2)
    run = train.prepare(config, dataset=small_dataset())
    state = step.first_state(run)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    split = [path for path, _ in leaves if "groups" in [getattr(k, "key", None) for k in path]]
    assert len(split) == 4 * len(jax.tree.leaves(state["params"]["groups"]))
    for path, leaf in leaves:
        expected = (8 // 4, *leaf.shape[1:]) if path in split else leaf.shape
        assert len(leaf.addressable_shards) == 8
        assert {s.data.shape for s in leaf.addressable_shards} == {expected}, path


def test_make_fills_in_the_rest():
    assert dict(mesh_lib.make(1, -1, groups=16, batch=8).shape) == {"data": 8, "group": 1}
    assert dict(mesh_lib.make(-1, 2, groups=16, batch=8).shape) == {"data": 2, "group": 4}
    assert dict(mesh_lib.make(-1, 1, groups=4, batch=8).shape) == {"data": 1, "group": 4}
    assert dict(mesh_lib.make(-1, 8, groups=0, batch=8).shape) == {"data": 8, "group": 1}
    three = jax.devices()[:3]
    assert dict(mesh_lib.make(-1, 1, groups=16, batch=8, devices=three).shape)["group"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"group": 3, "data": 1, "groups": 16}, ["16 groups", "3 devices", "[1, 2, 4, 8, 16]"]),
        ({"group": 16, "data": 1, "groups": 16}, ["mesh.group=16", "8", "-1"]),
        ({"group": 4, "data": 4, "groups": 16}, ["mesh.data=4", "mesh.group=4", "16", "8"]),
        ({"group": 2, "data": 1, "groups": 0}, ["0 groups", "2 devices", "[1]"]),
        ({"group": 1, "data": 8, "groups": 16, "batch": 12}, ["12", "data=8", "multiple of 8"]),
        ({"group": 1, "data": -1, "groups": 16, "batch": 10}, ["10", "mesh.data=8"]),
        (
            {"group": 1, "data": 8, "groups": 16, "batch": 48, "accumulate": 4},
            ["a batch of 48 in train.accumulate=4 parts", "multiple of 32"],
        ),
        ({"group": -1, "data": -1, "groups": 16}, ["only one", "mesh.group", "mesh.data"]),
        ({"group": 1, "data": 1, "groups": 0, "aggregate": "bf16"}, ["'bf16'", "has none"]),
        ({"group": 8, "data": 1, "groups": 4, "parts": "towers"}, ["4 towers cannot", "[1, 2, 4]"]),
    ],
)  # fmt: skip
def test_make_names_what_does_not_fit(arguments, words):
    with pytest.raises(ValueError) as caught:
        mesh_lib.make(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_no_process_is_left_without_a_device():
    """Of 4 hosts with 2 devices each, 4 devices would leave the last two idle."""
    pod = [types.SimpleNamespace(process_index=i // 2) for i in range(8)]
    with pytest.raises(ValueError, match="but none of process 2, 3: start fewer"):
        mesh_lib.make(1, 4, groups=16, batch=12, devices=pod)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model__towers": 4}, r"^4 towers cannot split over 8 devices.*\[1, 2, 4\]"),
        ({"model__trunk": "sharded"}, r"^4 groups and kernels cannot split over 8 devices"),
        ({"model__groups": 2}, r"^2 groups cannot split over 8 devices.*\[1, 2\]"),
    ],
)
def test_a_run_names_the_parts_of_its_network(model, words):
    with pytest.raises(ValueError, match=words):
        train.prepare(small_config(mesh__group=8, **model), dataset=small_dataset())
