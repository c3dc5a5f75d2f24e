"""The optimizer: its schedule at points worked out by hand, what decays, and the clip."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import hlo
from support.small_runs import made_up_values, small_config, small_dataset

import hsvit_jax
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax import models, train
from hsvit_jax.train import optim


def settings(**values):
    return small_config(**{f"optim__{key}": value for key, value in values.items()}).optim


@pytest.mark.parametrize(
    ("chosen", "steps", "expected"),
    [
        (  # warm-up over 2 epochs of 5 steps to the peak; then 40 steps of cosine
            {"warmup_epochs": 2.0, "cosine_per": "step"},
            50,
            {0: 0.02, 4: 0.1, 9: 0.2, 10: 0.2, 20: 0.05 * (2 + math.sqrt(2)), 30: 0.1, 50: 0},
        ),
        (  # a constant rate after the warm-up
            {"warmup_epochs": 1.0, "cosine_per": "never"},
            50,
            {0: 0.04, 4: 0.2, 5: 0.2, 49: 0.2, 60: 0.2},
        ),
        (  # warm-up, then a line to zero
            {"warmup_epochs": 2.0, "schedule": "linear", "cosine_per": "step"},
            50,
            {0: 0.02, 9: 0.2, 10: 0.2, 20: 0.15, 40: 0.05, 49: 0.005},
        ),
        (  # a warm-up that ends within an epoch of 5 steps; the rate still moves between epochs
            {"warmup_epochs": 1.4, "cosine_per": "epoch"},
            27,
            {
                6: 0.2,
                7: 0.2,
                9: 0.2,
                10: 0.1 * (1 + math.cos(0.15 * math.pi)),
                17: 0.1 + 0.1 * math.cos(0.4 * math.pi),
            },
        ),
        # a run shorter than its warm-up
        ({"warmup_epochs": 5.0}, 4, {0: 0.008, 1: 0.016, 2: 0.024, 3: 0.032}),
    ],
)
def test_the_schedule_at_known_points(chosen, steps, expected):
    rate = optim.schedule(settings(learning_rate=0.2, **chosen), steps, 5)
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(value, abs=1e-7), step


def test_cosine_per_epoch_is_pytorchs():
    """CosineAnnealingLR(T_max=epochs) stepped once an epoch: lr/2 · (1 + cos(π·epoch/T_max))."""
    peak, epochs, per_epoch = 1e-3, 10, 41  # 41 · k / 41 < k for some k in a compiled program
    chosen = settings(learning_rate=peak, warmup_epochs=0.0, cosine_per="epoch")
    rate = jax.jit(jax.vmap(optim.schedule(chosen, epochs * per_epoch, per_epoch)))
    found = rate(np.arange(epochs * per_epoch)).reshape(epochs, per_epoch)
    expected = peak / 2 * (1 + np.cos(np.pi * np.arange(epochs) / epochs))
    np.testing.assert_allclose(found, np.repeat(expected[:, None], per_epoch, 1), rtol=1e-5)


def test_decay_names_every_kernel_of_c2a2_and_nothing_else():
    model = hsvit_jax.build_model("c2a2")
    params, _ = model.init_shapes()
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    decays = jax.tree.leaves(optim.decay_mask(params))
    # The matrices, told by their size: convolutions, the projection (an 8×8 map to 64), packed
    # queries, keys and values, attention's output, the classifier. 4 + 1 + 2·2 + 1 of them.
    matrices = {
        (3, 3, 3, 64), (3, 3, 64, 64), (3, 3, 64, 128), (3, 3, 128, 128),
        (64, 64), (16, 3, 64, 64), (16, 64, 64), (64, 10),
    }  # fmt: skip
    assert [leaf.shape in matrices for _, leaf in flat] == decays
    assert sum(decays) == 10


def test_depthwise_kernels_of_separable_convolutions_decay_and_are_no_matrices_of_muon():
    settings = config_lib.get_config("c2a2", "model.convolution=separable").model.to_dict()
    model = models.build(settings, image_size=(32, 32), channels=3, num_classes=10)
    params, _ = model.init_shapes()

    def of_depthwise(mask):
        return jax.tree.leaves([block["depthwise"] for block in mask["trunk"]["blocks"].values()])

    assert of_depthwise(optim.decay_mask(params)) == [True] * 3
    assert of_depthwise(optim.matrices(params)) == []


@pytest.mark.parametrize("family", models.FAMILIES)
def test_neither_biases_nor_norms_of_a_family_are_taken_for_kernels(family):
    """A module may be called after a kernel: MobileViT's depthwise convolution has a norm."""
    record = models.FAMILIES[family]
    chosen = {"dtype": "float32", "family": family, **record.settings()}
    chosen |= record.tiny(chosen)
    model = models.build(chosen, image_size=(32, 32), channels=3, num_classes=10)
    params, _ = model.init_shapes()
    assert jax.tree.leaves(optim.matrices(params))
    for path, decays in jax.tree_util.tree_leaves_with_path(optim.decay_mask(params)):
        name = [key.key for key in path if not key.key.isdigit()][-1]
        assert not (decays and ("bias" in name or "scale" in name)), path


