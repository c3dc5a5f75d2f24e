"""The fused kernel computes what XLA computes, gradients and dropout too, and can be lowered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.pallas import pallas_call
from jax.sharding import AbstractMesh, AxisType

from hsvit_jax import mesh as mesh_lib
from hsvit_jax.models.hsvit import groups_kernel, hsvit, sizes
from hsvit_jax.models.network import WHOLE, Call, Share

SMALL = hsvit.HSViTConfig(
    image_size=(8, 8),
    image_channels=3,
    num_classes=5,
    conv_channels=(4, 12),
    conv_kernels=(3, 3),
    pool_strides=(2, 2),
    groups=4,
    depth=2,
    embed_dim=16,
    heads=2,
    dropout=0.3,
)


def network(encoder, config=SMALL, dtype=jnp.float32):
    return hsvit.HSViT(dataclasses.replace(config, encoder=encoder), dtype)


def disturbed(tree):
    """Parameters with no zeros or ones left."""
    return jax.tree.map(
        lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), tree
    )


def call(batch, dropout, **rest):
    words = (jnp.uint32(7), jnp.uint32(11)) if dropout else None
    return Call(True, words, 3 * jnp.arange(batch) + 1, **rest)


def assert_close(ours, theirs, tolerance=1e-5):
    """Each tensor within `tolerance` of its own largest value."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in pairs:
        limit = tolerance * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=jax.tree_util.keystr(path))


def encoded(encoder, config, dtype=jnp.float32, dropout=True, batch=4):
    """The groups' CLS outputs of made-up tokens, and the gradients of a weighted sum of them."""
    model = network(encoder, config, dtype)
    groups = disturbed(model.init(jax.random.key(0))[0]["groups"])
    shape = (batch, config.groups, config.tokens - 1, config.embed_dim)
    tokens = jax.random.normal(jax.random.key(1), shape).astype(dtype)
    weights = jax.random.normal(jax.random.key(2), (config.groups, batch, config.embed_dim))

    def loss(groups, tokens):
        bound = model.bind({"groups": groups}, {})
        cls = bound["groups"](tokens, call(batch, dropout), jnp.arange(config.groups) + 2)
        return (cls * weights).sum(), cls

    (_, cls), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(groups, tokens)
    return cls, grads


def sized(depth, per_group, width, heads):
    channels = (4, 2 * per_group)
    return dataclasses.replace(
        SMALL, groups=2, depth=depth, conv_channels=channels, embed_dim=width, heads=heads
    )


@pytest.mark.parametrize(
    ("sizes", "dropout"),
    [
        ((1, 5, 24, 3), True),
        pytest.param((2, 3, 16, 2), False, marks=pytest.mark.slow),
        ((3, 32, 64, 8), True),
    ],
    ids=str,
)
def test_the_kernel_equals_xla_with_its_gradients(sizes, dropout, monkeypatch):
    """Depth, channels of a group (one token less than T), embedding and heads.

    Of four images, an instance takes two.
    """
    monkeypatch.setattr(groups_kernel, "_IMAGES", 2)
    config = sized(*sizes)
    ours, theirs = (encoded(e, config, dropout=dropout) for e in ("pallas", "xla"))
    assert_close(ours, theirs)


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_xla_is():
    config = sized(2, 5, 32, 4)
    exact, ours, theirs = (
        encoded(e, config, t)
        for e, t in (("xla", jnp.float32), ("pallas", jnp.bfloat16), ("xla", jnp.bfloat16))
    )
    assert ours[0].dtype == jnp.bfloat16

    def errors(tree):
        return [
            float(np.linalg.norm(a.astype(np.float32) - b) / np.linalg.norm(b))
            for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(exact), strict=True)
        ]

    for mine, others in zip(errors(ours), errors(theirs), strict=True):
        assert mine <= 1.5 * others + 1e-3


# --- In a network --------------------------------------------------------------------------------


def batch():
    images = jax.random.normal(jax.random.key(3), (4, 8, 8, 3))
    return images, jax.random.normal(jax.random.key(4), (4, SMALL.num_classes))


def trained(apply, params, stats):
    """Logits and gradients of a training pass with dropout."""
    images, weights = batch()

    def loss(params):
        logits, _ = apply(params, stats, images, train=True, dropout_key=jax.random.key(5))
        return (logits * weights).sum(), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, grads


@pytest.fixture(scope="module")
def reference():
    """Parameters, statistics, and what XLA makes of them on one device."""
    params, stats = network("xla").init(jax.random.key(0))
    params = disturbed(params)
    with jax.numpy_rank_promotion("raise"):
        return params, stats, trained(network("xla").apply, params, stats)


