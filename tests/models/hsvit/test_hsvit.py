"""HSViT: exact sizes, equality with the reference's numbers, and the properties that define it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import convnet_files

from hsvit_jax import models
from hsvit_jax.models import costs, network
from hsvit_jax.models.hsvit import hsvit

GOLDENS = ("hsvit-convattn", "hsvit-convonly", "hsvit-attnonly")

#: (variant, ablation, pixels, colours) → trained values, of the reference's code; grey images are
#: Fashion-MNIST's, in the paper's tables.
COUNTS = {
    ("c2a2", "none", 28, 1): 810_186,
    ("c3a4", "none", 28, 1): 2_240_714,
    ("c4a8", "none", 28, 1): 6_871_242,
    ("c2a2", "conv_only", 32, 3): 265_482,
    ("c3a4", "conv_only", 32, 3): 1_151_242,
    ("c4a8", "conv_only", 32, 3): 4_692_234,
    ("c2a2", "attention_only", 8, 3): 547_594,
    ("c3a4", "attention_only", 8, 3): 1_092_362,
    ("c4a8", "attention_only", 8, 3): 2_181_898,
}


def settings(variant, **changes):
    """A configuration's `model` section for a named variant, as a plain dict."""
    return {**hsvit.FAMILY.settings(variant), "dtype": "float32", **changes}


@pytest.mark.parametrize("case", COUNTS, ids=str)
def test_parameter_counts(case):
    variant, ablation, side, channels = case
    own = settings(variant, ablation=ablation)
    model = models.build(own, image_size=(side, side), channels=channels, num_classes=10)
    assert costs.parameters(model) == COUNTS[case]


# --- Goldens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", GOLDENS)
def test_training_step_equals_the_reference(name, double, golden_dir):
    # The stored gradients are float32 and agree with float64 to 2.1e-6 of each tensor's maximum.
    closely = {"tolerance": 3e-6 if double else 1e-5, "noise": 0, "statistics": 1e-6}
    convnet_files.training_step_agrees(golden_dir / f"{name}.npz", double=double, **closely)


# --- Properties ----------------------------------------------------------------------------------


def small(**changes):
    """A network whose sizes differ wherever they can: a swapped axis cannot pass."""
    sizes = {
        "image_size": (6, 10),
        "image_channels": 3,
        "num_classes": 7,
        "conv_channels": (5, 15),
        "conv_kernels": (3, 3),
        "pool_strides": (2, 1),
        "groups": 3,
        "depth": 2,
        "embed_dim": 22,
        "heads": 2,
        "dropout": 0.2,
        **changes,
    }
    return hsvit.HSViT(hsvit.HSViTConfig(**sizes))


def started(model, seed=0):
    """Random parameters and statistics of moderate size, as no initialisation would give them."""
    rng = np.random.default_rng(seed)
    params, stats = model.init_shapes()

    def draw(path, leaf):
        name = path[-1].key
        if name == "var":
            values = rng.uniform(0.5, 2, leaf.shape)
        else:
            kernel = "kernel" in jax.tree_util.keystr(path)
            spread = math.prod(leaf.shape[-4:-1]) ** -0.5 if kernel else 0.4
            mean = 1.0 if name in ("scale", "norm_scale") else 0.0
            values = rng.normal(mean, spread, leaf.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, (params, stats))


def images_for(model, batch=2, seed=3):
    shape = (batch, *model.config.image_size, model.config.image_channels)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Spy(network.GroupShard):
    """Sees, and can replace, what goes into the groups; sees what comes out."""

    def __init__(self, tokens=None):
        self.replacement = tokens

    def slice(self, x, axis):
        if axis == 0:
            return x
        self.tokens = x if self.replacement is None else self.replacement
        return self.tokens

    def sum(self, x_GBD):
        self.cls = x_GBD
        return x_GBD.sum(0)