def stepped(chosen, params, grads):
    """Parameters after one step of the optimizer."""
    tx = optim.build(chosen, optim.schedule(chosen, 10, 5), None)
    step = jax.jit(lambda p, g: optax.apply_updates(p, tx.update(g, tx.init(p), p)[0]))
    return step(params, grads)


@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_shrinks_kernels_or_everything(decay_all):
    chosen = settings(
        learning_rate=0.5, weight_decay=0.1, decay_all=decay_all, warmup_epochs=0.0, clip_norm=0.0
    )
    params = {"linear": {"kernel": jnp.full((2, 3), 4.0), "bias": jnp.full((3,), 4.0)}}
    new = stepped(chosen, params, jax.tree.map(jnp.zeros_like, params))["linear"]
    np.testing.assert_allclose(new["kernel"], 4.0 * (1 - 0.5 * 0.1), rtol=1e-6)
    np.testing.assert_allclose(new["bias"], 4.0 * (0.95 if decay_all else 1.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("clip", "norm", "factor"),
    [(0.0, None, 1), (2.0, None, 0.4), (100.0, None, 1), (2.0, 5.0, 0.4), (2.0, 8.0, 0.25)],
)
def test_clip_by_global_norm_comes_before_adam(clip, norm, factor):
    """Adam's first moment is (1 − β₁) of the clipped gradient; a norm that is given is believed.
    With and without a clip the first step is as long, and the state of one shape, so that a
    resumed run may change it."""
    chosen = settings(clip_norm=clip, beta1=0.75, learning_rate=0.5, warmup_epochs=0.0)
    tx = optax.with_extra_args_support(optim.build(chosen, optim.schedule(chosen, 10, 5), None))
    params = {"a": {"kernel": jnp.zeros(1)}, "b": {"bias": jnp.zeros(1)}}
    grads = {"a": {"kernel": jnp.array([3.0])}, "b": {"bias": jnp.array([-4.0])}}
    steps, state = jax.jit(lambda g, p: tx.update(g, tx.init(p), p, norm=norm))(grads, params)
    np.testing.assert_allclose([steps["a"]["kernel"], steps["b"]["bias"]], [[-0.5], [0.5]], 1e-4)
    other = optim.build(settings(clip_norm=1.0), lambda step: 0.1, None)
    assert jax.tree.structure(state) == jax.tree.structure(other.init(params))
    moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(moment["a"]["kernel"], [0.25 * 3 * factor], rtol=1e-6)
    np.testing.assert_allclose(moment["b"]["bias"], [0.25 * -4 * factor], rtol=1e-6)


def muon_shapes(network):
    """(matrices, inputs, outputs) by the name of each parameter that Muon steps."""
    params, _ = network.init_shapes()
    found = {}

    def add(path, leaf, axes):
        if axes is not None:
            inputs = math.prod(leaf.shape[i] for i in axes.reduction_axis)
            name = ".".join(k.key for k in path)
            found[name] = (leaf.size // inputs // leaf.shape[-1], inputs, leaf.shape[-1])

    jax.tree_util.tree_map_with_path(add, params, optim.matrices(params))
    return found


def small_network(**settings):
    config = config_lib.resolve(small_config(**settings), small_dataset().info)
    return train.build_model(config)


@pytest.mark.parametrize("towers", [1, 2])
def test_muon_sees_matrices_of_each_group_and_tower(towers):
    """8 groups of width 8, on tokens of 2×2 pixels of a grey image; towers halve channels and
    groups."""
    first, channels, groups = 4 // towers, 16 // towers, 8 // towers
    expected = {
        "trunk.blocks.0.kernels.1": (towers, 9 * first, first),
        "trunk.blocks.1.kernels.0": (towers, 9 * first, channels),
        "trunk.blocks.1.kernels.1": (towers, 9 * channels, channels),
        "trunk.embed.kernel": (towers, 4, 8),
        "groups.blocks.0.qkv_kernel": (towers * groups * 3, 8, 8),
        "groups.blocks.0.out_kernel": (towers * groups, 8, 8),
    }
    prefix = "towers." if towers > 1 else ""
    expected = {prefix + name: shape for name, shape in expected.items()}
    expected["head.linear.kernel"] = (1, 8, 7)
    assert muon_shapes(small_network(model__towers=towers)) == expected


def test_muon_leaves_depthwise_kernels_to_adam():
    separable = muon_shapes(small_network(model__convolution="separable"))
    assert "trunk.blocks.1.kernels.1" in separable
    assert not any("depthwise" in name for name in separable)
    settings = {"dtype": "float32", **models.FAMILIES["ccx"].settings()}
    ccn = muon_shapes(models.build(settings, image_size=(32, 32), channels=3, num_classes=10))
    assert {name.rpartition(".")[2] for name in ccn} == {"kernel"}  # no residual_kernel


@pytest.mark.parametrize("name", optim.DIRECTIONS)
def test_a_state_is_no_wider_with_x64(name):
    """So that a run goes on where double precision was switched on or off between."""
    model = small_network()

    def dtypes():
        tx = optim.build(config_lib.get_config("c2a2", f"optim.name={name}").optim, 1e-3, model)
        params, _ = model.init_shapes()
        return jax.tree.map(lambda x: x.dtype, jax.eval_shape(tx.init, params))

    narrow = dtypes()
    with jax.enable_x64(True):
        assert dtypes() == narrow


def test_layers_are_counted_alike_with_frozen_parts():
    """A frozen part's stop_gradient is no layer, and an HVT's pool decays with its block."""
    network = small_network(model__depth=2)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(made_up_values(network)[0])]
    frozen = network.with_frozen(frozenset({"groups"}))
    scales = [optim.layer_scales(one, 0.5) for one in (network, frozen)]
    for path in paths:
        assert scales[0](path) == scales[1](path), path
    config = config_lib.get_config("hvt:tiny,digits", "model.stage_depth=1", "model.depth=2")
    hvt = train.build_model(config_lib.resolve(config, hsvit_jax.data.describe("digits")))
    scale = optim.layer_scales(hvt, 0.5)
    params, _ = hvt.init_shapes()
    found = {
        key[2].key: scale(key)
        for key, _ in jax.tree_util.tree_leaves_with_path(params)
        if key[1].key == "pools"
    }
    assert found == {"after0": 0.5, "after1": 1.0}


@pytest.mark.parametrize("towers", [1, 2])
def test_layer_decay_shortens_the_steps_of_early_blocks(towers):
    """Layers of C2A2: stem none, two convolution blocks, two attention blocks, the rest on top."""
    network = small_network(model__towers=towers, model__depth=2)
    params = jax.tree.map(jnp.ones_like, made_up_values(network)[0])
    chosen = settings(
        name="lion", learning_rate=1.0, weight_decay=0.0, warmup_epochs=0.0, layer_decay=0.5
    )
    tx = optim.build(chosen, lambda step: 1.0, network)
    updates = jax.jit(lambda: tx.update(params, tx.init(params), params)[0])()
    if towers == 2:
        updates |= updates["towers"]
    steps = [
        float(-jnp.ravel(x)[0])
        for x in (
            *(jax.tree.leaves(updates["trunk"]["blocks"][n])[0] for n in "01"),
            *(updates["groups"]["blocks"][n]["out_kernel"] for n in "01"),
            updates["head"]["linear"]["kernel"],
        )
    ]
    assert steps == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]