@pytest.fixture
def interpreter_in_a_mesh(monkeypatch):
    """Pallas's interpreter told nothing of a mesh, which it does not know: see `runs`."""
    original = pallas_call._pallas_call_lowering

    def lower(ctx, *nodes, **params):
        def plain(avals):
            return [a.update_manual_axis_type(core.empty_mat) for a in avals]

        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return original(ctx, *nodes, **params)

    mlir.register_lowering(pallas_call.pallas_call_p, lower)
    monkeypatch.setattr(groups_kernel, "runs", lambda z: True)
    yield
    mlir.register_lowering(pallas_call.pallas_call_p, original)


def test_spread_over_two_by_two_devices_nothing_changes(reference, interpreter_in_a_mesh):
    params, stats, expected = reference
    model = network("pallas")
    mesh = mesh_lib.make(2, 2, groups=model.groups, devices=jax.devices()[:4])
    spread = mesh_lib.spread(model, mesh)
    images, _ = batch()
    assert "pallas_call" in str(jax.make_jaxpr(spread)(params, stats, images))
    assert_close(trained(spread, params, stats), expected)


def uses_kernel(model, params, stats, apply=None):
    return "pallas_call" in str(jax.make_jaxpr(apply or model.apply)(params, stats, batch()[0]))


def test_what_chooses_the_kernel(reference):
    """The setting alone; on CPU not in a mesh, and never where a pass is looked at."""
    params, stats, _ = reference
    chosen = {e: uses_kernel(network(e), params, stats) for e in sizes.ENCODERS}
    assert chosen == {"auto": False, "xla": False, "pallas": True}
    model = network("pallas")
    mesh = mesh_lib.make(1, 1, groups=model.groups, devices=jax.devices()[:1])
    assert not uses_kernel(model, params, stats, mesh_lib.spread(model, mesh))
    shapes = jax.eval_shape(model.views, params, stats, batch()[0])
    assert len(shapes["group attention"]) == SMALL.depth


class Ordered(Share):
    ordered = True


def test_some_groups_lost_and_the_others_one_by_one(reference):
    params, stats, _ = reference
    left = jnp.array([0, 3])
    there = {**params, "groups": jax.tree.map(lambda x: x[left], params["groups"])}

    def logits(encoder, share):
        model = network(encoder).without((1, 2))
        key = jax.random.key(5)
        return jax.jit(
            lambda p, x: model.apply(p, stats, x, train=True, dropout_key=key, share=share)[0]
        )(there, batch()[0])

    assert_close(logits("pallas", Ordered()), logits("xla", WHOLE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": "triton"}, "encoder must be one of .*got 'triton'"),
        ({"encoder": "pallas", "groups": 0}, "encoder='pallas' encodes nothing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


# --- On devices that are not here ----------------------------------------------------------------


def arguments(dtype, depth=3, groups=2, images=4, tokens=33, width=64):
    """Shapes of `encode`'s first arguments."""
    g, d = groups, width
    sizes = {
        **dict.fromkeys(("norm_scale", "norm_bias", "out_bias"), (g, depth, d)),
        "qkv_kernel": (g, depth, 3, d, d),
        "qkv_bias": (g, depth, 3, d),
        "out_kernel": (g, depth, d, d),
    }
    blocks = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in sizes.items()}
    z = jax.ShapeDtypeStruct((g, images, tokens, d), dtype)
    return z, blocks, jax.ShapeDtypeStruct((g, images, depth), jnp.uint32)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("target", "platform", "kernel", "device"),
    [
        ("gpu", "cuda", "__gpu$xla.gpu.triton", "NVIDIA H200"),
        ("tpu", "tpu", "tpu_custom_call", "TPU v5"),
    ],
)
def test_both_kernels_lower_for_a_device(target, platform, kernel, device, dtype):
    """As far as it goes without one: the device's own compiler has not seen them."""

    def loss(z, blocks, base):
        out = groups_kernel.encode(z, blocks, base, heads=8, rate=0.2, target=target)
        return out.astype(jnp.float32).sum()

    mesh = AbstractMesh(
        (1,),
        ("x",),
        axis_types=(AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice(device, None, target),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(*arguments(dtype))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"@{kernel}(") == 2


def test_other_devices_are_refused():
    z, blocks, base = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), arguments(jnp.float32))
    with pytest.raises(ValueError, match=r"not neuron: set model\.encoder"):
        groups_kernel.encode(z, blocks, base, heads=8, target="neuron")
