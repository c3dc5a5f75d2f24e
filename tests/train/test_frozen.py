"""Frozen parts: after training as they were, run as in evaluation, and without its costs."""

import jax
import numpy as np
import pytest
from support import small_runs
from support.small_runs import DATASET, PLAIN

from hsvit_jax import checkpoint, train
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.train import init_from
from hsvit_jax.train import step as step_lib
from hsvit_jax.weights.stored import averaged


def config_for(source, freeze, **settings):
    start = {"init__from": str(source), "init__freeze": freeze}
    return small_runs.small_config(**{**PLAIN, **start, **settings})


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_only_the_rest_is_trained(frozen):
    state = checkpoint.load_tree(frozen)[1]
    model = train.prepare(small_runs.small_config(), dataset=DATASET).model
    params, stats = small_runs.made_up_values(model)
    same(state["params"]["trunk"], params["trunk"])
    same(state["stats"]["trunk"], stats["trunk"])
    assert (state["params"]["head"]["linear"]["kernel"] != params["head"]["linear"]["kernel"]).all()
    assert set(state["ema"]["params"]) == {"groups", "head"} and not state["ema"]["stats"]
    moments = jax.tree_util.tree_flatten_with_path(state["opt"])[0]
    names = [jax.tree_util.keystr(path) for path, _ in moments]
    assert not [n for n in names if "trunk" in n] and [n for n in names if "groups" in n]
    average, _ = averaged(state)
    assert set(average) == set(params)
    same(average["trunk"], params["trunk"])


def test_it_goes_on_with_the_same_parts_only(stored_weights, frozen):
    for other in ("", "trunk,head"):
        with pytest.raises(ValueError, match=r"init\.freeze='trunk', now it is"):
            train.train(config_for(stored_weights, other), frozen, dataset=DATASET, verbose=False)
    config = config_for("", " trunk", train__epochs=0.0)  # without the weights it started from
    assert train.train(config, frozen, dataset=DATASET, verbose=False).step == 2


def test_no_gradient_is_computed_for_them(stored_weights):
    """A step costs less by the trunk's backward pass, which is more than its forward pass."""
    flops = {}
    for freeze in ("", "trunk", "head"):
        run = train.prepare(config_for(stored_weights if freeze else "", freeze), dataset=DATASET)
        batch = [
            jax.ShapeDtypeStruct((35, *s), d) for s, d in (((8, 8, 1), "uint8"), ((), "int32"))
        ]
        lowered = jax.jit(step_lib.make_train_step(run)).lower(run.state_shape, (*batch, batch[1]))
        flops[freeze] = lowered.cost_analysis()["flops"]
        if freeze == "trunk":
            apply = mesh_lib.spread(run.model, run.mesh)
            x = jax.ShapeDtypeStruct((35, 8, 8, 1), "float32")
            forward = jax.jit(apply).lower(run.state_shape["params"], run.state_shape["stats"], x)
            forward = forward.cost_analysis()["flops"]
    assert flops[""] - flops["trunk"] > 0.5 * forward
    assert flops["trunk"] < 0.75 * flops["head"]  # through a frozen head the gradient goes on


def test_parts_are_named(stored_weights):
    for freeze, message in (
        ("trunk,backbone", "it has no backbone; name .* not all: groups, head, trunk"),
        ("trunk,groups,head", "nothing would be left to train"),
    ):
        with pytest.raises(ValueError, match=message):
            train.prepare(config_for(stored_weights, freeze), dataset=DATASET)


def test_random_weights_are_not_frozen(monkeypatch, tmp_path):
    """Said before the data is read; where nothing starts from scratch, nothing is refused."""
    message = r"init\.freeze=trunk would need trained weights: .*--config\.init\.from=PATH"
    config = config_for("", "trunk")
    run = train.prepare(config, dataset=DATASET)  # as a plan or a benchmark needs it
    with pytest.raises(ValueError, match=message):
        init_from.load(run.config, run.model)
    monkeypatch.setattr("hsvit_jax.train.run.prepare", None)
    with pytest.raises(ValueError, match=message):
        train.train(config, tmp_path / "run", verbose=False)
    assert not (tmp_path / "run").exists()


def test_towers_are_frozen_whole(stored_weights):
    settings = {"model__towers": 2, "model__conv_channels": (4, 16), "model__votes": "learned"}
    run = train.prepare(config_for(stored_weights, "towers", **settings), dataset=DATASET)
    params, stats = small_runs.made_up_values(run.model)
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
    how = {"train": True, "dropout_key": jax.random.key(0)}
    logits, after = jax.jit(lambda: run.model.apply(params, stats, images, **how))()
    same(after, stats)
    expected = jax.jit(lambda: run.model.apply(params, stats, images))()[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