def test_sgd_steps_by_nesterov_s_momentum_and_lamb_by_the_parameter_s_norm():
    chosen = {"learning_rate": 0.5, "weight_decay": 0.0, "warmup_epochs": 0.0, "clip_norm": 0.0}
    params, grads = {"kernel": jnp.full((4, 1), 3.0)}, {"kernel": jnp.full((4, 1), 0.1)}
    sgd = stepped(settings(name="sgd", **chosen), params, grads)["kernel"]
    np.testing.assert_allclose(sgd, 3.0 - 0.5 * 0.1 * (1 + 0.9), rtol=1e-6)
    lamb = stepped(settings(name="lamb", **chosen), params, grads)["kernel"]
    np.testing.assert_allclose(lamb, 3.0 - 0.5 * 3.0, rtol=1e-5)


def test_muon_steps_along_each_group_s_orthogonalised_gradient():
    """U·Vᵀ of a group's own gradient, of the size of an Adam step, whatever the gradient's; then
    the decay of AdamW. What is no matrix takes Adam's step, with Nesterov's momentum."""
    chosen = settings(
        name="muon", learning_rate=0.5, weight_decay=0.1, warmup_epochs=0.0, clip_norm=0.0
    )
    rng = np.random.default_rng(0)
    grads_GDD = rng.normal(size=(3, 12, 8)) * np.array([1e-3, 1, 50])[:, None, None]
    params = {"groups": {"out_kernel": jnp.full((3, 12, 8), 4.0), "out_bias": jnp.zeros(2)}}
    grads = {"groups": {"out_kernel": jnp.array(grads_GDD), "out_bias": jnp.array([3.0, -40.0])}}
    new = stepped(chosen, params, grads)["groups"]
    np.testing.assert_allclose(
        new["out_bias"], 0.5 * (0.9 / 1.9 + 1) * np.array([-1, 1]), rtol=1e-4
    )
    taken_GDD = (4.0 * (1 - 0.05) - np.asarray(new["out_kernel"])) / (0.5 * 0.2 * math.sqrt(12))
    for taken_DD, grad_DD in zip(taken_GDD, grads_GDD, strict=True):
        u, _, v = np.linalg.svd(grad_DD, full_matrices=False)
        rotated = u.T @ taken_DD @ v.T
        assert np.abs(rotated - np.diag(np.diag(rotated))).max() < 1e-3
        assert np.diag(rotated).min() > 0.6 and np.diag(rotated).max() < 1.3