def encoder(model, params, stats, dropout_key=None):
    """The groups' encoder (group parameters, tokens) → CLS, and its input tokens, compiled."""

    def run(group_params, tokens=None):
        spy = Spy(tokens)
        own = {**params, "groups": group_params}
        model.apply(own, stats, images_for(model), dropout_key=dropout_key, shard=spy)
        return spy

    encode = jax.jit(lambda p, z: run(p, z).cls)
    return encode, jax.jit(lambda: run(params["groups"]).tokens)()


@pytest.mark.parametrize("dropout", [False, True])
def test_a_group_sees_only_its_own_channels(dropout):
    model = small()
    params, stats = started(model)
    encode, z_BGTD = encoder(model, params, stats, jax.random.key(5) if dropout else None)
    jacobian = jax.jit(jax.jacrev(lambda z: encode(params["groups"], z).sum((1, 2))))(z_BGTD)
    reach = np.abs(jacobian).max((1, 3, 4))  # (group of the CLS, group of the tokens)
    assert (reach[~np.eye(3, dtype=bool)] == 0).all()
    assert (np.diag(reach) > 1e-3).all()


def test_groups_may_be_permuted_with_their_channels():
    model = small()
    params, stats = started(model)
    order = np.array([2, 0, 1])
    channels = np.arange(15).reshape(3, 5)[order].ravel()
    moved, moved_stats = jax.tree.map(lambda x: x, (params, stats))
    last = moved["trunk"]["blocks"]["1"]
    last["kernels"]["1"] = last["kernels"]["1"][..., channels]
    last["norms"]["1"] = {k: v[channels] for k, v in last["norms"]["1"].items()}
    norm = moved_stats["trunk"]["blocks"]["1"]["norms"]
    norm["1"] = {k: v[channels] for k, v in norm["1"].items()}
    run = jax.jit(lambda p, s: model.apply(p, s, images_for(model))[0])
    logits = run(params, stats)
    channels_only = run(moved, moved_stats)
    moved["groups"] = jax.tree.map(lambda x: x[order], moved["groups"])
    np.testing.assert_allclose(run(moved, moved_stats), logits, rtol=0, atol=2e-6)
    assert np.abs(channels_only - logits).max() > 1e-3


def test_dropout_follows_the_example_and_the_key():
    model = small()
    params, stats = started(model)
    images, ids = images_for(model, batch=5), np.array([31, 7, 2, 19, 3])

    @jax.jit
    def run(images, ids, key):
        # Statistics of evaluation: in training, another batch would change them too.
        return model.apply(params, stats, images, dropout_key=key, example_ids_B=ids)[0]

    key = jax.random.key(1)
    whole = run(images, ids, key)
    order = np.array([3, 1, 4, 0, 2])
    close = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(run(images[order], ids[order], key), whole[order], **close)
    np.testing.assert_allclose(run(images[1:3], ids[1:3], key), whole[1:3], **close)
    assert np.abs(run(images, ids, jax.random.key(2)) - whole).min(0).max() > 1e-3
    assert np.abs(run(images, ids + 1, key) - whole).max() > 1e-2
    plain = run(images, ids, None)
    assert np.abs(plain - whole).max() > 1e-2
    np.testing.assert_array_equal(run(images, ids + 1, None), plain)


def test_each_example_has_masks_of_attention_of_its_own():
    """Of equal tokens, which nothing else tells apart."""
    model = small(depth=1)
    tokens_TD = np.random.default_rng(4).normal(size=(5, 22)).astype(np.float32)

    @jax.jit
    def cls_GBD(params, stats):
        spy = Spy(jnp.broadcast_to(tokens_TD, (4, 3, 5, 22)))
        images, key = images_for(model, batch=4), jax.random.key(6)
        model.apply(params, stats, images, dropout_key=key, shard=spy)
        return spy.cls

    assert np.abs(np.diff(cls_GBD(*started(model)), axis=1)).max((0, 2)).min() > 1e-3


