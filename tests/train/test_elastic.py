"""Losing groups and going on: in one process with a made-up loss; really in test_processes.py."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.small_runs import metric_lines, small_config, small_dataset

from hsvit_jax import checkpoint, train
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.runtime import coordination
from hsvit_jax.train import elastic
from hsvit_jax.train import step as step_lib
from hsvit_jax.train.evaluate import make_evaluator
from hsvit_jax.weights.stored import averaged

SETTINGS = {"mesh__group": 4, "train__steps": 6, "model__group_dropout": 0.2}


def test_what_cannot_go_on_says_so():
    def run(**settings):
        config = small_config(**{"mesh__group": 4, **settings})
        return train.prepare(config, dataset=small_dataset())

    elastic.check(run())
    elastic.check(run(model__towers=4))
    with pytest.raises(ValueError, match=r"mesh\.data is 2: set mesh\.data=1"):
        elastic.check(run(mesh__data=2))
    with pytest.raises(ValueError, match="whole trunk"):
        elastic.check(run(model__trunk="sharded"))
    with pytest.raises(ValueError, match="at least two"):
        elastic.check(run(mesh__group=1, model__ablation="conv_only"))


def lose(monkeypatch, at, gone):
    """The devices `gone` (places on the mesh) fail during the try at step number `at`."""
    tries = []

    @contextlib.contextmanager
    def live_devices(devices):
        tries.append(len(tries))
        yield devices
        if len(tries) == at:
            raise elastic.multihost_utils.ProcessFailureError({devices[i] for i in gone})

    monkeypatch.setattr(elastic.multihost_utils, "live_devices", live_devices)
    monkeypatch.setattr("hsvit_jax.train.run.Loop", elastic.RecoverableLoop)
    monkeypatch.setattr(coordination, "_survivors", None)


@pytest.mark.parametrize("towers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_left_is_the_network_less_the_lost_votes(towers):
    """Two losses, one after the other: devices of four, relabelled, with nothing copied."""
    config = small_config(mesh__group=4, model__towers=towers)
    run = train.prepare(config, dataset=small_dataset())
    model, images = run.model, np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)
    trees = dict(zip(("params", "stats"), model.init(jax.random.key(1)), strict=True))
    state = jax.device_put(trees, mesh_lib.state_shardings(run.mesh, trees, model))
    apply = jax.jit(model.apply)
    for gone in (0, 2), (0,):
        each = model.group_axis_limit // run.mesh.size
        numbers = np.asarray(model.surviving())
        lost = np.concatenate([numbers[i * each : (i + 1) * each] for i in gone])
        devices = [d for i, d in enumerate(run.mesh.devices.flat) if i not in gone]
        model = model.without(lost.tolist())
        mesh = mesh_lib.make(len(devices), 1, groups=model.group_axis_limit, devices=devices)
        state = mesh_lib.relabel(mesh, state, model)
        run = dataclasses.replace(run, mesh=mesh)

        here = np.repeat(np.asarray(model.surviving()), 2) * 2 + [0, 1] * model.group_axis_limit
        here = here if towers == 4 else np.asarray(model.surviving())
        votes_G = np.isin(np.arange(8), here).astype(np.float32)
        expected = apply(trees["params"], trees["stats"], images, votes_G=votes_G)[0]
        spread = mesh_lib.spread(model, mesh)
        got = jax.jit(lambda p, s, spread=spread: spread(p, s, images)[0])(*state.values())
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    part = "groups" if towers == 1 else "towers"
    fetched = mesh_lib.fetch(mesh, state)["params"]
    for a, b in zip(*(jax.tree.leaves(p[part]) for p in (fetched, trees["params"])), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b)[np.asarray(model.surviving())])
    with pytest.raises(ValueError, match="cannot lose"):
        model.without(range(8 if towers == 1 else 4))


def test_lost_groups_are_saved_as_the_run_began_with_them(stored_weights):
    """Those of init.from: random ones would stay so where they are frozen."""
    config = small_config(mesh__group=4, init__from=str(stored_weights), train__ema_decay=0.0)
    whole = train.prepare(config, dataset=small_dataset())
    run = dataclasses.replace(whole, model=whole.model.without([2, 3]))
    plain = step_lib.to_plain(
        jax.tree_util.tree_map_with_path(
            lambda path, x: np.ones(
                (6, *x.shape[1:]) if mesh_lib.is_spread(path, run.model) else x.shape, x.dtype
            ),
            whole.state_shape,
        )
    )
    loop = SimpleNamespace(complete_run=whole, run=run)
    filled = elastic.RecoverableLoop._with_fresh_groups(loop, plain)["params"]
    began = checkpoint.load_tree(stored_weights)[1]["params"]
    for got, start in zip(*(jax.tree.leaves(p["groups"]) for p in (filled, began)), strict=True):
        np.testing.assert_array_equal(got[2:4], start[2:4])
        assert (np.delete(got, [2, 3], 0) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 4])
def test_a_run_goes_on_with_what_is_left(tmp_path, monkeypatch, towers):
    """Lost in the third step, the second of four devices: its groups are gone and nothing else."""
    settings = SETTINGS | {"model__towers": towers}
    config = small_config(**settings)
    with monkeypatch.context() as patch:
        lose(patch, 3, [1])
        result = train.train(config, tmp_path, dataset=small_dataset(), verbose=False)
    assert result.step == 6
    lost = [1] if towers == 4 else [2, 3]

    # Every step is told once, and what is lost from then on.
    lines = [line for line in metric_lines(tmp_path) if "split" not in line]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert [line.get("lost_groups") for line in lines] == [None] * 2 + [lost] * 4
    assert metric_lines(tmp_path)[-1]["split"] == "test"

    # On disk is the whole network: what is lost as at the start, the rest as trained.
    step, saved, meta = checkpoint.load_tree(tmp_path)
    assert step == 6 and meta["lost_groups"] == lost
    whole = train.prepare(config, dataset=small_dataset())
    fresh = jax.device_get(step_lib.to_plain(step_lib.first_state(whole)))
    part = "groups" if towers == 1 else "towers"
    for a, b in zip(*(jax.tree.leaves(s["params"][part]) for s in (saved, fresh)), strict=True):
        same = [np.array_equal(x, y) for x, y in zip(a, b, strict=True)]
        assert [same[i] for i in lost] == [True] * len(lost)
    params = [s["params"].get("towers", s["params"]) for s in (saved, fresh)]
    trained, start = (p["groups"]["cls"] for p in params)
    for i in set(range(len(start))) - set(lost):
        moved = np.abs(trained[i] - start).reshape(len(start), -1).sum(1)
        assert moved.argmin() == i and moved[i] > 0

    # Less the votes of what is lost, it is the network that the run has ended with.
    votes_G = np.array([g not in (2, 3) for g in range(8)], np.float32)
    evaluate = make_evaluator(whole.model, whole.mesh, whole.config, votes_G=votes_G)
    found = evaluate(*averaged(saved), whole.dataset.test, 16)
    assert found.loss == pytest.approx(result.test.loss, rel=1e-5)
    np.testing.assert_array_equal(found.confusion_KK, result.test.confusion_KK)

    # A start of the finished run tells the same result.
    again = train.train(config, tmp_path, dataset=small_dataset(), verbose=False)
    assert again.test.loss == pytest.approx(result.test.loss, rel=1e-5)
    assert metric_lines(tmp_path)[-1]["lost_groups"] == lost

    # With all devices back, the same command goes on with the whole network.
    longer = small_config(**settings | {"train__steps": 8})
    result = train.train(longer, tmp_path, dataset=small_dataset(), verbose=False)
    assert result.step == 8
    assert "lost_groups" not in metric_lines(tmp_path)[-1]


@pytest.mark.slow
def test_without_a_loss_the_loop_is_the_usual_one(tmp_path, monkeypatch):
    config = small_config(**SETTINGS | {"train__log_every": 2})
    train.train(config, tmp_path / "usual", dataset=small_dataset(), verbose=False)
    lose(monkeypatch, 0, [])
    train.train(config, tmp_path / "other", dataset=small_dataset(), verbose=False)
    assert metric_lines(tmp_path / "other") == metric_lines(tmp_path / "usual")


def test_a_callback_cannot_act_where_processes_could_disagree(tmp_path, monkeypatch):
    class Halve(train.Callback):
        def on_step(self, step, figures):
            self.scale_rate(0.5)

    lose(monkeypatch, 0, [])
    options = {"dataset": small_dataset(), "verbose": False, "callbacks": [Halve()]}
    with pytest.raises(ValueError, match="remove it"):
        train.train(small_config(**SETTINGS), tmp_path / "run", **options)