def spread_update(network, name, group, data):
    """Updates and moments of a step over devices, and its program."""
    (params, _), (grads, _) = (made_up_values(network, seed) for seed in (1, 2))
    chosen = settings(name=name, warmup_epochs=0.0)
    tx = optim.build(chosen, optim.schedule(chosen, 10, 5), None)
    mesh = mesh_lib.make(group, data, groups=network.group_axis_limit, batch=16)
    trees = [
        jax.device_put(tree, mesh_lib.state_shardings(mesh, tree, network))
        for tree in (grads, tx.init(params), params)
    ]
    compiled = jax.jit(tx.update).lower(*trees).compile()
    return jax.device_get(compiled(*trees)), compiled.as_text()


def test_a_muon_step_does_not_depend_on_the_mesh():
    """Groups and the trunk's kernels spread over four devices: the same updates and moments."""
    network = small_network(model__trunk="sharded")
    results = (spread_update(network, "muon", *shape)[0] for shape in ((4, 2), (1, 1)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(b).max(), 1e-6))


@pytest.mark.parametrize("towers", [1, 4])
def test_muon_sends_nothing_of_its_own(towers):
    """Each device has its groups or towers whole: the clip's norms are summed, as for AdamW."""
    network = small_network(model__towers=towers)
    adamw, muon = (
        hlo.count(spread_update(network, name, 4, 2)[1], 4)[1] for name in ("adamw", "muon")
    )
    assert muon == adamw
    assert set(muon) == {("group", "all-reduce")}