def test_dropout_of_the_embedding():
    model = small(conv_channels=(5, 60), depth=1)
    params, stats = started(model)
    _, plain = encoder(model, params, stats)
    _, dropped = encoder(model, params, stats, jax.random.key(5))
    alive = np.asarray(plain) != 0  # the rest are zeros of the ReLU
    factors = np.asarray(dropped)[alive] / np.asarray(plain)[alive]
    assert set(np.round(factors, 4)) == {0, 1.25}
    assert abs((factors == 0).mean() - 0.2) < 4 * math.sqrt(0.2 * 0.8 / factors.size)


def test_bfloat16_computes_narrow_and_keeps_float32():
    """Logits within 5 % of the largest, gradients in direction, at eight bits of mantissa."""
    wide = small(conv_channels=(15,), conv_kernels=(3,), pool_strides=(2,), dropout=0.0)
    narrow = hsvit.HSViT(wide.config, jnp.bfloat16)
    params, stats = started(wide)
    images = images_for(wide, batch=4)
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(narrow.init, jax.random.key(0)))} == {
        jnp.dtype("float32")
    }

    def run(model):
        def loss(p):
            logits, after = model.apply(p, stats, images, train=True)
            return jax.nn.logsumexp(logits, axis=1).mean(), (logits, after)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    (grads, (logits, after)), (exact, (exact_logits, exact_after)) = run(narrow), run(wide)
    assert {x.dtype for x in jax.tree.leaves((grads, logits, after))} == {jnp.dtype("float32")}
    error = np.abs(logits - exact_logits).max() / np.abs(exact_logits).max()
    assert 1e-5 < error < 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), after, exact_after)
    a, b = (np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (grads, exact))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


