"""DHVT: exact sizes and costs, its three modules and what their ablations leave of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hf_files, state_dicts, torch_files

from hsvit_jax import models
from hsvit_jax.models import costs, network
from hsvit_jax.models.vit import dhvt
from hsvit_jax.weights import torch

#: (variant, image size, classes) → 10⁻⁹ multiply-adds as the supplement counts them.
COSTS = {
    ("t-patch4", 32, 100): 0.370,
    ("t-patch2", 32, 100): 1.409,
    ("s-patch4", 32, 100): 1.489,
    ("s-patch2", 32, 100): 5.582,
    ("t-patch16", 224, 345): 1.186,
    ("s-patch16", 224, 345): 4.682,
    ("t-imagenet", 224, 1000): 1.185,
    ("s-patch16", 224, 1000): 4.682,
}
SMALL = dhvt.DHVTConfig(
    image_size=(8, 12),
    image_channels=3,
    num_classes=5,
    patch=4,
    heads=2,
    embed_dim=8,
    depth=2,
    mlp_ratio=2.0,
)


@pytest.mark.parametrize("cases", [("t-patch4",), pytest.param((), marks=pytest.mark.slow)])
def test_flops_as_the_paper_counts_them(cases):
    """Of every variant in the longer suite."""
    for (variant, side, classes), macs in COSTS.items():
        if not cases or variant in cases:
            model = hf_files.network("dhvt", variant, (side, side), classes)
            flops, _ = model.paper_flops(costs.multiply_adds(model))
            assert flops / 1e9 == pytest.approx(macs, abs=6e-4), variant


# --- What the feed-forward's ablations do --------------------------------------------------------

CALL = network.ForwardContext(train=False, key_words=None, example_ids_B=jnp.arange(2))


@functools.cache
def fed(feed_forward, **changes):
    """The feed-forward, its input (B, T, D) and what it makes of it."""
    config = dataclasses.replace(SMALL, feed_forward=feed_forward, **changes)
    module = jax.jit(lambda: dhvt.DAFF(config, jax.random.key(0)))()
    x_BTD = jax.random.normal(jax.random.key(1), (2, config.tokens, config.embed_dim))
    return module, x_BTD, jax.jit(lambda x: module(x, CALL, 0))(x_BTD)


def test_split_leaves_cls_as_it_is():
    for name in ("ffn-split", "ffn-split-average"):
        _, x_BTD, y_BTD = fed(name)
        np.testing.assert_array_equal(y_BTD[:, 0], x_BTD[:, 0])
    _, x_BTD, y_BTD = fed("ffn")
    assert np.abs(y_BTD[:, 0] - x_BTD[:, 0]).max() > 0.1


def test_a_patch_meets_its_neighbours_where_it_should():
    """The first patch of a 2×3 grid: three neighbours, and two patches out of reach."""
    reach = {}
    for name in ("ffn", "ffn-split-average", "daff"):
        module, x_BTD, _ = fed(name)
        grads = jax.jit(jax.grad(lambda x, f=module: f(x, CALL, 0)[0, 1].sum()))(x_BTD)
        reach[name] = [int(t) - 1 for t in np.flatnonzero(np.abs(grads[0]).max(-1))]
    assert reach["ffn"] == [0]
    assert reach["ffn-split-average"] == reach["daff"] == [0, 1, 3, 4]


def test_the_average_counts_what_lies_inside():
    module, x_BTD, y_BTD = fed("ffn-split-average")
    hidden = jax.nn.gelu(module.up(x_BTD[:, 1:]), approximate=False).reshape(2, 2, 3, -1)
    corner = hidden[:, :, :2].mean((1, 2))
    np.testing.assert_allclose(y_BTD[:, 1], module.down(corner), atol=1e-6)


def test_the_average_s_counts_are_of_no_batch():
    """XLA folds them while it compiles: of a whole batch that took minutes."""
    traced = jax.make_jaxpr(dhvt._neighbour_mean)(jnp.ones((4, 5, 6, 3)))
    windows = [e for e in traced.eqns if e.primitive.name.startswith("reduce_window")]
    assert [e.invars[0].aval.shape for e in windows] == [(4, 5, 6, 3), (1, 5, 6, 1)]


def test_aggregation_weighs_cls_or_all():
    cls_module, x_BTD, cls_out = fed("daff")
    _, _, all_out = fed("daff-aggregate-all")  # the same key: the same parameters
    np.testing.assert_array_equal(cls_out[:, 0], all_out[:, 0])
    weight_BD = cls_out[:, 0] / x_BTD[:, 0]
    np.testing.assert_allclose(
        all_out[:, 1:], cls_out[:, 1:] * weight_BD[:, None], rtol=1e-4, atol=1e-7
    )
    squeezed = jax.nn.gelu(cls_module.gate["squeeze"](cls_out[:, 1:].mean(1)), approximate=False)
    np.testing.assert_allclose(weight_BD, cls_module.gate["excite"](squeezed), rtol=1e-4, atol=1e-7)


def test_the_shortcut_adds_what_was_there():
    with_shortcut, x_BTD, a = fed("daff")
    _, _, b = fed("daff-no-shortcut")
    t = with_shortcut.up(x_BTD[:, 1:]) / np.sqrt(1 + 1e-5)  # BatchNorm of fresh statistics
    t = with_shortcut.down(jax.nn.gelu(t, approximate=False)) / np.sqrt(1 + 1e-5)
    bias = with_shortcut.down.bias[...][None, None] / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(a[:, 1:] - b[:, 1:], t - bias, atol=1e-5)


def test_norms_are_what_they_are_called():
    stats = {
        (sope, daff): dhvt.DHVT(dataclasses.replace(SMALL, sope_norm=sope, daff_norm=daff))
        for sope in ("batch", "layer")
        for daff in ("batch", "layer")
    }
    for (sope, daff), model in stats.items():
        _, found = model.init_shapes()
        assert ("embedding" in found, "encoder" in found) == (sope == "batch", daff == "batch")


def test_a_representation_is_the_classifier_s_input():
    """The reference's `representation_size`: a linear map and a tanh between CLS and logits."""
    settings = {"embed_dim": 8, "heads": 2, "depth": 2, "representation": 6, "dtype": "float32"}
    settings = {**dhvt.FAMILY.defaults, **settings, "family": "dhvt"}
    model = models.build(settings, image_size=(8, 8), channels=3, num_classes=5)
    tensors = state_dicts.drawn({e.key: e.shape for e in torch_files.listing("dhvt", model)})
    assert tensors["pre_logits.fc.weight"].shape == (6, 8)
    given = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
    assert torch_files.settings("dhvt", tensors, given)[0]["representation"] == 6
    params, stats = torch.table(dhvt.FAMILY.name).load(tensors, model)
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    cls_BD = np.asarray(model.views(params, stats, images)["tokens"][-1], np.float64)[:, 0]
    cls_BD = (cls_BD - cls_BD.mean(1, keepdims=True)) / np.sqrt(cls_BD.var(1, keepdims=True) + 1e-6)
    y = cls_BD * tensors["norm.weight"] + tensors["norm.bias"]
    y = np.tanh(y @ tensors["pre_logits.fc.weight"].T + tensors["pre_logits.fc.bias"])
    logits, _ = model.apply(params, stats, images)
    expected = y @ tensors["head.weight"].T + tensors["head.bias"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