def test_bfloat16_sums_gradients_over_examples_in_float32():
    """Of CLS, positions and votes: a sum of 256 terms in bfloat16 errs by several of its steps."""
    model = hsvit.HSViT(small(dropout=0.0, votes="learned").config, jnp.bfloat16)
    params, stats = started(model)
    images = images_for(model, batch=256)

    @jax.jit
    def gradient(images):
        def loss(p):
            return jax.nn.logsumexp(model.apply(p, stats, images)[0], axis=1).sum()

        return jax.grad(loss)(params)["groups"]

    whole = gradient(images)
    parts = [gradient(images[i : i + 4]) for i in range(0, 256, 4)]
    for name in ("cls", "position", "vote"):
        expected = np.sum([np.asarray(part[name], np.float64) for part in parts], 0)
        error = np.linalg.norm(whole[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-3, (name, error)


def test_initial_values_are_the_reference_s():
    d, groups, classes, pixels, tokens = 48, 7, 37, 15, 6
    model = small(
        embed_dim=d, groups=groups, num_classes=classes, conv_channels=(33, 35), conv_kernels=(5, 3)
    )
    params, stats = jax.jit(model.init)(jax.random.key(4))

    def is_uniform(x, bound):
        x = np.asarray(x).ravel()
        n = x.size
        assert np.abs(x).max() <= bound
        assert np.abs(x).max() > bound * (1 - 8 / n)
        assert abs(x.mean()) < 4 * bound / math.sqrt(3 * n)
        assert abs(np.mean(x**2) * 3 / bound**2 - 1) < 4 / math.sqrt(n)

    def is_normal(x):
        n = x.size
        assert abs(np.mean(x)) < 4 / math.sqrt(n)
        assert abs(np.var(x) - 1) < 4 * math.sqrt(2 / n)
        assert np.abs(x).max() > 2.3  # not cut off

    def is_constant(x, value):
        np.testing.assert_array_equal(x, np.full(x.shape, value, np.float32))

    fans = {("0", "0"): 3 * 25, ("0", "1"): 33 * 9, ("1", "0"): 33 * 9, ("1", "1"): 35 * 9}
    for (i, j), fan_in in fans.items():
        block = params["trunk"]["blocks"][i]
        is_uniform(block["kernels"][j], fan_in**-0.5)
        is_constant(block["norms"][j]["scale"], 1)
        is_constant(block["norms"][j]["bias"], 0)
        is_constant(stats["trunk"]["blocks"][i]["norms"][j]["mean"], 0)
        is_constant(stats["trunk"]["blocks"][i]["norms"][j]["var"], 1)
    for linear, fan_in in ((params["trunk"]["embed"], pixels), (params["head"]["linear"], d)):
        is_uniform(linear["kernel"], fan_in**-0.5)
        is_uniform(linear["bias"], fan_in**-0.5)
    assert params["groups"]["position"].shape == (groups, tokens, d)
    is_normal(params["groups"]["cls"])
    is_normal(params["groups"]["position"])
    for block in params["groups"]["blocks"].values():
        is_constant(block["norm_scale"], 1)
        is_constant(block["norm_bias"], 0)
        is_uniform(block["qkv_kernel"], math.sqrt(6 / (d + 3 * d)))
        is_uniform(block["out_kernel"], d**-0.5)
        is_constant(block["qkv_bias"], 0)
        is_constant(block["out_bias"], 0)
    is_constant(params["head"]["norm_scale"], 1)
    is_constant(params["head"]["norm_bias"], 0)


# --- What does not fit ---------------------------------------------------------------------------


def test_images_that_do_not_fit_are_refused():
    """Of another size, and raw ones, whose numbers an integer network would be computed in."""
    model = small()
    with pytest.raises(ValueError, match=r"\(2, 10, 6, 3\).*\(6, 10, 3\)"):
        model.apply({}, {}, jnp.zeros((2, 10, 6, 3)))
    with pytest.raises(ValueError, match=r"images of uint8 .* normalised ones"):
        model.apply({}, {}, jnp.zeros((2, 6, 10, 3), jnp.uint8))


def test_half_precision_images_do_not_narrow_a_float32_network():
    model = small(groups=0)
    given = started(model)
    logits = [
        jax.jit(model.apply)(*given, images_for(model).astype(np.float16).astype(dtype))[0]
        for dtype in (np.float16, np.float32)
    ]
    np.testing.assert_array_equal(*logits)


def test_losing_groups_one_after_the_other():
    model = small().without({1})
    assert model.group_ids().tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"cannot lose \[0, 1, 2\] of 3 groups"):
        model.without({0, 2})


@pytest.mark.parametrize(
    ("variant", "size", "strides"),
    [
        ("c2a2", (64, 64), (4, 2)),
        ("c2a2", (128, 128), (4, 4)),
        ("c3a4", (28, 28), (2, 1, 2)),
        ("c4a8", (32, 32), (2, 1, 2, 1)),
        ("c4a8", (64, 64), (2, 2, 2, 1)),
        ("c4a8", (128, 128), (2, 2, 2, 2)),
        ("c4a8", (96, 64), (2, 2, 2, 1)),
        ("c2a2", (36, 20), (2, 2)),
        ("c4a8", (17, 16), (2, 1, 2, 1)),
        ("c2a2", (225, 225), (4, 4)),
    ],
)
def test_default_strides(variant, size, strides):
    sizes = {"image_size": size, "channels": 3, "num_classes": 10}
    assert hsvit.FAMILY.sizes(settings(variant), **sizes).pool_strides == strides


@pytest.mark.parametrize(("variant", "size"), [("c2a2", (17, 30)), ("c4a8", (50, 50))])
def test_any_size_of_image(variant, size):
    model = models.build(settings(variant), image_size=size, channels=3, num_classes=10)
    images = jnp.zeros((2, *size, 3))
    logits, _ = jax.eval_shape(lambda: model.apply(*model.init(jax.random.key(0)), images))
    assert logits.shape == (2, 10)
